"""A partition's first capture, kept until there is a second one."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch

from pgraph import compat
from pgraph.template.recording import Recording
from pgraph.template.template import Slot

__all__ = ["First", "kept"]

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
    found: list[Any] = []
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            found.append(value)
        elif value.device == device and not value.is_conj() and not value.is_neg():
            found.append(_without_memory(value))
        elif value.device != device and value.numel() <= _FEW:
            found.append(value)
        else:
            return None
    bare = dataclasses.replace(recording, graph=None)
    return First(bare, tuple(slots), tuple(found), tuple(alignments), compat.library_settings())


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device="meta")
    return empty.as_strided(tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))
