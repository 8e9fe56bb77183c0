"""Partitions of few kernels are tried on a real device, and what is faster for the host stays."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import compile_pgraph

import pgraph
from pgraph.drivers import choice
from pgraph.runtime.trial import ROUNDS


def scaled(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch._foreach_mul(tensors, 2)  # a few kernels for all of them


@pytest.mark.parametrize("tensors", [2, 200])
def test_the_faster_way_stays(tensors: int) -> None:
    compiled = compile_pgraph(scaled, dynamic=None, step_aside=True)
    with torch.no_grad():
        for call in range(4 + 2 * ROUNDS):
            given = [torch.randn(64, device="cuda") for _ in range(tensors)]
            assert all(torch.equal(a, b * 2) for a, b in zip(compiled(*given), given, strict=True))
            if call == 2:
                assert pgraph.report().on_trial == 1
    report = pgraph.report()
    assert report.on_trial == 0
    (partition,) = report.capturable
    (standing,) = partition.standings
    assert standing.launch_s is not None
    assert standing.own_s is not None
    assert 0 < standing.launch_s < 0.01
    assert 0 < standing.own_s < 0.01
    assert partition.state == ("captured" if standing.launch_s < standing.own_s else "set aside")
    if partition.state == "set aside":
        assert partition.exec_bytes == 0


def test_an_explanation_measures_the_own_code() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24))).cuda()
    with torch.no_grad():
        explanation = pgraph.explain(model)(torch.randn(8, 64, device="cuda"))
    (partition,) = explanation.partitions
    assert partition.state == "captured"
    assert partition.saved_s is not None
    assert partition.saved_s > 0
    assert "paid back after" in str(explanation)


def test_a_mark_tells_whether_the_device_has_come_to_it() -> None:
    driver = choice._get(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    passed = driver.mark()
    assert passed is not None
    assert not passed()
    torch.cuda.synchronize()
    assert passed()


def test_sizes_are_not_captured_where_the_device_sets_the_pace() -> None:
    """The host is done with each call long before the device begins with it."""
    wide = torch.randn(4096, 4096, device="cuda")

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x @ wide)
        return x

    compiled = compile_pgraph(run, dynamic=True, codegen="aten", step_aside=True)
    with torch.no_grad():
        for _ in range(40):
            for n in (2048, 4096):
                torch.cuda._sleep(20_000_000)
                compiled(torch.randn(n, 4096, device="cuda"))
    assert pgraph.report().captures <= 1, str(pgraph.report())
