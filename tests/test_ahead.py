"""Recordings of sizes that are to be expected, computed before they come."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import Block, same, train
from support_sizes import W, call, compiled, made, work
from torch import Tensor

import pgraph
from pgraph.compute.errors import NotComputableError
from pgraph.compute.sites import Sites
from pgraph.compute.stand_ins import Family
from pgraph.drivers.host.driver import HostDriver
from pgraph.drivers.interface import Driver
from pgraph.runtime import admission, ahead, registry
from pgraph.runtime.partition_runner import PartitionRunner
from pgraph.runtime.statistics import PartitionStats


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There host time is worth something. What is small is not tried; time is no matter."""
    monkeypatch.setattr(HostDriver, "host_times", True)
    monkeypatch.setattr("pgraph.runtime.cache.MOST_NODES", 0)
    monkeypatch.setattr(ahead, "_ALL_S", 1e6)
    monkeypatch.setattr(ahead, "_LEAST_S", 100.0)
    monkeypatch.setattr(ahead, "_MOST_S", 100.0)


def partitions(kind: str = "") -> list[PartitionRunner]:
    return [one for one in registry.live_capturable() if one.name.startswith(kind)]


def known(kind: str = "") -> list[int]:
    """The first sizes that recordings were made for."""
    found = [s for one in partitions(kind) for s in one.specializations() if s.program is not None]
    return sorted(s.guards.tensors[0].size[0] for s in found)


def stats() -> PartitionStats:
    (one,) = partitions()
    return one.stats


def test_sizes_between_those_that_came_are_there_before_they_come() -> None:
    """From the third size on. They are launched at their first call."""
    model = compiled()
    call(model, (20, 12))
    assert made()[1] <= 1
    call(model, (16,))
    assert set(known()) >= {n for n in range(12, 21) if n not in (12, 16, 20)}
    runs, launches = stats().uncaptured_runs, stats().launches
    call(model, (13, 19, 14, 13))
    assert (stats().uncaptured_runs, stats().launches) == (runs, launches + 4)
    assert made()[0] == made()[1]


def test_a_forward_and_its_backward() -> None:
    torch.manual_seed(0)
    block = Block()
    model = compiled(block)
    for n in (9, 3, 6, 4, 8, 5, 7):
        x = torch.randn(2, n, 32)
        want = train(block, block, x)
        for name, grad in train(block, model, x).items():
            same(grad, want[name], rtol=1e-3, atol=1e-4)
    for one in partitions():
        assert (one.stats.uncaptured_runs, one.stats.captures) == (3, one.stats.computed)


def test_what_a_graph_of_its_own_gets_is_told_by_the_others() -> None:
    """Dynamo compiles a function twice: each gets the sizes that it serves, from its first call on."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        if x.size(0) % 4 == 0:
            return (x.view(-1, 4, 8) @ w).sum(1) @ w
        return work(x, w)

    model = compiled(fn)
    call(model, (16, 8, 15), fn)
    odd = [one for one in partitions() if one.stats.calls == 1]
    assert len(odd) == 1
    sizes = {s.guards.tensors[0].size[0] for s in odd[0].specializations() if s.program is not None}
    assert sizes == {9, 10, 11, 13, 14}
    call(model, (11, 13, 9), fn)
    assert odd[0].stats.uncaptured_runs == 1


def test_two_sizes_may_be_all_that_there_are() -> None:
    model = compiled()
    call(model, (20, 12) * 6)
    assert set(known()) <= {12, 20}


def test_growing_sizes_leave_nothing_to_expect() -> None:
    """Those of a cache, one more at each call: what lies between is there."""
    model = compiled()
    call(model, range(5, 25))
    assert set(known()) <= set(range(5, 25))


def test_a_program_that_has_run_for_a_while_waits_for_nothing() -> None:
    model = compiled()
    call(model, (20,) * 20)
    before = made()
    call(model, (12, 16))
    assert made()[0] <= before[0] + 2


def test_listed_sizes_are_there_at_once() -> None:
    """Those of `capture_sizes`, whatever came. (All sizes have to be listed: 8 columns, too.)"""
    model = compiled(capture_sizes=(6, 8, 9, 30))
    call(model, (6,))
    assert set(known()) >= {8, 9, 30}
    runs = stats().uncaptured_runs
    call(model, (9, 30, 8))
    assert stats().uncaptured_runs == runs


@pytest.mark.parametrize(
    "options", [{"max_captures": 4}, {"compute_sizes": "check"}, {"compute_sizes": "off"}]
)
def test_not_where_captures_are_few_or_not_computed(options: dict[str, Any]) -> None:
    model = compiled(**options)
    call(model, (20, 12, 16))
    assert stats().computed == 0 or "max_captures" in options
    assert not {13, 14, 15, 17, 18, 19} & set(known())


def test_not_where_no_host_time_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDriver, "host_times", False)
    call(compiled(), (20, 12, 16))
    assert not {13, 14, 15, 17, 18, 19} & set(known())


def test_it_takes_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a lot that was begun no more are computed."""
    monkeypatch.setattr(ahead, "_LEAST_S", 1e-6)
    monkeypatch.setattr(ahead, "SHARE", 0.0)
    with caplog.at_level(logging.INFO, logger="pgraph.runtime.admission"):
        call(compiled(), (20, 12, 16))
    assert not {13, 14, 15, 17, 18, 19} & set(known())
    assert "0 sizes computed ahead" in caplog.text


def test_all_partitions_together_take_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of functions of a program get no seconds each; a reset begins anew."""
    monkeypatch.setattr(ahead, "SHARE", 0.0)
    call(compiled(), (20, 12, 16))
    assert len(known()) >= 6
    monkeypatch.setattr(ahead, "_ALL_S", 1e-6)
    torch._dynamo.reset()
    before = pgraph.report().computed
    call(compiled(), (20, 12, 16))
    assert pgraph.report().computed <= before + 1
    monkeypatch.setattr(ahead, "_ALL_S", 100.0)
    torch._dynamo.reset()
    pgraph.reset()
    call(compiled(), (20, 12, 16))
    assert len(known()) >= 6


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 3)), max_size=20))
def test_what_is_left_of_it(partitions: list[tuple[float, float]]) -> None:
    allowance = ahead.Allowance()
    before = allowance.left_s
    for compile_s, spent in partitions:
        allowance.compiled(compile_s)
        allowance.spent(spent)
    total = sum(ahead.SHARE * compile_s - spent for compile_s, spent in partitions)
    assert allowance.left_s == pytest.approx(before + total)
    allowance.reset()
    assert allowance.left_s == before


def test_too_many_sizes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of those that could be computed would ever come."""
    model = compiled()
    call(model, (6000, 2, 40))
    assert len(known()) <= 2
    monkeypatch.setattr(ahead, "_LEAST_S", 1e-2)
    monkeypatch.setattr(ahead, "SHARE", 0.0)
    pgraph.reset()
    torch._dynamo.reset()
    model = compiled()
    call(model, (3000, 2, 40))
    assert len(known()) <= 10


def test_a_size_in_vain_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three in a row that cannot be computed are enough."""
    tried: list[int] = []
    real = admission.build

    def build(driver: Driver, fn: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        if any(isinstance(t, Tensor) and t.is_meta for t in inputs):
            tried.append(1)
            return None
        return real(driver, fn, inputs, *given, **options)

    monkeypatch.setattr(admission, "build", build)
    model = compiled()
    call(model, (20, 12, 16, 13, 13, 19))
    assert len(tried) == 3
    assert all(s.standing.runs for s in partitions()[0].specializations())
    assert len(stats().standings) == len(partitions()[0].specializations())
    assert {n for n, _ in stats().met.sizes} == {20, 12, 16, 13, 19}


def test_what_python_collects_meanwhile_does_not_count() -> None:
    """Full collections take half a second each (H200): with them a backward got 8 sizes, not 90."""

    def slow(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            time.sleep(0.05)

    before = list(gc.callbacks)
    start = time.perf_counter()
    with ahead._Effort() as effort:
        gc.callbacks.insert(0, slow)
        try:
            gc.collect()
            collected = effort.seconds
            assert time.perf_counter() - start >= collected + 0.05
            gc.collect(0)
            assert effort.seconds >= collected + 0.05
        finally:
            gc.callbacks.remove(slow)
    assert gc.callbacks == before


@pytest.mark.parametrize("where", ["guards", "sizes", "lock"])
def test_whatever_is_in_the_way_a_program_runs(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("nobody expects it")

    model = compiled()
    call(model, (20, 12))
    owner, name = {
        "guards": (ahead, "_guards_like"),
        "sizes": (Family, "at"),
        "lock": (HostDriver, "capture_lock"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        call(model, (16,))
    assert not {13, 14, 15, 17, 18, 19} & set(known())
    call(model, (14, 13, 20))


def test_memory_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes for a size that has not come."""
    monkeypatch.setattr("pgraph.runtime.room.Room.fits", lambda room: False)
    call(compiled(), (20, 12, 16))
    assert not {13, 14, 15, 17, 18, 19} & set(known())


def test_a_report_tells_sizes_that_came() -> None:
    """Met are those that came; a user sees how many were there before."""
    model = compiled()
    call(model, (20, 12, 16, 13))
    told = stats().sizes
    assert told is not None
    assert told.met == 4
    assert told.ahead == 6
    assert "6 of them ahead of their first call" in str(told)
    assert pgraph.report().computed == told.computed >= 6


def test_what_it_costs_is_part_of_the_compilation() -> None:
    """The economy is told what computing takes, and has spent nothing."""
    call(compiled(), (20, 12, 16))
    (one,) = partitions()
    economy = one._cache.economy
    own = sum(s.program is not None and s.foreseen is None for s in one.specializations())
    assert len(economy._computed) >= 6
    assert economy._made == own
    assert economy.sizes == 3


def test_a_custom_op_is_recorded_at_no_size_that_did_not_run() -> None:
    @torch.library.custom_op("pgraph_ahead::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _like(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (twice(torch.relu(x @ w)) @ w).sin()  # type: ignore[no-any-return]

    call(compiled(fn), (20, 12, 16), fn)
    assert not {13, 14, 15, 17, 18, 19} & set(known())


@pytest.fixture
def numbers() -> Callable[..., None]:
    """Calls a model with numbers beside its tensors."""

    def fn(x: Tensor, w: Tensor, factor: float) -> Tensor:
        return work(x, w) * factor

    model = compiled(fn)

    def run(*sizes: int, factor: float = 2.0) -> None:
        for n in sizes:
            x = torch.randn(n, 8, dtype=W.dtype)
            same(model(x, W, factor), fn(x, W, factor), rtol=1e-4, atol=1e-5)

    return run


def test_other_arguments_may_vary_too(numbers: Callable[..., None]) -> None:
    """Results are right whatever is launched."""
    numbers(20, 12, 16)
    numbers(13, 14, 19, factor=3.0)
    numbers(13, 14, 19, 21, 11)


def test_two_sizes_that_vary() -> None:
    """All that may come of both, in training."""
    torch.manual_seed(0)
    block = Block()
    model = compiled(block)
    for batch, n in ((4, 9), (2, 5), (3, 7), (2, 9), (4, 6), (3, 5), (4, 7), (2, 8)):
        x = torch.randn(batch, n, 32)
        want = train(block, block, x)
        for name, grad in train(block, model, x).items():
            same(grad, want[name], rtol=1e-3, atol=1e-4)
    for one in partitions():
        assert one.stats.ahead >= 12
        assert one.stats.uncaptured_runs == 3


def test_inputs_that_are_aligned_otherwise_are_others() -> None:
    """Guards hold for what was computed ahead as for everything else."""
    model = compiled()
    call(model, (20, 12, 16))
    for n in (13, 14, 13, 14):
        x = torch.randn(n * 8 + 1, dtype=W.dtype)[1:].view(n, 8)
        same(model(x, W), work(x, W), rtol=1e-4, atol=1e-5)
    call(model, (13, 14))


def test_a_reset_forgets_them() -> None:
    model = compiled()
    call(model, (20, 12, 16))
    assert len(known()) >= 6
    pgraph.reset()
    assert known() == []
    call(model, (13, 20, 13))
    assert {n for n, _ in stats().met.sizes} >= {13, 20}


def test_library_calls_of_several_sizes_are_recorded_in_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin and end one takes as long as the calls of a size."""
    recorded: list[int] = []
    real = Sites.record

    def record(sites: Sites, calls: Any, whole: bool = False) -> None:
        recorded.append(len({call.key for call in calls}))
        real(sites, calls, whole)

    monkeypatch.setattr(Sites, "record", record)
    model = compiled()
    call(model, (40, 12))
    recorded.clear()
    call(model, (16,))
    ahead_of = stats().ahead
    assert ahead_of >= 24
    assert len(recorded) == -(-ahead_of // 8)
    assert max(recorded) >= 16
    recorded.clear()
    call(model, range(12, 41))
    assert recorded == []


def test_calls_that_cannot_be_recorded_ahead_are_recorded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sites.record

    def record(sites: Sites, calls: Any, whole: bool = False) -> None:
        if len({call.key for call in calls}) > 4:
            raise NotComputableError("too many")
        real(sites, calls, whole)

    monkeypatch.setattr(Sites, "record", record)
    model = compiled()
    call(model, (20, 12, 16))
    assert set(known()) >= {13, 14, 15, 17, 18, 19}
    call(model, (13, 19))
