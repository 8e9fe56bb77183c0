"""What two matching recordings prove: immutable, printable, free of torch and of CUDA.

A `Template` holds what nodes there are, which words of their parameters are the address of which region, and
the allocation timeline. It holds no addresses: those of a recording are ghosts (`pgraph.template.recording`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from pgraph.template.lifetimes import Lives, Rows, survives
from pgraph.template.plan import Plan
from pgraph.template.recording import GhostAllocation, NodeKind, NodeRecord, OutputSpec, Recording
from pgraph.text import amount

__all__ = ["Frame", "NodeFacts", "Region", "Slot", "Template", "alike", "borrowed", "node_facts", "slots_of"]

T = TypeVar("T")

RegionKind = Literal["input", "output", "temp", "workspace"]


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is remembered of a node.

    Args:
        nbytes: of its parameters.
    """

    kind: NodeKind
    name: str
    nbytes: int


# Equal ones are one object: a model has many layers, and many sizes.
node_facts = functools.lru_cache(maxsize=4096)(NodeFacts)


class Region(NamedTuple):
    """A contiguous address range with one owner, and its lifetime in node order.

    A workspace is kept by a library and lent at each launch; all others are in the plan.
    """

    index: int  # type: ignore[assignment]  # hides a method of tuples
    kind: RegionKind
    nbytes: int
    birth: int
    death: int


class Slot(NamedTuple):
    """One 8-byte word: at `offset` in the parameters of `node` stands `base(region) + delta`, modulo 2^64.

    `delta` is a signed 64-bit number, and may point outside the region (Note [Beyond a region] in
    `pgraph.template.match`). There are some for each node: a dataclass takes twice the time to make.
    """

    node: int
    offset: int
    region: int
    delta: int


def slots_of(slots: Sequence[Slot], first: int, last: int) -> Sequence[Slot]:
    """Those of the nodes [first, last).

    Args:
        slots: in the order of their nodes.
    """
    begin: tuple[Any, ...] = (first,)  # less than any slot of that node: they are compared as tuples
    end: tuple[Any, ...] = (last,)
    return slots[bisect.bisect_left(slots, begin) : bisect.bisect_left(slots, end)]


class Frame:
    """What templates have in common whose recordings have one skeleton. What was made for the latest of them
    is given again where it is equal.

    Note [A workspace for each op]
    A library keeps one workspace for all its calls, and leaves nothing in it from one call to the next.
    As one region it would live from the first product to the last, and come on top of what eager needs.
    So a temporary takes its place for each op that uses it.

    Args:
        a, b: the recordings; the same one, where one is proof enough.
        slots: of them.
        kept_inputs: inputs whose memory the caller keeps.
        workspaces: allocations that a library keeps.
        lent: the one of these that launches find where the library keeps it, if there is one.

    Attributes:
        lives: of the regions in the plan. Whoever plans sets it.
    """

    def __init__(
        self,
        a: Recording,
        b: Recording,
        slots: Sequence[Slot],
        kept_inputs: frozenset[int],
        workspaces: Sequence[int],
        lent: int | None,
    ) -> None:
        self.kept_inputs, self.workspaces, self.lent = kept_inputs, workspaces, lent
        self.lives: Lives | None = None
        n = len(a.nodes)
        lasting = survives(n)
        returned = {o.region for o in a.outputs if o.region is not None}
        returned_inputs = {o.input for o in a.outputs if o.input is not None}
        regions = []
        for i, (x, y) in enumerate(zip(a.allocations, b.allocations, strict=True)):
            end = n if x.death is None or y.death is None else max(x.death, y.death)
            if i < a.n_inputs:
                keep = x.death is None or i in kept_inputs or i in returned_inputs
                regions.append(Region(i, "input", x.nbytes, 0, lasting if keep else end))
            elif i in returned:
                regions.append(Region(i, "output", x.nbytes, x.birth, lasting))
            else:
                regions.append(Region(i, "workspace" if i == lent else "temp", x.nbytes, x.birth, end))
        self._wholes: list[int] = []  # whose place the further regions take
        self._moved: list[tuple[int, int]] = []  # positions of slots, and the further regions they name
        apart, steps = set(workspaces) - {lent}, (*a.steps, n)
        of_ops: dict[tuple[int, int], int] = {}
        for position, slot in enumerate(slots) if apart else ():
            if slot.region in apart:
                op = slot.region, bisect.bisect_right(steps, slot.node)
                self._moved.append((position, of_ops.setdefault(op, len(regions) + len(of_ops))))
        for (whole, step), index in of_ops.items():
            birth, death = steps[step - 1] if step else 0, steps[step]
            regions.append(Region(index, "temp", regions[whole].nbytes, birth, death))
            self._wholes.append(whole)
        columns = list(zip(*regions, strict=True)) or [()] * len(Region._fields)
        self._index, self._kinds, _, self._births, self._deaths = columns
        self._slots, self._told = tuple(slots), tuple(slots)
        self._slots = self._renamed(slots)
        self._nodes: tuple[NodeFacts, ...] = ()
        self._names: list[tuple[str, int]] = []

    def regions(self, allocations: Sequence[GhostAllocation]) -> Rows[Region]:
        """All regions of a recording with these allocations."""
        nbytes = [allocation.nbytes for allocation in allocations]
        nbytes += [nbytes[whole] for whole in self._wholes]
        return Rows(Region, self._index, self._kinds, tuple(nbytes), self._births, self._deaths)

    def slots(self, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """These slots of a recording, with the names of the further regions."""
        if not self._moved:
            return slots
        if slots is not self._told:
            self._told, self._slots = slots, self._renamed(slots)
        return self._slots

    def _renamed(self, slots: Sequence[Slot]) -> tuple[Slot, ...]:
        found = list(slots)
        for position, region in self._moved:
            node, offset, _, delta = slots[position]
            now, old = Slot(node, offset, region, delta), self._slots[position]
            found[position] = old if old == now else now
        return tuple(found)

    def nodes(self, records: Sequence[NodeRecord]) -> tuple[NodeFacts, ...]:
        """Facts of these nodes of a recording."""
        names = [(node.name, len(node.params)) for node in records]
        if names != self._names or not self._nodes:
            self._nodes = tuple([node_facts(node.kind, node.name, len(node.params)) for node in records])
            self._names = names
        return self._nodes


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """What is needed to launch a partition on any addresses, beside the parameters, which recipes have."""

    nodes: tuple[NodeFacts, ...]
    regions: Rows[Region]
    slots: tuple[Slot, ...]
    outputs: tuple[OutputSpec, ...]
    n_inputs: int
    plan: Plan

    def render(self) -> str:
        """The template as stable text: no address, one line per node with its slots."""
        counts = ((self.nodes, "node"), (self.slots, "slot"), (self.regions, "region"))
        lines = [", ".join(amount(len(things), noun) for things, noun in counts)]
        for r in self.regions:
            lines.append(f"  region {r.index}: {r.kind}, {r.nbytes} bytes, nodes [{r.birth}, {r.death})")
        by_node: dict[int, list[Slot]] = {}
        for slot in self.slots:
            by_node.setdefault(slot.node, []).append(slot)
        for i, node in enumerate(self.nodes):
            words = ", ".join(
                f"{s.offset}=r{s.region}{f'{s.delta:+d}' if s.delta else ''}" for s in by_node.get(i, ())
            )
            lines.append(f"  node {i}: {node.kind} {node.name} ({node.nbytes} bytes) {words}".rstrip())
        for i, out in enumerate(self.outputs):
            lines.append(f"  output {i}: {_render_output(out)}")
        lines.append(self.plan.render())
        return "\n".join(lines)


def alike(template: Template, other: Template) -> Template:
    """The same template, made of another's slots and regions where these are equal: it takes less memory."""
    slots = borrowed(template.slots, other.slots)
    regions = other.regions if template.regions == other.regions else template.regions
    return dataclasses.replace(template, slots=slots, regions=regions)


def borrowed(mine: tuple[T, ...], others: tuple[T, ...]) -> tuple[T, ...]:
    """The same items; where the others, as many of them, have an equal one in its place, it is that one."""
    if mine is others or mine == others:
        return others
    if len(mine) != len(others):
        return mine
    return tuple([b if a == b else a for a, b in zip(mine, others, strict=True)])


def _render_output(out: OutputSpec) -> str:
    if out.region is None and out.input is None:
        return f"constant {type(out.constant).__name__}"
    owner = f"region {out.region}" if out.region is not None else f"input {out.input}"
    if out.layout is None:
        return owner
    if out.same is not None:
        return f"the same tensor as output {out.same}"
    spec = out.layout
    how = "detached from" if out.detached else "a view of"
    view = f", {how} output {out.view_of}" if out.view_of is not None else ""
    if out.base is not None:
        view += f", a view of {list(out.base.size)} strides {list(out.base.stride)}"
    return f"{owner} + {spec.offset}: {spec.dtype} {list(spec.size)} strides {list(spec.stride)}{view}"
