"""Whether a computed recording is the captured one, byte for byte.

Pure logic: recordings in, a difference out; no torch, no CUDA.

Note [Words that nobody set]
Built-in ops leave parts of their kernels' parameter structs as they were: padding, and the unused end of a
list of dimensions (Note [Left-over addresses] in `pgraph.template.match`). What lay there before is often an
address of the host's memory. In two captures by the same code it may be equal, so they do not show that
nobody reads it; where the op is recorded by itself, something else lay there. Such words are left out, within
a struct of a built-in op's kernel:

* the lower halves are equal, and each upper half is zero or that of memory which is mapped in this process:
  a number of four bytes, and padding beside it;
* one of the two is, as a whole, an address of such memory: no kernel reads that;
* the kernel is one of those that leave most of a table unfilled (`pgraph.template.kernel_names`): what lies
  there need not be an address. What a built-in op computes for a struct depends on nothing but what it is
  given, and that was the same. Its kernel, grid and pointers are compared like any others.

Elsewhere a word is padding only where captures of one call showed it. Where two captures did not, and the
comparison fails, calls are recorded once more, by themselves (`pgraph.compute.sites.Sites.again`).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Final

from pgraph.compute.host_memory import HostMemory
from pgraph.template.kernel_names import leaves_words_over
from pgraph.template.recording import NodeRecord, OutputSpec, Recording
from pgraph.template.template import Slot
from pgraph.template.topology import Topology

__all__ = ["ENOUGH", "Loose", "difference", "kind_of", "launches", "loose_words"]

ENOUGH: Final = 3
"""Captures that must have come out as computed: two to see a number vary, and one to be sure."""

_HALF = 1 << 32
_UNKNOWN = HostMemory()

Loose = Mapping[Hashable, AbstractSet[int]]
"""By kernel (`kind_of`): bytes at which a word begins that is padding, as two captures of one call showed."""


def kind_of(node: NodeRecord) -> Hashable:
    """What nodes have in common whose parameters are laid out alike."""
    return node.kind, node.name, node.layout, len(node.params)


def launches(recording: Recording) -> list[Hashable]:
    """What is launched, and how. A library that chose otherwise passes other numbers, too: no padding."""
    return [(kind_of(node), node.header) for node in recording.nodes]


def loose_words(first: NodeRecord, second: NodeRecord, addresses: AbstractSet[int]) -> set[int]:
    """Where two captures of one call differ, and no address is."""
    return _differing(first.params, second.params).keys() - addresses


def difference(
    computed: Recording,
    slots: Sequence[Slot],
    captured: Recording,
    proved: Sequence[Slot],
    loose: Loose = MappingProxyType({}),
    host: HostMemory = _UNKNOWN,
) -> str | None:
    """The first thing in which they differ; None if a launch of the one does all that one of the other does.

    Addresses are no difference: of each word that is one, the region and the distance from its start count.
    A library's workspace is numbered last, whenever it came: it has the same address all along.

    Args:
        slots: of the computed one.
        proved: of the captured one.
        loose: words that are not compared.
        host: memory of this process.
    """
    computed, slots = _workspaces_last(computed, slots)
    captured, proved = _workspaces_last(captured, proved)
    if len(computed.nodes) != len(captured.nodes):
        return f"{len(computed.nodes)} nodes, {len(captured.nodes)} were captured"
    if (told := _of_orders(computed.order, captured.order)) is not None:
        return told
    mine, theirs = set(slots), set(proved)
    if mine != theirs:
        return f"slots differ: {min(mine ^ theirs, key=lambda s: (s.node, s.offset))}"
    words: dict[int, list[int]] = {}
    for slot in slots:
        words.setdefault(slot.node, []).append(slot.offset)
    for i, (a, b) in enumerate(zip(computed.nodes, captured.nodes, strict=True)):
        addresses = words.get(i, [])
        if (told := _of_nodes(a, b, addresses)) is not None:
            return f"node {i}: {told}"
        rest = {at: pair for at, pair in _differing(a.params, b.params).items() if at not in addresses}
        for offset in sorted(rest.keys() - loose.get(kind_of(b), set())) if rest else ():
            if i not in captured.builtin or not _left_over(b, offset, *rest[offset], host):
                x, y = rest[offset]
                return f"node {i}: {a.name}: byte {offset} of the parameters is {x:#x}, captured {y:#x}"
    lives = [
        [(a.nbytes, *((None, None) if a.library else (a.birth, a.death))) for a in recording.allocations]
        for recording in (computed, captured)
    ]
    if lives[0] != lives[1]:
        at = next((i for i, (a, b) in enumerate(zip(*lives, strict=False)) if a != b), min(map(len, lives)))
        return f"allocation {at} differs: " + ", ".join(str(life[at : at + 1]) for life in lives)
    if computed.n_inputs != captured.n_inputs:
        return f"{computed.n_inputs} inputs, {captured.n_inputs} were captured"
    if len(computed.outputs) != len(captured.outputs):
        return f"{len(computed.outputs)} results, {len(captured.outputs)} were captured"
    for i, (one, other) in enumerate(zip(computed.outputs, captured.outputs, strict=True)):
        if not _same_result(one, other):
            return f"result {i} is {one}, captured {other}"
    return "steps differ" if computed.steps != captured.steps else None


def _of_orders(a: Topology, b: Topology) -> str | None:
    if a == b:
        return None
    node, before, _ = min(_waits(a) ^ _waits(b))
    return f"node {node} does not wait for node {before} as it was captured"


def _waits(order: Topology) -> set[tuple[int, int, bytes]]:
    """(node, one that it waits for, how; nothing for a plain edge)."""
    how = {(before, node): kind for before, node, kind in order.odd}
    return {(node, before, how.get((before, node), b"")) for before, node in order.edges}


def _workspaces_last(recording: Recording, slots: Sequence[Slot]) -> tuple[Recording, Sequence[Slot]]:
    """Libraries' workspaces that a node names come last; the others go."""
    allocations = recording.allocations
    named = {slot.region for slot in slots}
    order = [i for i, a in enumerate(allocations) if not a.library]
    order += [i for i, a in enumerate(allocations) if a.library and i in named]
    if order == list(range(len(allocations))):
        return recording, slots
    place = {region: i for i, region in enumerate(order)}
    outputs = tuple(o if o.region is None else o._replace(region=place[o.region]) for o in recording.outputs)
    moved = tuple(allocations[i] for i in order)
    found = [_moved(slot, place[slot.region]) for slot in slots]
    return dataclasses.replace(recording, allocations=moved, outputs=outputs), found


def _moved(slot: Slot, region: int) -> Slot:
    return slot if region == slot.region else Slot(slot.node, slot.offset, region, slot.delta)


def _same_result(a: OutputSpec, b: OutputSpec) -> bool:
    """Of a constant that nobody reads, only that it is one."""
    if a.unread and b.unread:
        return True
    if type(a.constant) is not type(b.constant):
        return False
    # A tensor is the same only if it is that very object: its values may be anywhere.
    plain = isinstance(a.constant, bool | int | float | complex | str | None)
    same = a.constant == b.constant if plain else a.constant is b.constant
    return same and a._replace(constant=None) == b._replace(constant=None)


def _of_nodes(a: NodeRecord, b: NodeRecord, addresses: Sequence[int]) -> str | None:
    """In which two nodes differ, but for the words of their parameters."""
    if (a.kind, a.name, a.header, a.structs, a.layout) != (b.kind, b.name, b.header, b.structs, b.layout):
        return f"{a.kind} {a.name} {a.header}, captured {b.kind} {b.name} {b.header}"
    if len(a.params) != len(b.params):
        return f"{a.name}: {len(a.params)} bytes of parameters, captured {len(b.params)}"
    kept = [_without(n.kept, addresses) if isinstance(n.kept, bytes) else n.kept for n in (a, b)]
    return f"{a.name}: what an exec keeps differs" if kept[0] != kept[1] else None


def _left_over(b: NodeRecord, offset: int, x: int, y: int, host: HostMemory) -> bool:
    """Whether no kernel reads a word of a built-in op's node: see Note [Words that nobody set]."""
    return any(first <= offset < end for first, end in b.structs) and (
        leaves_words_over(b.name) or x in host or y in host or _padded(x, y, host)
    )


def _padded(x: int, y: int, host: HostMemory) -> bool:
    """Whether two words may be the same number of four bytes, beside halves of addresses of the host's."""
    return x % _HALF == y % _HALF and all(map(host.has_upper, {x // _HALF, y // _HALF} - {0}))


def _differing(a: bytes, b: bytes) -> dict[int, tuple[int, int]]:
    """The words that differ, by the bytes at which they begin."""
    if a == b:
        return {}
    pairs = zip(_words(a), _words(b), strict=False)
    return {8 * i: (x, y) for i, (x, y) in enumerate(pairs) if x != y}


def _words(params: bytes) -> tuple[int, ...]:
    return struct.unpack_from(f"={len(params) // 8}Q", params)


def _without(params: bytes, addresses: Sequence[int]) -> bytes:
    """Zeros in the place of addresses."""
    found = bytearray(params)
    for offset in addresses:
        found[offset : offset + 8] = bytes(8)
    return bytes(found)
