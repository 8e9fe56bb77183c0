"""How much memory captures may take, and which of them go for a new one.

The memory belongs to a device or to its host, so there are two budgets for all partitions of a process on a
device, however many models they are of. Whoever captures sees to it that the total of each is within its own
option `capture_memory_mb`.

A capture that needs another's memory may have it under the rules of Note [Taking turns] in
`pgraph.runtime.keeping`, which keep captures from pushing one another out again and again. Of those that may
go, the least useful go first: with the fewest launches for each byte and for the time since the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from pgraph.runtime.keeping import PATIENCE, Use
from pgraph.runtime.members import Members

__all__ = ["EXEC_BYTES", "NODE_BYTES", "Budget", "Held", "Holder", "Memory", "limit_of"]

Memory = Literal["execs", "recipes"]
"""What takes it: of the device, or of the host."""

NODE_BYTES: Final = 3500
"""What a node of an exec takes on a device (H200, driver 580: 32 execs of 100 nodes take 11 MB).

The driver takes memory in pieces of megabytes, so that most execs seem to take nothing and some too much.
They count as what was measured or as their nodes, whichever is more."""

EXEC_BYTES: Final = 75 << 10
"""What an exec takes on a device beside its nodes (H200, driver 580)."""

_LEAST: Final = 256 << 20
_SHARE: Final = 100  # a hundredth of the device's memory


class Held(Protocol):
    """A capture, or several that go together."""

    @property
    def use(self) -> Use: ...

    @property
    def nbytes(self) -> int: ...


H = TypeVar("H", bound=Held)


class Holder(Protocol[H]):
    """A partition's captures."""

    lock: Any  # a `threading.RLock`

    def takes(self, memory: Memory) -> int:
        """Bytes of all of them."""

    def held(self, memory: Memory) -> Sequence[H]:
        """What may go by itself. Called with its lock held."""

    def catch_up(self) -> None:
        """Note launches that were not told. Called with its lock held."""

    def evict(self, held: H) -> None:
        """Let one of these go for another's sake. Called with its lock held."""


def limit_of(wanted: int | None, device_bytes: int) -> int:
    """Bytes that captures may take.

    Args:
        wanted: option `capture_memory_mb`.
        device_bytes: all the device's memory.
    """
    return wanted << 20 if wanted is not None else max(_LEAST, device_bytes // _SHARE)


class Budget(Generic[H]):
    """Of one kind of memory. Safe to use from several threads.

    Attributes:
        tick: a number that grows: the time for `Use` of all partitions.
        dropped: how often captures went for another's sake.
    """

    def __init__(self, memory: Memory = "execs", tick: Callable[[], int] | None = None) -> None:
        self.memory = memory
        self._holders: Members[Holder[H]] = Members()
        self.tick: Callable[[], int] = tick or itertools.count(1).__next__
        self.dropped = 0

    def join(self, holder: Holder[H]) -> None:
        """Count this partition's captures, for as long as it lives."""
        self._holders.add(holder)

    def total(self) -> int:
        """Bytes of all captures."""
        return sum(holder.takes(self.memory) for holder in self._holders.all())

    def cleared(self) -> None:
        """A partition began anew: if nothing is left, so does the budget."""
        if not self.total():
            self.dropped = 0

    def patience(self, captures: int) -> int:
        """Runs to wait for before a capture takes others' memory: as captures are dropped it grows."""
        return min(self.dropped // max(captures, 1), PATIENCE)

    def make_room(
        self,
        mine: Holder[H],
        newcomer: H | None,
        limit: int,
        admits: Callable[[Holder[H], H], bool],
        *,
        planned: int = 0,
    ) -> bool:
        """Evict what may go until all is within the limit; nothing, if that is not enough.

        Partitions that other threads are busy with keep what they have: to wait for one with another's lock
        held might never end.

        Args:
            mine: the partition that wants room. Its lock is held.
            newcomer: what it is for, which stays; None if that is not there yet.
            limit: in bytes.
            admits: whether a capture of a partition may go.
            planned: bytes of a capture that is yet to be made. Nothing is evicted before it is.

        Returns:
            True if there is room now, or will be.
        """
        needed = self.total() + planned - limit
        if needed <= 0:
            return True
        locked = [
            holder for holder in self._holders.all() if holder is mine or holder.lock.acquire(blocking=False)
        ]
        try:
            for holder in locked:
                holder.catch_up()
            now = self.tick()
            may_go = [
                (_worth(held, now), number, place)
                for number, holder in enumerate(locked)
                for place, held in enumerate(holder.held(self.memory))
                if held is not newcomer and admits(holder, held)
            ]
            gone: list[tuple[Holder[H], H]] = []
            for _, number, place in sorted(may_go):
                if needed <= 0:
                    break
                gone.append((locked[number], locked[number].held(self.memory)[place]))
                needed -= gone[-1][1].nbytes
            if needed > 0:
                return False
            for holder, held in () if planned else gone:
                self.dropped += 1
                holder.evict(held)
        finally:
            for holder in locked:
                if holder is not mine:
                    holder.lock.release()
        return True


def _worth(held: Held, now: int) -> float:
    """Launches for each byte and for the time since the last one."""
    return (held.use.launches + 1) / (max(held.nbytes, 1) * (now - held.use.latest + 1))
