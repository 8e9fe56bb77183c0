"""What two recordings of one size prove of another size, of which there is one recording.

Pure logic: recordings in, slots out; no torch, no CUDA.

Note [Proved by another size]
Two captures tell which words are addresses (`pgraph.template.match`). The code of a partition is the same for
all sizes, so where a node runs a kernel that was proved at this very place, the same words of its parameters
are addresses of the same regions. One capture of a new size is enough if all of this holds:

* The recording has as many nodes and regions as one that was proved, the nodes wait for one another in the
  same way, the regions are born at the same nodes, and the results come from the same regions.
* Each node has a kernel, and a layout of parameters, that two captures proved there, at whatever size. (Sizes
  choose kernels; a layout may lack a parameter that another size needs.) Where captures proved several ways
  in which a kernel is given its regions, the words themselves tell which one it is.
* Each word that is an address lies within the region that it belongs to, which is alive. How far into it is
  read, not computed.
* No other word lies in the capture's ghosts or near them, nor in memory of the framework, but for the
  partition's constants. So an optional operand that this size alone has is found, and so is a buffer that a
  library keeps.

Left out are kernels that are given addresses outside of their regions (Note [Beyond a region] in
`pgraph.template.match`): of such words the second condition alone would tell. Where anything is missing the
size is captured a second time, and then proves more.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Hashable, Sequence
from typing import Final

from pgraph.template.kernel_names import CUDNN_KERNELS
from pgraph.template.plain_regions import suspects
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording
from pgraph.template.template import Slot

__all__ = ["Proofs"]

_Words = tuple[tuple[int, int], ...]  # (offset, region) of each address among a node's parameters
_Known = dict[Hashable, tuple[_Words, ...]]  # by kernel and layout; the latest first

_MOST: Final = 16
"""Structures that are remembered. A partition hardly has more than one or two."""

_WAYS: Final = 4
"""In which one kernel at one place may be given its regions. A product of cuBLAS takes its operands in either
order, as they are laid out, and library calls of one function have their proofs in common."""

_NEAR: Final = 1 << 30
"""Bytes. An address outside of its region is hardly further from it."""

_ELSEWHERE = re.compile("|".join(CUDNN_KERNELS))
_PLAIN = (int, float, bool, str, type(None))


class Proofs:
    """Of one partition. Called with its lock held."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[_Known]] = {}

    def add(self, recording: Recording, slots: Sequence[Slot]) -> None:
        """Remember what two recordings proved.

        Args:
            recording: one of them.
            slots: of both, in the order of their nodes.
        """
        structure = _structure(recording)
        if structure is None:
            return
        while structure not in self._known and len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        nodes = self._known.setdefault(structure, [{} for _ in recording.nodes])
        words: dict[int, list[tuple[int, int]]] = {}
        beyond = set()
        for slot in slots:
            words.setdefault(slot.node, []).append((slot.offset, slot.region))
            if not 0 <= slot.delta <= recording.allocations[slot.region].nbytes:
                beyond.add(slot.node)
        for i, (node, known) in enumerate(zip(recording.nodes, nodes, strict=True)):
            if i not in beyond and not (node.kind == "kernel" and _points_elsewhere(node.name)):
                mine, kind = tuple(words.get(i, ())), _kind(node)
                known[kind] = (mine, *(other for other in known.get(kind, ()) if other != mine))[:_WAYS]

    def slots(
        self, recording: Recording, framework: RangeMap | None, constants: RangeMap
    ) -> tuple[Slot, ...] | None:
        """The slots of a recording; None if it takes another one to know.

        Args:
            recording: of any size.
            framework: as `pgraph.template.match.match` takes it.
            constants: likewise.
        """
        nodes = self._known.get(_structure(recording))
        if nodes is None:
            return None
        expected: dict[tuple[int, int], int] = {}  # by node and offset: a region
        for i, (node, known) in enumerate(zip(recording.nodes, nodes, strict=True)):
            ways = known.get(_kind(node))
            if ways is None:
                return None
            inside = (words for words in ways if len(ways) == 1 or _inside(recording, node, words))
            words = max(inside, key=len, default=ways[0])
            expected.update(((i, offset), region) for offset, region in words)
        return _slots(recording, expected, framework, constants)


def _inside(recording: Recording, node: NodeRecord, words: _Words) -> bool:
    """Whether these words lie in these regions. They are apart: of ways with the same words, one is right."""
    for offset, region in words:
        (value,) = struct.unpack_from("=Q", node.params, offset)
        allocation = recording.allocations[region]
        if not 0 <= value - allocation.address <= allocation.nbytes:
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _points_elsewhere(kernel: str) -> bool:
    return _ELSEWHERE.search(kernel) is not None


def _structure(recording: Recording) -> Hashable | None:
    """What recordings of other sizes must have in common with this one; None if that cannot be told."""
    outputs = tuple(map(_origin, recording.outputs))
    if None in outputs:
        return None
    births = tuple((a.birth, a.library) for a in recording.allocations)
    return recording.order, births, recording.n_inputs, outputs


def _origin(output: OutputSpec) -> Hashable | None:
    """Where a result comes from; None for a constant that only a second capture shows to be one."""
    if not output.unread and type(output.constant) not in _PLAIN:
        return None
    layout = output.layout
    view = layout and (len(layout.size), layout.dtype, layout.conj, layout.neg)
    return (
        output.region,
        output.input,
        view,
        type(output.constant),
        output.unread,
        output.same,
        output.view_of,
        output.detached,
        output.counted,
        output.base is not None,
    )


def _kind(node: NodeRecord) -> Hashable:
    return node.kind, node.name, node.layout, len(node.params), node.structs


def _slots(
    recording: Recording,
    expected: dict[tuple[int, int], int],
    framework: RangeMap | None,
    constants: RangeMap,
) -> tuple[Slot, ...] | None:
    """The slots of a recording; None if one of its words is not what was proved."""
    found = []
    first, end = recording.ghost_range[0] - _NEAR, recording.ghost_range[1] + _NEAR
    spans = [(first, end)] + ([framework.span] if framework is not None else [])
    for index, word, value, _ in suspects(recording.nodes, recording.nodes, spans):
        region = expected.get((index, word * 8))
        if region is not None:
            allocation = recording.allocations[region]
            delta = value - allocation.address
            if not 0 <= delta <= allocation.nbytes or not _alive(allocation, index):
                return None
            found.append(Slot(index, word * 8, region, delta))
        elif constants.find(value) is None:
            held = framework is not None and framework.find(value) is not None
            if held or first <= value < end:
                return None
    # An address that is none here lies outside of its region.
    return tuple(found) if len(found) == len(expected) else None


def _alive(allocation: GhostAllocation, node: int) -> bool:
    return allocation.birth <= node and (allocation.death is None or node < allocation.death)
