"""The `torch.compile` backend: Dynamo graph in, runners out.

1. Inductor's front end (`codegen="inductor"`) or AOTAutograd alone (`"aten"`) makes forward,
   backward and inference ATen graphs.
2. `pgraph.safety` judges each node, `pgraph.partition` cuts the graph into contiguous parts.
3. Each part is compiled on its own; a safe one gets a `PartitionRunner`, an unsafe one runs as it is.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

from pgraph import compat, drivers, stats
from pgraph.drivers.base import Driver
from pgraph.options import Options, parse
from pgraph.partition import Call, SplitPlan, extract, scan
from pgraph.runner import Boxed, GraphRunner, PartitionRunner
from pgraph.safety import refusal

__all__ = ["Backend", "backend"]

log = logging.getLogger(__name__)

_numbers = itertools.count()


class Backend:
    """`torch.compile(..., backend="pgraph")`.

    Raises:
        OptionError: an option is unknown or ill-typed.
        RuntimeError: `mode` is not one of torch.compile's.
    """

    compiler_name = "pgraph"

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        chosen = parse(options)
        settings = {**compat.inductor_mode(mode), **chosen.inductor}
        if chosen.codegen == "aten":
            return _aten(gm, example_inputs, chosen)
        compiler = functools.partial(_compile_inductor, chosen, settings)
        return compat.compile_model(gm, example_inputs, compiler, settings)

    def reset(self) -> None:
        """Free everything captured; also called by `torch._dynamo.reset()`."""
        reset()


def reset() -> None:
    """Free every capture, exec and driver resource. Compiled code stays usable and captures anew."""
    for partition in stats.live_partitions():
        partition.reset()
    stats.forget()
    drivers.close_all()


backend = Backend()


# -- one ATen graph ------------------------------------------------------------------------------

# (module, its example inputs, positions of inputs that never move or None to leave that as it is) -> code.
_CompilePart = Callable[[torch.fx.GraphModule, Sequence[Any], Sequence[int] | None], Boxed]


def _compile_inductor(
    options: Options,
    settings: dict[str, Any],
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

    kind = (
        "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
    )
    return _compile(gm, example_inputs, options, kind, compile_part)


def _aten(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    def compiler(kind: str) -> Callable[..., Boxed]:
        return lambda graph, inputs: _compile(graph, inputs, options, kind, _compile_aten)

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
    kind: str,
    compile_part: _CompilePart,
) -> Boxed:
    """Cut one ATen graph, compile the parts, and put a runner around them."""
    driver = drivers.choose(options.driver, gm)
    split = _split(gm, driver, options) if driver is not None else None
    if driver is None or split is None or not split.calls:
        return compile_part(gm, example_inputs, None)
    name = f"{kind} {next(_numbers)}"
    static = compat.static_inputs(gm, kind == "backward")
    if split.calls[0].module is gm:
        return compat.boxed(
            _runner(name, split.calls[0], compile_part(gm, example_inputs, None), driver, options, static)
        )
    position_of = {slot: i for i, slot in enumerate(split.input_slots)}
    parts = []
    with compat.own_output_strides(len(split.output_slots)):
        for call in split.calls:
            inputs = [n.meta["val"] for n in call.module.graph.nodes if n.op == "placeholder"]
            fixed = [i for i, slot in enumerate(call.inputs) if position_of.get(slot) in static]
            compiled = compile_part(call.module, inputs, fixed)
            part_name = f"{name}, part {call.part.index}"
            parts.append(_runner(part_name, call, compiled, driver, options, frozenset(fixed)))
    return compat.boxed(GraphRunner(split, parts))


def _split(gm: torch.fx.GraphModule, driver: Driver, options: Options) -> SplitPlan:
    refuse = functools.partial(refusal, device_type=driver.device.type)
    return extract(gm, scan(gm.graph, refuse, min_ops=options.min_ops))


def _runner(
    name: str, call: Call, compiled: Boxed, driver: Driver, options: Options, static: frozenset[int]
) -> Boxed:
    if not call.part.safe:
        stats.note_plain(name, call.part.reasons)
        for reason in call.part.reasons:
            log.info("%s stays outside: %s", name, reason)
        return compiled
    return PartitionRunner(
        name,
        compiled,
        driver,
        options,
        namespaces=compat.generated_namespaces(compiled),
        constants=_constants(call.module, compiled),
        static=static,
    )


def _constants(module: torch.fx.GraphModule, compiled: Any) -> list[torch.Tensor]:
    """Tensors that the code holds: attributes of the module, constants that Inductor folded."""
    held = [
        getattr(module, n.target, None)
        for n in module.graph.nodes
        if n.op == "get_attr" and "." not in n.target
    ]
    held += list((getattr(compiled, "constants", None) or {}).values())
    return [t for t in held if isinstance(t, torch.Tensor)]
