"""One capture as the driver saw it, with the ghost addresses of that capture: plain facts, immutable.

What there are hundreds of in each recording is made as a tuple, which takes a third of the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

from pgraph.reasons import Dispatch
from pgraph.template.topology import Topology

__all__ = ["GhostAllocation", "NodeKind", "NodeRecord", "OutputSpec", "Recording", "TensorSpec"]


NodeKind = Literal["kernel", "memcpy", "memset", "empty"]


class NodeRecord(NamedTuple):
    """One graph node of one capture.

    Args:
        kind: the node's type; "empty" ones only wait for others.
        name: kernel or op name, for reports.
        header: everything that is fixed for the node's life (function, grid, copy kind...);
            comparable, and equal between two captures of the same partition.
        params: parameter bytes, addresses included, in the machine's byte order. Every address is
            an 8-byte word aligned to 8 within these bytes.
        structs: [first, end) in `params` of arguments larger than a word, which may have padding.
        kept: what an exec keeps of the node it was made from, whatever is set later: a kernel's launch
            attributes, or the parameters of a copy or a fill, with zeros for what may be set besides
            addresses. None if it is not known, or was not asked for.
        layout: how the parameters are laid out, as far as kernels of one name may differ in that.
    """

    kind: NodeKind
    name: str
    header: tuple[Any, ...]
    params: bytes
    structs: tuple[tuple[int, int], ...] = ()
    kept: tuple[Any, ...] | bytes | None = ()
    layout: Hashable = ()


class GhostAllocation(NamedTuple):
    """A ghost range of one capture: an input's alias, or memory allocated while capturing.

    Args:
        address: first byte.
        nbytes: size in bytes.
        birth: count of nodes recorded when it came to be (0 for inputs); a join.
        death: count of nodes recorded when it was seen dead, a join; None if it outlived the capture.
        margin: bytes on either side that belong to no other range (pointers before the start or past
            the end still mean this range).
        library: a library kept it to the end, and gave it back when asked.
    """

    address: int
    nbytes: int
    birth: int
    death: int | None
    margin: int = 0
    library: bool = False


class TensorSpec(NamedTuple):
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


class OutputSpec(NamedTuple):
    """How one result of the partition is made from today's regions.

    Exactly one of the three holds: `region` (a new tensor, or a view of one), `input` (an input
    returned, or a view of it; `layout` None means the very tensor), `constant` (anything that does
    not depend on the call; `unread` if its value means nothing). `same` is the position of an earlier
    result that was the very same tensor, `view_of` of one that it shared its version counter with, and
    `detached` if neither was a view of the other or of what that was a view of; `counted` if it shared that
    of the input. `base` is of a result that others are views of (`view_of`), and that was a view itself: how
    the tensor was laid out that it was a view of.
    """

    region: int | None = None
    input: int | None = None
    layout: TensorSpec | None = None
    constant: Any = None
    unread: bool = False
    same: int | None = None
    view_of: int | None = None
    detached: bool = False
    counted: bool = False
    base: TensorSpec | None = None


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
        builtin: nodes recorded by built-in ops; not those of custom ops and of generated kernels.
        steps: counts of nodes at which an op began or ended, as far as they are joins; ascending. Between two
            of them lie the nodes of one op, of generated kernels, or of ops that overlap.
        ops: those that recorded nodes, in order. Generated kernels belong to none.
        skeleton: the same object for computed recordings that differ in nothing but parameters and names of
            nodes, bytes of allocations that no library keeps, layouts of outputs, and the slots' distances.
            None for a capture's.
    """

    nodes: tuple[NodeRecord, ...]
    order: Topology
    allocations: tuple[GhostAllocation, ...]
    n_inputs: int
    outputs: tuple[OutputSpec, ...]
    ghost_range: tuple[int, int]
    graph: Any
    builtin: frozenset[int] = frozenset()
    steps: tuple[int, ...] = ()
    ops: tuple[Dispatch, ...] = ()
    skeleton: object = dataclasses.field(default=None, compare=False, repr=False)
