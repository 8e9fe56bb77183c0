"""What an evaluation puts a recording together from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from pgraph.compute.script import CallLibrary, LaunchKernel
from pgraph.template.recording import NodeRecord, OutputSpec, Recording
from pgraph.template.template import Slot
from pgraph.template.topology import Topology

__all__ = ["Form", "Part", "Proved", "Tools"]

Proved = tuple[Recording, tuple[Slot, ...]]
"""A recording and its slots."""


class Form(NamedTuple):
    """All of a part but numbers that differ from size to size. What must agree for one skeleton to be right.

    Args:
        kinds: of the nodes.
        words: node, byte, which range: those of its tensors, and then those of its allocations.
        allocations: birth, death, and the bytes of a library's; None for others.
        results: which allocation; None for a constant.
        order: of its nodes, a piece of the whole; None for a chain of which nothing more is to be told. In
            `odd` the node before the first is -1.
        steps: within its nodes.
    """

    kinds: tuple[str, ...] = ()
    words: tuple[tuple[int, int, int], ...] = ()
    allocations: tuple[tuple[int, int | None, int | None], ...] = ()
    results: tuple[int | None, ...] = ()
    order: Topology | None = None
    steps: tuple[int, ...] = ()


class Part(NamedTuple):
    """What a launch or a call adds to a recording, and each one that is like it.

    Args:
        distances: how far into its range each word leads.
        sizes: bytes of its allocations.
        results: which allocation, and the number of the layout; or a constant.
    """

    nodes: tuple[NodeRecord, ...] = ()
    form: Form = Form()
    distances: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    results: tuple[tuple[int, int] | OutputSpec, ...] = ()


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
        record: records all calls that `site` was asked for in vain since the last time, and tells what it
            would give for each, in that order; None if that cannot be.
        foretell: types of a call's results before it was ever recorded; none if they cannot be told.
    """

    node: Callable[[int, LaunchKernel, Sequence[Any]], tuple[NodeRecord, Sequence[tuple[int, int]]]]
    site: Callable[[CallLibrary, Sequence[Any]], Proved | None]
    types: dict[int, Any]
    sample: Callable[[LaunchKernel], Hashable] | None = None
    offsets: bool = True
    record: Callable[[], Sequence[Proved | None]] | None = None
    foretell: Callable[[CallLibrary, Sequence[Any]], Sequence[Any]] = lambda event, arguments: ()
