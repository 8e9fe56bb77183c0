"""What recordings of several sizes must have in common to share an exec."""

from __future__ import annotations

from typing import Any

import pytest

from pgraph.template.plan import Chunk
from pgraph.template.recording import NodeRecord
from pgraph.template.sharing import sharing_key
from pgraph.template.template import Slot
from pgraph.template.topology import chain


def key(kind: Any, params: bytes, *slots: Slot) -> Any:
    """Of one copy or fill, whose second word may be set to any other."""
    nodes = [NodeRecord(kind, kind, (), params, kept=params[:8] + bytes(8))]
    return sharing_key(nodes, chain(1), slots, (Chunk(0, 1, (), (), (), 0),))


@pytest.mark.parametrize("kind", ["memcpy", "memset"])
def test_what_no_launch_sets_is_the_very_same(kind: str) -> None:
    """Without an address that is rebound, a copy or a fill does what it did when the exec was made."""
    one, other = (bytes([8] * 8 + [n] * 8) for n in (1, 2))
    slot = Slot(0, 0, 0, 0)
    assert key(kind, one, slot) == key(kind, other, slot)
    assert key(kind, one) == key(kind, one)
    assert key(kind, one) != key(kind, other)
    assert key(kind, one) != key(kind, one, slot)
