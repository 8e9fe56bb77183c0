"""Ops that read a tensor's storage by sizes and strides of their own get the tensor that owns the storage."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pgraph import compat
from pgraph.ops.fx import VIEWS, is_getitem, op_name

__all__ = ["clone_from_own_start", "count_from_owners", "owner_of"]

_aten = torch.ops.aten
_READERS = frozenset({"aten::as_strided", "aten::as_strided_copy"})


def count_from_owners(gm: GraphModule, by_inductor: bool) -> None:
    """Give `as_strided` the tensor whose storage it reads, in place of a view of it; in place.

    Note [Storage does not cross borders]
    `as_strided` looks through its argument at the storage, and counts from the storage's start. What one
    partition hands to the next is a tensor: a copy of what was a view, or a view that the next partition's
    code takes for the start of a storage. With the owner for an argument the numbers mean the same in every
    partition. (Its own strides are then to be those of the trace: `pgraph.compiler.borders`.) Inductor needs
    that within one graph, too: given a view of what it fuses, it reads another place.

    Inputs begin anywhere in their storages, and nothing guards where: what was a tensor of its own may be a
    part of another one at the next call. A number that the program gives to `as_strided` counts from the
    storage's start all the same. Where it gives none, the trace's counts from where the input begins.
    (Inductor's code counts all numbers from there.)

    Args:
        by_inductor: whether Inductor makes the code.
    """
    changed = False
    nodes: list[Any] = list(gm.graph.nodes)
    for node in nodes:
        if not _is_reader(node):
            continue
        view, owner = node.args[0], owner_of(node.args[0])
        if owner is view:
            continue
        offset: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
        size, stride = (
            node.args[at] if len(node.args) > at else node.kwargs[name]
            for at, name in ((1, "size"), (2, "stride"))
        )
        given = offset is not None
        if not given:
            offset = view.meta["val"].storage_offset()
        if given or by_inductor or owner.op != "placeholder" or _counted(view, owner):
            if not isinstance(offset, (int, Node)):
                continue  # a number that no node has
            node.args, node.kwargs = (owner, size, stride, offset), {}
        else:
            further = offset - owner.meta["val"].storage_offset()
            if not isinstance(further, int) or further < 0:
                continue
            node.args, node.kwargs = (_further(node, owner, further), size, stride), {}
        changed = True
    if changed:
        gm.recompile()


def clone_from_own_start(gm: GraphModule, made: Sequence[Any]) -> None:
    """Clone tensors with their strides from where they begin, not from where their storage does; in place.

    What takes a wrapped custom op apart clones what the op writes into: the storage from its first element to
    the tensor's last, as the trace had it, and a view of that like the tensor. But inputs begin anywhere: see
    Note [Storage does not cross borders]. And a result would be a view, which cannot be detached in place.
    So a tensor without holes is cloned as it is; if it begins elsewhere in the trace, its elements are.

    Args:
        gm: the graph.
        made: nodes that it left in place of the wrapped ops, in order.
    """
    for whole in made:
        clones = [user for user in whole.users if user.target is _aten.clone.default]
        if whole.target is not _aten.as_strided.default or not clones or whole.args[3:] != (0,):
            continue
        tensor, (length,), ones = whole.args[:3]
        first = tensor.meta["val"].storage_offset()
        if not isinstance(first, int):
            continue  # a number that each call tells anew
        order = _memory_order(tensor.meta["val"])
        if order is not None and all(_replaced(clone, tensor, first) for clone in clones):
            whole.graph.erase_node(whole)
            continue
        whole.args = (tensor, [_less(whole, length, first)], ones)
        if first:  # which is where its twin begins, and what counts from there may be anywhere
            whole.meta["val"] = whole.target(*map_arg(whole.args, lambda node: node.meta["val"]))
            for clone in clones:
                clone.target = _aten.constant_pad_nd.default
                clone.args, clone.kwargs = (whole, [first, 0]), {}
        if order is not None:
            _flattened(whole, tensor, order)
    if made:
        gm.recompile()


def _memory_order(val: torch.Tensor) -> list[int] | None:
    """The dimensions of a traced tensor in the order of memory, if its elements lie there without holes.

    Returns:
        None if they may not, if it is empty, or its values are not those in memory.
    """
    if 0 in val.size() or val.is_conj() or val.is_neg():
        return None
    order: list[int] = []
    expected: int | torch.SymInt = 1
    left = list(range(val.dim()))
    while left:
        fits = (d for d in left if compat.same_number(val.stride(d), expected))
        single = (d for d in left if compat.same_number(val.size(d), 1))
        dim = next(single, next(fits, None))
        if dim is None:
            return None
        left.remove(dim)
        order.insert(0, dim)
        expected = expected * val.size(dim)
    return order


def _replaced(clone: Node, tensor: Node, first: int) -> bool:
    """Have a clone of the tensor itself stand for the views of a clone of its storage.

    Returns:
        Whether that was possible: all of them look like the tensor, and nothing counts from where a storage
        starts that would start elsewhere now.
    """
    val, views = tensor.meta["val"], list(clone.users)
    if first and any(_is_reader(user) for view in views for user in _all_users(view)):
        return False
    for view in views:
        if view.target is not _aten.as_strided.default or view.args[3:] != (first,):
            return False
        seen = view.meta["val"]
        pairs = zip((*seen.size(), *seen.stride()), (*val.size(), *val.stride()), strict=False)
        if seen.dim() != val.dim() or not all(compat.same_number(a, b) for a, b in pairs):
            return False
    with clone.graph.inserting_before(clone):
        made = clone.graph.call_function(_aten.clone.default, (tensor,))
    made.meta = {**clone.meta, "val": _aten.clone.default(val)}
    for view in views:
        view.replace_all_uses_with(made)
        clone.graph.erase_node(view)
    clone.graph.erase_node(clone)
    return True


def _all_users(node: Node) -> set[Node]:
    """Whatever depends on the node."""
    found, queue = set[Node](), [node]
    while queue:
        new = queue.pop().users.keys() - found
        found |= new
        queue += new
    return found


def _is_reader(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and op_name(node.target) in _READERS


def _flattened(whole: Node, tensor: Node, order: Sequence[int]) -> None:
    """Have a node that reads a storage read the elements instead, which lie there in this order."""
    with whole.graph.inserting_before(whole):
        if list(order) != sorted(order):
            permuted = whole.graph.call_function(_aten.permute.default, (tensor, list(order)))
            permuted.meta = {**tensor.meta, "val": _aten.permute.default(tensor.meta["val"], list(order))}
            tensor = permuted
    whole.target, whole.args = _aten.view.default, (tensor, [whole.args[1][0]])  # type: ignore[index]


def _less(node: Node, number: int | Node, by: int) -> int | Node:
    """A number, less so much, as an argument of `node`."""
    if isinstance(number, int) or not by:
        return number - by if isinstance(number, int) else number
    with node.graph.inserting_before(node):
        found: Node = node.graph.call_function(operator.sub, (number, by))
    found.meta["val"] = number.meta["val"] - by
    return found


def _further(node: Node, owner: Node, elements: int) -> Node:
    """A view, for `node`, of one element of the owner's storage: so many further on than the owner begins."""
    if not elements:
        return owner
    with node.graph.inserting_before(node):
        found = owner
        for target, args in (
            (_aten.as_strided.default, ([elements + 1], [1])),
            (_aten.slice.Tensor, (0, elements, elements + 1)),
        ):
            found, base = node.graph.call_function(target, (found, *args)), found
            found.meta = {**node.meta, "val": target(base.meta["val"], *args)}
    return found


def _counted(view: Node, owner: Node) -> bool:
    """Whether an `as_strided` of the program says where in the storage the view begins."""
    node: Any = view
    while node is not owner:
        if _is_reader(node) and len(node.args) > 3:
            return True
        node = node.args[0]
    return False


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
