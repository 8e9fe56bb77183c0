"""Results that are views: of blocks, and of arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pgraph.compat import base_of, lazily, reinterpret
from pgraph.template.recording import TensorSpec

__all__ = ["based", "beside", "counted", "view", "with_counter"]


def view(owner: torch.Tensor, layout: TensorSpec, offset: int) -> torch.Tensor:
    """The tensor of this layout, `offset` bytes plus its own offset after the owner's first byte."""
    return _view(owner, layout, offset, reinterpret)


def counted(owner: torch.Tensor, layout: TensorSpec, offset: int) -> torch.Tensor:
    """The same with the owner's version counter."""
    made = _view(owner, layout, offset, _part)
    return made if made.dtype == owner.dtype else _sharing(owner, made)


def based(owner: torch.Tensor, layout: TensorSpec, offset: int, base: TensorSpec) -> torch.Tensor:
    """The same as a view of a tensor that is laid out as `base`, which has the same type."""
    whole = view(owner, base, offset)
    first = (layout.offset - base.offset) // layout.dtype.itemsize
    return torch.as_strided(whole, layout.size, layout.stride, whole.storage_offset() + first)


def beside(other: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A view of what another result, made by `based`, is a view of; or that very tensor."""
    whole = base_of(other)
    if whole is None:  # in inference mode there are no views
        return torch.as_strided(other, size, stride, offset)
    if (whole.size(), whole.stride(), whole.storage_offset()) == (size, stride, offset):
        return whole
    return torch.as_strided(whole, size, stride, offset)


def with_counter(other: torch.Tensor, layout: TensorSpec, offset: int) -> torch.Tensor:
    """A tensor of this layout, `offset` bytes plus its own offset after the first byte of another's storage.

    It has the other's version counter, and is no view of it.
    """
    return _sharing(other, _typed(other, layout, offset + layout.offset))


def _sharing(other: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with another one's version counter."""
    found = other.detach()
    found.data = tensor
    return found


def _part(owner: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    return torch.as_strided(owner, size, stride, owner.storage_offset() + offset)


def _view(
    owner: torch.Tensor, layout: TensorSpec, offset: int, make: Callable[..., torch.Tensor]
) -> torch.Tensor:
    start = offset + layout.offset
    if owner.dtype == layout.dtype and start % layout.dtype.itemsize == 0:
        same = start == 0 and owner.size() == layout.size and owner.stride() == layout.stride
        if same and (owner.is_conj(), owner.is_neg()) == (layout.conj, layout.neg):
            return owner
        # It has the owner's bits, and each view with a bit turns that one over.
        part = make(owner, layout.size, layout.stride, start // layout.dtype.itemsize)
        return lazily(part, layout.conj != part.is_conj(), layout.neg != part.is_neg())
    return _typed(owner, layout, int(owner.storage_offset()) * owner.element_size() + start)


def _typed(owner: torch.Tensor, layout: TensorSpec, start: int) -> torch.Tensor:
    """The tensor of this layout, so many bytes after the first one of the owner's storage."""
    view = torch.empty(0, dtype=layout.dtype, device=owner.device)
    view.set_(owner.untyped_storage(), start // layout.dtype.itemsize, layout.size, layout.stride)
    return lazily(view, layout.conj, layout.neg)
