"""Words of which it is told at once what they are, as of nearly all.

The matcher looks here first and asks its rules (`pgraph.template.match`) of the words that are left; they
alone decide what is refused. Nothing here says anything else of a word than those rules would.
"""

from __future__ import annotations

import array
import ctypes
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from pgraph.native import libraries
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import GhostAllocation, NodeRecord
from pgraph.template.template import Slot

__all__ = ["PlainRegions", "Suspect", "in_python", "suspects"]

Suspect = tuple[int, int, int, int]
"""The position of a node, that of a word in its parameters, and its values in two captures."""

_MASK = (1 << 64) - 1
_NEVER = 1 << 62
_SUSPECT = struct.Struct("=2i2Q")


def suspects(
    first: Sequence[NodeRecord], second: Sequence[NodeRecord], spans: Sequence[tuple[int, int]]
) -> Iterable[Suspect]:
    """Words that may be anything but constants, in order: those that differ, or lie in a span.

    Args:
        first, second: the nodes of two captures, with as many bytes of parameters each.
        spans: [low, high) of addresses.
    """
    library = libraries.load()
    if library is None:
        return in_python(first, second, spans)
    ends = array.array("q", accumulate(len(node.params) // 8 for node in first))
    limits = array.array("Q", (min(max(limit, 0), _MASK) for span in spans for limit in span))
    words = ends[-1] if ends else 0
    found = ctypes.create_string_buffer(max(words, 1) * _SUSPECT.size)
    values = [
        b"".join([node.params[: len(node.params) // 8 * 8] for node in nodes]) for nodes in (first, second)
    ]
    places = ends.buffer_info()[0], len(ends), limits.buffer_info()[0], len(spans)
    count = library.pg_suspects(*values, *places, ctypes.addressof(found))
    return _SUSPECT.iter_unpack(memoryview(found)[: count * _SUSPECT.size])


def in_python(
    first: Sequence[NodeRecord], second: Sequence[NodeRecord], spans: Sequence[tuple[int, int]]
) -> Iterator[Suspect]:
    """The reference of `suspects`."""
    for index, (x, y) in enumerate(zip(first, second, strict=True)):
        layout = f"={len(x.params) // 8}Q"
        one, other = struct.unpack_from(layout, x.params), struct.unpack_from(layout, y.params)
        found = {word for word, (a, b) in enumerate(zip(one, other, strict=True)) if a != b}
        for low, high in spans:
            found.update([word for word, a in enumerate(one) if low <= a < high])
        yield from ((index, word, one[word], other[word]) for word in sorted(found))


class PlainRegions:
    """Regions that no other one moved as far as, and at each of whose bytes no other one is found.

    A word in such a region that moved with it, while it is alive, is a slot of it, whatever passes it.

    Args:
        a, b: the regions of two captures; each was born at the same node in both.
        moved: by how far they moved, modulo 2^64, which ones.
        found: finds a region of the first capture.
    """

    def __init__(
        self,
        a: Sequence[GhostAllocation],
        b: Sequence[GhostAllocation],
        moved: Mapping[int, Sequence[int]],
        found: RangeMap,
    ) -> None:
        # By how far it moved: (region, first and one past its last byte in the first capture, the node from
        # which and before which it is alive, in one capture or in both).
        self._plain: dict[int, tuple[int, int, int, int, int]] = {}
        undisturbed = found.undisturbed()
        for distance, regions in moved.items():
            i, x, y = regions[0], a[regions[0]], b[regions[0]]
            if len(regions) == 1 and distance != 0 and x.nbytes > 0 and i in undisturbed:
                death = _NEVER if x.death is None or y.death is None else max(x.death, y.death)
                self._plain[distance] = i, x.address, x.address + x.nbytes, x.birth, death

    def told(self, words: Iterable[Suspect]) -> tuple[list[Slot], list[Suspect]]:
        """The slots that are found at once, and the words that take the rules; both in their order."""
        plain = self._plain.get
        slots, doubtful = [], []
        for word in words:
            node, position, a, b = word
            found = plain((a - b) & _MASK)
            if found is not None and found[1] <= a < found[2] and found[3] <= node < found[4]:
                slots.append(Slot(node, position * 8, found[0], a - found[1]))
            else:
                doubtful.append(word)
        return slots, doubtful
