"""The `torch.compile` backend: Dynamo graph in, runners out.

Inductor's front end (`codegen="inductor"`) or AOTAutograd alone (`"aten"`) makes forward, backward and
inference ATen graphs; on the way, `pgraph.rewrites.constants` gives the device what was made for it on the
CPU out of nothing. `pgraph.compiler.compile_graph` turns each graph into runners.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pgraph import compat
from pgraph.compiler import skipped
from pgraph.compiler.compile_graph import compile_partitions
from pgraph.compiler.context import Context, Origin
from pgraph.compiler.graph_breaks import break_of
from pgraph.drivers import choice
from pgraph.errors import FullCaptureError, OptionError
from pgraph.options import Options, parse
from pgraph.partition.facts import Kind
from pgraph.rewrites import constants
from pgraph.rewrites.storage_owners import clone_from_own_start
from pgraph.runtime import ahead, full_capture, functions, progress, registry
from pgraph.runtime.protocols import Boxed

__all__ = ["Backend", "backend"]

log = logging.getLogger(__name__)


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
        name: str | None = None,
    ) -> Callable[..., Any]:
        functions.graph_arrived()
        _tell_of_version()
        chosen = parse(options)
        _check_inductor(chosen)
        settings = {**compat.inductor_mode(mode), **chosen.inductor}
        broken = break_of(gm)
        parameter = next((x for x in example_inputs if isinstance(x, torch.nn.Parameter)), None)
        module = compat.module_with(parameter) if parameter is not None else None
        model = weakref.ref(module) if module is not None else lambda: None
        del module
        if not chosen.require_full_capture:
            return _build(gm, example_inputs, chosen, settings, Origin(broken, model))
        try:
            if broken is not None:
                full_capture.refuse("what follows the graph break", broken)
            with compat.eager_backward():
                return _build(gm, example_inputs, chosen, settings, Origin(None, model))
        except FullCaptureError as e:
            return full_capture.raising(e)

    def reset(self) -> None:
        """Free everything captured; also called by `torch._dynamo.reset()`."""
        reset()


def reset() -> None:
    """Free every capture and exec. Compiled code stays usable and captures anew."""
    for partition in registry.live_capturable():
        partition.reset()
    ahead.OF_THE_PROCESS.reset()
    progress.close()


backend = Backend()
skipped.listen(lambda other: isinstance(other, Backend))


@functools.cache
def _tell_of_version() -> None:
    """Once per process."""
    if told := compat.untested():
        log.warning("%s", told)


def _check_inductor(chosen: Options) -> None:
    """Refuse settings that Inductor does not have or would misread; say where it is not asked at all."""
    if unknown := compat.unknown_settings(chosen.inductor):
        (name, near), *_ = unknown.items()
        meant = f"did you mean {near!r}? " if near is not None else ""
        raise OptionError(
            f"pgraph option 'inductor' sets {name!r}, which Inductor of torch {torch.__version__} "
            f"does not have. Fix: {meant}torch._inductor.list_options() lists what it has"
        )
    if wrong := compat.wrong_settings(chosen.inductor):
        name, wanted = wrong[0]
        raise OptionError(
            f"pgraph option 'inductor' sets {name!r} to {chosen.inductor[name]!r}; "
            f"it must be of type {wanted}"
        )
    if chosen.inductor and chosen.codegen == "aten":
        _tell_of_unused(tuple(chosen.inductor))


@functools.cache
def _tell_of_unused(settings: tuple[str, ...]) -> None:
    """Once per process. No error: PGRAPH_CODEGEN=aten is how to ask whether Inductor's code is at fault."""
    log.warning(
        "pgraph option 'inductor' sets %s, which changes nothing: with codegen='aten' Inductor makes no "
        "code. Fix: leave out one of the two options",
        ", ".join(map(repr, settings)),
    )


# -- one ATen graph ------------------------------------------------------------------------------


def _build(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    settings: dict[str, Any],
    origin: Origin,
) -> Callable[..., Any]:
    if options.codegen == "aten":
        return _aten(gm, example_inputs, options, origin)
    compiler = functools.partial(_compile_inductor, options, settings, origin)
    return compat.compile_model(gm, example_inputs, compiler, settings, constants.on_device)


def _compile_inductor(
    options: Options,
    settings: dict[str, Any],
    origin: Origin,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *unused: Any,
    **kwargs: Any,
) -> Boxed:
    """Inner compiler for Inductor's front end (2.13 passes more positional arguments than 2.11)."""

    def compile_partition(
        module: torch.fx.GraphModule, inputs: Sequence[Any], fixed: Sequence[int] | None
    ) -> Boxed:
        changed = {} if fixed is None else {"static_input_idxs": fixed}
        return compat.compile_graph(module, inputs, settings, **{**kwargs, **changed})

    kind: Kind = (
        "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
    )
    driver, joint = choice.choose(options.driver, gm), compat.joint_of()
    return compile_partitions(
        gm, example_inputs, Context(driver, options, kind, compile_partition, origin, joint)
    )


def _aten(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, origin: Origin
) -> Callable[..., Any]:
    def compiler(kind: Kind) -> Callable[..., Boxed]:
        def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            clone_from_own_start(graph, compat.unwrap_mutations(graph))
            if kind == "inference":
                constants.on_device(graph, by_inductor=False)
            driver = choice.choose(options.driver, graph)
            return compile_partitions(graph, inputs, Context(driver, options, kind, _compile_aten, origin))

        return compile_graph

    return compat.aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=_partition,
        keep_inference_input_mutations=True,
    )(gm, example_inputs)


def _partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A training graph as forward and backward, with nothing saved on the CPU that depends on nothing."""
    constants.on_device(joint, by_inductor=False)
    return compat.partition_joint(joint, *args, **kwargs)


def _compile_aten(module: torch.fx.GraphModule, inputs: Sequence[Any], fixed: Sequence[int] | None) -> Boxed:
    return compat.boxed_module(module)
