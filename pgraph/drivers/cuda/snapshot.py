"""What the caching allocator holds, and its log; blocks of it.

Note [Borrowed references]
PyTorch's function for both takes a tuple: a pool's id and whether the log is wanted. It gives back references
to the tuple's items that it never took (seen in 2.11; pytorch#196366, still open when 2.15 came out). Small
numbers survive that, in Python 3.12 and later for ever. The id of a pool beyond the 256th does not: it is
freed while in use, and the interpreter stops some allocations later. So each item is given one reference
first. Where PyTorch is right, that keeps an int alive: some 30 bytes a call.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["log", "numbers", "segments", "taken"]


def numbers(device: int) -> dict[str, Any]:
    """The allocator's statistics of a device, as `torch.cuda.memory_stats_as_nested_dict` gives them: that
    asks which device is meant, which takes as long again.
    """
    found: dict[str, Any] = torch._C._cuda_memoryStats(device)
    return found


def segments() -> list[dict[str, Any]]:
    """All segments of all devices with their blocks, as `torch.cuda.memory_snapshot` gives them."""
    return list(_snapshot((0, 0), False)["segments"])


@contextlib.contextmanager
def taken(sizes: Iterable[int], device: torch.device, stream: int | torch.cuda.Stream) -> Iterator[list[int]]:
    """Blocks of so many bytes, which the allocator has back afterwards; their addresses.

    Note [Blocks that nobody fills]
    Where deterministic algorithms are asked for, `torch.empty` fills what it returns. That kernel runs later:
    on ghosts when they have no addresses any more, which ends the process; or on all of a large block, for
    nothing. So what pgraph takes for itself is asked of the allocator: no op makes it, and no mode sees one.

    Raises:
        torch.OutOfMemoryError: there is no memory for one of them.
    """
    held: list[int] = []
    try:
        for nbytes in sizes:
            held.append(torch.cuda.caching_allocator_alloc(nbytes, device, stream))
        yield held
    finally:
        for address in held:
            torch.cuda.caching_allocator_delete(address)


def log(device: int, pool: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """What the allocator of a device did since its log began, oldest first.

    Args:
        pool: id of a pool. The allocator tells its log together with the state of that pool, or of all
            memory, which takes long in a large program.
    """
    return list(_snapshot(pool or (0, 0), True)["device_traces"][device])


def _snapshot(pool: tuple[int, int], traces: bool) -> dict[str, Any]:
    which = (*pool, traces)
    for item in which:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))  # Note [Borrowed references]
    found: dict[str, Any] = torch._C._cuda_memorySnapshot(which)
    return found
