"""Partitions in order: what each takes, when values die, what is returned."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from pgraph.errors import PgraphError
from pgraph.partition.extract import Call, Const, SplitPlan
from pgraph.partition.scan import Partition
from pgraph.runtime.graph_runner import GraphRunner


class Value:
    """Something that can be watched."""


Slots = tuple[int, ...]


def plan(calls: list[tuple[Slots, Slots, Slots]], outputs: tuple[Any, ...]) -> SplitPlan:
    """Of two inputs; (inputs, outputs, last use) of each call."""
    module, nothing = GraphModule(torch.nn.Module(), torch.fx.Graph()), Partition(0, False, ())
    made = [Call(nothing, module, *call) for call in calls]
    return SplitPlan(tuple(made), 2 + sum(len(c.outputs) for c in made), (0, 1), outputs)


def test_values_are_handed_on_and_die_when_they_are_handed_for_the_last_time() -> None:
    seen: list[Any] = []
    dead: list[bool] = []

    def first(args: list[Any]) -> list[Any]:
        seen.append(len(args))
        args.clear()
        dead.append(watched() is None)
        return [Value(), 5, Value()]

    def second(args: list[Any]) -> tuple[Any, ...]:
        seen.append(args[1:])
        inner = weakref.ref(args[0])
        args.clear()
        dead.append(inner() is None)
        return ()

    calls: list[Any] = [((0,), (2, 3, 4), (0,)), ((4, 3, 1), (), (4,))]
    given = [Value(), "kept"]
    watched = weakref.ref(given[0])
    run = GraphRunner(plan(calls, (3, Const(None), 1, 3, Const(7))), [first, second])
    assert run(given) == (5, None, "kept", 5, 7)
    assert (given, seen, dead) == ([], [1, [5, "kept"]], [True, True])


def test_other_results_than_were_planned_are_an_error() -> None:
    run = GraphRunner(plan([((0, 1), (2, 3), (0, 1))], (2, 3)), [lambda args: [1]])
    with pytest.raises(PgraphError, match="1 results in the place of 2"):
        run([1, 2])
