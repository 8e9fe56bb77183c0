"""How partitions are cut out of an ATen graph: each becomes a module of its own.

The graph becomes calls of these modules over a flat list of value slots, so that an executor needs a list and
a loop.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from pgraph.errors import PgraphError
from pgraph.ops.fx import copied, is_structural, is_token, output_values, symbols
from pgraph.partition.scan import Partition

__all__ = ["Call", "Const", "SplitPlan", "extract", "twin"]


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
    owner = {node: partition.index for partition in partitions for node in partition.nodes}
    for node in graph.nodes:
        if not is_structural(node) and node not in owner:
            raise PgraphError(
                f"partition list misses {node.format_node()}. Fix: pass what scan() returned for it"
            )
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    results = _results(graph)
    if len(partitions) == 1 and isinstance(graph.output_node().args[0], tuple):
        return _whole(gm, partitions[0], len(placeholders), len(results))
    reads = [_reads(partition, owner, placeholders) for partition in partitions]
    wanted = {node for nodes in reads for node in nodes}
    wanted |= {node for node in results if isinstance(node, Node) and node.op != "get_attr"}
    made = [[node for node in partition.nodes if node in wanted] for partition in partitions]
    slots = {node: slot for slot, node in enumerate(itertools.chain(placeholders, *made))}
    output_slots = tuple(_output_slot(gm, value, slots) for value in results)

    inputs = [tuple(slots[node] for node in nodes) for nodes in reads]
    kept = {slot for slot in output_slots if isinstance(slot, int)}
    dying = _last_uses(inputs, len(placeholders), kept)
    calls = tuple(
        Call(partition, _module(gm, partition, read, new), taken, tuple(slots[node] for node in new), last)
        for partition, read, new, taken, last in zip(partitions, reads, made, inputs, dying, strict=True)
    )
    return SplitPlan(calls, len(slots), tuple(range(len(placeholders))), output_slots)


def _output_slot(gm: GraphModule, value: Any, slots: Mapping[Node, int]) -> int | Const:
    if not isinstance(value, Node):
        return Const(value)
    return Const(_attribute(gm, str(value.target))) if value.op == "get_attr" else slots[value]


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
    Ordered effects hand a token on, which Inductor lowers to nothing: no partition can return it.
    Partitions run in the order of the program anyway, so each one begins with a token of its own.
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
    # A symbol that is no value of the graph must be a plain size of some input tensor: no more is
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
    module = GraphModule(gm, graph, class_name=f"Partition{partition.index}")
    module.meta = dict(gm.meta)
    return module


def twin(gm: GraphModule) -> GraphModule:
    """A copy of a graph that stays as it is when `gm` is compiled; tensors are shared."""
    graph = copied(gm.graph)
    module = GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(found := _attribute(gm, str(node.target)), GraphModule):
            setattr(module, str(node.target), copy.deepcopy(found))  # Inductor rewrites subgraphs in place
    return module


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
