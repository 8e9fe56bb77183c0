"""All temporaries of a chain in one block, where in blocks of their own they would make it several chunks.

Note [One block]
Blocks that have the sizes of tensors (`pgraph.template.packing`) take more than what is alive at once, and
where that is more than the limit, a chain is cut. Each further chunk is one more launch, and between two the
device waits. Of the batches of 1 to 32 of a small transformer (`serving` in `bench/sizes.py`) those from 24
on came in six chunks on the host driver; an H200 is through with one in 0.6 ms. Packed freely they take no
more than what is alive. But then the caching allocator sees a size that nobody else asks for, and has to have
it in one piece. So it is done where it saves several launches (`WORTH`), and for small chains only
(`MOST_BYTES`): in larger ones a launch is nothing beside what the device does.

Each lies as low as what is there while it lives lets it. Those come first that take most room, in bytes times
nodes. Whoever finds none within the limit comes first at the next try, all anew. For transformers a try or
three are enough for what is alive and no more; in the order of sizes alone, the usual one (Y. Pisarchyk and
J. Lee, Efficient memory management for deep neural net inference, 2020), they take 1.08 to 1.17 of that.
"""

from __future__ import annotations

import itertools
import operator
from bisect import insort
from collections.abc import Sequence
from typing import Final

__all__ = ["MOST_BYTES", "WORTH", "offsets"]

MOST_BYTES: Final = 64 << 20

WORTH: Final = 3
"""Chunks from which on it is done: one launch more or less is not worth a large block."""

_MOST: Final = 256
"""Temporaries: each is compared with all others."""

_TRIES: Final = 8


def offsets(
    sizes: Sequence[int], starts: Sequence[int], ends: Sequence[int], limit: int
) -> tuple[list[int], int] | None:
    """Where each lies, in bytes from the block's start, and how large the block is.

    Args:
        sizes: in bytes.
        starts, ends: the nodes [start, end) during which each one is there.
        limit: bytes of the block.

    Returns:
        None if it would be larger than the limit or than `MOST_BYTES`, or there are too many.
    """
    limit = min(limit, MOST_BYTES)
    if len(sizes) > _MOST or _alive(sizes, starts, ends) > limit:
        return None
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i] * (starts[i] - ends[i]), starts[i]))
    for _ in range(_TRIES):
        found, without = _placed(order, sizes, starts, ends, limit)
        if without is None:
            return found, max(map(operator.add, found, sizes), default=0)
        order.remove(without)
        order.insert(0, without)
    return None


def _alive(sizes: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> int:
    """The most bytes that are there at once."""
    changes = [*zip(starts, sizes, strict=True), *zip(ends, map(operator.neg, sizes), strict=True)]
    changes.sort()  # what ends at a node goes before what starts there comes
    return max(itertools.accumulate([change for _, change in changes]), default=0)


def _placed(
    order: Sequence[int], sizes: Sequence[int], starts: Sequence[int], ends: Sequence[int], limit: int
) -> tuple[list[int], int | None]:
    """Where each lies, in this order; and who finds no room, if there is one."""
    found = [0] * len(sizes)
    placed: list[tuple[int, int, int, int]] = []  # (first byte, end, start, end), ascending
    for i in order:
        size, start, end, at = sizes[i], starts[i], ends[i], 0
        for first, behind, since, until in placed:
            if first - at >= size:
                break
            if since < end and start < until and behind > at:
                at = behind
        if at + size > limit:
            return found, i
        found[i] = at
        insort(placed, (at, at + size, start, end))
    return found, None
