"""Peaks of the allocator's statistics, made right again after a capture.

Note [Peaks made right]
Ghosts raise the peaks that PyTorch counts (Note [Ghosts in the statistics] in `pgraph.drivers.peak_stats`),
and nothing lowers a peak but a reset, after which it stands at what is in use now. From there it can be
raised again: by allocating what is missing and freeing it at once. That takes no memory of the device. What
was allocated at the peak and has been freed since lies in the allocator's cache, and is taken from there;
what the cache has given back to the device meanwhile is allocated as ghosts.
"""

from __future__ import annotations

import contextlib

import torch

from pgraph.drivers.cuda import snapshot
from pgraph.drivers.cuda.cache import divides_blocks
from pgraph.drivers.cuda.ghost import CudaArena, GhostPools, unlimited
from pgraph.drivers.peak_stats import FreeBlock, Lift, lift

__all__ = ["restore"]

_SMALLEST_SEGMENT = 2 << 20
_EXACT_SEGMENT = 10 << 20  # from here on a segment has the size of its block, rounded up to the smallest


def restore(device: torch.device, allocated: int, reserved: int) -> bool:
    """Reset the peaks of the current device, and raise them to these bytes again.

    Returns:
        Whether that was possible; if not, nothing has changed.
    """
    if not divides_blocks():
        return False
    stats = snapshot.numbers(device.index)
    now = [stats[name]["all"]["current"] for name in ("allocated_bytes", "reserved_bytes")]
    plan = lift((allocated, reserved), (now[0], now[1]), _free_blocks(device))
    if plan is None or plan.ghosts % _SMALLEST_SEGMENT:
        return False
    torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(torch.OutOfMemoryError):  # another thread has taken such a block
        _raise(device, plan)
    return True


def _raise(device: torch.device, plan: Lift) -> None:
    with contextlib.ExitStack() as stack:
        for nbytes, stream in plan.blocks:
            stack.enter_context(snapshot.taken([nbytes], device, stream))
        if plan.ghosts:
            _allocate_ghosts(device, plan.ghosts)


def _allocate_ghosts(device: torch.device, nbytes: int) -> None:
    """Allocate and free so many bytes, in segments of just that many (Note [Blocks that nobody fills])."""
    sizes = [nbytes] if nbytes >= _EXACT_SEGMENT else [_SMALLEST_SEGMENT // 2] * (nbytes // _SMALLEST_SEGMENT)
    arena = CudaArena(device, 0)
    try:
        stream = torch.cuda.current_stream(device)
        with unlimited(device), GhostPools(arena), snapshot.taken(sizes, device, stream):
            pass
    finally:
        arena.close()


def _free_blocks(device: torch.device) -> list[FreeBlock]:
    return [
        FreeBlock(block["size"], segment["stream"], segment["segment_type"] == "small")
        for segment in snapshot.segments()
        if tuple(segment["segment_pool_id"]) == (0, 0) and segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
