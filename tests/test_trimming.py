"""When cached memory is given back after captures (Note [Trimmed once settled])."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import host
from torch import nn

import pgraph
from pgraph.drivers.host.driver import HostDriver
from pgraph.runtime import layouts, registry, trimming

MB = 1 << 20


class FakeDriver:
    """Says how much is in use, and counts trims. Sizes are in MB, here and in `play`."""

    def __init__(self) -> None:
        self.used, self.trims, self.ready, self.piece, self.stream = 0, 0, True, 0, 0
        self.pieces: list[int] = []  # of all trims
        self.takes = True  # pieces suit the allocator
        self.held = 1000  # reserved before the first trim
        self.held_with: dict[int, int] = {}  # by piece, else 900

    def in_use(self) -> int:
        return self.used * MB

    def current_stream(self) -> int:
        return self.stream

    def reserved(self) -> int:
        return self.held * MB

    def trim(self, piece: int) -> int | None:
        if not self.ready:
            return None
        self.piece = piece // MB
        self.pieces.append(self.piece)
        self.trims += 1
        self.held = self.held_with.get(self.piece, 900)
        return piece if self.takes else 0


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
        trimming.called(name, growth * MB)
        if driver.trims > before:
            trimmed.append(position)
    return trimmed


def test_training_is_trimmed_where_a_step_begins() -> None:
    driver: Any = FakeDriver()
    trimming.captured("f", driver)
    trimming.captured("b", driver)
    assert play(driver, "fb" * 5, {"f": 100, "b": 900}, growth=50) == [4]
    assert trimming.pending is None
    assert driver.piece == 806, "95 % of what is in use during the backward, less what is now"


@pytest.mark.parametrize(
    ("held", "pieces"),
    [
        ({806: 964, 0: 0}, [806]),
        ({806: 965, 0: 964}, [806, 0]),
        ({806: 965, 0: 965}, [806, 0]),
        ({806: 965, 0: 966}, [806, 0, 806]),
        ({806: 1200, 0: 1068}, [806, 0]),
        ({806: 1200, 0: 1080, 402: 1081, 200: 1000, 100: 0}, [806, 0, 402, 200]),
        ({806: 1200, 0: 1080, 402: 1081, 200: 1082, 100: 1083}, [806, 0, 402, 200, 100, 0]),
        ({806: 1200, 0: 1080, 402: 1081, 200: 1070, 100: 1083}, [806, 0, 402, 200, 100, 200]),
    ],
    ids=[
        "all-in-use",
        "many-is-less",
        "the-same",
        "one-is-less",
        "many-is-fair",
        "a-quarter-is-fair",
        "none-is-better",
        "a-quarter-is-best",
    ],
)
def test_the_layout_that_reserves_least(held: dict[int, int], pieces: list[int]) -> None:
    """950 MB are in use at the peak; a 64th more is as good, an eighth more is not worth a third trial."""
    driver: Any = FakeDriver()
    driver.held_with = held
    trimming.captured("f", driver)
    trimming.captured("b", driver)
    trimmed = play(driver, "fb" * 20, {"f": 100, "b": 900}, growth=50)
    assert trimmed == [4 * (i + 1) for i in range(len(pieces))]
    assert driver.pieces == pieces
    assert trimming.pending is None


def test_a_layout_is_judged_after_two_rounds() -> None:
    """The second round of a BERT's training took 32 MB that the first had not needed."""
    driver: Any = FakeDriver()
    driver.held_with = {806: 960, 0: 1000}
    trimming.captured("f", driver)
    trimming.captured("b", driver)
    used = {"f": 100, "b": 900}
    assert play(driver, "fbfb" + "fb", used, growth=50) == [4]
    driver.held = 1010
    assert play(driver, "fb" * 10, used, growth=50) == [2]
    assert driver.pieces == [806, 0]


@pytest.mark.parametrize("growth", [0, 63], ids=["none", "little"])
def test_little_is_not_worth_a_piece(growth: int) -> None:
    driver: Any = FakeDriver()
    trimming.captured("i", driver)
    assert play(driver, "i" * 12, {"i": 100}, growth=growth) == [1]
    assert driver.pieces == [0]
    assert trimming.pending is None


def test_an_allocator_that_takes_no_pieces_is_emptied_once() -> None:
    driver: Any = FakeDriver()
    driver.takes = False
    trimming.captured("i", driver)
    assert play(driver, "i" * 12, {"i": 100}, growth=500) == [1]
    assert trimming.pending is None


def test_no_piece_is_smaller_than_8_mb() -> None:
    driver: Any = FakeDriver()
    trimming.captured("i", driver)
    play(driver, "i" * 30, {"i": 100}, growth=100)
    assert driver.pieces == [94, 0, 46, 22, 10]
    trimming.captured("i", driver)
    driver.pieces.clear()
    play(driver, "i" * 30, {"i": 100}, growth=64)
    assert driver.pieces == [60, 0, 30, 14]
    assert trimming.pending is None


def test_a_piece_is_a_part_of_what_is_needed_on_top_of_what_is_in_use_then() -> None:
    driver: Any = FakeDriver()
    driver.held_with = {806: 970, 0: 980}
    trimming.captured("f", driver)
    trimming.captured("b", driver)
    used = {"f": 100, "b": 800}
    assert play(driver, "fb" * 5, used, growth=150) == [4, 8]
    driver.ready = False
    assert play(driver, "fbf", used, growth=150) == []
    driver.ready = True
    assert play(driver, "bf", used, growth=150) == [0]
    assert driver.piece == 142, "not 806: the backward has 800 of the 950 in use"
    assert trimming.pending is None


def test_two_streams_are_only_trimmed() -> None:
    driver: Any = FakeDriver()
    trimming.captured("f", driver)
    trimming.captured("b", driver)
    assert play(driver, "fb", {"f": 100, "b": 900}, growth=50) == []
    driver.stream = 7
    assert play(driver, "fb", {"f": 100, "b": 900}, growth=50) == []
    assert play(driver, "f", {"f": 100, "b": 900}, growth=50) == [0]
    assert driver.piece == 0


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
    assert len(play(driver, "bf" * 100, used)) == 1
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
        def trim(self, piece: int) -> int | None:
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

    def trim(self: HostDriver, piece: int) -> int | None:
        trims.append(piece)
        return piece

    monkeypatch.setattr(HostDriver, "trim", trim)
    for name in ("_WORTH", "_SHARE", "_ROUND"):
        monkeypatch.setattr(layouts, name, 1)
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


def test_a_program_whose_sizes_vary_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture may come at any time, and no round tells what the next one needs."""
    trims = []
    monkeypatch.setattr(HostDriver, "trim", lambda self, piece: trims.append(piece) or piece)
    compiled = host(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), dynamic=True, capture_sizes=[4, 6, 9])
    for size in (*[4] * 8, *[6] * 8, *[9] * 8):
        compiled(torch.randn(size, 8)).sum().backward()
    assert pgraph.report().captures >= 4
    assert len(trims) <= 1, "of the first size"
    assert trimming.pending is None
