"""Ops on a device that take operands from the CPU, and which ops do the same without.

Note [CPU scalars are numbers]
CUDA's elementwise kernels read a CPU scalar on the host, convert it to the type they compute in and get it as
an argument: `div` even multiplies by its reciprocal. A scalar on the device takes another way: it is rounded
to the other operand's type first, and it is divided by. A Python number takes the first way (it becomes a CPU
scalar of the widest type), so it is what a scalar is replaced by, where the type of the result is the other
operand's already, so that no rule about numbers and types can change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg

from pgraph.ops import op_names
from pgraph.ops.fx import argument, op_name

__all__ = ["COPIES", "PLAIN_TYPES", "by_number", "is_copied", "is_pure", "replaced"]

_aten = torch.ops.aten

# Elementwise ops whose CUDA kernels take CPU scalars as arguments (Note [CPU scalars are numbers]), and what
# takes a number instead: of arithmetic the same overload, on either side; else one for a number on the right.
_NUMBER_OPS: Final = {
    _aten.add.Tensor: _aten.add.Tensor,
    _aten.bitwise_and.Tensor: _aten.bitwise_and.Scalar,
    _aten.bitwise_or.Tensor: _aten.bitwise_or.Scalar,
    _aten.bitwise_xor.Tensor: _aten.bitwise_xor.Scalar,
    _aten.div.Tensor: _aten.div.Tensor,
    _aten.div.Tensor_mode: _aten.div.Tensor_mode,
    _aten.eq.Tensor: _aten.eq.Scalar,
    _aten.ge.Tensor: _aten.ge.Scalar,
    _aten.gt.Tensor: _aten.gt.Scalar,
    _aten.le.Tensor: _aten.le.Scalar,
    _aten.lt.Tensor: _aten.lt.Scalar,
    _aten.mul.Tensor: _aten.mul.Tensor,
    _aten.ne.Tensor: _aten.ne.Scalar,
    _aten.sub.Tensor: _aten.sub.Tensor,
}
# Ops that ask the scalar `value` on the CPU for its number, and the overloads that take the number.
_ITEM_OPS: Final = {
    _aten.masked_fill.Tensor: _aten.masked_fill.Scalar,
    _aten.fill.Tensor: _aten.fill.Scalar,
}
# Ops that copy these arguments to the device first, unchanged. The larger of two numbers is copied here: it
# comes out alike, whether the scalar is rounded to the other's type before or after.
_COPIED: Final = {
    _aten.copy.default: ("src",),
    _aten.copy_.default: ("src",),
    _aten.index.Tensor: ("indices",),
    _aten.index_put.default: ("indices", "values"),
    _aten.index_put_.default: ("indices", "values"),
    _aten._unsafe_index.Tensor: ("indices",),
    _aten._unsafe_index_put.default: ("indices", "values"),
    _aten.maximum.default: ("self", "other"),
    _aten.minimum.default: ("self", "other"),
    _aten.select_scatter.default: ("src",),
    _aten.slice_scatter.default: ("src",),
    _aten.where.self: ("condition", "self", "other"),
}
COPIES: Final = frozenset({_aten._to_copy.default, torch.ops.prims.device_put.default})
"""Ops that copy one tensor, to another device or not."""

PLAIN_TYPES: Final = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)

_SCALARS: Final = frozenset({"condition", "other", "self", "values"})
_CONVERTED: Final = frozenset({"src", "values"})


def by_number(node: Node, scalar: Node) -> OpOverload | None:
    """The overload that does the same with a Python number in the place of a scalar on the CPU, if any.

    Args:
        node: an op on the device that takes `scalar`.
        scalar: a tensor without dimensions on the CPU.
    """
    value = scalar.meta["val"]
    if value.dim() != 0 or value.dtype not in PLAIN_TYPES:
        return None
    if node.target in _NUMBER_OPS and _keeps_its_type(node, value, scalar):
        other = _NUMBER_OPS[node.target]  # type: ignore[index]
        return other if other is node.target or argument(node, "other") is scalar else None
    if node.target in _ITEM_OPS and argument(node, "value") is scalar:
        return _ITEM_OPS[node.target]  # type: ignore[index]
    return None


def _keeps_its_type(node: Node, value: torch.Tensor, scalar: Node) -> bool:
    others = [n.meta.get("val") for n in node.all_input_nodes if n is not scalar]
    if len(others) != 1 or not isinstance(others[0], torch.Tensor):
        return False
    other = torch.empty((1,) * min(others[0].dim(), 1), dtype=others[0].dtype)
    return torch.result_type(other, torch.empty((), dtype=value.dtype)) == other.dtype


def is_copied(node: Node, source: Node) -> bool:
    """Whether an op on the device copies a tensor from the CPU to the device, wherever it takes it."""
    if node.target not in _COPIED:
        return False
    places = [name for name in _COPIED[node.target] if source in _flat(argument(node, name))]  # type: ignore[index]
    uses = sum(given is source for given in _flat([node.args, list(node.kwargs.values())]))
    found = sum(given is source for name in places for given in _flat(argument(node, name)))
    return found == uses and all(_copied_as(node, name, source.meta["val"]) for name in places)


def _copied_as(node: Node, name: str, value: torch.Tensor) -> bool:
    if name == "indices":
        return value.dtype not in (torch.bool, torch.uint8)  # a mask hides a nonzero
    if name in _SCALARS and value.dim() != 0:
        return False
    # What does not fit into a whole number becomes another one on each device.
    return name not in _CONVERTED or not value.is_floating_point() or node.meta["val"].is_floating_point()


def is_pure(op: Any) -> bool:
    """Whether a built-in op only computes: it draws nothing and writes into no argument."""
    if not isinstance(op, OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    drawn = torch.Tag.nondeterministic_seeded in op.tags
    return not (drawn or op._schema.is_mutable or op_name(op) in op_names.PIN_OPS)


def replaced(node: Node, source: Node, by: Any) -> Any:
    """Arguments and keyword arguments of the node, with something else in the place of `source`."""
    return map_arg((node.args, dict(node.kwargs)), lambda n: by if n is source else n)


def _flat(argument: Any) -> Iterator[Any]:
    if isinstance(argument, list | tuple):
        for partition in argument:
            yield from _flat(partition)
    else:
        yield argument
