"""Measuring on fast cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


class Machine:
    """Cores with a speed each, and where this process's threads may run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: dict[int, float], cores: int = 8) -> None:
        self.slow, self.used = slow, dict.fromkeys((0, 17), frozenset(range(cores)))
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: self.used[thread], raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", self.use, raising=False)

    def use(self, thread: int, cores: Any) -> None:
        if thread not in self.used:
            raise ProcessLookupError(thread)
        self.used[thread] = frozenset(cores)

    def measure(self) -> float:
        return max(self.slow.get(core, 100.0) for core in self.used[0])


@pytest.fixture
def host_speed(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load("host_speed")
    monkeypatch.setattr(module, "_threads", lambda: (0, 17, 99))  # the last one has ended
    return module


def test_all_threads_run_on_the_fast_cores(host_speed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {1: 190.0, 5: 109.0, 7: 130.0})
    cores = host_speed.Cores(machine.measure)
    assert cores.choose() == {0, 2, 3, 4, 5, 6}
    assert machine.used == dict.fromkeys((0, 17), frozenset({0, 2, 3, 4, 5, 6}))
    machine.slow = dict.fromkeys(range(8), 150.0)
    assert cores.slowdown() == 1.5
    machine.slow = {0: 50.0, 3: 90.0}
    assert cores.choose() == {0, 3}, "two at least"
    cores.release()
    assert machine.used == dict.fromkeys((0, 17), frozenset(range(8)))


def test_without_affinity_it_runs_where_it_is_put(host_speed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    took = iter((10.0, 12.0, 8.0, 8.0))
    cores = host_speed.Cores(lambda: next(took))
    assert cores.choose() == frozenset()
    assert cores.slowdown() == 1.2
    assert cores.slowdown() == 1.0, "as fast as it has been seen"
    assert cores.slowdown() == 1.0


def test_a_loop_takes_time(host_speed: Any) -> None:
    assert 1.0 < host_speed.loop_us() < 1e6


@pytest.mark.parametrize(
    ("slowdowns", "turns", "used"),
    [([1.0] * 5, 5, [1.0] * 5), ([1.0, 1.9, 1.1, 1.5, 1.2, 1.0, 1.0], 7, [1.0] * 3 + [1.1, 1.2])],
)
def test_turns_on_a_slow_host_are_taken_again(
    load: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    slowdowns: list[float],
    turns: int,
    used: list[float],
) -> None:
    timing = load("coverage_time")
    left, stood = iter(slowdowns), list[int]()
    cores = SimpleNamespace(choose=lambda: None, release=lambda: None, slowdown=lambda: next(left))
    monkeypatch.setattr(timing, "Cores", lambda: cores)
    taken = timing.take_turns(lambda: None, timing.Device("cpu"), 2, lambda: stood.append(1))
    assert len(taken) == turns
    assert len(stood) == turns - 1, "all others stand still at first"
    assert sorted(turn.slowdown for turn in taken)[: timing.TURNS] == used
    assert all(len(turn.times) == 2 and len(turn.issue) == timing.ISSUE_STEPS for turn in taken)


def test_a_host_that_stays_slow_is_measured_all_the_same(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = load("coverage_time")
    slow = SimpleNamespace(choose=lambda: None, release=lambda: None, slowdown=lambda: 2.0)
    monkeypatch.setattr(timing, "Cores", lambda: slow)
    assert len(timing.take_turns(lambda: None, timing.Device("cpu"), 2, lambda: None)) == timing.MOST_TURNS
