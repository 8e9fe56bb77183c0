"""Which storages still live, while a partition is captured, where there is no C++.

A storage cannot die before the tensor object that it was first seen in, so only those are asked whose object
is gone (views may keep their storages). One that gave its storage away while it lived (``set_``) is never
asked: it then counts as living, which is safe.
"""

from __future__ import annotations

import weakref

import torch

from pgraph.compat import forget_storage, storage_is_gone, weak_storage

__all__ = ["AskingWatch"]


class _Object(weakref.ref[torch.Tensor]):
    """Tells when the tensor object is gone that a storage was first seen in."""

    __slots__ = ("owner",)
    owner: int


class AskingWatch:
    """The storages of one capture, by numbers that the caller gives."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by weak reference, of those that are not known to have gone
        self._objects: list[_Object] = []  # they report for as long as they live
        self._lost: list[_Object] = []  # those whose tensor has gone since it was asked last
        self._orphans: dict[int, None] = {}  # their storages, in order
        self._owners: list[int] = []

    def first_seen(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(address, bytes) of a tensor's storage; None if it is watched already."""
        storage = tensor.untyped_storage()
        return None if storage._cdata in self._numbers else (storage.data_ptr(), storage.nbytes())

    def add(self, tensor: torch.Tensor, number: int) -> int:
        """Watch its storage, which is not watched yet; returns what PyTorch calls it (`_cdata`)."""
        owner = weak_storage(tensor.untyped_storage())
        self._owners.append(owner)
        self._numbers[owner] = number
        # No reference to the watch itself: a circle would keep it, with the collector off.
        seen = _Object(tensor, self._lost.append)
        seen.owner = owner
        self._objects.append(seen)
        return owner

    def ended(self) -> list[int]:
        """Numbers of those that have gone since this was asked last, in any order."""
        while self._lost:
            self._orphans[self._lost.pop().owner] = None
        gone = [owner for owner in self._orphans if storage_is_gone(owner)] if self._orphans else []
        for owner in gone:
            del self._orphans[owner]
        return [self._numbers.pop(owner) for owner in gone]

    def living(self) -> list[int]:
        """Numbers of those that have not gone, ascending."""
        return sorted(number for owner, number in self._numbers.items() if not storage_is_gone(owner))

    def close(self) -> None:
        """Watch nothing any more. To be called last."""
        while self._owners:
            forget_storage(self._owners.pop())
        self._numbers.clear()
        self._orphans.clear()
        self._lost.clear()
        self._objects.clear()
