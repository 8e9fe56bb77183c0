"""The partitions of an ATen graph, compiled in the order in which they run, each in its runner."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from pgraph import compat
from pgraph.compiler.borders import Borders
from pgraph.compiler.context import Context, Memory
from pgraph.compute.stand_ins import Family
from pgraph.launch.guards import Trait, lazy_bits_and_type, storage_facts
from pgraph.native import ghosts, libraries
from pgraph.ops import op_names
from pgraph.ops.fx import op_name
from pgraph.partition.extract import SplitPlan, twin
from pgraph.partition.facts import PartitionFacts
from pgraph.rewrites.numbers import short_cut, stay_inside
from pgraph.runtime.ahead import Ahead
from pgraph.runtime.graph_runner import GraphRunner
from pgraph.runtime.lessons import Lessons
from pgraph.runtime.partition_runner import PartitionRunner
from pgraph.runtime.protocols import Boxed
from pgraph.runtime.sizes import Dimension, dimensions
from pgraph.runtime.uncaptured import UncapturedPartition

__all__ = ["Assembly", "SplitSource", "assemble", "counts_from_storages"]

Runner = PartitionRunner | UncapturedPartition


@dataclasses.dataclass(frozen=True, slots=True)
class SplitSource:
    """What it takes to compile a partition once more.

    Args:
        graph: a copy, made before a compiler changed the graph.
        inputs: example inputs.
        memory: of the inputs.
        first: device ops of the whole graph that run before it.
        traced: see `pgraph.compat.compiling_again`.
    """

    graph: GraphModule
    inputs: tuple[Any, ...]
    memory: Memory
    first: int
    traced: compat.Tracing


@dataclasses.dataclass(frozen=True, slots=True)
class Assembly:
    """A graph that can run.

    Args:
        run: the graph.
        runners: of its partitions, in order.
        sources: of the partitions that may be split once more; None for the others.
    """

    run: Boxed
    runners: tuple[Runner, ...]
    sources: tuple[SplitSource | None, ...]


def assemble(
    context: Context,
    gm: GraphModule,
    inputs: Sequence[Any],
    split: SplitPlan,
    facts: Sequence[PartitionFacts],
    memory: Memory,
    *,
    keep_sources: bool,
) -> Assembly:
    """Compile the partitions of a graph.

    Args:
        gm: the graph, up to date with its inputs.
        inputs: its example inputs.
        split: of `gm`.
        facts: of each partition.
        memory: of the inputs and results.
        keep_sources: whether the partitions may be split once more.
    """
    borders = Borders(gm, inputs, split, by_inductor=context.by_inductor)
    runners: list[Runner] = []
    sources: list[SplitSource | None] = []
    first = 0
    numbers_stay = stay_inside(gm)
    with borders.reported():
        for call, partition, mine in zip(split.calls, facts, _memory_of(split, memory), strict=True):
            source, given = None, tuple(borders.inputs(call))
            if keep_sources and _may_be_split(context, partition):
                # A twin, since a compiler changes the module.
                source = SplitSource(twin(call.module), given, mine, first, compat.tracing(given))
            start = time.perf_counter()
            code = borders.compile(call, context.compile_partition, mine)
            seconds = time.perf_counter() - start
            if numbers_stay and not partition.safe and context.driver is not None:
                code = short_cut(call.module, code, context.driver.device) or code
            runners.append(_runner(context, call.module, code, partition, mine, given, seconds))
            sources.append(source)
            first += partition.device_ops
    run = runners[0] if borders.whole else GraphRunner(split, runners)
    return Assembly(run, tuple(runners), tuple(sources))


def _may_be_split(context: Context, facts: PartitionFacts) -> bool:
    worth = facts.safe and facts.device_ops > context.options.min_ops
    return worth and not context.options.require_full_capture


def _memory_of(split: SplitPlan, memory: Memory) -> Iterator[Memory]:
    """For each partition, what is known of its inputs and results.

    Args:
        memory: of those of the graph that was split.
    """
    position_of = {slot: i for i, slot in enumerate(split.input_slots)}
    # What one partition alone reads, no other partition and no result has, nor a view of it.
    reads = Counter(itertools.chain(split.output_slots, *(call.inputs for call in split.calls)))
    # None stands for what an earlier partition made, of a gradient perhaps.
    unsteady = {None, *memory.gradients} if memory.gradients else set()
    slots = {i: slot for i, slot in enumerate(split.output_slots) if isinstance(slot, int)}
    saved = {slot: memory.saved[i] for i, slot in slots.items() if i in memory.saved}
    kept = {slot for i, slot in slots.items() if i in memory.kept}
    lasting = {slot for i, slot in slots.items() if i in memory.lasting}
    for call in split.calls:
        places = [position_of.get(slot) for slot in call.inputs]
        alone = [reads[slot] == 1 for slot in call.inputs]
        outputs = [(i, slot) for i, slot in enumerate(call.outputs) if reads[slot] == 1]
        yield Memory(
            static=frozenset(i for i, place in enumerate(places) if place in memory.static),
            donated=frozenset(i for i, place in enumerate(places) if place in memory.donated and alone[i]),
            gradients=tuple(i for i, place in enumerate(places) if place in unsteady),
            saved={i: saved[slot] for i, slot in outputs if slot in saved},
            kept=frozenset(i for i, slot in outputs if slot in kept),
            lasting=frozenset(i for i, slot in enumerate(call.outputs) if slot in lasting),
        )


def _runner(
    context: Context,
    module: GraphModule,
    code: Boxed,
    facts: PartitionFacts,
    memory: Memory,
    given: Sequence[Any],
    compile_s: float,
) -> Runner:
    if not facts.safe:
        return UncapturedPartition(facts, code)
    assert context.driver is not None, "only graphs on a device are assembled"
    varying = dimensions(module)
    learns = bool(varying) and context.options.compute_sizes == "on" and context.by_inductor
    return PartitionRunner(
        facts,
        code,
        context.driver,
        context.options,
        namespaces=compat.generated_namespaces(code),
        constants=_constants(module, code),
        static=memory.static,
        saved=memory.saved,
        kept=memory.kept,
        lasting=memory.lasting,
        joint=context.joint,
        dimensions=varying,
        watched=_watched(context, module, memory.gradients),
        lessons=_lessons(context, given, varying, compile_s) if learns else None,
    )


def _lessons(
    context: Context, given: Sequence[Any], varying: Sequence[Dimension], compile_s: float
) -> Lessons:
    assert context.driver is not None, "only graphs on a device are assembled"
    # A compiler may have to run for the helpers: not in the time that lessons may take.
    ghosts.calls()
    if context.driver.device.type == "cuda":
        libraries.load_workspaces()
    family = Family(given)
    came = {d.symbol: d.came for d in varying if d.symbol is not None}
    options, ahead = context.options, None
    if context.driver.host_times and options.max_captures is None:
        ahead = Ahead(family, came, options.capture_sizes, compile_s)
    return Lessons(family, compile_s, ahead)


def _watched(context: Context, module: GraphModule, lazy: Iterable[int]) -> dict[int, Trait]:
    """Arguments of which the code depends on more than layout and address.

    Note [Unguarded arguments]
    Dynamo guards the inputs of a forward, lazy bits included, and what a forward saves is as it was traced.
    No guard covers the gradients that come into a backward: they may be lazy conjugates in one call and not
    in the next. ATen code depends on more, which Inductor's code fixes by itself, whoever runs it:
    `as_strided` counts from the start of the storage; and hooks on saved tensors may give a backward another
    type than was saved.
    """
    if context.by_inductor:
        return dict.fromkeys(lazy, compat.lazy_bits)
    inputs = sum(node.op == "placeholder" for node in module.graph.nodes)
    if counts_from_storages(module):
        return dict.fromkeys(range(inputs), storage_facts)
    return dict.fromkeys(range(inputs) if context.kind == "backward" else lazy, lazy_bits_and_type)


def counts_from_storages(module: GraphModule) -> bool:
    """Whether an op of the graph depends on where in its storage a tensor begins."""
    ops = {op_name(node.target) for node in module.graph.nodes if isinstance(node.target, OpOverload)}
    return bool(ops & op_names.STORAGE_OFFSETS)


def _constants(module: GraphModule, code: Any) -> list[torch.Tensor]:
    """Tensors that the code holds: attributes of the module, constants that Inductor folded."""
    held = [
        getattr(module, n.target, None)
        for n in module.graph.nodes
        if n.op == "get_attr" and "." not in n.target
    ]
    held += list((getattr(code, "constants", None) or {}).values())
    return [t for t in held if isinstance(t, torch.Tensor)]
