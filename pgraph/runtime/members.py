"""What lives in a process, without keeping it alive."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

__all__ = ["Members"]

M = TypeVar("M")


class Members(Generic[M]):
    """A set of weak references that any thread may use.

    A `WeakSet` that grows while another thread walks over it raises an error in that thread.
    """

    def __init__(self) -> None:
        # Reentrant: the collector may run while it is held, and what it frees may ask for all members.
        self._lock = threading.RLock()
        self._members: weakref.WeakSet[M] = weakref.WeakSet()

    def add(self, member: M) -> None:
        """One more, for as long as it lives."""
        with self._lock:
            self._members.add(member)

    def discard(self, member: M) -> None:
        """It is none any more, if it was one."""
        with self._lock:
            self._members.discard(member)

    def clear(self) -> None:
        """None is any more."""
        with self._lock:
            self._members.clear()

    def all(self) -> list[M]:
        """Those that live now, in any order."""
        with self._lock:
            return list(self._members)
