"""What an evaluation puts a recording together from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from pgraph.compute.script import Call, Run
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording
from pgraph.template.template import Slot
from pgraph.template.topology import Topology

__all__ = ["Form", "Part", "Proved", "Tools"]

Proved = tuple[Recording, tuple[Slot, ...]]
"""A recording and its slots."""


class Form(NamedTuple):
    """All of a part but numbers that differ from size to size. What must agree for one skeleton to be right.

    Args:
        kinds: of the nodes.
        words: node, byte, which range.
        allocations: birth, death, and the bytes of a library's; None for others.
        results: which allocation; None for a constant.
        order, steps: as a `Part` has them.
    """

    kinds: tuple[str, ...] = ()
    words: tuple[tuple[int, int, int], ...] = ()
    allocations: tuple[tuple[int, int | None, int | None], ...] = ()
    results: tuple[int | None, ...] = ()
    order: Topology | None = None
    steps: tuple[int, ...] = ()


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

    Attributes:
        form: of it.
        distances: how far into its range each word leads.
        sizes: bytes of its allocations.
    """

    nodes: tuple[NodeRecord, ...] = ()
    words: tuple[tuple[int, int, int, int], ...] = ()
    allocations: tuple[GhostAllocation, ...] = ()
    steps: tuple[int, ...] = ()
    results: tuple[tuple[int, int] | OutputSpec, ...] = ()
    order: Topology | None = None
    form: Form = dataclasses.field(init=False, compare=False)
    distances: tuple[int, ...] = dataclasses.field(init=False, compare=False)
    sizes: tuple[int, ...] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        form = Form(
            tuple([node.kind for node in self.nodes]),
            tuple([word[:3] for word in self.words]),
            tuple([(a.birth, a.death, a.nbytes if a.library else None) for a in self.allocations]),
            tuple([result[0] if isinstance(result, tuple) else None for result in self.results]),
            self.order,
            self.steps,
        )
        object.__setattr__(self, "form", form)
        object.__setattr__(self, "distances", tuple([word[3] for word in self.words]))
        object.__setattr__(self, "sizes", tuple([a.nbytes for a in self.allocations]))


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
        offsets: whether it matters where in its storage a tensor begins.
        record: makes all calls known that `site` was asked for since the last time; None if that cannot be.
    """

    node: Callable[[int, Run, Sequence[Any]], tuple[NodeRecord, Sequence[tuple[int, int]]]]
    site: Callable[[Call, Sequence[Any]], Proved | None]
    types: dict[int, Any]
    sample: Callable[[Run], Hashable] | None = None
    offsets: bool = True
    record: Callable[[], None] | None = None
