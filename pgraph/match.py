"""Which words of the node parameters are which region: two captures, one proof.

Pure logic: bytes and ranges in, slots out; no torch, no CUDA.

Both captures ran the same code, on ghost memory at different addresses. So, for each aligned
8-byte word of each node's parameters:

==========================================  ======================================================
the two values                              what it is
==========================================  ======================================================
equal, and no address of a ghost            a constant: never rewritten
equal, in memory of the framework           a pointer to something that is not an argument: refuse
differ, same region and same delta in both  a slot
differ, both in regions dead by then        left-over bytes in padding: harmless, ignored
differ, one of them anywhere in ghost VA    ambiguous: refuse
differ, one of them in device memory        ambiguous: refuse
differ, neither                             uninitialised padding: harmless, ignored
==========================================  ======================================================

Cost: O(words * log(regions)).
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence

from pgraph.errors import MatchError
from pgraph.reasons import Reason
from pgraph.template import Allocation, NodeRecord, Recording, Slot

__all__ = ["RangeMap", "match"]

_RERUN = (
    "mark the op with pgraph.mark_unsafe, or report it: the rest of the model is still captured around it"
)


class RangeMap:
    """Finds the range that holds an address. Ranges must not overlap.

    Args:
        ranges: (first byte, size in bytes, slack in bytes on either side), any order.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        order = sorted(range(len(ranges)), key=lambda i: ranges[i][0])
        self._index = order
        self._base = [ranges[i][0] for i in order]
        self._low = [ranges[i][0] - ranges[i][2] for i in order]
        self._high = [ranges[i][0] + max(ranges[i][1], 1) + ranges[i][2] for i in order]

    def find(self, address: int) -> tuple[int, int] | None:
        """(position in the constructor's list, offset from the range's first byte), or None."""
        k = bisect.bisect_right(self._low, address) - 1
        if k < 0 or address >= self._high[k]:
            return None
        return self._index[k], address - self._base[k]


def match(
    a: Recording,
    b: Recording,
    *,
    framework: RangeMap | None = None,
    constants: RangeMap | None = None,
) -> tuple[Slot, ...]:
    """All slots of two captures of the same partition.

    Args:
        a: first capture.
        b: second capture, on ghost addresses disjoint from the first one's.
        framework: device memory that the framework's allocator holds; a word that points there
            without being a slot is a pointer to something that is not an argument.
        constants: ranges in `framework` that live as long as the template (the partition's own
            constant tensors): words pointing there are legitimate constants.

    Raises:
        MatchError: the captures differ in more than addresses, or a word is ambiguous.
    """
    _same_structure(a, b)
    matcher = _Matcher(a, b, framework, constants)
    return tuple(
        slot
        for index, (node_a, node_b) in enumerate(zip(a.nodes, b.nodes, strict=True))
        for slot in matcher.node(index, node_a, node_b)
    )


def _same_structure(a: Recording, b: Recording) -> None:
    if len(a.nodes) != len(b.nodes):
        raise _refuse("nodes-differ", f"two captures recorded {len(a.nodes)} and {len(b.nodes)} nodes")
    for i, (x, y) in enumerate(zip(a.nodes, b.nodes, strict=True)):
        if x.kind != y.kind or x.header != y.header or len(x.params) != len(y.params):
            raise _refuse(
                "nodes-differ", f"node {i} is {x.kind} {x.name} in one capture and {y.kind} {y.name} in another"
            )
    sizes_a = [(r.nbytes, r.birth) for r in a.allocations]
    sizes_b = [(r.nbytes, r.birth) for r in b.allocations]
    if a.n_inputs != b.n_inputs or sizes_a != sizes_b:
        raise _refuse(
            "allocations-differ",
            f"two captures made {len(sizes_a)} and {len(sizes_b)} allocations, or of other sizes",
        )
    if a.outputs != b.outputs:
        raise _refuse("outputs-differ", "two captures returned results of different layout or origin")
    if a.ghost_range[0] < b.ghost_range[1] and b.ghost_range[0] < a.ghost_range[1]:
        raise _refuse("ghosts-overlap", "the ghost ranges of two captures overlap")


class _Matcher:
    def __init__(
        self, a: Recording, b: Recording, framework: RangeMap | None, constants: RangeMap | None
    ) -> None:
        self._a, self._b = a, b
        self._map_a, self._map_b = _region_map(a.allocations), _region_map(b.allocations)
        self._framework = framework
        self._constants = constants

    def node(self, index: int, node_a: NodeRecord, node_b: NodeRecord) -> list[Slot]:
        words = len(node_a.params) // 8
        values_a = struct.unpack_from(f"={words}Q", node_a.params)
        values_b = struct.unpack_from(f"={words}Q", node_b.params)
        slots = []
        for w, (va, vb) in enumerate(zip(values_a, values_b, strict=True)):
            where = f"word {w * 8} of node {index} ({node_a.kind} {node_a.name})"
            if va == vb:
                self._constant(va, where)
            elif (slot := self._moving(index, w * 8, va, vb, where)) is not None:
                slots.append(slot)
        return slots

    def _constant(self, value: int, where: str) -> None:
        if self._ghost(value):
            raise _refuse("ambiguous-word", f"{where} holds a ghost address that did not move")
        if self._framework is None or self._framework.find(value) is None:
            return
        if self._constants is not None and self._constants.find(value) is not None:
            return
        raise _refuse("hidden-pointer", f"{where} points to device memory that is not an argument")

    def _moving(self, index: int, offset: int, va: int, vb: int, where: str) -> Slot | None:
        in_a, in_b = self._map_a.find(va), self._map_b.find(vb)
        if in_a is not None and in_a == in_b:
            region, delta = in_a
            # Program order decides what is alive; a word that names a region already dead (or not
            # yet born) in both captures is left-over padding and must not be given an address.
            if self._dead(self._a, region, index) and self._dead(self._b, region, index):
                return None
            return Slot(index, offset, region, delta)
        if in_a is not None and in_b is not None:
            if self._dead(self._a, in_a[0], index) and self._dead(self._b, in_b[0], index):
                return None
            raise _refuse(
                "ambiguous-word",
                f"{where} is region {in_a[0]}+{in_a[1]} in one capture and {in_b[0]}+{in_b[1]} in another",
            )
        if self._ghost(va) or self._ghost(vb):
            if in_a is not None and self._dead(self._a, in_a[0], index) and not self._ghost(vb):
                return None
            if in_b is not None and self._dead(self._b, in_b[0], index) and not self._ghost(va):
                return None
            raise _refuse("ambiguous-word", f"{where} is a ghost address in one capture only")
        if self._framework is not None and (self._framework.find(va) or self._framework.find(vb)):
            raise _refuse("ambiguous-word", f"{where} points to device memory and moved between captures")
        return None

    def _ghost(self, value: int) -> bool:
        return any(r.ghost_range[0] <= value < r.ghost_range[1] for r in (self._a, self._b))

    @staticmethod
    def _dead(recording: Recording, region: int, node: int) -> bool:
        allocation = recording.allocations[region]
        return node < allocation.birth or (allocation.death is not None and node >= allocation.death)


def _region_map(allocations: Sequence[Allocation]) -> RangeMap:
    return RangeMap([(r.address, r.nbytes, r.slack) for r in allocations])


def _refuse(code: str, sentence: str) -> MatchError:
    return MatchError(Reason(code, sentence, _RERUN))
