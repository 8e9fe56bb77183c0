"""What an evaluation puts a recording together from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from pgraph.compute.script import Call, Run
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording, TensorSpec
from pgraph.template.template import Slot
from pgraph.template.topology import Topology

__all__ = ["Latest", "Part", "Proved", "Range", "Tools"]

Proved = tuple[Recording, tuple[Slot, ...]]
"""A recording and its slots."""


@dataclasses.dataclass(slots=True)
class Range:
    """An allocation."""

    address: int
    nbytes: int
    birth: int
    death: int | None = None
    library: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What a launch or a call adds to a recording, and each one that is like it.

    Args:
        words: node, byte, which range, how far into it; of the ranges of its tensors, and then of its
            allocations.
        steps: within its nodes.
        results: which allocation, and the number of the layout; or a constant.
        order: of its nodes, a piece of the whole; None for a chain of which nothing more is to be told. In
            `odd` the node before the first is -1.
    """

    nodes: tuple[NodeRecord, ...]
    words: tuple[tuple[int, int, int, int], ...]
    allocations: tuple[GhostAllocation, ...] = ()
    steps: tuple[int, ...] = ()
    results: tuple[tuple[int, int] | OutputSpec, ...] = ()
    order: Topology | None = None


class Latest:
    """Facts of the latest recording of a script: most of those of the next are equal, and not made."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Sequence[Any], Sequence[Any]]] = {}

    def allocations(self, ranges: Sequence[Range]) -> tuple[GhostAllocation, ...]:
        rows = [(r.address, r.nbytes, r.birth, r.death, 0, r.library) for r in ranges]
        return self._made(GhostAllocation, rows)

    def slots(self, rows: Sequence[tuple[int, int, int, int]]) -> tuple[Slot, ...]:
        return self._made(Slot, rows)

    def outputs(self, rows: Sequence[OutputSpec | tuple[Any, ...]]) -> tuple[OutputSpec, ...]:
        """Rows are as `_output` takes them; constants stand for themselves."""
        made = iter(self._made(_output, [row for row in rows if isinstance(row, tuple)]))
        return tuple([next(made) if isinstance(row, tuple) else row for row in rows])

    def clear(self) -> None:
        self._known.clear()

    def _made(self, kind: Callable[..., Any], rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """What the function makes of each row."""
        told, known = self._known.get(kind, ((), ()))
        found = [old if row == was else kind(*row) for row, was, old in zip(rows, told, known, strict=False)]
        found += [kind(*row) for row in rows[len(found) :]]
        self._known[kind] = rows, found
        return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """What it takes besides a script.

    Args:
        node: the node of a generated kernel (its position among the nodes, which one, its arguments), and
            (byte of the parameters, number of the argument) of each address in it.
        site: a library call of these arguments, recorded by itself; None if it is not known.
        types: of results of library calls, by memory; those that become known are added.
        sample: equal for launches of one kernel whose nodes are equal if their arguments are, but for
            addresses; None for a launch that is like no other. Without it each event is evaluated by itself.
        latest: of this script.
        offsets: whether it matters where in its storage a tensor begins.
        record: makes all calls known that `site` was asked for since the last time; None if that cannot be.
    """

    node: Callable[[int, Run, Sequence[Any]], tuple[NodeRecord, Sequence[tuple[int, int]]]]
    site: Callable[[Call, Sequence[Any]], Proved | None]
    types: dict[int, Any]
    sample: Callable[[Run], Hashable] | None = None
    latest: Latest = dataclasses.field(default_factory=Latest)
    offsets: bool = True
    record: Callable[[], None] | None = None


def _output(
    region: int | None, given: int | None, layout: tuple[Any, ...] | None, same: int | None
) -> OutputSpec:
    spec = TensorSpec(*layout) if layout is not None else None
    return OutputSpec(region=region, input=given, layout=spec, same=same)
