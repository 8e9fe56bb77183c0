"""Idle rectangles of blocks: bytes that nobody uses for a while."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Idle"]

_SCAN = 24  # idle rectangles looked at per bucket: bounds the cost where hundreds have one size


class Idle:
    """Idle rectangles (bytes x nodes) of blocks, to be found by the span of nodes they cover.

    Each lies in the bucket of the smallest aligned power-of-two window around its span. A rectangle
    that covers a tenant's span can only be in the buckets of windows around that span: at most
    log2(nodes) of them. Inside a bucket the order is size, then latest end, then earliest start, so
    that the first ones looked at are those most likely to cover.

    Args:
        n: nodes of the chunk.
        least: bytes of the smallest tenant to come, more than 0. What is smaller need not be found.
    """

    __slots__ = ("_buckets", "_least", "_top")

    def __init__(self, n: int, least: int) -> None:
        self._buckets: dict[int, list[tuple[int, int, int, int, int]]] = {}
        self._least = least
        self._top = (n - 1).bit_length()

    def add(self, size: int, start: int, end: int, lane: int, offset: int) -> None:
        if size >= self._least and end > start:
            level = (start ^ (end - 1)).bit_length()
            place = (start >> level) << 6 | level
            bucket = self._buckets.get(place)
            if bucket is None:
                self._buckets[place] = [(size, -end, start, lane, offset)]
            else:
                insort(bucket, (size, -end, start, lane, offset))

    def take(self, size: int, start: int, end: int) -> tuple[int, int] | None:
        """Best fit of `size` bytes over nodes ``[start, end)``: its ``(lane, offset)``, or None."""
        best: tuple[int, int, int, int, int] | None = None
        home: list[tuple[int, int, int, int, int]] = []
        at, room = 0, 1 << 62  # of the best so far
        buckets, key, minus_end = self._buckets, (size,), -end
        for level in range((start ^ (end - 1)).bit_length(), self._top + 1):
            bucket = buckets.get((start >> level) << 6 | level)
            if not bucket or bucket[-1] < key:
                continue
            first = bisect_left(bucket, key)
            for i, found in enumerate(bucket[first : first + _SCAN], first):
                if found[0] >= room:
                    break
                if found[2] <= start and found[1] <= minus_end:
                    best, home, at, room = found, bucket, i, found[0]
                    break
            if room == size:
                break
        if best is None:
            return None
        del home[at]
        total, minus_until, since, lane, offset = best
        self.add(total - size, since, -minus_until, lane, offset + size)
        self.add(size, since, start, lane, offset)
        self.add(size, end, -minus_until, lane, offset)
        return lane, offset
