"""What captures leave behind: plain facts, immutable, printable, free of torch and of CUDA.

`Recording` is one capture as the driver saw it, with the ghost addresses of that capture.
`Template` is what two matching recordings prove: the nodes, which words of their parameters are
which region, and the allocation timeline. Addresses do not survive into a template.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pgraph.template.plan import Plan
from pgraph.template.topology import Topology
from pgraph.text import amount

__all__ = [
    "Allocation",
    "Dispatch",
    "NodeRecord",
    "OutputSpec",
    "Recording",
    "Region",
    "Slot",
    "Template",
    "TensorSpec",
]

NodeKind = Literal["kernel", "memcpy", "memset", "empty"]
RegionKind = Literal["input", "output", "temp"]


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRecord:
    """One graph node of one capture.

    Args:
        kind: the node's type; "empty" ones only wait for others.
        name: kernel or op name, for reports.
        header: everything that is fixed for the node's life (function, grid, copy kind...);
            comparable, and equal between two captures of the same partition.
        params: parameter bytes, addresses included, in the machine's byte order. Every address is
            an 8-byte word aligned to 8 within these bytes.
        structs: [first, end) in `params` of arguments larger than a word, which may have padding.
    """

    kind: NodeKind
    name: str
    header: tuple[Any, ...]
    params: bytes
    structs: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A ghost range of one capture: an input's alias, or memory allocated while capturing.

    Args:
        address: first byte.
        nbytes: size in bytes.
        birth: count of nodes recorded when it came to be (0 for inputs); a join.
        death: count of nodes recorded when it was seen dead, a join; None if it outlived the capture.
        slack: bytes on either side that belong to nobody else (pointers before the start or past
            the end still mean this range).
        library: a library kept it to the end, and gave it back when asked.
    """

    address: int
    nbytes: int
    birth: int
    death: int | None
    slack: int = 0
    library: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """Layout of a tensor.

    Args:
        size, stride: in elements.
        offset: bytes from its region's base.
        conj, neg: bits of a view that is conjugated or negated when it is read (Note [Lazy conjugates]).
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    offset: int
    conj: bool = False
    neg: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSpec:
    """How one result of the partition is made from today's regions.

    Exactly one of the three holds: `region` (a new tensor, or a view of one), `input` (an input
    returned, or a view of it; `layout` None means the very tensor), `constant` (anything that does
    not depend on the call; `unread` if its value means nothing). `same` is the position of an earlier
    result that was the very same tensor, `view_of` of one that it shared its version counter with.
    """

    region: int | None = None
    input: int | None = None
    layout: TensorSpec | None = None
    constant: Any = None
    unread: bool = False
    same: int | None = None
    view_of: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatch:
    """One op that was dispatched while a partition was captured.

    Args:
        op: ``ns::name``.
        first, end: the nodes that it recorded; the same count twice if it failed.
        tensors: (dtype, size, stride) of the tensors among its arguments, in order.
        literals: numbers, texts and the like among its arguments, in order.
        nth: how many calls of the op with such arguments came before.
    """

    op: str
    first: int
    end: int
    tensors: tuple[tuple[Any, tuple[int, ...], tuple[int, ...]], ...] = ()
    literals: tuple[Any, ...] = ()
    nth: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """One capture. `allocations[:n_inputs]` are the inputs' aliases, in input order.

    Args:
        nodes: each after those that it waits for.
        order: which of them wait for which.
        allocations: inputs first, then by birth.
        n_inputs: number of tensor inputs.
        outputs: one per result, regions numbered as `allocations`.
        ghost_range: [lo, hi) of all ghost addresses that this capture handed out, gaps included.
        graph: the driver's own handle.
        own: nodes recorded by ops of PyTorch's own; not those of custom ops and of generated kernels.
        steps: counts of nodes at which an op began or ended, as far as they are joins; ascending. Between two
            of them lie the nodes of one op, of generated kernels, or of ops that overlap.
        ops: those that recorded nodes, in order. Generated kernels belong to none.
    """

    nodes: tuple[NodeRecord, ...]
    order: Topology
    allocations: tuple[Allocation, ...]
    n_inputs: int
    outputs: tuple[OutputSpec, ...]
    ghost_range: tuple[int, int]
    graph: Any
    own: frozenset[int] = frozenset()
    steps: tuple[int, ...] = ()
    ops: tuple[Dispatch, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A contiguous address range with one owner, and its lifetime in node order."""

    index: int
    kind: RegionKind
    nbytes: int
    birth: int
    death: int


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One 8-byte word: at `offset` in the parameters of `node` stands `base(region) + delta`, modulo 2^64.

    `delta` is a signed 64-bit number, and may point outside the region (Note [Beyond a region] in
    `pgraph.template.match`).
    """

    node: int
    offset: int
    region: int
    delta: int


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """All that is needed to launch a partition on any addresses."""

    nodes: tuple[NodeRecord, ...]
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
            lines.append(f"  node {i}: {node.kind} {node.name} ({len(node.params)} bytes) {words}".rstrip())
        for i, out in enumerate(self.outputs):
            lines.append(f"  output {i}: {_render_output(out)}")
        lines.append(self.plan.render())
        return "\n".join(lines)


def _render_output(out: OutputSpec) -> str:
    if out.region is None and out.input is None:
        return f"constant {type(out.constant).__name__}"
    owner = f"region {out.region}" if out.region is not None else f"input {out.input}"
    if out.layout is None:
        return owner
    if out.same is not None:
        return f"the same tensor as output {out.same}"
    spec = out.layout
    view = f", a view of output {out.view_of}" if out.view_of is not None else ""
    return f"{owner} + {spec.offset}: {spec.dtype} {list(spec.size)} strides {list(spec.stride)}{view}"
