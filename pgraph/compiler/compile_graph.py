"""One ATen graph in, its runners out.

1. `pgraph.rewrites.checkpoint_rng` frees ops that draw nothing from the generator's states that are kept
   for them.
2. `pgraph.ops.safety` judges each node, and the graph is cut into contiguous partitions.
3. Each partition is compiled on its own (`pgraph.compiler.assemble`); a safe one gets a `PartitionRunner`,
   an unsafe one runs as it is. A `Splitter` stands by for each partition that may be split once more.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pgraph import compat
from pgraph.compiler.assemble import assemble, counts_from_storages
from pgraph.compiler.borders import bring_up_to_date
from pgraph.compiler.context import Context, Memory
from pgraph.compiler.resplit import Splitter
from pgraph.drivers import choice
from pgraph.launch.allocations import may_share, small_of
from pgraph.ops.fx import is_neutral, storage_of
from pgraph.ops.safety import refusal
from pgraph.partition.extract import extract
from pgraph.partition.facts import PartitionFacts, graph_facts, partition_facts
from pgraph.partition.scan import Partition, scan
from pgraph.reasons import Reason
from pgraph.rewrites.checkpoint_rng import unwrap
from pgraph.rewrites.idle_numbers import take_out
from pgraph.rewrites.storage_owners import count_from_owners
from pgraph.runtime import full_capture, registry, trace
from pgraph.runtime.partition_runner import PartitionRunner
from pgraph.runtime.protocols import Boxed
from pgraph.runtime.uncaptured import UncapturedPartition

__all__ = ["compile_partitions"]

log = logging.getLogger(__name__)

_numbers = itertools.count()


def compile_partitions(gm: GraphModule, inputs: Sequence[Any], context: Context) -> Boxed:
    """Unwrap what draws nothing, cut one ATen graph, compile the partitions, and put a runner around them."""
    if context.kind == "backward" and context.joint is not None:
        context.joint.plain = not counts_from_storages(gm) and not _returns_what_was_saved(gm)
        context.joint.deaths = _deaths(gm)
    if context.driver is None:
        return _compile(gm, inputs, context)
    counted = take_out(gm)
    run = _unwrapped(gm if counted is None else counted.module, inputs, context)
    return run if counted is None else counted.around(run)


def _unwrapped(gm: GraphModule, inputs: Sequence[Any], context: Context) -> Boxed:
    unwrapped = unwrap(gm)
    if unwrapped is None:
        return _compile(gm, inputs, context)
    return unwrapped.around(_compile(unwrapped.module, unwrapped.inputs(inputs), context))


def _compile(gm: GraphModule, inputs: Sequence[Any], context: Context) -> Boxed:
    count_from_owners(gm, context.by_inductor)
    partitions, facts = _scan(gm, context)
    if not partitions:
        return context.compile_partition(gm, inputs, None)
    if context.options.require_full_capture:
        full_capture.insist(facts)
    _log(facts)
    trace.cut(facts)
    if context.driver is None:
        return _uncaptured(gm, inputs, context, facts[0])
    if len(partitions) > 1 and context.by_inductor:
        bring_up_to_date(gm, inputs)
    split = extract(gm, partitions)
    made = assemble(context, gm, inputs, split, facts, _memory(gm, inputs, context), keep_sources=True)
    for runner, source in zip(made.runners, made.sources, strict=True):
        if isinstance(runner, PartitionRunner) and source is not None:
            Splitter(runner, source, context)
    return compat.boxed(made.run)


def _scan(gm: GraphModule, context: Context) -> tuple[list[Partition], list[PartitionFacts]]:
    """The partitions of a graph, and the facts of each."""
    judged: dict[Node, Reason | None] = {}
    nowhere = choice.why_none(context.options.driver, gm) if context.driver is None else None

    def refuse(node: Node) -> Reason | None:
        if context.driver is None:
            judged[node] = None if is_neutral(node) else nowhere
        else:
            judged[node] = refusal(
                node,
                device_type=context.driver.device.type,
                as_cuda=choice.preview is not None,
                by_inductor=context.by_inductor,
            )
        return judged[node]

    min_ops = context.options.min_ops
    partitions = scan(gm.graph, refuse, min_ops=min_ops)
    graph, causes = graph_facts(
        context.kind,
        next(_numbers),
        gm.graph,
        partitions,
        judged,
        min_ops=min_ops,
        broken=context.origin.broken if context.kind != "backward" else None,
        compilation=compat.compilation(),
    )
    registry.belongs(graph.number, context.origin.model())
    whole = len(partitions) == 1
    return partitions, [partition_facts(graph, partition, causes, whole=whole) for partition in partitions]


def _log(facts: Sequence[PartitionFacts]) -> None:
    for partition in facts:
        verdict = "to be captured" if partition.safe else "stays outside"
        log.info("%s: %d device ops, %s", partition.name, partition.device_ops, verdict)
        for reason in partition.reasons:
            log.info("%s stays outside: %s", partition.name, reason)


def _uncaptured(gm: GraphModule, inputs: Sequence[Any], context: Context, facts: PartitionFacts) -> Boxed:
    """The code of a graph that is on no device."""
    code = context.compile_partition(gm, inputs, None)
    return code if facts.safe else compat.boxed(UncapturedPartition(facts, code))


def _returns_what_was_saved(gm: GraphModule) -> bool:
    """Whether a backward hands something on that its forward saved, or a view of it."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    gradients = compat.tangents(gm)
    saved = {storage_of(node) for i, node in enumerate(placeholders) if i not in gradients} - {None}
    results = [value for value in _results(gm) if isinstance(value, Node)]
    # What a sparse gradient consists of may have been saved.
    return any(_is_sparse(value) or storage_of(value) in saved for value in results)


def _deaths(gm: GraphModule) -> dict[str, int]:
    """For each input, the place of its last use among the nodes; -1 without any."""
    places = {node: place for place, node in enumerate(gm.graph.nodes)}
    inputs = (node for node in gm.graph.nodes if node.op == "placeholder")
    return {node.name: max(map(places.__getitem__, node.users), default=-1) for node in inputs}


def _is_sparse(value: Any) -> bool:
    example = _example(value)
    return isinstance(example, torch.Tensor) and example.layout != torch.strided


def _results(gm: GraphModule) -> list[Any]:
    results: Any = gm.graph.output_node().args[0]
    return list(results)


def _memory(gm: GraphModule, inputs: Sequence[Any], context: Context) -> Memory:
    """What the compilation under way knows of a graph's inputs and results."""
    memory = Memory(
        static=compat.static_inputs(gm, context.kind == "backward"), donated=frozenset(), gradients=()
    )
    small = (
        context.joint.small if context.joint is not None else 0
    )  # a forward is compiled before its backward
    if context.kind == "backward":
        donated = frozenset(i for i in compat.donated_inputs() if not may_share(inputs[i], small))
        kept = _small(gm, compat.parameter_gradients(gm), small) if context.by_inductor else frozenset()
        return dataclasses.replace(memory, donated=donated, gradients=tuple(compat.tangents(gm)), kept=kept)
    saved = compat.saved_results(gm) if context.kind == "forward" else {}
    lasting = frozenset(range(len(_results(gm)))).difference(saved)
    sharing = {}
    if saved and context.by_inductor and context.joint is not None:
        results = _results(gm)
        context.joint.small = small_of(_example(results[i]) for i in saved)
        sharing = {i: saved[i] for i in _small(gm, saved, context.joint.small)}
    return dataclasses.replace(memory, saved=sharing, lasting=lasting)


def _small(gm: GraphModule, positions: Iterable[int], small: int) -> frozenset[int]:
    """Those of a graph's results that may share memory."""
    results = _results(gm)
    return frozenset(i for i in positions if may_share(_example(results[i]), small))


def _example(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, Node) else None
