"""What recordings must have in common for one exec to serve them all.

Why: Note [Shared execs] in `pgraph.drivers.execs`.

Pure logic: nodes and slots in, a key out; no torch, no CUDA.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

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
    rebound: dict[int, list[int]] = {}
    for slot in slots:
        rebound.setdefault(slot.node, []).append(slot.offset)
    kept: list[Hashable] = []
    for i, node in enumerate(nodes):
        if node.kept is None:
            return None
        if isinstance(node.kept, bytes):
            offsets = rebound.get(i, [])
            stays = _blank(node.kept, offsets) if offsets else node.params
            kept.append((node.kind, tuple(offsets), stays))
        else:
            kept.append((node.kind, node.kept))
    return tuple(kept), order.edges, order.odd, tuple((chunk.first, chunk.last) for chunk in chunks)


def _blank(params: bytes, offsets: Sequence[int]) -> bytes:
    """The parameters with zeros in these words."""
    blank = bytearray(params)
    for offset in offsets:
        blank[offset : offset + 8] = bytes(8)
    return bytes(blank)
