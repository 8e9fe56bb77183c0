"""Measuring on fast cores."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
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


def test_all_threads_run_on_the_fastest_core(host_speed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {0: 190.0, 1: 101.0, 5: 109.0})
    cores = host_speed.Cores(machine.measure)
    assert cores.choose() == 2
    assert machine.used == dict.fromkeys((0, 17), frozenset({2}))
    machine.slow = dict.fromkeys(range(8), 150.0)
    assert cores.slowdown() == 1.5
    machine.slow[7] = 90.0
    assert cores.choose() == 7
    assert cores.slowdown() == 1.0
    cores.release()
    assert machine.used == dict.fromkeys((0, 17), frozenset(range(8)))


def test_of_many_cores_a_few_are_looked_at(host_speed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {core: 100.0 + core for core in range(64)}, cores=64)
    looked: list[float] = []
    cores = host_speed.Cores(lambda: looked.append(machine.measure()) or looked[-1])
    chosen = cores.choose()
    assert len(set(looked)) == len(looked) == 8
    assert 100.0 + chosen == min(looked)


def test_processes_side_by_side_have_cores_of_their_own(
    host_speed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, {1: 90.0, 2: 80.0, 6: 95.0})
    halves = [host_speed.Cores(machine.measure, part, 2) for part in range(2)]
    one_of_nine = host_speed.Cores(machine.measure, 8, 9)
    assert [cores.choose() for cores in halves] == [2, 6]
    assert one_of_nine.choose() == 2, "fewer cores than processes: any of them"


def test_without_affinity_it_runs_where_it_is_put(host_speed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    took = iter((10.0, 12.0, 8.0, 8.0))
    cores = host_speed.Cores(lambda: next(took))
    assert cores.choose() is None
    assert cores.slowdown() == 1.2
    assert cores.slowdown() == 1.0, "as fast as it has been seen"
    assert cores.slowdown() == 1.0


def test_a_loop_takes_time(host_speed: Any) -> None:
    assert 1.0 < host_speed.loop_us() < 1e6


def test_runs_on_a_slow_host_are_made_again(host_speed: Any) -> None:
    slowdowns = iter([1.0, 1.5, 1.1, 1.3, 1.0, 9.0])
    cores = SimpleNamespace(choose=lambda: 0, release=lambda: None, slowdown=lambda: next(slowdowns))
    numbers = itertools.count()
    assert host_speed.on_fast_cores(lambda: next(numbers), 3, cores) == [0, 4, 2]
    numbers, slowdowns = itertools.count(), itertools.chain([2.0, 1.4], itertools.repeat(3.0))
    assert host_speed.on_fast_cores(lambda: next(numbers), 2, cores) == [1, 0]
    assert next(numbers) == 8


def fake_cores(slowdowns: Iterator[float], chosen: list[int]) -> Any:
    def slowdown() -> float:
        return next(slowdowns)

    return SimpleNamespace(choose=lambda: chosen.append(1), release=lambda: None, slowdown=slowdown)


def fake_device(monkeypatch: pytest.MonkeyPatch, timing: Any, issue: float) -> Any:
    """A step takes 1 ms, of which the host is busy for `issue`."""
    device = timing.Device("cpu")
    monkeypatch.setattr(device, "timed", lambda step, steps: [1.0] * steps)
    monkeypatch.setattr(device, "issue", lambda step, steps: [issue] * steps)
    return device


def test_bursts_on_a_slow_host_are_taken_again(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = load("coverage_time")
    monkeypatch.setattr(timing, "TURNS", 2)
    stood, chosen = list[int](), list[int]()
    slowdowns = iter([1.0, 1.9, 1.1, 1.5, 1.1, 1.0, 1.0, 1.0])
    monkeypatch.setattr(timing, "Cores", lambda: fake_cores(slowdowns, chosen))
    device = fake_device(monkeypatch, timing, issue=0.9)
    taken = timing.take_turns(lambda: None, device, 12, lambda: stood.append(1))
    assert [burst.slowdown for burst in taken] == [1.0, 1.9, 1.1, 1.5, 1.1, 1.0, 1.0, 1.0]
    assert len(stood) == 1, "all others stand still at first"
    assert len(chosen) == 4, "at the start of a turn, and after a slow burst"
    assert all(burst.times == [1.0, 1.0] and burst.issue == 0.9 for burst in taken)


@pytest.mark.parametrize(("issue", "times"), [(0.9, 3), (0.4, 1)], ids=["sets the pace", "waits"])
def test_a_host_that_stays_slow_is_measured_all_the_same(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, issue: float, times: int
) -> None:
    """And no more often than another one, where it waits for the device."""
    timing = load("coverage_time")
    monkeypatch.setattr(timing, "Cores", lambda: fake_cores(itertools.repeat(2.0), []))
    taken = timing.take_turns(lambda: None, fake_device(monkeypatch, timing, issue), 24, lambda: None)
    assert load("bursts").MOST == 3
    assert len(taken) == timing.TURNS * timing.BURSTS * times


@pytest.mark.parametrize(("steps", "bursts"), [(120, 3), (24, 3), (4, 3), (3, 1), (0, 1)])
def test_of_long_steps_there_are_fewer_bursts(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, steps: int, bursts: int
) -> None:
    """A step of 0.7 s would take minutes with all of them."""
    timing = load("coverage_time")
    monkeypatch.setattr(timing, "Cores", lambda: fake_cores(itertools.repeat(1.0), []))
    taken = timing.take_turns(lambda: None, fake_device(monkeypatch, timing, issue=0.9), steps, lambda: None)
    assert len(taken) == timing.TURNS * bursts
    assert {len(burst.times) for burst in taken} == {max(2, steps // timing.TURNS // bursts)}


def test_where_sizes_vary_each_burst_holds_all_of_them(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = load("coverage_time")
    monkeypatch.setattr(timing, "Cores", lambda: fake_cores(itertools.cycle([1.0, 1.9]), []))
    device, now = timing.Device("cpu"), [0]
    monkeypatch.setattr(device, "timed", lambda step, steps: [step() for _ in range(steps)])
    monkeypatch.setattr(device, "issue", lambda step, steps: [step() for _ in range(steps)])

    def step() -> float:
        now[0] += 1
        return float(now[0] % 5)

    taken = timing.take_turns(step, device, 40, lambda: None, round_of=5)
    assert len(taken) == 2 * timing.TURNS - 1, "a burst a turn, and each on a slow host once more"
    assert [sorted(burst.times) for burst in taken] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * len(taken)
    assert [burst.issue for burst in taken] == [2.0] * len(taken)
    with pytest.raises(ValueError, match="a burst of 7 steps"):
        load("bursts").bursts(step, device, 7, 1, fake_cores(itertools.repeat(1.0), []), round_of=5)


def test_the_fastest_bursts_count_in_their_order(load: Callable[[str], Any]) -> None:
    module = load("bursts")
    taken = [module.Burst([float(i)], 0.0, {}, slowdown) for i, slowdown in enumerate([1.0, 1.4, 1.1, 1.0])]
    assert [burst.times[0] for burst in module.fastest(taken, 3)] == [0.0, 2.0, 3.0]
    assert [burst.times[0] for burst in module.fastest(taken, 9)] == [0.0, 1.0, 2.0, 3.0]
