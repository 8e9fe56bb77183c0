"""The reason that a user should act on: where an op is refused because of another op, that op's reason."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from pgraph.ops.fx import (
    is_structural,
    op_name,
    op_of,
    output_values,
    touched_values,
    unbacked,
)
from pgraph.reasons import Reason

__all__ = ["causes_of"]

# Sizes found by a kernel of the forward return in the backward; the graphs share only the ShapeEnv.
_known: weakref.WeakKeyDictionary[Any, dict[str, Reason]] = weakref.WeakKeyDictionary()


def causes_of(graph: Graph, judged: Mapping[Node, Reason | None]) -> dict[Node, Reason]:
    """Refused nodes with the reason to act on.

    An op that takes a size that depends on data can be captured once the op that made the size is changed,
    so it gets that op's reason.
    """
    makers: dict[Any, Node] = {}
    for node in graph.nodes:
        for value in () if is_structural(node) else output_values(node):
            for symbol in unbacked(value):
                makers.setdefault(symbol, node)
    causes: dict[Node, Reason] = {}
    for node, reason in judged.items():
        if reason is not None:
            causes[node] = _cause(node, reason, makers, judged)
    return causes


def _cause(
    node: Node, reason: Reason, makers: Mapping[Any, Node], judged: Mapping[Node, Reason | None]
) -> Reason:
    suffers = reason.info.suffers or op_name(op_of(node)) == "aten::_assert_scalar"
    for _, value in touched_values(node):
        for symbol in sorted(unbacked(value), key=str):
            env = _shape_env(value)
            known = _known.setdefault(env, {}) if env is not None else {}
            made = judged.get(makers[symbol]) if symbol in makers else None
            if made is not None and not made.info.suffers:
                known.setdefault(str(symbol), made)
            if suffers and str(symbol) in known:
                return known[str(symbol)]
    return reason


def _shape_env(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        numbers = (*value.shape, *value.stride()) if value.layout == torch.strided else tuple(value.shape)
        value = next((n for n in numbers if isinstance(n, torch.SymInt)), None)
    return getattr(getattr(value, "node", None), "shape_env", None)
