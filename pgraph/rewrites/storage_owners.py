"""Ops that read a tensor's storage by sizes and strides of their own get the tensor that owns the storage."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pgraph.ops.fx import VIEWS, is_getitem, op_name

__all__ = ["count_from_owners", "owner_of"]

_READERS = frozenset({"aten::as_strided", "aten::as_strided_copy"})


def count_from_owners(gm: GraphModule) -> None:
    """Give `as_strided` the tensor whose storage it reads, in place of a view of it; in place.

    Note [Storage does not cross borders]
    `as_strided` looks through its argument at the storage, and counts from the storage's start. What one
    partition hands to the next is a tensor: a copy of what was a view, or a view that the next partition's
    code takes for the start of a storage. With the owner for an argument the numbers mean the same in every
    partition. (Its own strides are then to be those of the trace: `pgraph.compiler.borders`.) Inductor needs
    that within one graph, too: given a view of what it fuses, it reads another place.
    """
    changed = False
    for node in gm.graph.nodes:
        if not isinstance(node.target, OpOverload) or op_name(node.target) not in _READERS:
            continue
        view, owner = node.args[0], owner_of(node.args[0])
        offset: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
        if offset is None:
            offset = view.meta["val"].storage_offset()
        if owner is view or not isinstance(offset, (int, Node)):
            continue  # a number that no node has
        size, stride = (
            node.args[at] if len(node.args) > at else node.kwargs[name]
            for at, name in ((1, "size"), (2, "stride"))
        )
        node.args, node.kwargs = (owner, size, stride, offset), {}
        changed = True
    if changed:
        gm.recompile()


def owner_of(node: Any) -> Any:
    """The node that made the tensor of which this one is a view, as far as types stay the same."""
    while True:
        source = node.args[0] if is_getitem(node) and isinstance(node.args[0], Node) else node
        if not isinstance(source.target, OpOverload) or op_name(source.target) not in VIEWS:
            return node
        base: Any = source.args[0]
        values = [n.meta.get("val") for n in (base, node)]
        if not all(isinstance(v, torch.Tensor) for v in values) or values[0].dtype != values[1].dtype:
            return node
        node = base
