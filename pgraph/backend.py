"""The `torch.compile` backend: Dynamo graph in, runners out.

1. Inductor's front end (`codegen="inductor"`) or AOTAutograd alone (`"aten"`) makes forward,
   backward and inference ATen graphs.
2. `pgraph.seedless` frees ops that draw nothing from the generator's states that are kept for them,
   `pgraph.safety` judges each node, `pgraph.partition` cuts the graph into contiguous parts.
3. Each part is compiled on its own; a safe one gets a `PartitionRunner`, an unsafe one runs as it is.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload

from pgraph import compat, drivers, optable, stats, strict
from pgraph.borders import Borders, CompilePart, bring_up_to_date
from pgraph.breaks import break_of
from pgraph.drivers.base import Driver
from pgraph.errors import FullCaptureError, OptionError
from pgraph.facts import Kind, PartFacts, graph_facts, part_facts
from pgraph.graph_runner import GraphRunner
from pgraph.nodes import is_neutral, op_name
from pgraph.observe import PlainPart
from pgraph.options import Options, parse
from pgraph.partition import Call, Part, extract, scan
from pgraph.reasons import Reason
from pgraph.runner import Boxed, PartitionRunner
from pgraph.safety import refusal
from pgraph.seedless import unwrap
from pgraph.sizes import dimensions
from pgraph.storage import count_from_owners
from pgraph.variant import Trait, all_that_ops_see, lazy_bits, lazy_bits_and_type

__all__ = ["Backend", "backend"]

log = logging.getLogger(__name__)

_numbers = itertools.count()


class Backend:
    """`torch.compile(..., backend="pgraph")`.

    Raises:
        OptionError: an option is unknown or ill-typed. torch wraps it into its `BackendCompilerFailed`.
        RuntimeError: `mode` is not one of torch.compile's.
    """

    compiler_name = "pgraph"

    def __repr__(self) -> str:
        return "pgraph"

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        chosen = parse(options)
        if unknown := compat.unknown_settings(chosen.inductor):
            raise OptionError(
                f"pgraph option 'inductor' sets {unknown[0]!r}, which Inductor of torch {torch.__version__} "
                "does not have. Fix: torch._inductor.list_options() lists what it has"
            )
        settings = {**compat.inductor_mode(mode), **chosen.inductor}
        broken = break_of(gm)
        if not chosen.require_full_capture:
            return _build(gm, example_inputs, chosen, settings, broken)
        try:
            if broken is not None:
                strict.refuse("what follows the graph break", broken)
            with compat.eager_backward():
                return _build(gm, example_inputs, chosen, settings, None)
        except FullCaptureError as e:
            return strict.raising(e)

    def reset(self) -> None:
        """Free everything captured; also called by `torch._dynamo.reset()`."""
        reset()


def reset() -> None:
    """Free every capture, exec and driver resource. Compiled code stays usable and captures anew."""
    for partition in stats.live_partitions():
        partition.reset()
    drivers.close_all()


backend = Backend()


# -- one ATen graph ------------------------------------------------------------------------------


def _build(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    settings: dict[str, Any],
    broken: Reason | None,
) -> Callable[..., Any]:
    if options.codegen == "aten":
        return _aten(gm, example_inputs, options, broken)
    compiler = functools.partial(_compile_inductor, options, settings, broken)
    return compat.compile_model(gm, example_inputs, compiler, settings)


def _compile_inductor(
    options: Options,
    settings: dict[str, Any],
    broken: Reason | None,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *unused: Any,
    **kwargs: Any,
) -> Boxed:
    """Inner compiler for Inductor's front end (2.13 passes more positional arguments than 2.11)."""

    def compile_part(
        module: torch.fx.GraphModule, inputs: Sequence[Any], fixed: Sequence[int] | None
    ) -> Boxed:
        changed = {} if fixed is None else {"static_input_idxs": fixed}
        return compat.compile_graph(module, inputs, settings, **{**kwargs, **changed})

    kind: Kind = (
        "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
    )
    return _compile(gm, example_inputs, options, kind, compile_part, broken)


def _aten(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, broken: Reason | None
) -> Callable[..., Any]:
    def compiler(kind: Kind) -> Callable[..., Boxed]:
        def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            compat.unwrap_mutations(graph)
            return _compile(graph, inputs, options, kind, _compile_aten, broken)

        return compile_graph

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        keep_inference_input_mutations=True,
    )(gm, example_inputs)


def _compile_aten(module: torch.fx.GraphModule, inputs: Sequence[Any], fixed: Sequence[int] | None) -> Boxed:
    return compat.boxed_module(module)


def _compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    kind: Kind,
    compile_part: CompilePart,
    broken: Reason | None,
) -> Boxed:
    """Unwrap what draws nothing, cut one ATen graph, compile the parts, and put a runner around them."""
    driver = drivers.choose(options.driver, gm)
    if driver is None or (unwrapped := unwrap(gm)) is None:
        return _compile_parts(gm, example_inputs, driver, options, kind, compile_part, broken)
    inputs = unwrapped.inputs(example_inputs)
    run = _compile_parts(unwrapped.module, inputs, driver, options, kind, compile_part, broken)
    return unwrapped.around(run)


def _compile_parts(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    driver: Driver | None,
    options: Options,
    kind: Kind,
    compile_part: CompilePart,
    broken: Reason | None,
) -> Boxed:
    count_from_owners(gm)
    parts, facts = _scan(gm, driver, options, kind, broken if kind != "backward" else None)
    if not parts:
        return compile_part(gm, example_inputs, None)
    if options.require_full_capture:
        strict.insist(facts)
    for part in facts:
        verdict = "to be captured" if part.safe else "stays outside"
        log.info("%s: %d device ops, %s", part.name, part.device_ops, verdict)
        for reason in part.reasons:
            log.info("%s stays outside: %s", part.name, reason)
    if driver is None:
        compiled = compile_part(gm, example_inputs, None)
        return compiled if facts[0].safe else compat.boxed(PlainPart(facts[0], compiled))
    chosen_strides = options.codegen != "aten"
    if len(parts) > 1 and chosen_strides:
        bring_up_to_date(gm, example_inputs)
    split = extract(gm, parts)
    static = compat.static_inputs(gm, kind == "backward")
    gradients = compat.tangents(gm) if kind == "backward" else ()
    if split.calls[0].module is gm:
        compiled = compile_part(gm, example_inputs, None)
        watched = _watched(gm, options, kind, gradients)
        return compat.boxed(_runner(facts[0], split.calls[0], compiled, driver, options, static, watched))
    position_of = {slot: i for i, slot in enumerate(split.input_slots)}
    donated = frozenset(compat.donated_inputs() if kind == "backward" else ())
    # One part alone reads it, so that no other has it or a view of it.
    reads = Counter(itertools.chain(split.output_slots, *(call.inputs for call in split.calls)))
    # `None` stands for what an earlier part made: of a gradient, perhaps. What was saved is as it was traced.
    unsteady = {None, *gradients} if gradients else set()
    runners = []
    borders = Borders(gm, example_inputs if chosen_strides else None, split)
    with compat.own_output_strides() as output_strides:
        for call, part in zip(split.calls, facts, strict=True):
            fixed = [i for i, slot in enumerate(call.inputs) if position_of.get(slot) in static]
            own = [i for i, slot in enumerate(call.inputs) if position_of.get(slot) in donated]
            with compat.donating([i for i in own if reads[call.inputs[i]] == 1]):
                compiled = borders.compile(call, compile_part, fixed)
            lazy = [i for i, slot in enumerate(call.inputs) if position_of.get(slot) in unsteady]
            watched = _watched(call.module, options, kind, lazy)
            runners.append(_runner(part, call, compiled, driver, options, frozenset(fixed), watched))
        output_strides += borders.output_strides()
    return compat.boxed(GraphRunner(split, runners))


def _scan(
    gm: torch.fx.GraphModule, driver: Driver | None, options: Options, kind: Kind, broken: Reason | None
) -> tuple[list[Part], list[PartFacts]]:
    """The parts of a graph, and the facts of each."""
    judged: dict[torch.fx.Node, Reason | None] = {}

    def refuse(node: torch.fx.Node) -> Reason | None:
        if driver is None:
            judged[node] = None if is_neutral(node) else drivers.NOT_ON_A_DEVICE
        else:
            judged[node] = refusal(node, device_type=driver.device.type)
        return judged[node]

    parts = scan(gm.graph, refuse, min_ops=options.min_ops)
    whole = len(parts) == 1
    graph, causes = graph_facts(
        kind, next(_numbers), gm.graph, parts, judged, min_ops=options.min_ops, broken=broken
    )
    return parts, [part_facts(graph, part, causes, whole=whole) for part in parts]


def _runner(
    facts: PartFacts,
    call: Call,
    compiled: Boxed,
    driver: Driver,
    options: Options,
    static: frozenset[int],
    watched: Mapping[int, Trait],
) -> Boxed:
    if not facts.safe:
        return PlainPart(facts, compiled)
    return PartitionRunner(
        facts,
        compiled,
        driver,
        options,
        namespaces=compat.generated_namespaces(compiled),
        constants=_constants(call.module, compiled),
        static=static,
        dimensions=dimensions(call.module),
        watched=watched,
    )


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
    if ops & optable.STORAGE_OFFSETS:
        return dict.fromkeys(range(inputs), all_that_ops_see)
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
