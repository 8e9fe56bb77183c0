"""The caching allocator's free memory: given back to the device, and taken again in one piece.

Note [One piece]
The allocator takes memory from the device in segments: of 20 MB for blocks of up to 10 MB, else as large as
the block. Free blocks of two segments never become one, so a training step leaves holes that its next large
tensor does not fit in. Blocks within one segment do become one again. So after the cache was emptied, one
segment is taken that holds most of what a step needs, and is left to the allocator as a free block. No more
is taken than was given back. How large a piece is worth it, `pgraph.runtime.layouts` finds out.

It is not done where free blocks of that size would not be divided (``max_split_size_mb``), nor where segments
grow (``expandable_segments``), which have no such holes. Nor where other streams hold memory (FSDP2's
parameters are gathered on one): a free block serves one stream, and what each will need cannot be told.
"""

from __future__ import annotations

from collections import Counter

import torch

from pgraph.drivers.cuda import snapshot

__all__ = ["divides_blocks", "empty_into_one_piece"]

_OTHERS = 64 << 20  # bytes of other streams
_ROUND = 2 << 20


def empty_into_one_piece(piece: int) -> int:
    """Give free memory back to the current device, and take one free block for the current stream.

    Args:
        piece: bytes to take; 0: the cache is only emptied.

    Returns:
        Bytes that were taken: fewer where fewer were given back, 0 where it would do harm.
    """
    device, mine = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    before = _reserved()
    torch.cuda.empty_cache()
    given_back = before[mine] - _reserved()[mine]
    piece = min(piece, given_back) // _ROUND * _ROUND
    if piece <= 0 or before.total() - before[mine] >= _OTHERS:
        return 0
    if not divides_blocks() or _segments_grow():
        return 0
    try:
        with snapshot.taken([piece], torch.device("cuda", device), mine):
            return piece
    except torch.OutOfMemoryError:  # others were faster
        return 0


def _reserved() -> Counter[int]:
    """Bytes of the current device's ordinary segments, by stream."""
    found: Counter[int] = Counter()
    for segment in snapshot.segments():
        ordinary = tuple(segment["segment_pool_id"]) == (0, 0)
        if ordinary and segment["device"] == torch.cuda.current_device():
            found[segment["stream"]] += segment["total_size"]
    return found


def divides_blocks() -> bool:
    """Whether the current device's allocator is PyTorch's own, and divides free blocks of any size."""
    if torch.cuda.get_allocator_backend() != "native":
        return False
    limit = torch.cuda.memory_stats().get("max_split_size", 0)  # -1: there is none
    return not 0 <= limit < 1 << 62


def _segments_grow() -> bool:
    return any(s.get("is_expandable", False) for s in snapshot.segments())
