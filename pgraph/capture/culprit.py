"""Which op made a capture fail, and which nodes of the traced graph that op came from.

Note [One op to blame]
A refusal names a node of the recording or the op that was being dispatched. Nothing links these to the graph
that was compiled: Inductor renames, fuses and reorders. So the op is looked up by name, then by the types and
shapes of its tensors, then by strides and other arguments, as long as some node agrees. This proves nothing,
and need not: a wrong guess costs a compilation, and each capture around it is proved like any other capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from pgraph.ops.fx import flat_values, is_neutral, op_name, op_of
from pgraph.reasons import Dispatch
from pgraph.template.recording import Recording

__all__ = ["arguments_of", "culprit_of", "dispatch_at", "dispatch_of", "nodes_of", "numbered"]

# What Inductor calls is often a sibling of what was traced: a sum moves into a product and out again.
_SIBLINGS: Final = (
    frozenset({"aten::mm", "aten::addmm", "aten::_int_mm"}),
    frozenset({"aten::bmm", "aten::baddbmm"}),
    frozenset({"aten::convolution", "aten::_convolution", "aten::cudnn_convolution"}),
)
_LITERALS = frozenset({int, float, bool, str, complex})


def dispatch_of(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None, first: int, end: int
) -> Dispatch:
    """A dispatched call in plain words, without its ``out=`` and not `numbered`; it holds no tensor."""
    return Dispatch(op_name(op), first, end, *arguments_of(op, args, kwargs))


def arguments_of(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """`Dispatch.tensors` and `Dispatch.literals` of a call."""
    leaves = flat_values(args)
    if kwargs:
        targets = _targets(op) if isinstance(op, OpOverload) else ()
        leaves += flat_values([value for name, value in kwargs.items() if name not in targets])
    tensors, literals = [], []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            strides = leaf.stride() if leaf.layout is torch.strided else ()
            tensors.append((leaf.dtype, leaf.size(), strides))
        elif type(leaf) in _LITERALS:
            literals.append(leaf)
    return tuple(tensors), tuple(literals)


@functools.lru_cache(maxsize=4096)
def _targets(op: OpOverload) -> frozenset[str]:
    """Names of the arguments that results are written to."""
    return frozenset(a.name for a in op._schema.arguments if a.is_out)


def numbered(ops: Sequence[Dispatch], call: Dispatch) -> Dispatch:
    """The call with `nth` as these ops, which came before it, tell."""
    key = call.op, call.tensors, call.literals
    nth = sum((op.op, op.tensors, op.literals) == key for op in ops)
    return call._replace(nth=nth) if nth else call


def dispatch_at(ops: Sequence[Dispatch], node: int | None) -> Dispatch | None:
    """The op that recorded a node; None for a generated kernel's."""
    for i, op in enumerate(ops):
        if node is not None and op.first <= node < op.end:
            return numbered(ops[:i], op)
    return None


def culprit_of(first: Recording, second: Recording, node: int | None) -> Dispatch | None:
    """The op at fault where two recordings do not match.

    Args:
        node: position of the node that differs, if it is one; else the first op that recorded another
            number of nodes.
    """
    if node is not None:
        return dispatch_at(first.ops, node)
    for i, (a, b) in enumerate(zip(first.ops, second.ops, strict=False)):
        if (a.op, a.first, a.end) != (b.op, b.first, b.end):
            return numbered(first.ops[:i], a) if (a.op, a.first) == (b.op, b.first) else None
    return None


def nodes_of(culprit: Dispatch, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that may have become this op; all those that look alike, since they fail alike.

    Args:
        nodes: of a partition, with ``meta["val"]``.

    Returns:
        None of them, if no name fits.
    """
    work = [node for node in nodes if not is_neutral(node)]
    found = [node for node in work if op_name(op_of(node)) == culprit.op]
    if not found:
        siblings = frozenset().union(*(group for group in _SIBLINGS if culprit.op in group))
        found = [
            node for node in work if op_name(op_of(node)) in siblings and _like(node, culprit) >= _SHAPES
        ]
    return _best(found, lambda node: _like(node, culprit))


_SHAPES, _STRIDES, _ALL = 1, 2, 3


def _best(nodes: list[Node], score: Callable[[Node], int]) -> list[Node]:
    scores = [score(node) for node in nodes]
    return [node for node, s in zip(nodes, scores, strict=True) if s == max(scores)]


def _like(node: Node, culprit: Dispatch) -> int:
    """How far a node's arguments agree with a call's: not, in shapes, in strides too, in all."""
    leaves = [
        leaf.meta.get("val") if isinstance(leaf, Node) else leaf
        for leaf in tree_leaves((node.args, node.kwargs))
    ]
    mine = [value for value in leaves if isinstance(value, torch.Tensor)]
    theirs = culprit.tensors
    if op_name(op_of(node)) != culprit.op:
        operands = ((mine[:2], theirs[:2]), (mine[-2:], theirs[-2:]))
        return _SHAPES if any(_shapes_agree(*pair) for pair in operands) else 0
    if not _shapes_agree(mine, theirs):
        return 0
    if not all(
        _agree(tuple(t.stride()) if t.layout == torch.strided else (), stride)
        for t, (_, _, stride) in zip(mine, theirs, strict=True)
    ):
        return _SHAPES
    literals = [value for value in leaves if type(value) in _LITERALS]
    return _ALL if _agree(literals, culprit.literals) else _STRIDES


def _shapes_agree(tensors: Sequence[torch.Tensor], layouts: Sequence[Any]) -> bool:
    return len(tensors) == len(layouts) and all(
        t.dtype == dtype and _agree(tuple(t.size()), size)
        for t, (dtype, size, _) in zip(tensors, layouts, strict=True)
    )


def _agree(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Equal as far as it is known: a symbol agrees with any number."""
    return len(mine) == len(theirs) and all(
        isinstance(a, torch.SymInt) or a == b for a, b in zip(mine, theirs, strict=True)
    )
