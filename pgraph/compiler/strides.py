"""Results that get the strides which were promised for them, where a compiler chose others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pgraph import compat
from pgraph.compat import Strides
from pgraph.runtime.sizes import symbols_in

__all__ = ["dense", "keep_strides"]

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
