"""Which part of a peak may be ghosts: a ledger against a simulated allocator."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pgraph
from pgraph.drivers import choice
from pgraph.drivers.peak_stats import SMALL, FreeBlock, GhostPeaks, Lift, PeakLedger, lift
from pgraph.runtime.statistics import Report


class Allocator:
    """One statistic with a peak, and the peak that it would have without ghosts."""

    def __init__(self) -> None:
        self.current = self.peak = self.true_peak = 0

    def allocate(self, nbytes: int, ghost: bool = False) -> None:
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        if not ghost:
            self.true_peak = max(self.true_peak, self.current)

    def free(self, nbytes: int) -> None:
        self.current -= nbytes

    def reset(self) -> None:
        self.peak = self.true_peak = self.current

    def capture(self, ledger: PeakLedger, ghosts: int) -> None:
        ledger.before(self.peak)
        self.allocate(ghosts, ghost=True)
        self.free(ghosts)
        ledger.after(self.peak)


def test_a_capture_that_passes_the_peak_is_told() -> None:
    memory, ledger = Allocator(), PeakLedger(1)
    memory.allocate(100)
    memory.capture(ledger, 40)
    assert memory.peak == 140
    assert ledger.excess(memory.peak) == (40,)
    memory.capture(ledger, 70)
    assert ledger.excess(memory.peak) == (70,)
    memory.allocate(69)  # not seen in the peak: the program's own lies between
    assert ledger.excess(memory.peak) == (70,)
    memory.allocate(2)
    assert memory.peak == memory.true_peak == 171
    assert ledger.excess(memory.peak) == (0,)


def test_a_capture_below_the_peak_changes_nothing() -> None:
    memory, ledger = Allocator(), PeakLedger(1)
    memory.allocate(100)
    memory.free(90)
    memory.capture(ledger, 50)
    assert (memory.peak, ledger.excess(memory.peak)) == (100, (0,))


def test_after_a_reset_the_peak_is_the_programs() -> None:
    memory, ledger = Allocator(), PeakLedger(1)
    memory.allocate(100)
    memory.capture(ledger, 40)
    memory.reset()
    assert ledger.excess(memory.peak) == (0,)
    memory.capture(ledger, 10)
    assert (memory.peak, ledger.excess(memory.peak)) == (110, (10,))


@pytest.mark.parametrize("seed", range(50))
def test_the_true_peak_is_never_outside_the_bounds(seed: int) -> None:
    rng, memory, ledger = random.Random(seed), Allocator(), PeakLedger(1)
    told = 0
    for _ in range(200):
        step = rng.random()
        if step < 0.45:
            memory.allocate(rng.randrange(1, 1000))
        elif step < 0.85:
            memory.free(rng.randrange(memory.current + 1))
        elif step < 0.97:
            memory.capture(ledger, rng.randrange(3000))
        else:
            memory.reset()
        (excess,) = ledger.excess(memory.peak)
        assert memory.peak - excess <= memory.true_peak <= memory.peak
        told += excess > 0
        if memory.true_peak == memory.peak and excess:
            assert memory.peak == ledger._left[0]
    assert told, "no capture ever passed a peak: nothing was shown"


def test_the_report_says_what_to_subtract_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = GhostPeaks("cuda:0", 1 << 20, 2 << 20)

    class Inflated:
        def ghost_peaks(self) -> GhostPeaks:
            return peaks

    class Exact:
        def ghost_peaks(self) -> None:
            return None

    devices = {torch.device("cuda", 0): Inflated(), torch.device("cpu"): Exact()}
    monkeypatch.setattr(choice, "_drivers", devices)
    report = pgraph.report()
    assert report.ghost_peaks == (peaks,)
    assert report.to_dict()["ghost_peaks"] == [
        {"device": "cuda:0", "allocated": 1 << 20, "reserved": 2 << 20}
    ]
    line = (
        "cuda:0: up to 1,048,576 B of max_memory_allocated and 2,097,152 B of max_memory_reserved are what "
        "captures counted and no memory; torch.cuda.reset_peak_memory_stats() after warm-up gives exact peaks"
    )
    assert line in str(report)
    assert "max_memory" not in str(Report(()))
    monkeypatch.undo()
    assert pgraph.report().ghost_peaks == ()


class Cache:
    """How PyTorch's caching allocator serves requests from free blocks: best fit, which it may divide."""

    def __init__(self, free: list[FreeBlock]) -> None:
        self.free = list(free)
        self.given = 0

    def allocate(self, nbytes: int, stream: int) -> None:
        small = nbytes <= SMALL
        fitting = [b for b in self.free if (b.stream, b.small) == (stream, small) and b.nbytes >= nbytes]
        assert fitting, f"{nbytes} bytes would have to come from the device"
        best = min(fitting, key=lambda b: b.nbytes)
        self.free.remove(best)
        rest = best.nbytes - nbytes
        if rest >= 512 if small else rest > SMALL:
            self.free.append(FreeBlock(rest, stream, small))
            self.given += nbytes
        else:
            self.given += best.nbytes


BLOCKS = st.lists(
    st.builds(
        FreeBlock, st.integers(1, 8 * SMALL // 512).map(lambda n: 512 * n), st.integers(0, 2), st.just(False)
    )
    | st.builds(
        FreeBlock, st.integers(1, 2 * SMALL // 512).map(lambda n: 512 * n), st.integers(0, 2), st.just(True)
    )
)


@example(
    free=[FreeBlock(1024, 0, True), FreeBlock(SMALL, 0, True), FreeBlock(SMALL + 512, 0, True)],
    share=1.0,
    ghosts=0,
)
@given(free=BLOCKS, share=st.floats(0, 1), ghosts=st.integers(0, 4).map(lambda n: n * 2 * SMALL))
def test_peaks_are_raised_out_of_the_cache(free: list[FreeBlock], share: float, ghosts: int) -> None:
    usable = sum(b.nbytes for b in free if b.small or b.nbytes > SMALL)
    missing = int(usable * share) // 512 * 512
    now = (1000 * SMALL, 3000 * SMALL)
    plan = lift((now[0] + missing + ghosts, now[1] + ghosts), now, free)
    if plan is None:
        return
    cache = Cache(free)
    for nbytes, stream in plan.blocks:
        cache.allocate(nbytes, stream)
    assert sum(plan.ghosts) == ghosts
    assert abs(missing - cache.given) <= 2 * SMALL


def test_one_free_block_is_enough() -> None:
    """The usual case: after a step the cache holds what the step had in use."""
    large = [FreeBlock(100 * SMALL, 0, False)]
    for missing in (2 * SMALL, 50 * SMALL, 98 * SMALL, 100 * SMALL):
        plan = lift((missing, 100 * SMALL), (0, 100 * SMALL), large)
        assert plan is not None
        assert plan.blocks == ((missing, 0),)
    plan = lift((100 * SMALL - 512, 100 * SMALL), (0, 100 * SMALL), large)
    assert plan is not None
    assert plan.blocks == ((99 * SMALL - 512, 0),), "the block is not divided so near its end"


@pytest.mark.parametrize(
    ("peaks", "now"),
    [
        ((10, 90), (20, 90)),
        ((90, 90), (20, 95)),
        ((11, 90), (10, 10)),
        ((60, 91), (10, 60)),
        ((12, 200), (10, 10)),
    ],
    ids=["more is allocated", "more is reserved", "too little was allocated", "no segments", "too many"],
)
def test_what_cannot_be_raised_is_left(peaks: tuple[int, int], now: tuple[int, int]) -> None:
    free = [FreeBlock(100 * SMALL, 0, False)]
    assert lift((peaks[0] * SMALL, peaks[1] * SMALL), (now[0] * SMALL, now[1] * SMALL), free) is None


def test_more_can_be_reserved_than_was_allocated() -> None:
    """A server's cache was emptied: 30 MB are to be reserved again, 27 were allocated above today's."""
    free = [FreeBlock(4 * SMALL, 0, False)]
    plan = lift((160 * SMALL - 512, 180 * SMALL), (133 * SMALL, 150 * SMALL), free)
    assert plan == Lift((), (26 * SMALL, 4 * SMALL)), "to within 1 MB"
    plan = lift((140 * SMALL, 180 * SMALL), (133 * SMALL, 150 * SMALL), free)
    assert plan is not None
    assert plan.ghosts == (6 * SMALL,) * 5


def test_a_cache_in_small_pieces_is_no_help() -> None:
    free = [FreeBlock(SMALL, 0, False)] * 50
    assert lift((30 * SMALL, 60 * SMALL), (10 * SMALL, 60 * SMALL), free) is None


def test_a_restored_ledger_tells_nothing() -> None:
    ledger = PeakLedger(1)
    ledger.before(100)
    ledger.after(140)
    assert ledger.excess(140) == (40,)
    ledger.restored()
    assert ledger.excess(100) == ledger.excess(140) == (0,)
