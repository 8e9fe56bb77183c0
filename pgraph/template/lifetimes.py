"""When the regions of a recording must exist: what a plan is made from."""

from __future__ import annotations

import array
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

from pgraph.errors import PlanError

__all__ = ["GRANULE", "Lifetime", "Lives", "Pairs", "Rows", "check", "survives"]

T = TypeVar("T")

GRANULE = 512
"""Bytes to which the caching allocator rounds every size; offsets are multiples of it."""


class Rows(Sequence[T], Generic[T]):
    """A tuple of rows, kept column by column: a row is made when it is asked for.

    Python's garbage collector looks at each row that is kept, of each size, but at no tuple of numbers.

    Args:
        kind: makes a row, a named tuple.
        columns: a sequence for each of its fields.
    """

    __slots__ = ("_columns", "_kind")

    def __init__(self, kind: type[T], *columns: Sequence[Any]) -> None:
        self._kind, self._columns = kind, columns

    def column(self, name: str) -> Sequence[Any]:
        """A field of each row."""
        return self._columns[self._kind._fields.index(name)]  # type: ignore[attr-defined]  # a named tuple's

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...

    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        found = [column[at] for column in self._columns]
        return tuple(map(self._kind, *found)) if isinstance(at, slice) else self._kind(*found)

    def __iter__(self) -> Iterator[T]:
        return map(self._kind, *self._columns)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rows):
            return self._columns == other._columns
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Pairs(Sequence[tuple[int, int]]):
    """A tuple of pairs of numbers, kept as one array of 64-bit words: a fifth of the memory, and nothing for
    the garbage collector.

    Attributes:
        words: first and second of each; not to be changed.
    """

    __slots__ = ("words",)

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        # By way of a list, whose length is known: an array that grows takes more than it needs.
        self.words = array.array("q", list(itertools.chain.from_iterable(pairs)))

    def __len__(self) -> int:
        return len(self.words) // 2

    @overload
    def __getitem__(self, at: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[tuple[int, int], ...]: ...

    def __getitem__(self, at: int | slice) -> tuple[int, int] | tuple[tuple[int, int], ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        place = 2 * range(len(self))[at]
        return self.words[place], self.words[place + 1]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        words = iter(self.words)
        return zip(words, words, strict=True)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Pairs):
            return self.words == other.words
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def survives(n_nodes: int) -> int:
    """The `Lifetime.death` of a region that outlives the launch."""
    return n_nodes + 1


class Lifetime(NamedTuple):
    """When a region must exist, in node order. A tuple: there are hundreds for each plan.

    Args:
        region: unique id.
        nbytes: size in bytes; 0 is allowed.
        birth: it must exist before node `birth` runs; 0 for inputs.
        death: it may be freed once all nodes < `death` have run; ``survives(n_nodes)`` for outputs
            and for inputs that the caller keeps.
        kind: who owns it.
    """

    region: int
    nbytes: int
    birth: int
    death: int
    kind: Literal["input", "output", "temp"]


def check(n_nodes: int, lifetimes: Sequence[Lifetime]) -> None:
    """See to it that these can be planned.

    Raises:
        PlanError: they contradict each other.
    """
    seen: set[int] = set()
    end = survives(n_nodes)
    for life in lifetimes:
        region, nbytes, birth, death, kind = life
        right = nbytes >= 0 <= birth <= death <= end and region not in seen
        if right and (
            (kind == "temp" and death < end)
            or (kind == "output" and death == end and birth <= n_nodes)
            or (kind == "input" and birth == 0)
        ):
            seen.add(region)
            continue
        if life.region in seen:
            wrong = "appears twice; give each region an id of its own"
        elif life.nbytes < 0:
            wrong = f"has nbytes {life.nbytes}; pass a size >= 0"
        elif life.birth < 0:
            wrong = f"has birth {life.birth}; pass a node >= 0"
        elif life.death > end:
            wrong = f"has death {life.death} in a chain of {n_nodes} nodes; pass at most {end} (survives)"
        elif life.birth > life.death:
            wrong = f"has birth {life.birth} after death {life.death}; pass birth <= death"
        elif life.kind == "input" and life.birth != 0:
            wrong = f"is an input with birth {life.birth}; inputs exist before the launch, pass 0"
        elif life.kind == "output" and (life.death != end or life.birth > n_nodes):
            wrong = (
                f"is an output with birth {life.birth} and death {life.death}; outputs survive, pass a "
                f"birth <= {n_nodes} and death {end}, or make it a temp"
            )
        elif life.kind == "temp" and life.death == end:
            wrong = f"is a temp with death {end} (survives); pass at most {n_nodes}, or make it an output"
        else:
            wrong = f"has kind {life.kind!r}; pass 'input', 'output' or 'temp'"
        raise PlanError(f"region {life.region} {wrong}")


class Lives:
    """When regions exist, indexed by node, whatever their sizes: what the plans of many sizes have in common.

    Regions are renumbered 0.. in order of birth. A chain without nodes counts as one node.

    Args:
        n_nodes: length of the chain.
        lifetimes: of all regions. Their sizes are checked, and not kept.

    Attributes:
        n: nodes, at least one.
        order: the position of each region in `lifetimes`.
        regions: the id of each.
        start, end: the nodes [start, end) for which each has to exist; `n` + 1 for what outlives the launch.
        born, dying: those that are no inputs, in the order of their starts and of their ends.
        freed: inputs in the order of their ends.
        births, deaths, frees: how many of these start or end before each node.
        birth_of: births by id, as they were told.
        results: births of outputs, ascending.

    Raises:
        PlanError: they contradict each other.
    """

    def __init__(self, n_nodes: int, lifetimes: Sequence[Lifetime]) -> None:
        check(n_nodes, lifetimes)
        self.n_nodes = n_nodes
        n = self.n = max(n_nodes, 1)
        last, lasting = n - 1, survives(n_nodes)
        starts = [life.birth if life.birth < last else last for life in lifetimes]
        self.order = sorted(range(len(starts)), key=starts.__getitem__)
        self.regions = [lifetimes[i].region for i in self.order]
        self.start = [starts[i] for i in self.order]
        self.end = list[int]()
        self.born, self.freed = list[int](), list[int]()
        births = [0] * (n + 2)
        for r, (i, start) in enumerate(zip(self.order, self.start, strict=True)):
            end = lifetimes[i].death
            if end == lasting:
                end = n + 1
            elif end <= start:
                end = start + 1  # what dies at its birth is treated as used by that node: the safe reading
            self.end.append(end)
            if lifetimes[i].kind == "input":
                self.freed.append(r)
            else:
                self.born.append(r)
                births[start + 1] += 1
        self.births = list(itertools.accumulate(births))
        self.dying, self.deaths = self._by_end(self.born)
        self.freed, self.frees = self._by_end(self.freed)
        self.birth_of = {life.region: life.birth for life in lifetimes}
        self.results = sorted([life.birth for life in lifetimes if life.kind == "output"])

    @functools.cached_property
    def tables(self) -> list[array.array[int]]:
        """What C reads of them: `pg_chain`."""
        found = self.start, self.end, self.born, self.births, self.dying, self.deaths
        return [array.array("q", numbers) for numbers in found]

    def _by_end(self, regions: list[int]) -> tuple[list[int], list[int]]:
        """These in the order in which they end, and how many end before each node."""
        counts = [0] * (self.n + 3)
        for r in regions:
            counts[self.end[r] + 1] += 1
        return sorted(regions, key=self.end.__getitem__), list(itertools.accumulate(counts))
