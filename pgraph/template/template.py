"""What two matching recordings prove: immutable, printable, free of torch and of CUDA.

A `Template` holds what nodes there are, which words of their parameters are the address of which region, and
the allocation timeline. It holds no addresses: those of a recording are ghosts (`pgraph.template.recording`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from pgraph.template.plan import Plan
from pgraph.template.recording import NodeKind, OutputSpec
from pgraph.text import amount

__all__ = ["NodeFacts", "Region", "Slot", "Template", "alike", "borrowed", "node_facts", "slots_of"]

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
    start, end = (bisect.bisect_left(slots, node, key=lambda slot: slot.node) for node in (first, last))
    return slots[start:end]


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """What is needed to launch a partition on any addresses, beside the parameters, which recipes have."""

    nodes: tuple[NodeFacts, ...]
    regions: tuple[Region, ...]
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
    slots, regions = borrowed(template.slots, other.slots), borrowed(template.regions, other.regions)
    return dataclasses.replace(template, slots=slots, regions=regions)


def borrowed(mine: tuple[T, ...], others: tuple[T, ...]) -> tuple[T, ...]:
    """The same items; where the others, as many of them, have an equal one in its place, it is that one."""
    if mine == others:
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
