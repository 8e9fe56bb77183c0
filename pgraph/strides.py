"""Strides that depend on data: promised to the next part, and not kept by Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from pgraph import compat
from pgraph.nodes import unbacked
from pgraph.sizes import symbols_in

__all__ = ["keep_strides"]

_Code = Callable[[list[Any]], Any]


def keep_strides(module: GraphModule, code: _Code) -> _Code:
    """`code`, which Inductor made of a part, with results that have the strides of the trace.

    Note [Strides that depend on data]
    The parts of a graph are compiled one by one, each for the strides that the trace says. Inductor returns
    what it compiles with just those, but where they hold a number that only the data tell (the transposed
    result of `nonzero`, as many rows as there are), it chooses others. The next part would then stop at
    Inductor's check of its inputs, or compute on them wrongly if that was switched off.

    A stride is left alone if its numbers are not among the sizes of the part's arguments and results.
    """
    inputs = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    returned: Any = module.graph.output_node().args[0]
    outputs = [node.meta.get("val") for node in returned]
    promised = {
        position: value.stride()
        for position, value in enumerate(outputs)
        if isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and any(unbacked(stride) for stride in value.stride())
    }
    if not promised:
        return code
    before, after = symbols_in(inputs), symbols_in(outputs)

    def run(args: list[Any]) -> tuple[Any, ...]:
        numbers = {symbol: place.of(args) for symbol, place in before.items()}
        results = list(code(args))
        numbers |= {symbol: place.of(results) for symbol, place in after.items()}
        for position, strides in promised.items():
            wanted = [s if isinstance(s, int) else compat.evaluate(s, numbers) for s in strides]
            tensor = results[position]
            if None not in wanted and list(tensor.stride()) != wanted:
                results[position] = tensor.new_empty_strided(tensor.size(), wanted).copy_(tensor)
        return tuple(results)

    return run
