"""A split graph at run time: its partitions in program order, values handed from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from pgraph.errors import PgraphError
from pgraph.partition.extract import Call, Const, SplitPlan
from pgraph.runtime.protocols import Boxed

__all__ = ["GraphRunner"]

Picked = Callable[[list[Any]], tuple[Any, ...]]


class GraphRunner:
    """Runs the partitions of a split graph in order over a list of values.

    Each value lives until the last partition that reads it has been handed it, as it would in one piece of
    code. There may be hundreds, at every call: they are moved by slices, not one by one.

    Args:
        split: which values each partition takes and makes.
        partitions: the code of each partition; takes one list and empties it.
    """

    def __init__(self, split: SplitPlan, partitions: Sequence[Boxed]) -> None:
        self._literals = [output.value for output in split.output_slots if isinstance(output, Const)]
        literal = iter(range(split.n_slots, split.n_slots + len(self._literals)))  # they lie behind all slots
        self._missing = [None] * (split.n_slots - len(split.input_slots))
        self._outputs = _picked([next(literal) if isinstance(o, Const) else o for o in split.output_slots])
        self._steps = [_Step(run, call) for run, call in zip(partitions, split.calls, strict=True)]
        assert split.input_slots == tuple(range(len(split.input_slots))), "inputs come first, in their order"

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        values: list[Any] = [*args, *self._missing, *self._literals]
        args.clear()
        for step in self._steps:
            handed = list(step.inputs(values))
            for dying, nothing in step.dying:
                values[dying] = nothing
            results = step.run(handed)
            if len(results) != step.count:
                raise PgraphError(f"a partition gave {len(results)} results in the place of {step.count}")
            values[step.outputs] = results
            results = None  # or the last one would outlive its last use by a partition
        return self._outputs(values)


class _Step:
    """One partition.

    Attributes:
        run: its code.
        inputs: what it takes of a list of values.
        dying: slices of that list that nothing reads after this, and what is put there.
        outputs, count: the slice for its results, and their number.
    """

    __slots__ = ("count", "dying", "inputs", "outputs", "run")

    def __init__(self, partition: Boxed, call: Call) -> None:
        self.run = partition
        self.inputs = _picked(call.inputs)
        self.dying = [(slice(r.start, r.stop), [None] * len(r)) for r in _runs(call.last_use)]
        self.count = len(call.outputs)
        first = call.outputs[0] if call.outputs else 0
        self.outputs = slice(first, first + self.count)
        assert call.outputs == tuple(range(first, first + self.count)), "results lie side by side"


def _picked(slots: Sequence[int]) -> Picked:
    """What takes these values of a list."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda values: tuple(values[slot] for slot in slots)


def _runs(slots: Sequence[int]) -> list[range]:
    """The same slots, which are in order, as ranges."""
    found: list[range] = []
    for slot in slots:
        if found and found[-1].stop == slot:
            found[-1] = range(found[-1].start, slot + 1)
        else:
            found.append(range(slot, slot + 1))
    return found
