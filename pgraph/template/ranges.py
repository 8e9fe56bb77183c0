"""Finds the range of memory that holds an address."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["RangeMap"]


class RangeMap:
    """Finds the range that holds an address. Ranges must not overlap.

    Args:
        ranges: (first byte, size in bytes, margin in bytes on either side), any order.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        given = sorted([(first, i, nbytes or 1, margin) for i, (first, nbytes, margin) in enumerate(ranges)])
        self._index = [i for _, i, _, _ in given]
        self._base = [first for first, _, _, _ in given]
        self._low = [first - margin for first, _, _, margin in given]
        self._end = [first + nbytes for first, _, nbytes, _ in given]
        self._high = [first + nbytes + margin for first, _, nbytes, margin in given]

    @property
    def span(self) -> tuple[int, int]:
        """[first, end) of addresses outside which nothing is found; (0, 0) if there are no ranges."""
        return (self._low[0], self._high[-1]) if self._low else (0, 0)

    def undisturbed(self) -> set[int]:
        """Positions in the constructor's list of ranges at each of whose bytes they are found themselves."""
        # The lowest address at which a later one is found: margins may reach over several ranges.
        later = [*accumulate(reversed(self._low), min, initial=self._end[-1] if self._end else 0)][-2::-1]
        ends = zip(self._index, self._end, later, strict=True)
        return {position for position, end, low in ends if end <= low}

    def find(self, address: int) -> tuple[int, int] | None:
        """(position in the constructor's list, offset from the range's first byte), or None."""
        k = bisect.bisect_right(self._low, address) - 1
        if k < 0 or address >= self._high[k]:
            return None
        return self._index[k], address - self._base[k]
