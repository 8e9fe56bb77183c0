"""Peaks of the allocator's statistics, made right again after a capture.

Note [Peaks made right]
Ghosts raise the peaks that PyTorch counts (Note [Ghosts in the statistics] in `pgraph.drivers.peak_stats`),
and nothing lowers a peak but a reset, after which it stands at what is in use now. From there it can be
raised again: by allocating what is missing and freeing it at once. That takes no memory of the device. What
was allocated at the peak and has been freed since lies in the allocator's cache, and is taken from there;
what the cache has given back to the device meanwhile is allocated as ghosts. At the peak of reserved memory
less may have been allocated than is given back since: then ghosts come and go one after the other, each in a
pool that keeps it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from pgraph.drivers.cuda import snapshot
from pgraph.drivers.cuda.cache import divides_blocks
from pgraph.drivers.cuda.ghost import CudaArena, GhostPools, unlimited
from pgraph.drivers.peak_stats import SEGMENT, FreeBlock, Lift, lift

__all__ = ["restore"]

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
    if plan is None:
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


def _allocate_ghosts(device: torch.device, ghosts: Sequence[int]) -> None:
    """Allocate and free so many bytes, one after the other, in segments of just that many.

    Each has a pool of its own: what one has freed stays reserved there, and serves no other. The allocator is
    asked for them as Note [Blocks that nobody fills] has it.
    """
    stream, arena = torch.cuda.current_stream(device), CudaArena(device, 0)
    try:
        with unlimited(device), GhostPools(arena) as pools:
            for i, nbytes in enumerate(ghosts):
                if i:
                    pools.renew()
                sizes = [nbytes] if nbytes >= _EXACT_SEGMENT else [SEGMENT // 2] * (nbytes // SEGMENT)
                with snapshot.taken(sizes, device, stream):
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
