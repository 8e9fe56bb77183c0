"""What the caching allocator did during a capture, from its own log."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pgraph.drivers.cuda import snapshot
from pgraph.drivers.cuda.ghost import CudaArena
from pgraph.drivers.interface import HiddenAllocation
from pgraph.errors import DriverError

__all__ = ["allocator_trace", "clear_trace", "last_logged", "read_trace", "still_held"]

# A block is asked back before it is given back.
_FREED = ("free_requested", "free_completed")
_NOT_READ = ("free_completed", "segment_alloc", "segment_free", "oom", "snapshot")


@contextlib.contextmanager
def allocator_trace() -> Iterator[bool]:
    """Have the caching allocator log what it does; True if it does so already, for the user.

    The user's own recording goes on untouched, and may keep fewer entries than a capture makes.
    """
    if torch._C._cuda_isHistoryEnabled():
        yield True
        return
    clear_trace()
    try:
        yield False
    finally:
        torch.cuda.memory._record_memory_history(None)


def clear_trace() -> None:
    """Have the log begin anew; only where it is not the user's."""
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True, **_left_out())


@functools.cache
def _left_out() -> dict[str, Any]:
    """What tells the log to leave out what is not read, if this PyTorch can: each entry takes time."""
    known = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    return {"skip_actions": list(_NOT_READ)} if "skip_actions" in known else {}


def last_logged(device: int) -> int:
    """When the last entry of a device's log was made, in microseconds; -1 if there is none."""
    return max(map(_time_of, snapshot.log(device)), default=-1)


def _time_of(entry: dict[str, Any]) -> int:
    return int(entry.get("time_us", -1))


def read_trace(arena: CudaArena, pool: tuple[int, int]) -> list[HiddenAllocation]:
    """Every allocation that the caching allocator placed in the arena, oldest first.

    Args:
        pool: id of one of its pools; that is faster.

    Raises:
        DriverError: memory for the arena's stream came from elsewhere, and launches would write to it
            (Note [Pools of the program's own]).
    """
    sizes, alive = _told(arena, pool, ())
    return [HiddenAllocation(address, nbytes, address not in alive) for address, nbytes in sizes.items()]


def still_held(arena: CudaArena, pool: tuple[int, int], before: Sequence[HiddenAllocation] = ()) -> set[int]:
    """The addresses of allocations in the arena that have not been freed.

    Args:
        pool: as `read_trace` takes it.
        before: what was read before the log was cleared.

    Raises:
        DriverError: as `read_trace`.
    """
    return _told(arena, pool, before)[1]


def _told(
    arena: CudaArena, pool: tuple[int, int], before: Sequence[HiddenAllocation]
) -> tuple[dict[int, int], set[int]]:
    """Bytes by address, and the addresses that are held."""
    found = _replayed(arena, pool, before)
    return found if len(found[0]) >= arena.segments else _replayed(arena, None, before)


def _replayed(
    arena: CudaArena, pool: tuple[int, int] | None, before: Sequence[HiddenAllocation]
) -> tuple[dict[int, int], set[int]]:
    sizes = {h.address: h.nbytes for h in before}
    alive = {h.address for h in before if not h.freed}
    low, high, since, stream = arena.low, arena.high, arena.since, arena.stream
    log = snapshot.log(arena.device.index, pool)
    for entry in log if since < 0 else [e for e in log if not -1 < _time_of(e) <= since]:
        address, action = entry.get("addr", -1), entry["action"]  # no address where memory ran out
        if low <= address < high:
            if action == "alloc":
                nbytes = entry["size"]
                if sizes.setdefault(address, nbytes) < nbytes:
                    sizes[address] = nbytes
                alive.add(address)
            elif action in _FREED:
                alive.discard(address)
        elif action == "alloc" and stream is not None:
            on = entry.get("stream")
            if on == stream:
                raise DriverError(f"{entry['size']} bytes came from elsewhere than from ghost memory")
    return sizes, alive
