"""The memory that captures may take: never more than that, no thrashing, and the least useful go first."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import host, same
from torch import Tensor

import pgraph
from pgraph.drivers.host.driver import HostSession
from pgraph.runtime import holdings, registry, room
from pgraph.runtime.budget import Budget, limit_of
from pgraph.runtime.keeping import PATIENCE, Keeper, Use

MIB = 1 << 20
ROOM = 3  # captures of one node each


def one(x: Tensor) -> Tensor:
    return x.cumsum(0)


def two(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def nodes_take(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (room, holdings):
        monkeypatch.setattr(module, "NODE_BYTES", nbytes)


@pytest.fixture(autouse=True)
def _each_size_takes_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture has an exec of its own, as where launch attributes cannot be read."""
    nodes_take(MIB // ROOM, monkeypatch)
    monkeypatch.setattr(HostSession, "_kept", lambda *args: None)


@pytest.fixture
def _sizes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """But here they do, and it is the host's memory that they take much of."""
    monkeypatch.setattr(HostSession, "_kept", KEPT)
    nodes_take(1000, monkeypatch)
    monkeypatch.setattr(holdings, "RECIPE_BYTES", MIB // ROOM - 1000)


KEPT = HostSession._kept


def total(which: int = 0) -> int:
    gc.collect(0)
    return holdings._budgets[torch.device("cpu")][which].total()


def kept(number: int = 0) -> list[int]:
    """Sizes that have a capture, of a partition."""
    partition = registry.live_capturable()[number]
    return sorted(s.guards.tensors[0].size[0] for s in partition.specializations() if s.program is not None)


def compiled(fn: Callable[[Tensor], Tensor], **options: Any) -> Callable[[int], bool]:
    """Calls with a size, compares, and says whether it was launched."""
    graph = host(fn, **{"dynamic": True, "capture_memory_mb": 1, **options})

    def call(n: int) -> bool:
        before = pgraph.report().launches
        x = torch.randn(n, 3)
        same(graph(x), fn(x))
        assert max(total(0), total(1)) <= MIB
        return pgraph.report().launches > before

    return call


def heard(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and word in r.getMessage()]


def test_as_many_are_kept_as_there_is_memory_for(caplog: pytest.LogCaptureFixture) -> None:
    """Sizes in turn: the next one needed never goes."""
    call = compiled(one)
    launched = [call(n) for n in [5, 6, 7, 8, 9, 10, 11] * 20]
    assert kept() == [5, 6, 7]
    assert pgraph.report().captures == ROOM
    assert sum(launched) == ROOM * 19
    (told,) = heard(caplog, "capture_memory_mb")
    assert "capture_memory_mb=1 lets in" in told
    assert "raise capture_memory_mb" in told


def test_without_a_limit_sizes_are_not_counted() -> None:
    call = compiled(one, capture_memory_mb=None)
    cache_bytes = MIB // ROOM
    graph = host(two, dynamic=True)
    for n in range(5, 5 + 40):
        for _ in range(2):
            graph(torch.randn(n, 3))
    assert pgraph.report().captures == 40
    assert total() == 40 * cache_bytes
    pgraph.reset()
    assert total() == 0
    assert call is not None


def test_work_that_moves_on_to_another_model_takes_the_memory_along() -> None:
    first, second = compiled(one), compiled(two)
    for n in (5, 6, 7):
        for _ in range(3):
            first(n)
    for n in (5, 6, 7):
        launched = [second(n) for _ in range(3 * PATIENCE)]
        assert sum(launched) >= PATIENCE
    assert (kept(0), kept(1)) == ([], [5, 6, 7])
    assert pgraph.report().captures == 2 * ROOM


def test_models_in_turn_do_not_push_each_other_out() -> None:
    first, second = compiled(one), compiled(two)
    for n in (5, 6, 7):
        for _ in range(3):
            first(n)
    for _ in range(6 * PATIENCE):
        for n in (5, 6, 7):
            assert first(n)
            assert not second(n)
    assert pgraph.report().captures == ROOM


def test_the_least_useful_goes_first() -> None:
    first, second = compiled(one), compiled(two)
    for n, times in ((5, 40), (6, 4), (7, 40)):
        for _ in range(times):
            first(n)
    for _ in range(3 * PATIENCE):
        second(9)
    assert (kept(0), kept(1)) == ([5, 7], [9])


def test_what_needs_more_than_all_of_it_is_captured_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes_take(2 * MIB, monkeypatch)
    call = compiled(one, dynamic=False)
    assert not any(call(5) for _ in range(5 * PATIENCE))
    assert (pgraph.report().captures, total(), pgraph.report().exec_bytes) == (1, 0, 0)
    assert heard(caplog, "capture_memory_mb=1")


def test_both_limits_hold() -> None:
    call = compiled(one, max_captures=2)
    for n in [5, 6, 7, 8] * 10:
        call(n)
    assert kept() == [5, 6]


def test_memory_comes_back_with_the_model() -> None:
    call = compiled(one)
    for _ in range(3):
        call(5)
    assert total() == MIB // ROOM
    del call
    torch._dynamo.reset()
    gc.collect()
    assert total() == 0


def test_a_partition_that_another_thread_is_busy_with_keeps_what_it_has() -> None:
    first, second = compiled(one), compiled(two)
    for n in (5, 6, 7):
        for _ in range(3):
            first(n)
    busy, done = threading.Event(), threading.Event()
    lock = registry.live_capturable()[0]._cache.lock

    def hold() -> None:
        with lock:
            busy.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    busy.wait(30)
    try:
        assert not any(second(9) for _ in range(3 * PATIENCE))
    finally:
        done.set()
        thread.join()
    assert kept(0) == [5, 6, 7]
    for _ in range(3 * PATIENCE):
        second(9)
    assert kept(1) == [9]


@pytest.mark.usefixtures("_sizes_share")
def test_recipes_take_the_hosts_memory(caplog: pytest.LogCaptureFixture) -> None:
    """They are as few as there is memory for, and the next one needed never goes; one exec serves all."""
    call = compiled(one)
    launched = [call(n) for n in [5, 6, 7, 8, 9, 10, 11] * 20]
    assert kept() == [5, 6, 7]
    assert (sum(launched), total(0)) == (ROOM * 19, 1000)
    (told,) = heard(caplog, "capture_memory_mb")
    assert "raise capture_memory_mb" in told
    for _ in range(3 * PATIENCE):
        call(11)
    assert 11 in kept()
    assert len(kept()) == ROOM


@pytest.mark.usefixtures("_sizes_share")
def test_sizes_that_share_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device's memory is short, and a new model needs all of it, all of them go."""
    nodes_take(MIB * 2 // 3, monkeypatch)
    monkeypatch.setattr(holdings, "RECIPE_BYTES", 100)
    first, second = compiled(one), compiled(two)
    for n in (5, 6, 7, 8, 9) * 3:
        first(n)
    assert (len(kept()), total()) == (5, MIB * 2 // 3)
    for _ in range(3 * PATIENCE):
        second(9)
    assert (kept(0), kept(1)) == ([], [9])
    assert total(1) < 1000, "the others' recipes went, too"
    for _ in range(2 * PATIENCE):
        for n in (5, 6, 7):
            first(n)
            second(9)
    assert kept(0) == [], "models in turn do not push each other out"


def test_sizes_that_turn_out_not_to_share_stop_being_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is taken for one that shares: once, and then known not to."""
    nodes_take(MIB * 2 // 3, monkeypatch)
    call = compiled(one)
    for _ in range(PATIENCE):
        call(5)
        call(6)
    assert pgraph.report().captures == 2
    assert kept() == [5]


@given(
    room=st.integers(1, 4),
    blocks=st.lists(
        st.tuples(
            st.integers(0, 1), st.lists(st.integers(5, 10), min_size=1, max_size=6), st.integers(1, 12)
        ),
        max_size=12,
    ),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_sizes_of_two_models(
    room: int, blocks: list[tuple[int, list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right numbers, never too much memory, and captures no more often than patience allows."""
    pgraph.reset()
    torch._dynamo.reset()
    nodes_take(MIB // room, monkeypatch)
    calls = compiled(one), compiled(two)
    made = pgraph.report().captures
    for which, sizes, times in blocks:
        for n in sizes * times:
            calls[which](n)
    report = pgraph.report()
    uncaptured = sum(p.uncaptured_runs for p in report.capturable)
    patient = uncaptured // (1 + PATIENCE)
    assert report.captures - made <= room * (2 + PATIENCE) + patient


def test_who_gets_no_memory_asks_less_and_less() -> None:
    """To look for memory takes a hundred microseconds where there are many captures."""
    keeper, use, asked = Keeper(None, 1), Use(), []
    for run in range(1, 40_001):
        keeper.ran(use, 2 * run)
        if keeper.may_ask(use, 0):
            keeper.declined(use)
            asked.append(run)
    assert asked[:3] == [1, 3, 6]
    assert len(asked) < 400
    assert asked[-1] - asked[-2] < 200, "it still asks"


# -- the rule by itself ----------------------------------------------------------------------------


class Capture:
    def __init__(self, nbytes: int, latest: int, launches: int) -> None:
        self.nbytes, self.use = nbytes, Use(latest=latest, launches=launches)


class Partition:
    """Holds captures."""

    def __init__(self, *captures: Capture) -> None:
        self.captures = list(captures)
        self.lock = threading.RLock()

    def takes(self, memory: str) -> int:
        return sum(c.nbytes for c in self.captures)

    def held(self, memory: str) -> list[Capture]:
        return list(self.captures)

    def catch_up(self) -> None:
        pass

    def evict(self, held: Capture) -> None:
        self.captures.remove(held)


@pytest.fixture
def budget() -> Budget[Capture]:
    budget: Budget[Capture] = Budget()
    for _ in range(100):
        budget.tick()
    return budget


def test_launches_bytes_and_time_say_what_goes(budget: Budget[Capture]) -> None:
    often, seldom = Capture(10, 90, 100), Capture(10, 90, 5)
    large, old = Capture(1000, 90, 100), Capture(10, 1, 100)
    mine = Partition()
    other = Partition(often, seldom, large, old)
    budget.join(mine)
    budget.join(other)
    assert budget.total() == 1030
    for limit, left in (
        (1029, [often, seldom, old]),
        (29, [often, old]),
        (15, [often]),
    ):
        assert budget.make_room(mine, Capture(0, 0, 0), limit, lambda holder, held: True)
        assert other.captures == left
    assert budget.dropped == 3


def test_nothing_goes_where_that_is_not_enough(budget: Budget[Capture]) -> None:
    mine, other = Partition(Capture(50, 90, 1)), Partition(Capture(50, 90, 1))
    budget.join(mine)
    budget.join(other)
    assert not budget.make_room(mine, Capture(0, 0, 0), 40, lambda holder, held: holder is other)
    assert budget.total() == 100
    assert budget.make_room(mine, Capture(0, 0, 0), 60, lambda holder, held: holder is other)
    assert (len(mine.captures), len(other.captures)) == (1, 0)


def test_a_plan_evicts_nothing(budget: Budget[Capture]) -> None:
    mine, other = Partition(), Partition(Capture(50, 90, 1))
    budget.join(mine)
    budget.join(other)
    assert budget.make_room(mine, Capture(0, 0, 0), 60, lambda holder, held: True, planned=20)
    assert not budget.make_room(mine, Capture(0, 0, 0), 60, lambda holder, held: True, planned=70)
    assert budget.total() == 50


def test_a_hundredth_of_the_device_but_no_less_than_256_mib() -> None:
    assert limit_of(None, 0) == 256 * MIB
    assert limit_of(None, 80 << 30) == (80 << 30) // 100
    assert limit_of(7, 80 << 30) == 7 * MIB
