"""Which part of a peak may be ghosts: a ledger against a simulated allocator."""

from __future__ import annotations

import random

import pytest
import torch

import pgraph
from pgraph.drivers import choice
from pgraph.drivers.peak_stats import GhostPeaks, PeakLedger
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
