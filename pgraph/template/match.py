"""Which words of the node parameters are which region: two captures, one proof.

Pure logic: bytes and ranges in, slots out; no torch, no CUDA.

Both captures ran the same code, on ghost memory at different addresses. A word that is computed from the
address of a region moves from one capture to the other exactly as far as that region does, and no two
regions move equally far. So, for each aligned 8-byte word of each node's parameters:

============================================  ====================================================
the two values                                what it is
============================================  ====================================================
equal, in memory of the framework             a pointer to something that is no argument: refuse *
equal, anything else                          a constant: never rewritten
as far apart as one region, which is alive    a slot of that region, however far from it
the same, but both in others that are alive   ambiguous: refuse *
as far apart as several that are alive        ambiguous: refuse
as far apart as regions that are all dead     left-over bytes in padding: ignored **
each in its own ghosts, in dead regions       left-over bytes in padding: ignored **
each in its own ghosts, otherwise             ambiguous: refuse *
one in its ghosts, one in the framework's     ambiguous: refuse *
both in the framework's memory                ambiguous: refuse, unless the op is built-in
anything else that differs                    uninitialised padding (common): ignored
============================================  ====================================================

* Where a built-in op passes a struct, more words are known to be padding.
** Only for the kernel of a built-in op. A custom op may use memory that another op has freed, and copies and
fills have no padding: there the word is refused.

Note [Beyond a region]
A slot's delta may lie past the end of its region or before the start, however far: cuDNN's kernels are given
the address of an optional operand behind their workspace, where nothing is read, and others an origin from
which an index leads back into the region. Such a word may lie in a neighbour, in one capture or in both, so
where it lies says nothing. How far it moved does: the arenas see to it that no two regions move equally far
(Note [Two layouts] in `pgraph.drivers.interface`). Each launch then computes what an uncaptured run would
have. Should two living regions have moved equally far after all, a word that moved with them is refused.

A custom op may also use its memory in turn: one region in this capture, another in that. Those two may happen
to lie as far apart as a third one moved, so a word that lies in others in both captures is refused there.
What a built-in op computes for a struct depends on nothing but what it is given: it follows the third.

Note [Left-over addresses]
Ops and libraries fill large parameter structs on the stack and leave the padding as it was. It often holds
half of an old address (of the host's memory, too, which shares the upper bits) beside some small number,
and where the framework holds tens of gigabytes such a word looks like a device address. A parameter of
eight bytes has no padding. For a struct's words, what is known of built-in ops tells:

* In a capture whatever they are given or allocate lies in ghost memory, so none of their pointers moves
  within real memory, or is a ghost in one capture only.
* A pointer is computed from a range that is alive, so it moves as far as that range (Note [Beyond a region]).
  Other words do not: not those of regions that differ, and not a number of two or four bytes beside the
  rest of an old address (Note [Two layouts]). A whole old address does; rewriting it does no harm.
* Between calls they keep no device memory, save workspaces of cuBLAS (a capture is given its own and no
  other) or what is refused by name (`pgraph.ops.op_names`: states of recurrent nets). Would a later version
  keep a buffer, a kernel would get the address at which it begins: such a word is refused, one that points
  inside a block is not. Kernels that leave most of a table unfilled, or mix addresses with numbers of half
  their size, take no such buffer (`pgraph.template.kernel_names`); they are not refused, for the framework's
  memory often begins where the lower half of an address is zero.

A custom op may use buffers of its own in turn, and nothing tells, so there all of these words are refused.

Cost: O(regions), and O(log(regions)) for each word that moves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from pgraph.errors import MatchError
from pgraph.reasons import Reason
from pgraph.template.kernel_names import leaves_words_over
from pgraph.template.plain_regions import PlainRegions, suspects
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording
from pgraph.template.template import Slot

__all__ = ["match"]

_PLAIN = (int, float, bool, str, complex)
_MASK = (1 << 64) - 1


def match(
    a: Recording,
    b: Recording,
    *,
    framework: RangeMap | None = None,
    workspaces: frozenset[int] = frozenset(),
    constants: RangeMap | None = None,
) -> tuple[Slot, ...]:
    """All slots of two captures of the same partition.

    Args:
        a: first capture.
        b: second capture, on ghost addresses disjoint from the first one's.
        framework: device memory that the framework's allocator holds; a word that points there
            without being a slot is a pointer to something that is not an argument.
        workspaces: first bytes of ranges in `framework` that libraries keep for other streams.
        constants: ranges in `framework` that live as long as the template (the partition's own
            constant tensors): words pointing there are legitimate constants.

    Raises:
        MatchError: the captures differ in more than addresses, or a word is ambiguous; with the node where
            it is one node that is at fault.
    """
    _same_structure(a, b)
    matcher = _Matcher(a, b, framework, workspaces, constants)
    words = suspects(a.nodes, b.nodes, [framework.span] if framework is not None else [])
    slots, doubtful = matcher.plain.told(words)
    at_once = len(slots)
    for index, word, va, vb in doubtful:
        try:
            slot = matcher.word(index, word * 8, va, vb)
        except MatchError as e:
            e.node = index
            raise
        if slot is not None:
            slots.append(slot)
    return tuple(sorted(slots) if len(slots) > at_once else slots)


def _same_structure(a: Recording, b: Recording) -> None:
    if len(a.nodes) != len(b.nodes):
        raise _refuse("nodes-differ", f"two captures recorded {len(a.nodes)} and {len(b.nodes)} nodes")
    for i, (x, y) in enumerate(zip(a.nodes, b.nodes, strict=True)):
        if x.kind != y.kind or x.header != y.header or len(x.params) != len(y.params):
            error = _refuse(
                "nodes-differ",
                f"node {i} is {x.kind} {x.name} in one capture and {y.kind} {y.name} in another",
            )
            error.node = i
            raise error
    if a.order != b.order:
        raise _refuse("nodes-differ", "the nodes of two captures wait for one another in different ways")
    sizes_a = [(r.nbytes, r.birth) for r in a.allocations]
    sizes_b = [(r.nbytes, r.birth) for r in b.allocations]
    if a.n_inputs != b.n_inputs or sizes_a != sizes_b:
        raise _refuse(
            "allocations-differ",
            f"two captures made {len(sizes_a)} and {len(sizes_b)} allocations, or of other sizes",
        )
    if len(a.outputs) != len(b.outputs) or not all(map(_same_output, a.outputs, b.outputs)):
        raise _refuse("outputs-differ", "two captures returned results of different layout or origin")
    if a.ghost_range[0] < b.ghost_range[1] and b.ghost_range[0] < a.ghost_range[1]:
        raise _refuse("ghosts-overlap", "the ghost ranges of two captures overlap")


def _same_output(x: OutputSpec, y: OutputSpec) -> bool:
    if any(getattr(x, name) != getattr(y, name) for name in OutputSpec._fields if name != "constant"):
        return False
    if x.unread:
        return True
    # Constants may be tensors, which `==` would compare element by element.
    plain = type(x.constant) is type(y.constant) and type(x.constant) in _PLAIN
    return x.constant is y.constant or (plain and x.constant == y.constant)


class _Word(NamedTuple):
    """Eight bytes of a node's parameters, and what is known of them (Note [Left-over addresses])."""

    record: NodeRecord
    node: int
    offset: int
    builtin: bool  # of a built-in op
    loose: bool  # and within a struct, so that it may be padding

    def __str__(self) -> str:
        return f"word {self.offset} of node {self.node} ({self.record.kind} {self.record.name})"


class _Matcher:
    def __init__(
        self,
        a: Recording,
        b: Recording,
        framework: RangeMap | None,
        workspaces: frozenset[int],
        constants: RangeMap | None,
    ) -> None:
        self._a, self._b = a, b
        self._map_a = RangeMap([(r.address, r.nbytes, r.margin) for r in a.allocations])
        self._framework = framework
        self._workspaces = workspaces
        self._constants = constants
        self._builtin = a.builtin & b.builtin
        self._moved: dict[int, list[int]] = {}  # how far regions moved, modulo 2^64: which ones
        for i, (x, y) in enumerate(zip(a.allocations, b.allocations, strict=True)):
            self._moved.setdefault((x.address - y.address) & _MASK, []).append(i)
        self.plain = PlainRegions(a.allocations, b.allocations, self._moved, self._map_a)

    @functools.cached_property
    def _map_b(self) -> RangeMap:  # of what few words ask
        return RangeMap([(r.address, r.nbytes, r.margin) for r in self._b.allocations])

    def word(self, index: int, offset: int, va: int, vb: int) -> Slot | None:
        record, builtin = self._a.nodes[index], index in self._builtin
        loose = builtin and any(low <= offset < high for low, high in record.structs)
        word = _Word(record, index, offset, builtin, loose)
        if va != vb:
            return self._moving(word, va, vb)
        self._constant(word, va)
        return None

    def _constant(self, word: _Word, value: int) -> None:
        found = self._in_framework(value)
        if found is None or (word.loose and not self._may_be_a_buffer(word, value, found[1])):
            return
        if self._constants is not None and self._constants.find(value) is not None:
            return
        raise _refuse(
            "hidden-pointer", f"{word} points to device memory that is not an argument ({value:#x})"
        )

    def _may_be_a_buffer(self, word: _Word, value: int, offset: int) -> bool:
        return not (offset or value in self._workspaces or leaves_words_over(word.record.name))

    def _moving(self, word: _Word, va: int, vb: int) -> Slot | None:
        regions = self._moved.get((va - vb) & _MASK)
        if regions is not None:
            return self._following(word, va, vb, regions)
        ghost_a, ghost_b = _within(va, self._a.ghost_range), _within(vb, self._b.ghost_range)
        if ghost_a and ghost_b:
            return self._astray(word, va, vb)
        # A pointer is one in both captures: an address on one side only is left in padding.
        known = word.loose if ghost_a or ghost_b else word.builtin
        if not known and (ghost_a or self._in_framework(va)) and (ghost_b or self._in_framework(vb)):
            raise _refuse(
                "ambiguous-word",
                f"{word} points to device memory and moved between captures ({va:#x}, {vb:#x})",
            )
        return None

    def _following(self, word: _Word, va: int, vb: int, regions: Sequence[int]) -> Slot | None:
        """A word that moved as far as these regions did (Note [Beyond a region])."""
        if not word.loose and self._in_turn(word.node, va, vb, regions):
            raise self._disagreement(word, va, vb)
        # Program order decides what is alive; a word that names a region already dead (or not
        # yet born) in both captures is left-over padding and must not be given an address.
        alive = [i for i in regions if not self._gone(i, i, word.node)]
        deltas = [_signed(va - self._a.allocations[i].address) for i in alive or regions]
        if len(alive) > 1:
            names = " or ".join(f"region {i}{d:+d}" for i, d in zip(alive[:2], deltas, strict=False))
            raise _refuse("ambiguous-word", f"{word} is {names}: they moved equally far between captures")
        if alive:
            return Slot(word.node, word.offset, alive[0], deltas[0])
        self._must_be_padding(word)
        return None

    def _astray(self, word: _Word, va: int, vb: int) -> Slot | None:
        """A word in the ghosts of both captures that moved as no region did."""
        in_a, in_b = self._map_a.find(va), self._map_b.find(vb)
        if in_a is not None and in_b is not None and self._gone(in_a[0], in_b[0], word.node):
            self._must_be_padding(word)
            return None
        if word.loose:
            return None
        raise self._disagreement(word, va, vb)

    def _in_turn(self, node: int, va: int, vb: int, regions: Sequence[int]) -> bool:
        """Whether the word lies in memory in use in both captures, but not in these regions."""
        found = []
        for recording, hit in ((self._a, self._map_a.find(va)), (self._b, self._map_b.find(vb))):
            # Bytes of a region itself, and its end: no pointer to another region lies in the gaps.
            if hit is None or hit[0] in regions or not 0 <= hit[1] <= recording.allocations[hit[0]].nbytes:
                return False
            found.append(hit[0])
        return not self._gone(found[0], found[1], node)

    def _disagreement(self, word: _Word, va: int, vb: int) -> MatchError:
        found = (self._map_a.find(va), self._map_b.find(vb))
        what = [f"region {i[0]}{i[1]:+d}" if i else "no region" for i in found]
        return _refuse("ambiguous-word", f"{word} is {what[0]} in one capture and {what[1]} in another")

    @staticmethod
    def _must_be_padding(word: _Word) -> None:
        """Refuse a word that names dead memory, unless it can be nothing but left-over bytes."""
        if not (word.builtin and word.record.kind == "kernel"):
            raise _refuse("ambiguous-word", f"{word} points to memory that is not in use at this node")

    def _gone(self, in_a: int, in_b: int, node: int) -> bool:
        """Whether a region of either capture is dead, or not yet born, in its capture."""
        return _dead(self._a.allocations[in_a], node) and _dead(self._b.allocations[in_b], node)

    def _in_framework(self, value: int) -> tuple[int, int] | None:
        return self._framework.find(value) if self._framework is not None else None


def _dead(allocation: GhostAllocation, node: int) -> bool:
    return node < allocation.birth or (allocation.death is not None and node >= allocation.death)


def _signed(value: int) -> int:
    """The same modulo 2^64, as a signed word: what a slot adds to a base."""
    return ((value + (1 << 63)) & _MASK) - (1 << 63)


def _within(value: int, ghosts: tuple[int, int]) -> bool:
    return ghosts[0] <= value < ghosts[1]


def _refuse(code: str, sentence: str) -> MatchError:
    return MatchError(Reason(code, sentence))
