"""Execs: counted while they live, freed on reset, on eviction, after a refusal and with their model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support import MLP, host, train
from torch import Tensor

import pgraph
from pgraph.drivers.host.driver import HostDriver, HostExec
from pgraph.drivers.host.faults import HostFaults, inject


def chain(x: Tensor) -> Tensor:
    return (x * 2 + 1).cumsum(0)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[HostExec]:
    """Every exec of this test that has not been freed."""
    execs: weakref.WeakSet[HostExec] = weakref.WeakSet()
    real = HostDriver.instantiate

    def instantiate(self: HostDriver, *args: Any) -> Any:
        made = real(self, *args)
        execs.add(made)
        return made

    monkeypatch.setattr(HostDriver, "instantiate", instantiate)
    return execs


def counted(execs: weakref.WeakSet[HostExec]) -> int:
    """Bytes of the living execs, which is what the report has to say."""
    total = sum(e.nbytes for e in execs)
    assert pgraph.report().exec_bytes == total
    assert (f", {total:,} B of execs" in pgraph.report().summary()) == (total > 0)
    return total


def test_the_report_counts_the_execs_that_there_are(alive: weakref.WeakSet[HostExec]) -> None:
    model = MLP()
    compiled = host(model)
    for _ in range(3):
        train(model, compiled, torch.randn(3, 8))
    assert len(alive) == 2
    assert counted(alive) > 0
    partitions = pgraph.report().capturable
    assert sum(p.exec_bytes for p in partitions) == counted(alive)
    assert all(f"{p.exec_bytes:,} B of execs" in str(pgraph.report()) for p in partitions)


def test_one_exec_per_chunk_serves_all_layers_and_addresses(alive: weakref.WeakSet[HostExec]) -> None:
    layers = [MLP() for _ in range(4)]
    compiled = [host(layer, memory_slack_mb=0) for layer in layers]
    for _ in range(3):
        for layer, call in zip(layers, compiled, strict=True):
            train(layer, call, torch.randn(3, 8))
    report = pgraph.report()
    assert report.captures == 2, str(report)
    assert report.launches >= 2 * 4 * 2
    assert len(alive) == sum(p.chunks for p in report.capturable) > 2, "nothing was cut, so nothing was shown"


def test_reset_frees_all(alive: weakref.WeakSet[HostExec]) -> None:
    compiled = host(chain)
    for _ in range(2):
        compiled(torch.randn(50))
    assert counted(alive) > 0
    pgraph.reset()
    assert len(alive) == 0
    assert counted(alive) == 0
    for _ in range(2):
        compiled(torch.randn(50))
    assert counted(alive) > 0


def test_eviction_frees_the_least_recently_used(alive: weakref.WeakSet[HostExec]) -> None:
    """Sizes come and go for ever; execs stay as many as `max_captures`."""
    compiled = host(chain, dynamic=True, max_captures=2)
    seen = []
    for size in (10, 20, 30, 40, 10, 20):
        for _ in range(2):
            compiled(torch.randn(size))
        seen.append(len(alive))
        counted(alive)
    assert max(seen) <= 2
    assert pgraph.report().captures > 2


def test_a_refusal_at_launch_frees(alive: weakref.WeakSet[HostExec]) -> None:
    compiled = host(chain)
    for _ in range(2):
        compiled(torch.randn(50))
    assert counted(alive) > 0
    with inject(HostFaults(fail_at="launch")):
        compiled(torch.randn(50))
    assert pgraph.report().refused == 1
    assert len(alive) == 0
    assert counted(alive) == 0


def test_they_die_with_the_compiled_code_and_serve_the_next_model_until_then(
    alive: weakref.WeakSet[HostExec],
) -> None:
    """Dynamo keeps the code of a class when a model of it is gone; it is for the next one."""
    for _ in range(3):
        model = MLP()
        compiled = host(model)
        for _ in range(3):
            train(model, compiled, torch.randn(3, 8))
        assert len(alive) == 2, "a second model of the class was captured anew"
        del model, compiled
        gc.collect()
    assert counted(alive) > 0
    torch._dynamo.reset()
    gc.collect()
    assert len(alive) == 0
    assert counted(alive) == 0


def test_explain_and_dict_tell_the_total(alive: weakref.WeakSet[HostExec]) -> None:
    model = MLP()
    found = pgraph.explain(model, driver="host", codegen="aten", min_ops=1)(torch.randn(3, 8))
    total = sum(e.nbytes for e in alive)
    assert total > 0
    assert found.exec_bytes == found.to_dict()["exec_bytes"] == total
    assert f"memory of the recordings: {total:,} B of execs" in str(found)
    assert pgraph.report().to_dict()["exec_bytes"] == total
