"""Cut an ATen graph into contiguous partitions, and each partition out as a module of its own.

`scan` keeps program order, which is what keeps in-place ops right: the stock partitioners order partitions
by data edges alone, and may run a mutation ahead of an earlier read. `extract` turns the partitions into
calls over a flat list of value slots, so that an executor needs a list and a loop.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from pgraph.errors import PgraphError
from pgraph.ops import op_names
from pgraph.ops.fx import (
    is_getitem,
    is_neutral,
    is_structural,
    is_token,
    op_name,
    op_of,
    output_values,
    symbols,
)
from pgraph.reasons import Reason

__all__ = ["Call", "Const", "Partition", "SplitPlan", "extract", "scan", "twin"]

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


@dataclasses.dataclass(frozen=True, slots=True)
class Const:
    """A literal in the graph's output: None, a number, or a tensor held by the module."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One partition as a module, and the slots it reads, writes and is the last to read.

    Args:
        partition: what was cut out.
        module: takes the input slots in order, returns a tuple with one value for each output slot.
        inputs: slots handed over.
        outputs: slots filled.
        last_use: slots that nothing reads after this call; the graph's outputs are never among them.
    """

    partition: Partition
    module: GraphModule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last_use: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SplitPlan:
    """The whole graph as calls over a list of `n_slots` values.

    Args:
        calls: in the order in which they run.
        n_slots: length of the list.
        input_slots: where the graph's inputs go, one for each placeholder.
        output_slots: what the graph returns: a slot, or a literal.
    """

    calls: tuple[Call, ...]
    n_slots: int
    input_slots: tuple[int, ...]
    output_slots: tuple[int | Const, ...]


@dataclasses.dataclass(slots=True)
class _Run:
    safe: bool | None  # None while it has neutral nodes only
    nodes: list[Node]
    reasons: list[Reason]

    def device_ops(self) -> int:
        return sum(not is_neutral(node) for node in self.nodes)


# --- scan


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
    seeds = _hoistable_seeds(reasons)
    runs: list[_Run] = []
    home: dict[Node, _Run] = {}
    if seeds:
        runs.append(_Run(False, seeds, [reason for node in seeds if (reason := reasons[node])]))
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
            runs.append(_Run(safe, [], []))
        run = runs[-1]
        if run.safe is None:
            run.safe = safe
        run.nodes.append(node)
        if reason is not None:
            run.reasons.append(reason)
        home[node] = run

    runs = _merge_small(runs, min_ops)
    return [
        Partition(index, run.safe is not False, tuple(run.nodes), tuple(dict.fromkeys(run.reasons)))
        for index, run in enumerate(runs)
    ]


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


def _merge_small(runs: list[_Run], min_ops: int) -> list[_Run]:
    if len(runs) < 2:
        return runs
    merged: list[_Run] = []
    for run in runs:
        if run.safe is not False and (ops := run.device_ops()) < max(min_ops, 1):
            noun = "op" if ops == 1 else "ops"
            small = Reason(
                "too-small",
                f"{ops} {noun} between uncaptured ones cannot pay for a launch (min_ops is {min_ops})",
            )
            # A run without device ops loses nothing, so there is nothing to tell.
            run = _Run(False, run.nodes, [small] if ops else [])
        if merged and merged[-1].safe == run.safe:
            merged[-1].nodes.extend(run.nodes)
            merged[-1].reasons.extend(run.reasons)
        else:
            merged.append(run)
    return merged


# --- extract


def extract(gm: GraphModule, partitions: Sequence[Partition]) -> SplitPlan:
    """Make a module of each partition, and say how values flow between them.

    A partition that has a symbol in any of its shapes gets that symbol as an input of its own whenever the
    graph has it as a value, since compilers cannot solve for it (``2*s0`` alone does not give ``s0``).
    A partition without outputs stays: it mutates.

    Args:
        gm: the graph that was scanned; not changed. A bare output counts as a tuple of one.
        partitions: what `scan` returned for ``gm.graph``.

    Raises:
        PgraphError: the partitions miss one of the graph's ops, or an output is nested.
    """
    graph = gm.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    covered = {node for partition in partitions for node in partition.nodes}
    for node in graph.nodes:
        if not is_structural(node) and node not in covered:
            raise PgraphError(
                f"partition list misses {node.format_node()}. Fix: pass what scan() returned for it"
            )
    results = _results(graph)
    if len(partitions) == 1 and isinstance(graph.output_node().args[0], tuple):
        return _whole(gm, partitions[0], len(placeholders), len(results))

    owner = {node: partition.index for partition in partitions for node in partition.nodes}
    reads = {partition.index: _reads(partition, owner, placeholders) for partition in partitions}
    wanted = {node for nodes in reads.values() for node in nodes}
    wanted |= {node for node in results if isinstance(node, Node) and node.op != "get_attr"}

    slots = {node: slot for slot, node in enumerate(placeholders)}
    for partition in partitions:
        for node in partition.nodes:
            if node in wanted:
                slots[node] = len(slots)

    output_slots: list[int | Const] = []
    for value in results:
        if not isinstance(value, Node):
            output_slots.append(Const(value))
        elif value.op == "get_attr":
            output_slots.append(Const(_attribute(gm, str(value.target))))
        else:
            output_slots.append(slots[value])
    kept = {slot for slot in output_slots if isinstance(slot, int)}

    modules = []
    for partition in partitions:
        outputs = [node for node in partition.nodes if node in slots]
        module = _module(gm, partition, reads[partition.index], outputs)
        inputs = tuple(slots[node] for node in reads[partition.index])
        modules.append((partition, module, inputs, tuple(slots[node] for node in outputs)))
    dying = _last_uses([inputs for _, _, inputs, _ in modules], len(placeholders), kept)
    calls = tuple(Call(*fields, last) for fields, last in zip(modules, dying, strict=True))
    return SplitPlan(calls, len(slots), tuple(range(len(placeholders))), tuple(output_slots))


def _results(graph: Graph) -> list[Any]:
    returned = graph.output_node().args[0]
    results = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    for position, value in enumerate(results):
        if isinstance(value, (tuple, list, dict, slice)):
            raise PgraphError(
                f"output {position} is nested: {value!r}. Fix: flatten the outputs, as AOTAutograd does"
            )
    return results


def _whole(gm: GraphModule, partition: Partition, n_inputs: int, n_outputs: int) -> SplitPlan:
    # Nothing to cut: the module itself, with a slot of its own for each output, literals included.
    inputs = tuple(range(n_inputs))
    outputs = tuple(range(n_inputs, n_inputs + n_outputs))
    call = Call(partition, gm, inputs, outputs, inputs)
    return SplitPlan((call,), n_inputs + n_outputs, inputs, outputs)


def _reads(partition: Partition, owner: dict[Node, int], placeholders: Iterable[Node]) -> list[Node]:
    """What the partition takes from outside: plain symbols first, then values in order of first use.

    Note [Tokens stay at home]
    Ordered effects hand a token on, which Inductor lowers to nothing: no partition can return it. Parts run
    in the order of the program anyway, so each one begins with a token of its own.
    """
    direct: dict[Node, None] = {}
    for node in partition.nodes:
        for source in node.all_input_nodes:
            if source.op != "get_attr" and owner.get(source) != partition.index and not is_token(source):
                direct[source] = None
    needed: set[Any] = set()
    for node in (*direct, *partition.nodes):
        for value in output_values(node):
            needed |= symbols(value)
    if not needed:
        return list(direct)

    providers: dict[Any, Node] = {}
    earlier = (node for node in owner if owner[node] < partition.index)
    for node in (*placeholders, *earlier):
        values = output_values(node)
        if len(values) == 1 and isinstance(values[0], torch.SymInt):
            providers.setdefault(values[0].node.expr, node)
    # A symbol that nobody passes as a number must be a plain size of some input tensor: no more is
    # known to the original graph either.
    plain = {providers[symbol]: None for symbol in sorted(needed, key=str) if symbol in providers}
    return [*plain, *(node for node in direct if node not in plain)]


def _module(gm: GraphModule, partition: Partition, inputs: list[Node], outputs: list[Node]) -> GraphModule:
    graph = Graph()
    made: dict[Node, Node] = {}
    for node in inputs:
        placeholder = graph.placeholder(node.name)
        placeholder.meta = copy.copy(node.meta)
        # Inside the partition the number is given, not found.
        placeholder.meta.pop("unbacked_bindings", None)
        made[node] = placeholder
    for node in partition.nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in made:
                made[source] = graph.node_copy(source)
            elif source not in made and is_token(source):  # see Note [Tokens stay at home]
                made[source] = graph.call_function(torch.ops.prims._make_token.default)
                made[source].meta = copy.copy(source.meta)
        made[node] = graph.node_copy(node, made.__getitem__)
    output = graph.output(tuple(made[node] for node in outputs))
    # What a compiler makes of them it tells (Note [Borders]); it is asked for the strides in `val`.
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    module = GraphModule(gm, graph, class_name=f"Part{partition.index}")
    module.meta = dict(gm.meta)
    return module


def twin(gm: GraphModule) -> GraphModule:
    """A copy of a graph that stays as it is when `gm` is compiled; tensors are shared."""
    graph = Graph()
    made: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, made))
    new, old = graph.output_node(), gm.graph.output_node()
    new.meta = copy.copy(old.meta)
    copied = GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(found := _attribute(gm, str(node.target)), GraphModule):
            setattr(copied, str(node.target), copy.deepcopy(found))  # Inductor rewrites subgraphs in place
    return copied


def _attribute(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value


def _last_uses(inputs: list[tuple[int, ...]], n_inputs: int, kept: set[int]) -> list[tuple[int, ...]]:
    # Graph inputs that no call reads die with the first call: the arguments are boxed.
    last = dict.fromkeys(range(n_inputs), 0)
    for index, read in enumerate(inputs):
        last.update(dict.fromkeys(read, index))
    return [
        tuple(sorted(slot for slot, at in last.items() if at == index and slot not in kept))
        for index in range(len(inputs))
    ]
