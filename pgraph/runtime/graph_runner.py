"""A split graph at run time: its partitions in program order, values handed from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgraph.partition.extract import Const, SplitPlan
from pgraph.runtime.protocols import Boxed

__all__ = ["GraphRunner"]


class GraphRunner:
    """Runs the partitions of a split graph in order over a list of values.

    Each value lives until the last partition that reads it has been handed it, as it would in one piece of
    code.

    Args:
        split: which values each partition takes and makes.
        partitions: the code of each partition; takes one list and empties it.
    """

    def __init__(self, split: SplitPlan, partitions: Sequence[Boxed]) -> None:
        self._n_slots = split.n_slots
        self._input_slots = split.input_slots
        self._outputs = split.output_slots
        self._calls = [
            (partition, call.inputs, call.outputs, call.last_use)
            for partition, call in zip(partitions, split.calls, strict=True)
        ]

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        values: list[Any] = [None] * self._n_slots
        for position, slot in enumerate(self._input_slots):
            values[slot] = args[position]
        args.clear()
        for partition, inputs, outputs, last_use in self._calls:
            handed = [values[slot] for slot in inputs]
            for slot in last_use:
                values[slot] = None
            results = partition(handed)
            for slot, result in zip(outputs, results, strict=True):
                values[slot] = result
            results = result = None  # or the last one would outlive its last use by a partition
        return tuple(o.value if isinstance(o, Const) else values[o] for o in self._outputs)
