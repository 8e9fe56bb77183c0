"""Where an ATen graph is cut: contiguous runs of nodes that may be captured, and of nodes that may not.

Program order is kept, which is what keeps in-place ops right: the stock partitioners order partitions by data
edges alone, and may run a mutation ahead of an earlier read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from pgraph.ops import op_names
from pgraph.ops.fx import is_getitem, is_neutral, is_structural, op_name, op_of
from pgraph.reasons import Reason

__all__ = ["Partition", "scan"]

Refuse = Callable[[Node], Reason | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """A run of nodes, in the order in which they run.

    Args:
        index: position among the partitions.
        safe: whether the run may be captured.
        nodes: the graph's own nodes, without placeholders, attributes and the output.
        reasons: why it may not; empty when it may.
    """

    index: int
    safe: bool
    nodes: tuple[Node, ...]
    reasons: tuple[Reason, ...] = ()


@dataclasses.dataclass(slots=True)
class _Stretch:
    safe: bool | None  # None while it has neutral nodes only
    nodes: list[Node]
    reasons: list[Reason]

    def device_ops(self) -> int:
        return sum(not is_neutral(node) for node in self.nodes)


def scan(graph: Graph, refuse: Refuse, *, min_ops: int) -> list[Partition]:
    """Cut `graph` into maximal runs of safe and unsafe nodes, in program order.

    Neutral nodes join the run they sit in, getitem its producer's. A safe run with fewer than
    `min_ops` device ops cannot pay for a launch and joins its unsafe neighbours; a graph that is
    safe as a whole is left alone. Draws of seeds go to the front when nothing drew before them, so
    that they do not cut the graph. The graph itself is not changed.

    Args:
        graph: an ATen graph with ``meta["val"]``.
        refuse: why a node must stay outside; see `pgraph.ops.safety.refusal`.
        min_ops: fewest device ops that are worth a launch.

    Returns:
        The partitions; none when the graph has no ops.
    """
    reasons = {node: refuse(node) for node in graph.nodes if not is_structural(node)}
    runs = _merge_small(_runs(reasons, _hoistable_seeds(reasons)), min_ops)
    return [
        Partition(index, run.safe is not False, tuple(run.nodes), tuple(dict.fromkeys(run.reasons)))
        for index, run in enumerate(runs)
    ]


def _runs(reasons: dict[Node, Reason | None], seeds: list[Node]) -> list[_Stretch]:
    """The nodes in maximal runs, the draws of seeds first.

    Args:
        reasons: why each node must stay outside, in program order.
        seeds: those that go first.
    """
    runs: list[_Stretch] = []
    home: dict[Node, _Stretch] = {}
    if seeds:
        runs.append(_Stretch(False, seeds, [reason for node in seeds if (reason := reasons[node])]))
        home.update(dict.fromkeys(seeds, runs[0]))
    for node, reason in reasons.items():
        if node in home:
            continue
        producer = _producer(node)
        if producer is not None and producer in home:
            home[producer].nodes.append(node)
            home[node] = home[producer]
            continue
        safe = None if reason is None and is_neutral(node) else reason is None
        # Neutral nodes do not lengthen the run of hoisted seeds: what follows them is more likely theirs.
        fresh = not runs or (len(runs) == 1 and bool(seeds))
        if fresh or not (safe is None or runs[-1].safe is None or runs[-1].safe == safe):
            runs.append(_Stretch(safe, [], []))
        run = runs[-1]
        if run.safe is None:
            run.safe = safe
        run.nodes.append(node)
        if reason is not None:
            run.reasons.append(reason)
        home[node] = run
    return runs


def _producer(node: Node) -> Node | None:
    if is_getitem(node) and isinstance(node.args[0], Node):
        return node.args[0]
    return None


def _hoistable_seeds(reasons: dict[Node, Reason | None]) -> list[Node]:
    """The refused draws of seeds that may go first: no inputs, and nothing drew before them."""
    found: list[Node] = []
    for node, reason in reasons.items():
        if reason is None:
            continue
        name = op_name(node.target) if isinstance(node.target, OpOverload) else ""
        if name in op_names.SEED_OPS and not node.all_input_nodes:
            found.append(node)
        elif reason.info.draws_random or _is_random(node):
            break  # seeds may not overtake it
    return found


def _is_random(node: Node) -> bool:
    """Whether the op may draw random numbers, whatever it is refused for."""
    op = op_of(node)
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def _merge_small(runs: list[_Stretch], min_ops: int) -> list[_Stretch]:
    if len(runs) < 2:
        return runs
    merged: list[_Stretch] = []
    for run in runs:
        if run.safe is not False and (ops := run.device_ops()) < max(min_ops, 1):
            noun = "op" if ops == 1 else "ops"
            small = Reason(
                "too-small",
                f"{ops} {noun} between uncaptured ones cannot pay for a launch (min_ops is {min_ops})",
            )
            # A run without device ops loses nothing, so there is nothing to tell.
            run = _Stretch(False, run.nodes, [small] if ops else [])
        if merged and merged[-1].safe == run.safe:
            merged[-1].nodes.extend(run.nodes)
            merged[-1].reasons.extend(run.reasons)
        else:
            merged.append(run)
    return merged
