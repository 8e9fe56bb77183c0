"""How much of the peaks in the framework's memory statistics is ghost memory.

Note [Ghosts in the statistics]
What an op allocates while it is captured comes from a pool of the caching allocator over ghost
memory. It takes no memory, but the allocator counts it, and its peaks cannot be reset without losing the
program's own. So a capture notes the peaks before and after itself. As long as a peak is what a capture
left, the program's own peak lies somewhere between the two; once the program has used more, or has reset its
statistics, the peak is its own.
"""

from __future__ import annotations

import dataclasses

__all__ = ["GhostPeaks", "PeakLedger"]


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
            peak - own if peak == left else 0
            for peak, own, left in zip(peaks, self._own, self._left, strict=True)
        )
