"""Where sizes vary: partitions whose captures have to pay, on the host driver."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_trial import Tried

import pgraph
from pgraph.drivers.host.driver import HostDriver
from pgraph.drivers.interface import Passed
from pgraph.runtime import registry
from pgraph.runtime.economy import Economy


@pytest.mark.parametrize("behind", [True, False])
def test_the_driver_tells_whether_the_device_is_behind(behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once the code was run, of a mark from before, and not while there is one size alone."""
    order: list[str] = []

    def mark(driver: HostDriver) -> Passed:
        order.append("mark")
        return lambda: order.append("asked") or not behind

    monkeypatch.setattr(HostDriver, "mark", mark)
    monkeypatch.setattr("pgraph.runtime.cache.MOST_NODES", 0)
    tried = Tried(monkeypatch, launch_us=7, own_us=10e6, dynamic=True)
    tried.served(3)
    assert order == []
    for _ in range(12):
        tried.call(5)
        tried.call(3)
    assert order[:2] == ["mark", "asked"]
    assert tried.stats.captures == (1 if behind else 2)


def test_it_is_told_which_runs_are_a_sizes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    real = Economy.ran

    def ran(economy: Economy, seconds: float, behind: bool = False, first: bool = False) -> None:
        told.append(first)
        real(economy, seconds, behind, first)

    monkeypatch.setattr(Economy, "ran", ran)
    monkeypatch.setattr("pgraph.runtime.cache.MOST_NODES", 0)
    tried = Tried(monkeypatch, launch_us=7, own_us=10e6, dynamic=True)
    tried.served(3)
    before = len(told)
    assert told == [True] + [False] * (before - 1)
    for _ in range(2):
        tried.call(5)
    assert told[before:] == [True, False]


def test_a_second_size_waits_until_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgraph.runtime.cache.MOST_NODES", 0)
    tried = Tried(monkeypatch, launch_us=7, own_us=9, dynamic=True)
    tried.served(3)
    assert (tried.stats.captures, tried.stats.reasons) == (1, ())
    for _ in range(4):
        tried.call(5)
        tried.call(3)
    assert tried.stats.captures == 1
    assert tried.stats.state == "captured"
    assert [reason.code for reason in tried.stats.reasons] == ["sizes-vary"]
    tried.own = 10e6  # ten seconds: more than any capture here
    for _ in range(12):  # the fastest of the last few runs counts
        tried.call(5)
        tried.call(3)
    assert tried.stats.captures == 2
    assert tried.stats.reasons == ()
    assert len([s for (p,) in [registry.live_capturable()] for s in p.specializations()]) == 2


@pytest.mark.parametrize("options", [{"step_aside": False}, {"capture_sizes": (3, 5)}])
def test_whoever_asks_for_them_gets_captures(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgraph.runtime.cache.MOST_NODES", 0)
    tried = Tried(monkeypatch, launch_us=7, own_us=9, dynamic=True, **options)
    for _ in range(3):
        tried.call(5)
        tried.call(3)
    assert tried.stats.captures == 2
    assert isinstance(tried.compiled(torch.randn(3, 8)), torch.Tensor)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_captured_numbers_are_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random sizes, times, threads and resets: each call is compared with the uncompiled model."""
    rng = random.Random(seed)
    if rng.random() < 0.6:
        monkeypatch.setattr("pgraph.runtime.cache.MOST_NODES", 0)
    told = {key: 2 for key in ("max_captures", "warmup") if rng.random() < 0.25}
    tried = Tried(monkeypatch, rng.choice([3, 7, 50]), rng.choice([5, 9, 1e4, 1e7]), dynamic=True, **told)
    for _ in range(200):
        size = rng.choice([3, 3, rng.randrange(2, 9), rng.randrange(2, 200)])
        what = rng.random()
        if what < 0.02:
            pgraph.reset()
        elif what < 0.05:
            tried.own, tried.launches = rng.choice([5, 9, 1e4, 1e7]), rng.choice([3, 7, 50])
        if what > 0.95:
            with ThreadPoolExecutor(1) as other:
                other.submit(tried.call, size).result()
        else:
            tried.call(size)
    assert tried.stats.launches + tried.stats.uncaptured_runs > 0
