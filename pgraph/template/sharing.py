"""What recordings must have in common for one exec to serve them all.

Why: Note [Shared execs] in `pgraph.drivers.execs`.

Pure logic: nodes and slots in, a key out; no torch, no CUDA.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from pgraph.template.plan import Chunk
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot
from pgraph.template.topology import Topology

__all__ = ["sharing_key"]


def sharing_key(
    nodes: Sequence[NodeRecord], order: Topology, slots: Sequence[Slot], chunks: Sequence[Chunk]
) -> Hashable | None:
    """Equal for recordings whose nodes may be set in one another's execs; None if that cannot be told.

    A copy or a fill must be given the same addresses anew: an exec keeps the others, and takes only some. One
    that is given none is never set, so all of it must be the same.

    Args:
        slots: in the order of their nodes.
    """
    kept: list[Any] = [node.kept for node in nodes]
    rebound: dict[int, list[int]] = {}  # of copies and fills
    for i, what in enumerate(kept):
        if what is None:
            return None
        if isinstance(what, bytes):
            rebound[i] = []
    for slot in slots if rebound else ():
        if slot.node in rebound:
            rebound[slot.node].append(slot.offset)
    for i, offsets in rebound.items():
        kept[i] = tuple(offsets), _blank(kept[i], offsets) if offsets else nodes[i].params
    kinds = tuple([node.kind for node in nodes])
    return kinds, tuple(kept), order.edges, order.odd, tuple([(chunk.first, chunk.last) for chunk in chunks])


def _blank(params: bytes, offsets: Sequence[int]) -> bytes:
    """The parameters with zeros in these words."""
    blank = bytearray(params)
    for offset in offsets:
        blank[offset : offset + 8] = bytes(8)
    return bytes(blank)
