"""Ghost tensors and their storages, in C++ where it can be had: a capture asks for them at each op.

In Python a ghost takes five calls of PyTorch: 6.3 us on a machine where C++ takes 0.8.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pgraph.compat import counter_of, tensor_layout
from pgraph.native import libraries
from pgraph.native.timeline import AskingTimeline, Place, Timeline

__all__ = ["GhostCalls", "calls", "in_python"]


class GhostCalls(NamedTuple):
    """The functions; whoever made them, they do the same.

    Args:
        ghost: (address, bytes, device, size, stride, dtype, offset) -> a tensor that owns nothing. Address
            and bytes are its storage's, the offset counts elements, the device is the index of a GPU
            (-1: the CPU).
            No dispatch mode sees how it is made.
        storage_of: tensor -> (number, address, bytes) of its storage. No two that live have one number.
        counter_of: see `pgraph.compat.counter_of`.
        timeline: where -> the allocations of a capture.
    """

    ghost: Callable[[int, int, int, Sequence[int], Sequence[int], torch.dtype, int], torch.Tensor]
    storage_of: Callable[[torch.Tensor], tuple[int, int, int]]
    counter_of: Callable[[torch.Tensor], torch.Tensor]
    timeline: Callable[[Place], Timeline]


def _ghost(
    address: int,
    nbytes: int,
    device: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    offset: int,
) -> torch.Tensor:
    where = torch.device("cpu") if device < 0 else torch.device("cuda", device)
    storage = torch._C._construct_storage_from_data_pointer(address, where, nbytes)
    # This is no op of the program: no dispatch mode may see it.
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=dtype, device=where).set_(storage, offset, size, stride)


def _storage_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.data_ptr(), storage.nbytes()


in_python = GhostCalls(_ghost, _storage_of, counter_of, AskingTimeline)
"""The reference, and what serves where there is no C++."""


@functools.cache
def calls() -> GhostCalls:
    """The fastest that there are. The first call may have to wait for a compiler."""
    library, (offset, implementation) = libraries.load_tensors(), tensor_layout()
    if library is None or not offset:
        return in_python
    made = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64, ctypes.c_uint64, *[ctypes.py_object] * 3)
    functions: Any = made(("pg_ghost_functions", library))
    return GhostCalls(*functions(offset, implementation, *in_python[1:3], torch.Tensor))
