"""Strides that depend on data: promised to the next part, and not kept by Inductor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from pgraph import compat
from pgraph.nodes import unbacked

__all__ = ["keep_strides"]

_Code = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where the value of a symbol can be read: an argument or a result, or one of its sizes."""

    symbol: str
    position: int
    dim: int | None

    def read(self, values: Sequence[Any]) -> int:
        value = values[self.position]
        return int(value if self.dim is None else value.size(self.dim))


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
    before, after = tuple(_places(inputs)), tuple(_places(outputs))

    def run(args: list[Any]) -> tuple[Any, ...]:
        numbers = {place.symbol: place.read(args) for place in before}
        results = list(code(args))
        numbers |= {place.symbol: place.read(results) for place in after}
        for position, strides in promised.items():
            wanted = [s if isinstance(s, int) else compat.evaluate(s, numbers) for s in strides]
            tensor = results[position]
            if None not in wanted and list(tensor.stride()) != wanted:
                results[position] = tensor.new_empty_strided(tensor.size(), wanted).copy_(tensor)
        return tuple(results)

    return run


def _places(values: Sequence[Any]) -> Iterator[_Place]:
    for position, value in enumerate(values):
        if isinstance(value, torch.SymInt) and (name := compat.plain_symbol(value)):
            yield _Place(name, position, None)
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.size()):
                if isinstance(size, torch.SymInt) and (name := compat.plain_symbol(size)):
                    yield _Place(name, position, dim)
