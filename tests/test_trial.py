"""Partitions of few kernels are tried: launched and run uncaptured in turn, then kept or set aside."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import MLP, host

import pgraph
from pgraph.drivers.host.driver import HostDriver
from pgraph.explanation import as_text
from pgraph.runtime import registry, trial
from pgraph.runtime.partition_runner import PartitionRunner
from pgraph.runtime.trial import MOST_NODES, ROUNDS, Trial


def test_launches_and_own_runs_take_turns_until_it_is_over() -> None:
    one = Trial(nodes=3)
    turns = ""
    while not one.over:
        turns += "L" if one.launches_next else "o"
        (one.launches if one.launches_next else one.own).append(float(len(turns)))
    assert turns == "L" + "oL" * ROUNDS
    assert (one.own_s, one.launch_s) == (2.0, 3.0), "the first launch does not count"


@pytest.mark.parametrize(("launch", "own", "gains"), [(4.0, 5.0, True), (5.0, 5.0, False), (6.0, 5.0, False)])
def test_the_fastest_of_each_kind_counts(launch: float, own: float, gains: bool) -> None:
    one = Trial(nodes=1, own=[own + 1, own, own + 2], launches=[0.0, launch, launch + 3, launch + 1])
    assert one.over
    assert one.gains is gains


class Tried:
    """An MLP on the host driver, whose host times are these."""

    def __init__(self, patch: pytest.MonkeyPatch, launch_us: float, own_us: float, **options: Any) -> None:
        now = 0.0
        self.launches, self.own = launch_us, own_us

        def launching(runner: PartitionRunner, captured: Any, args: list[Any]) -> Any:
            nonlocal now
            now += self.launches * 1e-6
            return launch(runner, captured, args)

        def running(code: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
            def run(args: list[Any]) -> Any:
                nonlocal now
                now += self.own * 1e-6
                return code(args)

            return run

        launch = PartitionRunner._launch
        patch.setattr(PartitionRunner, "_launch", launching)
        patch.setattr(HostDriver, "host_times", True)
        patch.setattr(trial, "clock", lambda: now)
        self.model = MLP()
        self.compiled = host(self.model, **options)
        self.call()
        for runner in registry.live_capturable():
            runner._plain = running(runner._plain)
            runner.admission.code = type(runner.admission.code)(runner._plain)
        (self.stats,) = (p.stats for p in registry.live_capturable())

    def call(self, n: int = 3) -> None:
        x = torch.randn(n, 8)
        with torch.no_grad():
            assert torch.equal(self.compiled(x), self.model(x))

    def served(self, calls: int) -> str:
        """L for each call that was launched, o for each one that ran uncaptured."""
        found = ""
        for _ in range(calls):
            launches = self.stats.launches
            self.call()
            found += "L" if self.stats.launches > launches else "o"
        return found


def test_what_gains_nothing_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch, launch_us=9, own_us=7)
    assert tried.served(1) == "L"
    kernels = tried.stats.nodes
    assert tried.served(2 * ROUNDS + 3) == "oL" * ROUNDS + "ooo"
    assert tried.stats.state == "set aside"
    assert tried.stats.exec_bytes == 0
    (reason,) = tried.stats.reasons
    assert str(reason).startswith(
        f"[no-gain] a launch of its {kernels} kernels takes the host 9 us, its own code 7 us. "
        "Fix: nothing to do"
    )
    assert pgraph.report().refused == 0
    (runner,) = registry.live_capturable()
    monkeypatch.setattr(runner.admission, "choose", lambda *args, **kwargs: pytest.fail("it looked further"))
    tried.call()


def test_other_sizes_of_what_gains_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch, launch_us=7, own_us=10e6, dynamic=True)
    assert tried.served(2 * ROUNDS + 3) == "L" + "oL" * ROUNDS + "LL"
    while tried.stats.captures < 2:
        tried.call(5)
    launches = tried.stats.launches
    for _ in range(ROUNDS):
        tried.call(5)
    assert tried.stats.launches == launches + ROUNDS


def test_other_sizes_of_what_was_set_aside_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch, launch_us=9, own_us=7, dynamic=True)
    tried.served(1 + 2 * ROUNDS)
    assert tried.stats.state == "set aside"
    for _ in range(3):
        tried.call(5)
    assert tried.stats.captures == 1
    pgraph.reset()
    assert tried.stats.captures == 0
    tried.call()
    tried.call()
    assert tried.stats.captures == 1, "after a reset everything begins anew"


def test_a_trial_that_another_thread_ends_is_launched_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch, launch_us=9, own_us=7)
    tried.call()
    (runner,) = registry.live_capturable()
    cache, (one,) = runner._cache, runner.specializations()
    assert one.trial is not None
    found: list[Any] = []
    with cache.lock:
        other = threading.Thread(target=lambda: found.append(cache.captured_as(one)))
        other.start()
        other.join(0.2)
        assert not found, "it waits for the other one's verdict"
        one.trial, one.program = None, None
    other.join(10)
    assert found == [cache.captured]


def test_what_gains_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch, launch_us=7, own_us=9)
    assert tried.served(2) == "Lo"
    assert pgraph.report().on_trial == 1
    assert tried.stats.state == "captured"
    assert tried.served(2 * ROUNDS - 1 + 4) == "L" + "oL" * (ROUNDS - 1) + "LLLL"
    assert pgraph.report().on_trial == 0
    assert tried.stats.state == "captured"
    assert tried.stats.reasons == ()


@pytest.mark.parametrize("why", ["option", "hard mode", "host", "large"])
def test_without_a_trial(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "option": {"step_aside": False},
        "hard mode": {"require_full_capture": True},
    }.get(why, {})
    if why == "large":
        monkeypatch.setattr("pgraph.runtime.cache.MOST_NODES", 2)
        assert MOST_NODES > 4
    tried = Tried(monkeypatch, launch_us=9, own_us=7, **options)
    if why == "host":
        monkeypatch.setattr(HostDriver, "host_times", False)
    assert tried.served(3 + 2 * ROUNDS) == "L" * (3 + 2 * ROUNDS)
    assert tried.stats.state == "captured"


def test_an_explanation_tells_what_captures_save(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = MLP(), torch.randn(3, 8)
    monkeypatch.setattr(HostDriver, "host_times", True)
    monkeypatch.setattr("pgraph.runtime.cache.MOST_NODES", 0)
    with torch.no_grad():
        explanation = pgraph.explain(model, driver="host")(x)
    (partition,) = explanation.partitions
    assert partition.own_s is not None
    assert partition.seconds is not None
    assert partition.saved_s == partition.own_s - partition.seconds
    assert partition.capture_s > 0
    shown = [line.strip() for line in str(explanation).splitlines() if "captured in" in line]
    assert len(shown) == 1
    assert ("paid back after" in shown[0]) == (partition.saved_s > 0)
    assert "captured in" not in explanation.render(times=False)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (2e-4, "saves 200 us of host time; captured in 31 ms, paid back after 156 steps"),
        (-1e-6, "saves no host time; captured in 31 ms"),
    ],
)
def test_when_a_capture_has_paid_for_itself(saved: float, text: str) -> None:
    with torch.no_grad():
        (partition,) = pgraph.explain(MLP(), driver="host")(torch.randn(3, 8)).partitions
    partition = dataclasses.replace(partition, seconds=1e-3, own_s=1e-3 + saved, capture_s=0.0311)
    assert as_text._saved(partition) == text
