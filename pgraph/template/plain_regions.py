"""Words of which it is told at once what they are, as of nearly all.

The matcher looks here first and asks its rules (`pgraph.template.match`) of the words that are left; they
alone decide what is refused. Nothing here says anything else of a word than those rules would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pgraph.template.ranges import RangeMap
from pgraph.template.recording import GhostAllocation
from pgraph.template.template import Slot

__all__ = ["PlainRegions", "suspects"]

_MASK = (1 << 64) - 1
_NEVER = 1 << 62


def suspects(
    first: Sequence[int], second: Sequence[int], framework: RangeMap | None
) -> list[tuple[int, int, int]]:
    """(position, its two values) of the words that may be anything but a constant.

    Those left out are equal and lie outside the framework's memory.

    Args:
        first, second: words of one node in two captures.
    """
    low, high = framework.span if framework is not None else (0, 0)
    pairs = enumerate(zip(first, second, strict=True))
    return [(i, a, b) for i, (a, b) in pairs if a != b or low <= a < high]


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
        for distance, regions in moved.items():
            i, x, y = regions[0], a[regions[0]], b[regions[0]]
            if len(regions) > 1 or distance == 0 or x.nbytes == 0:
                continue
            # The higher an address, the further the range that is found: what is found at both ends of a
            # region is found between them.
            end = x.address + x.nbytes
            ends = found.find(x.address), found.find(end - 1)
            if all(hit is not None and hit[0] == i for hit in ends):
                death = _NEVER if x.death is None or y.death is None else max(x.death, y.death)
                self._plain[distance] = i, x.address, end, x.birth, death

    def slot(self, node: int, offset: int, a: int, b: int) -> Slot | None:
        """The slot that a word is; None if that takes the rules.

        Args:
            offset: of the word in the node's parameters, in bytes.
            a, b: its two values.
        """
        plain = self._plain.get((a - b) & _MASK)
        if plain is not None:
            region, address, end, birth, death = plain
            if address <= a < end and birth <= node < death:
                return Slot(node, offset, region, a - address)
        return None
