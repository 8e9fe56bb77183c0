"""A partition's first capture, kept until there is a second one."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch

from pgraph import compat
from pgraph.compute.errors import NotComputableError
from pgraph.template.recording import Recording
from pgraph.template.template import Slot

__all__ = ["First", "kept", "like", "stand_in", "without_memory"]

_FEW: Final = 16
"""Elements of a tensor on the host that is kept as it is: a seed."""


@dataclasses.dataclass(frozen=True, slots=True)
class First:
    """What is compared later.

    Args:
        recording: without its graph.
        inputs: as they were; tensors of the device without memory.
        settings: of libraries, when it was captured.
    """

    recording: Recording
    slots: Sequence[Slot]
    inputs: Sequence[Any]
    alignments: Sequence[int]
    settings: Hashable


def kept(
    recording: Recording,
    slots: Sequence[Slot],
    inputs: Sequence[Any],
    alignments: Sequence[int],
    device: torch.device,
) -> First | None:
    """The capture as it can be kept; None if something of its arguments cannot be told without them."""
    try:
        found = tuple(stand_in(value, device) for value in inputs)
    except NotComputableError:
        return None
    bare = dataclasses.replace(recording, graph=None)
    return First(bare, tuple(slots), found, tuple(alignments), compat.library_settings())


def stand_in(value: Any, device: torch.device) -> Any:
    """What tells as much of an argument, without memory of the device.

    Raises:
        NotComputableError: there is none.
    """
    if not isinstance(value, torch.Tensor) or (value.device != device and value.numel() <= _FEW):
        return value
    if value.device != device:
        raise NotComputableError("an argument cannot be told without its memory")
    return like(value, value.size(), value.stride(), int(value.storage_offset()))


def like(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """What `without_memory` gives for elements that are read as a tensor's are."""
    return without_memory(tensor.dtype, size, stride, offset, compat.lazy_bits(tensor))


def without_memory(
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    lazy: tuple[bool, bool] = (False, False),
) -> torch.Tensor:
    """A tensor with this layout, in elements, and no memory.

    Args:
        lazy: as an `Operand` has it.
    """
    bare = torch.empty(0, dtype=dtype, device="meta").as_strided(tuple(size), tuple(stride), offset)
    return compat.lazily(bare, *lazy)
