"""When cached memory is given back after captures (Note [Trimmed once settled])."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import host
from torch import nn

from pgraph.drivers.host.driver import HostDriver
from pgraph.runtime import registry, trimming


class FakeDriver:
    """Says how much is in use, and counts trims."""

    def __init__(self) -> None:
        self.used, self.trims, self.ready, self.growth, self.stream = 0, 0, True, 0, 0
        self.held = 1000  # bytes reserved: before, with one piece, and with segments as they come
        self.held_in_one, self.held_in_many = 900, 800

    def in_use(self) -> int:
        return self.used

    def current_stream(self) -> int:
        return self.stream

    def reserved(self) -> int:
        return self.held

    def trim(self, growth: int) -> bool:
        self.growth = growth
        self.trims += self.ready
        if self.ready:
            self.held = self.held_in_one if growth else self.held_in_many
        return self.ready


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    trimming.pending = None
    yield
    trimming.pending = None


def play(driver: FakeDriver, calls: str, used: dict[str, int], growth: int = 0) -> list[int]:
    """Calls of partitions, a letter each; positions of those at which memory was trimmed."""
    trimmed = []
    for position, name in enumerate(calls):
        driver.used = used[name]
        before = driver.trims
        trimming.called(name, growth)
        if driver.trims > before:
            trimmed.append(position)
    return trimmed


def test_training_is_trimmed_where_a_step_begins() -> None:
    driver: Any = FakeDriver()
    trimming.captured("f", driver)
    trimming.captured("b", driver)
    assert play(driver, "fbfbfbfbfb", {"f": 100, "b": 900}, growth=50) == [4]
    assert trimming.pending is None
    assert driver.growth == 850, "what is in use during the backward, less what is now"


@pytest.mark.parametrize(
    ("one", "many", "trims", "growth"),
    [(964, 0, [4], 850), (965, 964, [4, 6], 0), (965, 965, [4, 6], 0), (965, 966, [4, 6, 8], 850)],
    ids=["all-in-use", "many-is-less", "the-same", "one-is-less"],
)
def test_one_piece_or_many_whichever_reserves_less(
    one: int, many: int, trims: list[int], growth: int
) -> None:
    """950 bytes are in use at the peak; a 64th more is not worth another attempt."""
    driver: Any = FakeDriver()
    driver.held_in_one, driver.held_in_many = one, many
    trimming.captured("f", driver)
    trimming.captured("b", driver)
    assert play(driver, "fbfbfbfbfbfbfbfb", {"f": 100, "b": 900}, growth=50) == trims
    assert driver.growth == growth
    assert trimming.pending is None


def test_the_last_piece_is_what_is_needed_on_top_of_what_is_in_use_then() -> None:
    driver: Any = FakeDriver()
    driver.held_in_one, driver.held_in_many = 970, 980
    trimming.captured("f", driver)
    trimming.captured("b", driver)
    assert play(driver, "fbfbfbfb", {"f": 100, "b": 900}, growth=50) == [4, 6]
    driver.ready = False
    assert play(driver, "f", {"f": 100}, growth=50) == []
    driver.ready = True
    assert play(driver, "bf", {"f": 100, "b": 900}, growth=50) == [0]
    assert driver.growth == 50, "not 850: the backward has 900 of the 950 in use"
    assert trimming.pending is None


def test_two_streams_are_only_trimmed() -> None:
    driver: Any = FakeDriver()
    trimming.captured("f", driver)
    trimming.captured("b", driver)
    assert play(driver, "fb", {"f": 100, "b": 900}, growth=50) == []
    driver.stream = 7
    assert play(driver, "fb", {"f": 100, "b": 900}, growth=50) == []
    assert play(driver, "f", {"f": 100, "b": 900}, growth=50) == [0]
    assert driver.growth == 0


def test_layers_that_share_a_partition() -> None:
    """Many calls of one partition in a row are one round's, and one of the first layer's is found."""
    driver: Any = FakeDriver()
    trimming.captured("f", driver)
    trimming.captured("b", driver)  # in the last layer of three
    trimmed = play(driver, "bb" + "fffbbb" * 4, {"f": 100, "b": 900})
    assert len(trimmed) == 1
    assert ("bb" + "fffbbb" * 4)[trimmed[0]] == "f"


def test_one_partition_alone() -> None:
    driver: Any = FakeDriver()
    trimming.captured("i", driver)
    assert play(driver, "iiii", {"i": 100}) == [1]


def test_a_further_capture_begins_anew() -> None:
    driver: Any = FakeDriver()
    trimming.captured("f", driver)
    assert play(driver, "f", {"f": 1}) == []
    trimming.captured("g", driver)
    assert play(driver, "fg", {"f": 1, "g": 5}) == []
    assert play(driver, "fgfg", {"f": 1, "g": 5}) == [2]


def test_more_memory_in_use_than_ever_again() -> None:
    """Where no call has as little in use as in the round that was watched, the next round's end will do."""
    driver: Any = FakeDriver()
    trimming.captured("b", driver)
    used = {"f": 100, "b": 900}
    assert play(driver, "fbfb", used) == []
    assert play(driver, "fbfb", {"f": 300, "b": 900}) == [1]


def test_a_round_that_does_not_end_is_looked_at_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that comes once in a thousand steps: what is in use is not asked for all that time."""
    monkeypatch.setattr(trimming, "_LOOKS", 4)
    driver: Any = FakeDriver()
    trimming.captured("f", driver)
    trimming.captured("e", driver)
    used = {"f": 100, "b": 900, "e": 50}
    assert play(driver, "fbfb" + "e" + "fbf", used) == []
    assert len(play(driver, "bfbfbfbf" * 2, used)) == 1
    assert trimming.pending is None


def test_not_while_the_driver_says_so() -> None:
    driver: Any = FakeDriver()
    driver.ready = False
    trimming.captured("i", driver)
    assert play(driver, "iii", {"i": 1}) == []
    driver.ready = True
    assert play(driver, "ii", {"i": 1}) == [0]


def test_a_trim_that_fails_is_told_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeDriver):
        def trim(self, growth: int) -> bool:
            raise RuntimeError("no such statistics")

    trimming.captured("i", Failing())  # type: ignore[arg-type]
    assert play(Failing(), "iiii", {"i": 1}) == []
    assert trimming.pending is None
    assert caplog.messages == ["cached memory was not given back: RuntimeError: no such statistics"]


def test_a_partition_that_never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimming, "_CALLS", 5)
    driver: Any = FakeDriver()
    trimming.captured("gone", driver)
    assert play(driver, "ffffffff", {"f": 1}) == []
    assert trimming.pending is None


def test_a_program_is_trimmed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trims = []

    def trim(self: HostDriver, growth: int) -> bool:
        trims.append(growth)
        return True

    monkeypatch.setattr(HostDriver, "trim", trim)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    compiled = host(model)
    for _ in range(10):
        compiled(torch.randn(4, 8)).sum().backward()
        model.zero_grad(set_to_none=True)
    assert len(trims) == 1
    assert trimming.pending is None
    # A driver without memory in use: what the largest launch allocates.
    plans = [p.template().plan for p in registry.live_capturable()]
    assert trims == [max(plan.peak - plan.inputs for plan in plans)]
    assert trims[0] > 0
