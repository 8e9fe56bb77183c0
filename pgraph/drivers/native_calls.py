"""What a driver offers to launches in C (`native/launch.c`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

__all__ = ["NativeCalls"]


@dataclasses.dataclass(frozen=True, slots=True)
class NativeCalls:
    """What a launch in C asks of a device. Addresses are of C functions.

    Args:
        empty: (size, stride, dtype) -> an ordinary tensor.
        current_stream: device index -> raw handle.
        current_device: () -> device index.
        index: of the device.
        raw_alloc: ``int32_t (uint64_t nbytes, void **result)``, from the framework's allocator on the
            current stream; 0 is success.
        raw_free: ``int32_t (void *memory)``.
        workspace: ``uint64_t (void *stream, uint64_t nbytes)``, as `Driver.workspace`, but 0 where that
            raises. Or None.
        no_workspace: (bytes) -> never: raises what `Driver.workspace` does.
        capturing: ``int (void *stream, int *status)``: writes whether the stream is being captured;
            0 is no. Or None.
        failed: (error code of a launch) -> never: raises.
        made_on: the device for tensors that `native/tensors.cpp` makes in place of `empty`: a CUDA device's
            index, -1 for the CPU; None if it makes none.
    """

    empty: Callable[..., torch.Tensor]
    current_stream: Callable[[int], int]
    current_device: Callable[[], int]
    index: int
    raw_alloc: int
    raw_free: int
    capturing: int | None
    failed: Callable[[int], None]
    workspace: int | None = None
    no_workspace: Callable[[int], None] | None = None
    made_on: int | None = None
