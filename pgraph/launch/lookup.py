"""Finds what is meant for today's sizes in one step, however many sizes there are.

A `Lookup` reads only those numbers in which its entries' guards differ: often one size of one input. They
make a key, and the key leads to the entries that may fit. A lookup never says that one does: its guards do,
all of them. Entries with one key (they differ in alignments or traits) are for the caller to try in turn.

What makes this right: where an entry's guards hold, the key of the arguments is the entry's. So no entry
that fits is ever missed, whichever numbers are read.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from pgraph.launch.guards import Guards

__all__ = ["KeyPart", "Lookup", "PartKind", "numbered"]

T = TypeVar("T")


class PartKind(enum.IntEnum):
    """What a part of a key is. The values stand in `native/launch.c`, too, which is checked."""

    VALUE = 0
    SIZE = 1
    STRIDE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class KeyPart:
    """A number that tells entries apart.

    Args:
        number: a number among the arguments (its hash, since equal numbers have one), a size, or a stride in
            elements: 0 where the size is at most 1, since guards do not look at it then.
        position: among the arguments.
        dim: of that tensor; 0 for a number.
        index: of the guard, among those of tensors or those of values.
    """

    number: PartKind
    position: int
    dim: int
    index: int

    def of_guards(self, guards: Guards) -> int:
        """What it is wherever these guards hold."""
        if self.number is PartKind.VALUE:
            return hash(guards.values[self.index].value)
        tensor = guards.tensors[self.index]
        size = tensor.size[self.dim]
        return size if self.number is PartKind.SIZE else tensor.stride[self.dim] if size > 1 else 0

    def of_arguments(self, args: Sequence[Any]) -> int:
        """What it is today."""
        argument = args[self.position]
        if self.number is PartKind.VALUE:
            return hash(argument)
        size: int = argument.size(self.dim)
        return size if self.number is PartKind.SIZE else argument.stride(self.dim) if size > 1 else 0


class Lookup(Generic[T]):
    """Entries by their guards. Not safe to change while another thread reads.

    Attributes:
        parts: of the key, found as entries come: one more whenever two would share a key that need not.
        entries: (guards, item) in the order in which they came.
        keys: of each entry. Kept, since to make hundreds of them takes 100 us.
    """

    __slots__ = ("_buckets", "_shape", "entries", "keys", "parts")

    def __init__(self) -> None:
        self.parts: tuple[KeyPart, ...] = ()
        self.entries: list[tuple[Guards, T]] = []
        self.keys: list[tuple[int, ...]] = []
        self._buckets: dict[tuple[int, ...], tuple[tuple[Guards, T], ...]] = {}
        self._shape: Any = None  # which arguments are guarded; None while there is no entry

    def add(self, guards: Guards, item: T) -> None:
        """Have it found where these guards hold, after all that came before it."""
        entry = guards, item
        self.entries.append(entry)
        if self._shape is None:
            self._shape = guards.shape
        if self._shape != guards.shape:
            # No number need be there for all of them: one key for all.
            self._shape, self.parts = (), ()
            self._arrange()
            return
        key = self.key(guards)
        self.keys.append(key)
        self._buckets[key] = bucket = (*self._buckets.get(key, ()), entry)
        further = _difference(bucket[0][0], guards) if len(bucket) > 1 else None
        while further is not None:
            self.parts += (further,)
            self._arrange()
            further = _difference(self._buckets[self.keys[-1]][0][0], guards)

    def discard(self, guards: Guards, item: T) -> None:
        """Have it found no more: the entry with these guards."""
        key = self.key(guards)
        stays = [entry[1] is not item for entry in self.entries]
        self.entries = list(itertools.compress(self.entries, stays))
        self.keys = list(itertools.compress(self.keys, stays))
        self._buckets[key] = tuple([entry for entry in self._buckets[key] if entry[1] is not item])
        if not self._buckets[key]:
            del self._buckets[key]

    def key(self, guards: Guards) -> tuple[int, ...]:
        """Of an entry with these guards."""
        return tuple([part.of_guards(guards) for part in self.parts])

    def candidates(self, args: Sequence[Any]) -> Sequence[tuple[Guards, T]]:
        """The entries that may fit, in the order in which they came."""
        try:
            return self._buckets.get(tuple([part.of_arguments(args) for part in self.parts]), ())
        except (AttributeError, IndexError, RuntimeError, TypeError):
            return ()  # no tensor, not as many dimensions, or a size that is a symbol: no guards hold

    def copied(self) -> Lookup[T]:
        """Another one with these entries, to which further ones are added."""
        made = Lookup[T]()
        made.parts, made.entries, made.keys = self.parts, list(self.entries), list(self.keys)
        made._buckets, made._shape = dict(self._buckets), self._shape
        return made

    def _arrange(self) -> None:
        self._buckets = {}
        self.keys = [self.key(guards) for guards, _ in self.entries]
        for key, entry in zip(self.keys, self.entries, strict=True):
            self._buckets[key] = (*self._buckets.get(key, ()), entry)


def numbered(all_guards: Iterable[Guards], before: Lookup[int] | None = None) -> Lookup[int]:
    """A lookup of the numbers of these guards.

    Args:
        before: if it is of the first of these, only the others are added.
    """
    guards = list(all_guards)
    known = [entry[0] for entry in before.entries] if before is not None else []
    further = before is not None and all(map(operator.is_, guards, known)) and len(known) <= len(guards)
    lookup = before.copied() if before is not None and further else Lookup[int]()
    for number in range(len(lookup.entries), len(guards)):
        lookup.add(guards[number], number)
    return lookup


def _difference(a: Guards, b: Guards) -> KeyPart | None:
    """A number in which they differ, the cheapest to read first; None if a key cannot tell them apart."""
    numbers = [
        KeyPart(PartKind.VALUE, guard.position, 0, index)
        for index, guard in enumerate(a.values)
        if hash(guard.value) != hash(b.values[index].value)
    ]
    if numbers:
        return numbers[0]
    for number in (PartKind.SIZE, PartKind.STRIDE):
        for index, guard in enumerate(a.tensors):
            other = b.tensors[index]
            if (guard.size, guard.stride) == (other.size, other.stride):
                continue
            for dim in range(len(guard.size)):
                part = KeyPart(number, guard.position, dim, index)
                if part.of_guards(a) != part.of_guards(b):
                    return part
    return None
