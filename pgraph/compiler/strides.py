"""Results that get the strides which were promised for them, where a compiler chose others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from pgraph import compat
from pgraph.compat import Strides
from pgraph.compiler.context import Declined
from pgraph.ops.fx import is_getitem, is_neutral, op_of
from pgraph.partition.extract import Const, SplitPlan
from pgraph.runtime.sizes import symbols_in

__all__ = ["as_before", "dense", "keep_strides"]

_Code = Callable[[list[Any]], Any]


def dense(size: Sequence[Any]) -> Strides:
    """The strides of a tensor without gaps, the last dimension first."""
    strides: list[Any] = [1]
    for length in reversed(size[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides)) if size else ()


def keep_strides(
    code: _Code, inputs: Sequence[Any], outputs: Sequence[Any], promised: Mapping[int, Strides | None]
) -> _Code:
    """`code`, which Inductor made of a partition, with results of certain strides: copies, where they have
    others.

    Note [Strides that depend on data]
    Inductor reports the strides of what it returns, but not where they hold a number that only the data
    tell (the transposed result of `nonzero`, as many rows as there are): there it chooses what it likes. The
    next partition would then stop at Inductor's check of its inputs, or compute on them wrongly if that was
    switched off.

    Such strides are made anew from today's sizes. A stride that the trace had is left alone if its numbers
    are not among the sizes of the partition's arguments and results.

    Args:
        inputs: traced arguments of the partition.
        outputs: traced results.
        promised: by position among the results: strides, or None for those of a tensor without gaps.
    """
    before, after = symbols_in(inputs), symbols_in(outputs)

    def run(args: list[Any]) -> tuple[Any, ...]:
        numbers = {symbol: place.of(args) for symbol, place in before.items()}
        results = list(code(args))
        numbers |= {symbol: place.of(results) for symbol, place in after.items()}
        for position, strides in promised.items():
            tensor = results[position]
            wanted = [
                s if isinstance(s, int) else compat.evaluate(s, numbers)
                for s in (dense(tensor.size()) if strides is None else strides)
            ]
            if None not in wanted and list(tensor.stride()) != wanted:
                results[position] = tensor.new_empty_strided(tensor.size(), wanted).copy_(tensor)
        return tuple(results)

    run.constants = getattr(code, "constants", None)  # type: ignore[attr-defined]
    return run


def as_before(code: _Code, split: SplitPlan, unsplit: Any, pieces: Sequence[Any]) -> _Code:
    """`code` with results that have the strides that the unsplit code gave them.

    Args:
        code: the pieces in order.
        split: into them.
        unsplit: Inductor's code of the whole.
        pieces: Inductor's code of each.

    Raises:
        Declined: a result that varies in size, or shares its memory, may get other strides.
    """
    made: dict[int, tuple[Any, Any]] = {}  # by slot: (node, strides as its piece tells them)
    for call, piece in zip(split.calls, pieces, strict=True):
        returned: Any = call.module.graph.output_node().args[0]
        told = compat.output_strides(piece)
        if told is None or len(told) != len(returned):
            told = [None] * len(returned)
        made.update(zip(call.outputs, zip(returned, told, strict=True), strict=True))
    wanted = compat.output_strides(unsplit)
    moved: dict[int, Strides | None] = {}
    for position, slot in enumerate(split.output_slots):
        if isinstance(slot, Const) or slot not in made:
            continue  # a literal, or an argument as it came
        node, strides = made[slot]
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            continue
        promised = wanted[position] if wanted is not None else tuple(map(str, value.stride()))
        if strides is not None and strides == promised:
            continue
        if promised is None or not all(text.isdigit() for text in promised) or not _is_fresh(node):
            raise Declined(f"result {position} might have other strides than before")
        moved[position] = tuple(map(int, promised))
    return keep_strides(code, (), (), moved) if moved else code


def _is_fresh(node: Node) -> bool:
    """Whether a value shares its memory with no other tensor, so that a copy can replace it."""
    while is_getitem(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    op = op_of(node)
    return isinstance(op, OpOverload) and not is_neutral(node) and not op._schema.is_mutable
