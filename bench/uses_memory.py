"""How much of a first step after waking is the device's memory, which has to be asked back from it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

_SMALL = 2 << 20  # bytes of a segment for tensors of up to a half of that


class Asked:
    """What a step asks of the device, once nothing is cached.

    `torch.cuda.empty_cache` gives all free segments back, so the step's temporaries and results need new
    ones. That is the same for every backend, and no work of a backend's.
    """

    def __init__(self) -> None:
        self._segments: list[int] = []
        self._counts: list[int] = []
        self._ready: list[float] = []

    def segments_of(self, step: Callable[[], Any]) -> Any:
        """Do a step; the bytes of the segments that it got from the device are remembered, and how many."""
        before, count = _segments(), _allocations()
        result = step()
        self._segments = [nbytes for at, nbytes in _segments().items() if at not in before]
        self._counts.append(_allocations() - count)
        return result

    def taken(self) -> None:
        """Have the allocator get those segments now, and keep them free."""
        kept = [
            torch.empty(_SMALL // 2 if nbytes <= _SMALL else nbytes, dtype=torch.uint8, device="cuda")
            for nbytes in self._segments
        ]
        del kept
        torch.cuda.synchronize()

    def ready(self, ms: float) -> None:
        """A first step, with its segments there, took so long."""
        self._ready.append(ms)

    def figures(self) -> dict[str, Any]:
        """Allocations of a first step, and ms of one whose memory was there."""
        return {
            "first_device_allocations": statistics.median(self._counts) if self._counts else None,
            "first_ready_ms": statistics.median(self._ready) if self._ready else None,
        }


def _segments() -> dict[int, int]:
    return {segment["address"]: segment["total_size"] for segment in torch.cuda.memory_snapshot()}


def _allocations() -> int:
    return int(torch.cuda.memory_stats()["num_device_alloc"])
