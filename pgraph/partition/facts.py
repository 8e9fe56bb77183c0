"""Facts about a graph and its partitions, collected when they are compiled: strings and numbers only.

The facts outlive the FX graph: a report must not keep a model, a module or a tensor alive. They hold
enough of the order of ops to answer "what would be captured if this reason were gone?" (`captured_ops`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.fx import Graph, Node

from pgraph.ops.fx import (
    is_custom,
    is_neutral,
    op_name,
    op_of,
    solver_of_check,
    user_line,
)
from pgraph.partition.causes import causes_of
from pgraph.partition.module_names import module_of
from pgraph.partition.scan import Partition
from pgraph.reasons import Reason

__all__ = [
    "GraphFacts",
    "OpRun",
    "PartitionFacts",
    "captured_ops",
    "graph_facts",
    "partition_facts",
    "respliced",
    "same_cause",
    "split_facts",
]

Kind = Literal["forward", "backward", "inference"]


@dataclasses.dataclass(frozen=True, slots=True)
class OpRun:
    """Ops in a row that may all be captured, or that all stay outside for one reason.

    Args:
        ops: how many device ops.
        reason: why they stay outside, traced back to its cause; None if they may be captured.
    """

    ops: int
    reason: Reason | None


@dataclasses.dataclass(frozen=True, slots=True)
class GraphFacts:
    """One ATen graph.

    Args:
        kind: what AOTAutograd made it for.
        number: counts the graphs of this process.
        min_ops: the option in force when it was cut.
        op_runs: its device ops in the order in which they run.
        broken: why Dynamo ended the graph where it did, if the function went on.
        compilation: id of Dynamo's compilation that it comes from, ``"3/0"``; None where there was none.
    """

    kind: Kind
    number: int
    min_ops: int
    op_runs: tuple[OpRun, ...] = ()
    broken: Reason | None = None
    compilation: str | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionFacts:
    """One part of a graph.

    Args:
        graph: the graph that it is a part of.
        index: position among the partitions; None if the graph was not cut.
        piece: position among the pieces of a partition that was split automatically.
        safe: whether it may be captured.
        ops: (name, count) of its device ops, in order of first use.
        reasons: why it may not be captured.
        places: (name, file:line) of its device ops, where known; of each op the first.
        custom: names of the custom ops among them.
        module: the innermost module of the user's that it comes from, e.g. ``"Block layers.3"``.
    """

    graph: GraphFacts
    index: int | None
    safe: bool
    ops: tuple[tuple[str, int], ...] = ()
    reasons: tuple[Reason, ...] = ()
    places: tuple[tuple[str, str], ...] = ()
    custom: tuple[str, ...] = ()
    module: str = ""
    piece: int | None = None

    @property
    def name(self) -> str:
        return self.graph.name if self.index is None else f"{self.graph.name}, partition {self.place}"

    @property
    def place(self) -> str:
        """Where it stands in its graph: ``"2"``, or ``"2.1"`` if partition 2 was split once more."""
        return f"{self.index or 0}" if self.piece is None else f"{self.index or 0}.{self.piece}"

    @property
    def label(self) -> str:
        """Name and module, for the profiler."""
        return f"{self.name}: {self.module}" if self.module else self.name

    @property
    def device_ops(self) -> int:
        return sum(count for _, count in self.ops)

    def placed(self, reason: Reason, op: str | None) -> Reason:
        """The reason with the user's line of `op`.

        Where neither the driver nor the dispatcher tells which op it was, the custom ops are named: what
        built-in ops do in a capture is known.
        """
        if op is None and reason.info.blames_custom_ops and self.custom:
            op = self.custom[0]
            names = ", ".join(self.custom[:3])
            reason = dataclasses.replace(reason, sentence=f"{reason.sentence} (custom ops here: {names})")
        where = dict(self.places).get(op or "")
        return reason if reason.where or where is None else dataclasses.replace(reason, where=where)

    @property
    def seeds_only(self) -> bool:
        """It draws seeds for the graph behind it and does nothing else."""
        return bool(self.reasons) and all(reason.info.free for reason in self.reasons)


def graph_facts(
    kind: Kind,
    number: int,
    graph: Graph,
    partitions: Sequence[Partition],
    judged: Mapping[Node, Reason | None],
    *,
    min_ops: int,
    broken: Reason | None = None,
    compilation: str | None = None,
) -> tuple[GraphFacts, dict[Node, Reason]]:
    """The facts of a graph, and for each refused node the reason at the root of it.

    Args:
        partitions: of `graph`, in order.
        judged: what the safety rules said of each node.
    """
    causes = causes_of(graph, judged)
    return GraphFacts(kind, number, min_ops, _op_runs(partitions, causes), broken, compilation), causes


def _op_runs(partitions: Sequence[Partition], causes: Mapping[Node, Reason]) -> tuple[OpRun, ...]:
    runs: list[OpRun] = []
    for partition in partitions:
        for node in partition.nodes:
            reason = causes.get(node)
            if not _is_device_op(node, causes):
                continue
            if runs and runs[-1].reason == reason:
                runs[-1] = OpRun(runs[-1].ops + 1, reason)
            else:
                runs.append(OpRun(1, reason))
    return tuple(runs)


def _is_device_op(node: Node, causes: Mapping[Any, Reason]) -> bool:
    """Whether it counts as an op; the check of a solver's error code belongs to the solver."""
    return solver_of_check(node) not in causes and (node in causes or not is_neutral(node))


def split_facts(
    whole: PartitionFacts, first: int, partitions: Sequence[Partition], refused: Mapping[Node, Reason]
) -> list[PartitionFacts]:
    """The facts of the pieces of a partition; they have new facts of the graph in common.

    Args:
        whole: the partition that was split.
        first: device ops of the graph that run before it.
        partitions: of its nodes, in order.
        refused: why nodes stay outside.
    """
    graph = respliced(whole.graph, first, whole.device_ops, _op_runs(partitions, refused))
    found = []
    for partition in partitions:
        facts = partition_facts(graph, partition, refused, whole=False)
        if whole.index is not None:
            facts = dataclasses.replace(facts, index=whole.index, piece=partition.index)
        found.append(facts)
    return found


def respliced(graph: GraphFacts, first: int, ops: int, runs: Sequence[OpRun]) -> GraphFacts:
    """A graph of which `ops` device ops, from number `first` on, are in other runs than they were."""
    before, after, at = [], [], 0
    for step in graph.op_runs:
        end = at + step.ops
        if at < first:
            before.append(OpRun(min(end, first) - at, step.reason))
        if end > first + ops:
            after.append(OpRun(end - max(at, first + ops), step.reason))
        at = end
    return dataclasses.replace(graph, op_runs=(*before, *runs, *after))


def partition_facts(
    graph: GraphFacts, partition: Partition, causes: Mapping[Node, Reason], *, whole: bool
) -> PartitionFacts:
    """The facts of one partition; `whole` if it is the only one."""
    ops = Counter(op_name(op_of(node)) for node in partition.nodes if _is_device_op(node, causes))
    # What the rules say of a node, but once per cause; then what the partitioner added.
    reasons: dict[Any, Reason] = {}
    for node in partition.nodes:
        if node in causes:
            reasons.setdefault(_kind(causes[node]), causes[node])
    for reason in partition.reasons:
        if reason.info.too_small:
            reasons.setdefault(_kind(reason), reason)
    if partition.safe:
        reasons.clear()
    return PartitionFacts(
        graph,
        None if whole else partition.index,
        partition.safe,
        tuple(ops.items()),
        tuple(reasons.values()),
        *_places(partition),
        module=module_of(partition.nodes),
    )


def _places(partition: Partition) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Where the partition's ops stand in the user's code, and which of them are custom ops."""
    places: dict[str, str] = {}
    custom: dict[str, None] = {}
    for node in partition.nodes:
        name = op_name(op_of(node))
        if is_custom(op_of(node)):
            custom[name] = None
        if name not in places and not is_neutral(node) and (where := user_line(node)) is not None:
            places[name] = where
    return tuple(places.items()), tuple(custom)


def same_cause(reason: Reason) -> tuple[str, ...]:
    """A key that is the same for reasons that one change removes: those of one line of the user's code.

    Such a line often becomes several refused ops, in the forward and in the backward.
    """
    return (reason.where,) if reason.where is not None else _kind(reason)


def _kind(reason: Reason) -> tuple[str, ...]:
    return (reason.code, reason.fix, reason.where or reason.sentence)


def captured_ops(graph: GraphFacts, without: Reason | None = None) -> tuple[int, int]:
    """(device ops in captured partitions, number of partitions) if all of `without`'s cause were gone."""
    gone = same_cause(without) if without is not None else None
    runs: list[list[Any]] = []
    for step in graph.op_runs:
        safe = step.reason is None or same_cause(step.reason) == gone
        if runs and runs[-1][0] == safe:
            runs[-1][1] += step.ops
        else:
            runs.append([safe, step.ops])
    if len(runs) > 1:
        for run in runs:
            run[0] = run[0] and run[1] >= graph.min_ops
    partitions = sum(i == 0 or runs[i - 1][0] != run[0] for i, run in enumerate(runs))
    return sum(ops for safe, ops in runs if safe), partitions
