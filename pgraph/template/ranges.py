"""Finds the range of memory that holds an address."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

__all__ = ["RangeMap"]


class RangeMap:
    """Finds the range that holds an address. Ranges must not overlap.

    Args:
        ranges: (first byte, size in bytes, margin in bytes on either side), any order.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        order = sorted(range(len(ranges)), key=lambda i: ranges[i][0])
        self._index = order
        self._base = [ranges[i][0] for i in order]
        self._low = [ranges[i][0] - ranges[i][2] for i in order]
        self._high = [ranges[i][0] + max(ranges[i][1], 1) + ranges[i][2] for i in order]

    @property
    def span(self) -> tuple[int, int]:
        """[first, end) of addresses outside which nothing is found; (0, 0) if there are no ranges."""
        return (self._low[0], self._high[-1]) if self._low else (0, 0)

    def find(self, address: int) -> tuple[int, int] | None:
        """(position in the constructor's list, offset from the range's first byte), or None."""
        k = bisect.bisect_right(self._low, address) - 1
        if k < 0 or address >= self._high[k]:
            return None
        return self._index[k], address - self._base[k]
