"""What the caching allocator holds, and its log.

Note [Borrowed references]
PyTorch's function for both takes a tuple: a pool's id and whether the log is wanted. It gives back references
to the tuple's items that it never took (seen in 2.11; pytorch#196366, still open when 2.15 came out). Small
numbers survive that, in Python 3.12 and later for ever. The id of a pool beyond the 256th does not: it is
freed while in use, and the interpreter stops some allocations later. So each item is given one reference
first. Where PyTorch is right, that keeps an int alive: some 30 bytes a call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["log", "segments"]


def segments() -> list[dict[str, Any]]:
    """All segments of all devices with their blocks, as `torch.cuda.memory_snapshot` gives them."""
    return list(_snapshot((0, 0), False)["segments"])


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
