"""One ATen graph in, its runners out.

1. `pgraph.rewrites.checkpoint_rng` frees ops that draw nothing from the generator's states that are kept
   for them.
2. `pgraph.ops.safety` judges each node, `pgraph.partition.split` cuts the graph into contiguous partitions.
3. Each partition is compiled on its own; a safe one gets a `PartitionRunner`, an unsafe one runs as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from pgraph import compat
from pgraph.compiler.borders import Borders, CompilePartition, bring_up_to_date
from pgraph.compiler.resplit import Account, Memory, Source, Splitter
from pgraph.drivers import choice
from pgraph.drivers.interface import Driver
from pgraph.launch.guards import Trait, lazy_bits, lazy_bits_and_type, storage_facts
from pgraph.ops import op_names
from pgraph.ops.fx import is_neutral, op_name
from pgraph.ops.safety import refusal
from pgraph.options import Options
from pgraph.partition.facts import Kind, PartitionFacts, graph_facts, partition_facts
from pgraph.partition.split import Partition, SplitPlan, extract, scan, twin
from pgraph.reasons import Reason
from pgraph.rewrites.checkpoint_rng import unwrap
from pgraph.rewrites.storage_owners import count_from_owners
from pgraph.runtime import full_capture
from pgraph.runtime.graph_runner import GraphRunner
from pgraph.runtime.partition_runner import PartitionRunner
from pgraph.runtime.protocols import Boxed
from pgraph.runtime.sizes import dimensions
from pgraph.runtime.uncaptured import UncapturedPartition

__all__ = ["CompilePartition", "compile_partitions"]

log = logging.getLogger(__name__)

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class _Compiler:
    """How the partitions of one graph become runners.

    Args:
        driver: where they are captured.
        options: of this compilation.
        kind: of the graph.
        compile_partition: code of one partition.
        account: of the splits that pgraph makes by itself.
    """

    driver: Driver
    options: Options
    kind: Kind
    compile_partition: CompilePartition
    account: Account

    def whole(
        self, gm: torch.fx.GraphModule, inputs: Sequence[Any], facts: PartitionFacts, memory: Memory
    ) -> Boxed:
        """The runner of a graph that was not cut."""
        source = self._source(gm, inputs, facts, memory, 0)
        compiled = self.compile_partition(gm, inputs, None)
        return self._runner(gm, compiled, facts, memory, source)

    def partitions(
        self,
        split: SplitPlan,
        borders: Borders,
        facts: Sequence[PartitionFacts],
        memory: Memory,
        *,
        again: bool = True,
    ) -> list[Any]:
        """The runners of a graph's partitions, or of the pieces of a partition.

        Args:
            borders: of `split`.
            memory: of the inputs of what was split.
            again: whether the partitions may be split once more.
        """
        first = 0
        position_of = {slot: i for i, slot in enumerate(split.input_slots)}
        # One partition alone reads it, so that no other has it or a view of it.
        reads = Counter(itertools.chain(split.output_slots, *(call.inputs for call in split.calls)))
        # `None` stands for what an earlier partition made: of a gradient, perhaps. What was saved is as it
        # was # traced.
        unsteady = {None, *memory.gradients} if memory.gradients else set()
        runners = []
        for call, partition in zip(split.calls, facts, strict=True):
            places = [position_of.get(slot) for slot in call.inputs]
            mine = Memory(
                static=frozenset(i for i, place in enumerate(places) if place in memory.static),
                donated=frozenset(
                    i
                    for i, place in enumerate(places)
                    if place in memory.donated and reads[call.inputs[i]] == 1
                ),
                gradients=tuple(i for i, place in enumerate(places) if place in unsteady),
            )
            source = (
                self._source(call.module, borders.inputs(call), partition, mine, first) if again else None
            )
            with compat.donating(sorted(mine.donated)):
                compiled = borders.compile(call, self.compile_partition, sorted(mine.static))
            runners.append(self._runner(call.module, compiled, partition, mine, source))
            first += partition.device_ops
        return runners

    def again(
        self,
        inputs: Sequence[Any],
        gm: torch.fx.GraphModule,
        split: SplitPlan,
        facts: Sequence[PartitionFacts],
        memory: Memory,
    ) -> list[Any]:
        """The runners of the pieces of a partition.

        Args:
            inputs: example inputs of the partition.
            gm: its graph, up to date with them.
        """
        return self.partitions(split, self.borders(gm, inputs, split), facts, memory, again=False)

    def borders(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], split: SplitPlan) -> Borders:
        """Those of a split graph; ATen code chooses no strides."""
        return Borders(gm, inputs if self.options.codegen != "aten" else None, split)

    def _source(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        facts: PartitionFacts,
        memory: Memory,
        first: int,
    ) -> Source | None:
        """What it takes to split this partition once more; None if that is never done."""
        worth = facts.safe and facts.device_ops > self.options.min_ops
        if self.options.require_full_capture or not worth:
            return None
        return Source(
            twin(module),
            tuple(inputs),
            memory,
            first,
            compat.tracing(inputs),
            self.options,
            functools.partial(self.again, inputs),
        )

    def _runner(
        self,
        module: torch.fx.GraphModule,
        compiled: Boxed,
        facts: PartitionFacts,
        memory: Memory,
        source: Source | None,
    ) -> Boxed:
        if not facts.safe:
            return UncapturedPartition(facts, compiled)
        runner = PartitionRunner(
            facts,
            compiled,
            self.driver,
            self.options,
            namespaces=compat.generated_namespaces(compiled),
            constants=_constants(module, compiled),
            static=memory.static,
            dimensions=dimensions(module),
            watched=_watched(module, self.options, self.kind, memory.gradients),
        )
        if source is not None:
            Splitter(runner, source, self.account)
        return runner


def compile_partitions(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    kind: Kind,
    compile_partition: CompilePartition,
    broken: Reason | None,
) -> Boxed:
    """Unwrap what draws nothing, cut one ATen graph, compile the partitions, and put a runner around them."""
    driver = choice.choose(options.driver, gm)
    if driver is None or (unwrapped := unwrap(gm)) is None:
        return _compile_partitions(gm, example_inputs, driver, options, kind, compile_partition, broken)
    inputs = unwrapped.inputs(example_inputs)
    run = _compile_partitions(unwrapped.module, inputs, driver, options, kind, compile_partition, broken)
    return unwrapped.around(run)


def _compile_partitions(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    driver: Driver | None,
    options: Options,
    kind: Kind,
    compile_partition: CompilePartition,
    broken: Reason | None,
) -> Boxed:
    count_from_owners(gm)
    partitions, facts = _scan(gm, driver, options, kind, broken if kind != "backward" else None)
    if not partitions:
        return compile_partition(gm, example_inputs, None)
    if options.require_full_capture:
        full_capture.insist(facts)
    for partition in facts:
        verdict = "to be captured" if partition.safe else "stays outside"
        log.info("%s: %d device ops, %s", partition.name, partition.device_ops, verdict)
        for reason in partition.reasons:
            log.info("%s stays outside: %s", partition.name, reason)
    if driver is None:
        compiled = compile_partition(gm, example_inputs, None)
        return compiled if facts[0].safe else compat.boxed(UncapturedPartition(facts[0], compiled))
    if len(partitions) > 1 and options.codegen != "aten":
        bring_up_to_date(gm, example_inputs)
    split = extract(gm, partitions)
    memory = Memory(
        static=compat.static_inputs(gm, kind == "backward"),
        donated=frozenset(compat.donated_inputs() if kind == "backward" else ()),
        gradients=tuple(compat.tangents(gm)) if kind == "backward" else (),
    )
    compiler = _Compiler(driver, options, kind, compile_partition, Account())
    if split.calls[0].module is gm:
        return compat.boxed(compiler.whole(gm, example_inputs, facts[0], memory))
    borders = compiler.borders(gm, example_inputs, split)
    with compat.own_output_strides() as output_strides:
        runners = compiler.partitions(split, borders, facts, memory)
        output_strides += borders.output_strides()
    return compat.boxed(GraphRunner(split, runners))


def _scan(
    gm: torch.fx.GraphModule, driver: Driver | None, options: Options, kind: Kind, broken: Reason | None
) -> tuple[list[Partition], list[PartitionFacts]]:
    """The partitions of a graph, and the facts of each."""
    judged: dict[torch.fx.Node, Reason | None] = {}

    def refuse(node: torch.fx.Node) -> Reason | None:
        if driver is None:
            judged[node] = None if is_neutral(node) else choice.NOT_ON_A_DEVICE
        else:
            judged[node] = refusal(node, device_type=driver.device.type)
        return judged[node]

    partitions = scan(gm.graph, refuse, min_ops=options.min_ops)
    whole = len(partitions) == 1
    graph, causes = graph_facts(
        kind, next(_numbers), gm.graph, partitions, judged, min_ops=options.min_ops, broken=broken
    )
    return partitions, [partition_facts(graph, partition, causes, whole=whole) for partition in partitions]


def _watched(
    module: torch.fx.GraphModule, options: Options, kind: Kind, lazy: Iterable[int]
) -> dict[int, Trait]:
    """Arguments of which layout and address do not say all that the code stands on.

    Note [What nobody guards]
    Dynamo guards the inputs of a forward, lazy bits included, and what a forward saves is as it was traced.
    Not so the gradients that come into a backward: one call's may be a lazy conjugate, the next one's not.
    ATen code stands on more, which Inductor's code freezes by itself, whoever runs it: `as_strided` counts
    from the start of the storage; and hooks on saved tensors may give a backward another type than was saved.
    """
    if options.codegen != "aten":
        return dict.fromkeys(lazy, lazy_bits)
    inputs = sum(node.op == "placeholder" for node in module.graph.nodes)
    ops = {op_name(node.target) for node in module.graph.nodes if isinstance(node.target, OpOverload)}
    if ops & op_names.STORAGE_OFFSETS:
        return dict.fromkeys(range(inputs), storage_facts)
    return dict.fromkeys(range(inputs) if kind == "backward" else lazy, lazy_bits_and_type)


def _constants(module: torch.fx.GraphModule, compiled: Any) -> list[torch.Tensor]:
    """Tensors that the code holds: attributes of the module, constants that Inductor folded."""
    held = [
        getattr(module, n.target, None)
        for n in module.graph.nodes
        if n.op == "get_attr" and "." not in n.target
    ]
    held += list((getattr(compiled, "constants", None) or {}).values())
    return [t for t in held if isinstance(t, torch.Tensor)]
