"""How much of the peaks in the framework's memory statistics is ghost memory.

Note [Ghosts in the statistics]
What an op allocates while it is captured comes from a pool of the caching allocator over ghost
memory. It takes no memory, but the allocator counts it. So when a partition was captured the peaks are made
right again, where that is possible (Note [Peaks made right] in `pgraph.drivers.cuda.peaks`).

Where it is not, what may be ghosts is told. A capture notes the peaks before and after itself. As long as a
peak is what a capture left, the program's own peak lies somewhere between the two; once the program has used
more, or has reset its statistics, the peak is its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

__all__ = ["SEGMENT", "SMALL", "FreeBlock", "GhostPeaks", "Lift", "PeakLedger", "lift"]

SMALL: Final = 1 << 20
"""The caching allocator serves requests of up to so many bytes from small segments, others from large ones.
It leaves no rest of this size or less in a large one: whoever asks gets it, too."""

SEGMENT: Final = 2 << 20
"""Bytes of its smallest segment. Larger ones are a multiple."""

_GRANULE: Final = 512
_MOST: Final = 64  # ghosts one after the other: each takes a pool of its own


@dataclasses.dataclass(frozen=True, slots=True)
class GhostPeaks:
    """What ghosts may have added to a device's peaks, in bytes; the program's own are at most so much lower.

    Args:
        device: as text, e.g. ``"cuda:0"``.
        allocated: of ``torch.cuda.max_memory_allocated``.
        reserved: of ``torch.cuda.max_memory_reserved``.
    """

    device: str
    allocated: int
    reserved: int

    def __str__(self) -> str:
        return (
            f"{self.device}: up to {self.allocated:,} B of max_memory_allocated and {self.reserved:,} B of "
            "max_memory_reserved are what captures counted and no memory; "
            "torch.cuda.reset_peak_memory_stats() after warm-up gives exact peaks"
        )


class PeakLedger:
    """Tells the program's peaks from those of captures, per quantity.

    Every method takes the peaks that the framework shows now, in bytes, in the same order.
    """

    def __init__(self, quantities: int) -> None:
        self._own = [0] * quantities  # the program has surely been so high
        self._left = [-1] * quantities  # where a capture left the peak

    def before(self, *peaks: int) -> None:
        """A capture begins."""
        for i, peak in enumerate(peaks):
            if peak != self._left[i]:
                self._own[i] = peak

    def after(self, *peaks: int) -> None:
        """It has ended."""
        self._left[:] = peaks

    def excess(self, *peaks: int) -> tuple[int, ...]:
        """How much of each peak may be ghosts."""
        return tuple(
            max(peak - own, 0) if peak == left else 0
            for peak, own, left in zip(peaks, self._own, self._left, strict=True)
        )

    def restored(self) -> None:
        """The peaks are the program's own again."""
        self._left = [-1] * len(self._left)


@dataclasses.dataclass(frozen=True, slots=True)
class FreeBlock:
    """A block in the allocator's cache.

    Args:
        nbytes: its size.
        stream: that it serves.
        small: whether it lies in a small segment.
    """

    nbytes: int
    stream: int
    small: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Lift:
    """What to allocate to raise the peaks.

    Args:
        blocks: (bytes, stream), from the allocator's cache, in this order, all at once.
        ghosts: bytes that the cache does not have; beside the blocks, one after the other. What is freed
            stays reserved: so more can be reserved than was ever allocated.
    """

    blocks: tuple[tuple[int, int], ...]
    ghosts: tuple[int, ...]


def lift(peaks: tuple[int, int], now: tuple[int, int], free: Sequence[FreeBlock]) -> Lift | None:
    """How to raise peaks that stand at what is in use now to what they were, to within `SMALL`.

    Args:
        peaks: (allocated, reserved) bytes that they are to show.
        now: (allocated, reserved) bytes in use.
        free: blocks of the cache.

    Returns:
        None if that is not possible: more is in use than was at the peak, the cache is in pieces that are
        too small, or what is to be reserved is not whole segments, or far more than may be allocated.
    """
    missing, reserved = peaks[0] - now[0], peaks[1] - now[1]
    if missing < 0 or reserved < 0 or reserved % SEGMENT:
        return None
    at_once = min(reserved, missing // SEGMENT * SEGMENT)
    if reserved > at_once * _MOST:
        return None
    ghosts = tuple(min(at_once, reserved - done) for done in range(0, reserved, at_once or 1))
    missing -= at_once
    blocks: list[tuple[int, int]] = []
    for block in sorted((b for b in free if not b.small), key=lambda b: -b.nbytes):
        taken = _of_large(block.nbytes, missing)
        if taken:
            blocks.append((taken, block.stream))
            missing -= taken
    small: list[tuple[int, int]] = []
    for block in sorted((b for b in free if b.small), key=lambda b: -b.nbytes):
        rest = block.nbytes
        while rest > 0 and missing > 0:
            taken = min(rest, SMALL, -(-missing // _GRANULE) * _GRANULE)
            small.append((taken, block.stream))
            rest, missing = rest - taken, missing - taken
    # The largest first: the best fit for a smaller one may be the block that a larger one needs.
    blocks += sorted(small, key=lambda b: -b[0])
    return Lift(tuple(blocks), ghosts) if missing <= SMALL else None


def _of_large(nbytes: int, missing: int) -> int:
    """Bytes to ask of a large block, so that no more than is missing is given; 0 for none."""
    if nbytes <= missing:
        taken = nbytes
    elif nbytes - missing > SMALL:
        taken = -(-missing // _GRANULE) * _GRANULE
    else:
        taken = nbytes - SMALL - _GRANULE
    return taken if taken > SMALL else 0
