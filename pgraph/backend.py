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
from pgraph.partition import Call, extract, scan
from pgraph.runner import GraphRunner, PartitionRunner
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


def _compile_inductor(
    options: Options,
    settings: dict[str, Any],
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *unused: Any,
    **kwargs: Any,
) -> Callable[[list[Any]], Any]:
    """Inner compiler for Inductor's front end (2.13 passes more positional arguments than 2.11)."""
    driver = drivers.choose(options.driver, gm)
    whole = functools.partial(compat.compile_graph, gm, example_inputs, settings, **kwargs)
    if driver is None:
        return whole()
    name = _name(kwargs)
    calls = _split(gm, driver, options)
    if not calls.calls:
        return whole()
    static = (
        frozenset(kwargs.get("static_input_idxs") or ()) if not kwargs.get("is_backward") else frozenset()
    )
    if len(calls.calls) == 1:
        compiled = whole()
        call = calls.calls[0]
        namespaces = compat.generated_namespaces(compiled)
        return compat.boxed(_runner(name, call, compiled, driver, options, namespaces, static))
    parts = []
    n_outputs = len(calls.output_slots)
    with compat.own_output_strides(n_outputs):
        for call in calls.calls:
            placeholders = [n for n in call.module.graph.nodes if n.op == "placeholder"]
            slot_of_input = {slot: i for i, slot in enumerate(calls.input_slots)}
            part_static = [i for i, s in enumerate(call.inputs) if slot_of_input.get(s) in static]
            compiled = compat.compile_graph(
                call.module,
                [n.meta["val"] for n in placeholders],
                settings,
                **{**kwargs, "static_input_idxs": part_static},
            )
            parts.append(
                _runner(
                    f"{name}, part {call.part.index}",
                    call,
                    compiled,
                    driver,
                    options,
                    compat.generated_namespaces(compiled),
                    frozenset(part_static),
                )
            )
    return compat.boxed(GraphRunner(calls, parts))


def _aten(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    compile_aten = functools.partial(_compile_aten, options)
    return aot_autograd(
        fw_compiler=functools.partial(compile_aten, {"is_backward": False}),
        bw_compiler=functools.partial(compile_aten, {"is_backward": True}),
        inference_compiler=functools.partial(compile_aten, {"is_inference": True}),
        keep_inference_input_mutations=True,
    )(gm, example_inputs)


def _compile_aten(
    options: Options, kwargs: dict[str, Any], gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[[list[Any]], Any]:
    driver = drivers.choose(options.driver, gm)
    calls = _split(gm, driver, options) if driver is not None else None
    if driver is None or calls is None or not calls.calls:
        return compat.boxed_module(gm)
    name = _name(kwargs)
    parts = [
        _runner(
            f"{name}, part {call.part.index}" if len(calls.calls) > 1 else name,
            call,
            compat.boxed_module(call.module),
            driver,
            options,
            [],
            frozenset(),
        )
        for call in calls.calls
    ]
    return compat.boxed(parts[0] if calls.calls[0].module is gm else GraphRunner(calls, parts))


def _split(gm: torch.fx.GraphModule, driver: Driver, options: Options) -> Any:
    refuse = functools.partial(refusal, device_type=driver.device.type)
    return extract(gm, scan(gm.graph, refuse, min_ops=options.min_ops))


def _runner(
    name: str,
    call: Call,
    compiled: Callable[[list[Any]], Any],
    driver: Driver,
    options: Options,
    namespaces: list[dict[str, Any]],
    static: frozenset[int],
) -> Any:
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
        namespaces=namespaces,
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


def _name(kwargs: Mapping[str, Any]) -> str:
    kind = (
        "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
    )
    return f"{kind} {next(_numbers)}"
