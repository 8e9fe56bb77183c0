"""Calls that a glance at their sizes is enough for, and what becomes of these sizes."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trial import Tried
from torch.utils._python_dispatch import TorchDispatchMode

from pgraph.errors import MatchError
from pgraph.reasons import Reason
from pgraph.runtime import admission, cache, registry
from pgraph.runtime.economy import Economy
from pgraph.runtime.glimpses import Glimpse, Glimpses
from pgraph.runtime.met import Met
from pgraph.runtime.purse import Purse
from pgraph.runtime.sizes import Dimension, Sizes


class Varying(Tried):
    """Sizes that come when nothing can be captured, for want of time saved up."""

    def __init__(self, patch: pytest.MonkeyPatch, **options: object) -> None:
        patch.setattr("pgraph.runtime.cache.MOST_NODES", 0)
        super().__init__(patch, launch_us=7, own_us=9, dynamic=True, **options)
        self.guarded = 0
        real = cache.guards_of

        def guards(*args: Any) -> Any:
            self.guarded += 1
            return real(*args)

        patch.setattr(cache, "guards_of", guards)

    def states(self) -> list[str]:
        (partition,) = registry.live_capturable()
        return [s.state.value for s in partition.specializations()]


def test_where_nothing_can_be_captured_a_glance_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    varying = Varying(monkeypatch)
    varying.served(3)
    for size in range(5, 30):
        varying.call(size)
        varying.call(size)
    assert varying.guarded == 1, "of the first size that came twice: how long it runs is not known before"
    assert varying.states() == ["captured", "warming up"]
    assert len(varying.stats.met.sizes) == 26
    assert [reason.code for reason in varying.stats.reasons] == ["sizes-vary"]


def test_sizes_that_never_come_again_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    varying = Varying(monkeypatch)
    for size in range(4, 30):
        varying.call(size)
    assert (varying.stats.captures, [reason.code for reason in varying.stats.reasons]) == (0, ["sizes-vary"])


def test_within_a_mode_sizes_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors may be fakes whose sizes are symbols, which would be specialized for."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    varying = Varying(monkeypatch)
    varying.served(3)
    given: list[list[Any]] = []
    (runner,) = registry.live_capturable()
    real = runner._plain
    runner._plain = lambda args: (given.append(list(args)), real(args))[1]
    varying.call(5)
    asked: list[int] = []
    monkeypatch.setattr(Glimpses, "at", lambda *args: asked.append(1))
    with torch.no_grad(), Mode():
        runner(list(given[0]))
    assert not asked
    with torch.no_grad():
        runner(given[0])
    assert asked == [1]


def seen_at_a_glance(monkeypatch: pytest.MonkeyPatch) -> Varying:
    """Size 6 is; now captures pay."""
    varying = Varying(monkeypatch)
    varying.served(3)
    for size in (5, 5, 6, 6):
        varying.call(size)
    assert varying.states() == ["captured", "warming up"]
    varying.own = 10e6
    for _ in range(12):  # the fastest of the last few counts
        varying.call(5)
        varying.call(3)
    assert varying.stats.captures == 2
    return varying


def test_what_it_was_enough_for_counts_as_run(monkeypatch: pytest.MonkeyPatch) -> None:
    varying = seen_at_a_glance(monkeypatch)
    varying.call(6)
    assert varying.stats.captures == 3
    varying.call(7)
    assert varying.stats.captures == 3
    varying.call(7)
    assert varying.stats.captures == 4


def test_unless_a_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is warmed up after all, and captured."""
    varying, real, failed = seen_at_a_glance(monkeypatch), admission.build, []

    def build(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise MatchError(Reason("capture-failed", "a library was not set up"))
        return real(*args, **kwargs)

    monkeypatch.setattr(admission, "build", build)
    varying.call(6)
    assert (failed, varying.stats.captures) == ([True], 2)
    assert "refused" not in varying.states()
    varying.call(6)
    assert varying.stats.captures == 3


def test_another_layout_of_it_has_not_run() -> None:
    glimpses = Glimpses(Sizes("one", (Dimension("n", 0, 0),), (), None), Met(), True)
    economy = Economy(lambda: 0, Purse(0.0), ops=250)
    economy.met(0, 0.0)
    x = torch.randn(6, 8)
    assert glimpses.at([x], economy, 1, 1.0, None) is Glimpse.NEW
    assert (glimpses.made([x]), glimpses.made([x]), glimpses.runs([x])) == (threading.get_ident(), None, 1)
    economy.ran(1e-3)
    assert glimpses.at([x], economy, 2, 2.0, None) is Glimpse.KNOWN
    assert (glimpses.made([x]), glimpses.runs([x])) == (None, 2)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("pays", [False, True])
def test_a_glance_is_enough_where_to_compute_a_size_would_not_pay(
    pays: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time may have been saved up: each new size would be looked at, in vain."""
    asked: list[Any] = []
    monkeypatch.setattr(Economy, "unaffordable", lambda *args: False)
    monkeypatch.setattr(Economy, "pays", lambda economy, *args, **kwargs: (asked.append(args), pays)[1])
    glimpses = Glimpses(Sizes("one", (Dimension("n", 0, 0),), (), None), Met(), True)
    economy, x = Economy(lambda: 0, Purse()), torch.randn(5, 8)
    computer: Any = SimpleNamespace(learning=False, reason=None)
    for rows in (3, 5) if known else (3, 4):
        economy.met(rows, float(rows))
        glimpses.made([torch.randn(rows, 8)])
    wanted = None if pays else Glimpse.KNOWN if known else Glimpse.NEW
    assert glimpses.at([x], economy, 9, 9.0, computer) is wanted
    assert asked == [(int(known), 9, 9.0)]
    assert (economy.sizes, glimpses.runs([x])) == (2 + (wanted is Glimpse.NEW), int(not pays))
    for learning, reason in ((True, None), (False, "words")):
        captures: Any = SimpleNamespace(learning=learning, reason=reason)
        assert glimpses.at([x], economy, 10, 10.0, captures) is None, "it is captured, if it comes again"


def test_what_a_look_takes_is_part_of_what_a_size_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    varying = Varying(monkeypatch)
    varying.served(3)
    real = cache.SpecializationCache.get

    def slowly(*args: Any) -> Any:
        time.sleep(0.05)
        return real(*args)

    monkeypatch.setattr(cache.SpecializationCache, "get", slowly)
    monkeypatch.setattr(Economy, "pays", lambda *args, **kwargs: True)
    monkeypatch.setattr(Economy, "unaffordable", lambda *args, **kwargs: False)
    (runner,) = registry.live_capturable()
    before = runner._cache.economy._spent
    varying.call(5)
    varying.call(5)
    assert varying.stats.captures == 2
    assert runner._cache.economy._spent - before >= 0.05


def test_how_many_came_once_and_twice() -> None:
    """Of sizes that a glance was enough for, and of specializations, launches included."""

    def known(runs: int, launches: int = 0) -> Any:
        return SimpleNamespace(standing=SimpleNamespace(runs=runs), use=SimpleNamespace(launches=launches))

    glimpses = Glimpses(Sizes("one", (Dimension("n", 0, 0),), (), None), Met(), True)
    economy = Economy(lambda: 0, Purse(0.0), ops=250)
    economy.met(0, 0.0)
    for call, rows in enumerate((3, 4, 4, 5, 6, 6), 1):
        glimpses.at([torch.randn(rows, 8)], economy, call, float(call), None)
        economy.ran(1e-3)
    glimpses.made([torch.randn(5, 8)])
    assert glimpses.rare([]) == (1, 2)
    closer = [known(1), known(1, 1), known(2), known(0, 7), known(0)]
    assert glimpses.rare(closer) == (2, 4)


def test_the_economy_is_told_how_many_came_once_and_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By it the economy tells how many sizes there are; also of a partition that begins anew."""
    varying = Varying(monkeypatch)
    varying.served(3)
    for size in (5, 5, 6, 6, 7):
        varying.call(size)
    (runner,) = registry.live_capturable()
    assert runner._cache.economy._rare() == (1, 2), "7; 5 and 6. The size that is launched came more often"
    runner.reset()
    assert runner._cache.economy._rare() == (0, 0)
    varying.call(9)
    assert runner._cache.economy._rare() == (1, 0)
