"""Inductor: its front end, its compiler of graphs, and what its code tells of itself."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_origin

import torch
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner, fake_tensor_prop
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized, view_to_reshape
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool, align_inputs_from_check_idxs

from pgraph.compat.tensors import Strides

__all__ = [
    "WRAPPED_MUTATIONS",
    "compile_graph",
    "compile_model",
    "generated_code",
    "generated_namespaces",
    "inductor_mode",
    "output_strides",
    "partition_ops",
    "propagate",
    "returned_strides",
    "unknown_settings",
    "unwrap_mutations",
    "wrong_settings",
]

# Splitting is pgraph's, graphs are pgraph's: Inductor must do neither.
# C++ around the kernels would allocate, and read, where no capture can put ghosts.
_INNER_CONFIG = {"graph_partition": False, "triton.cudagraphs": False, "cpp_wrapper": False}


# A custom op with mutable arguments appears wrapped in one of these; what runs is the wrapped op.
WRAPPED_MUTATIONS = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)


def compile_model(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    settings: dict[str, Any],
    change_joint: Callable[[torch.fx.GraphModule], None],
) -> Callable[..., Any]:
    """Inductor's whole front end (pre-grad and joint passes, AOTAutograd, min-cut), with another
    compiler for the resulting forward, backward and inference graphs.

    AOTAutograd's cache is switched off: an entry that plain Inductor left would be taken for ours.

    Args:
        change_joint: called with each joint or inference graph, after all of Inductor's joint passes.
    """
    chosen = settings.get("joint_custom_post_pass", inductor_config.joint_custom_post_pass)
    after = _AfterJointPasses(chosen, change_joint)
    patches = {**settings, **_INNER_CONFIG, "joint_custom_post_pass": after}
    with torch._functorch.config.patch(enable_autograd_cache=False):
        # Code and weights as one object are for ahead-of-time compilation only: here it is a function.
        compiled: Any = compile_fx(gm, list(inputs), inner_compile=inner_compile, config_patches=patches)
        return compiled


class _AfterJointPasses(CustomGraphPass):
    """The user's own passes (2.13 takes several), then ours."""

    def __init__(self, chosen: Any, ours: Callable[[torch.fx.GraphModule], None]) -> None:
        several = isinstance(chosen, list | tuple)
        self._chosen = list(chosen) if several else [] if chosen is None else [chosen]
        self._ours = ours

    def __call__(self, graph: torch.fx.Graph) -> None:
        for change in self._chosen:
            change(graph)
        if graph.owning_module is not None:
            self._ours(graph.owning_module)

    def uuid(self) -> Any:
        """What Inductor's cache tells it by; None, and nothing is cached, if a pass of the user's has none.

        What ours does shows in the graphs that are compiled, which are in the key.
        """
        known = [isinstance(change, CustomGraphPass) and change.uuid() for change in self._chosen]
        return ["pgraph", *known] if all(known) else None


def compile_graph(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any], **kwargs: Any
) -> Callable[[list[Any]], Any]:
    """Inductor's code for one ATen graph; the result takes one list and empties it."""
    kwargs["cudagraphs"] = BoxedBool(False)
    with inductor_config.patch({**settings, **_INNER_CONFIG}):
        return compile_fx_inner(gm, list(inputs), **kwargs)


def propagate(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Compute ``meta["val"]`` of a graph anew, as Inductor does for inputs that have other strides than were
    traced; 2.13, and in the sources of 2.11.
    """
    view_to_reshape(gm)
    with torch.no_grad():
        fake_tensor_prop(gm, list(inputs))


def output_strides(compiled: Any) -> list[tuple[str, ...] | None] | None:
    """The strides, as text, that Inductor's code gives its results (None for what is no tensor); None if the
    code does not tell; 2.13, and in the sources of 2.11.
    """
    found = getattr(compiled, "output_strides", None)
    if found is None:
        return None
    return [tuple(map(str, strides)) if strides is not None else None for strides in found]


def unknown_settings(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Those that are no settings of Inductor's, with the nearest that is one; 2.13, and in the sources of
    2.11.
    """
    known = inductor_config.get_config_copy() if settings else {}
    unknown = [name for name in settings if name not in known]
    return {
        name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), None) for name in unknown
    }


def wrong_settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Those whose value has another type than Inductor's setting, and that type's name; 2.13.

    As `torch.compile` judges its own options; a text such as ``"False"`` would be true.
    """
    wrong = []
    for name, value in settings.items():
        wanted = inductor_config.get_type(name)  # type: ignore[attr-defined]  # made by its module
        # Of unions no membership is told; None as the only hint tells nothing.
        plain = isinstance(wanted, type) and get_origin(wanted) is None and wanted is not type(None)
        if plain and not isinstance(value, wanted):
            wrong.append((name, wanted.__name__))
    return wrong


def inductor_mode(mode: str | None) -> dict[str, Any]:
    """Inductor settings of a `torch.compile(mode=...)`, less the ones about CUDA graphs.

    Raises:
        RuntimeError: the mode is unknown (the message lists the known ones).
    """
    settings = torch._inductor.list_mode_options(mode) if mode else {}
    return {k: v for k, v in settings.items() if "cudagraph" not in k}


def unwrap_mutations(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Custom ops that write into their arguments, as the clones and calls they stand for; 2.13, and in the
    sources of 2.11.

    Tracing wraps them into a higher-order op, which Inductor takes apart in the same way.

    Returns:
        The nodes that were made, in order.
    """
    before = set(gm.graph.nodes)
    if any(node.target in WRAPPED_MUTATIONS for node in before):
        decompose_auto_functionalized(gm.graph)
        gm.recompile()
    return [node for node in gm.graph.nodes if node not in before]


def returned_strides(compiled: Any, values: Sequence[Any]) -> list[Strides | None] | None:
    """The strides of each of its results, as Inductor says of its code; 2.13, and in the sources of 2.11.

    Args:
        compiled: what `compile_graph` returned.
        values: traced values of the graph: their symbols are those of the strides.

    Returns:
        None for what is no tensor, and where a stride depends on data; None alone where nothing is said.
    """
    told = getattr(compiled, "output_strides", None)
    if told is None:
        return None
    mode = detect_fake_mode(list(values))
    env = mode.shape_env if mode is not None else None
    read: Callable[[str], Any] = int if env is None else env.deserialize_symexpr
    return [None if strides is None else tuple(read(stride) for stride in strides) for strides in told]


def generated_namespaces(compiled: Any) -> list[dict[str, Any]]:
    """Globals of the modules that Inductor generated for `compiled`.

    Generated code allocates through names in its own module; whoever wants to see the allocations
    has to replace them there.
    """
    found: dict[int, dict[str, Any]] = {}
    seen: set[int] = set()
    queue: list[Any] = [compiled, getattr(compiled, "current_callable", None)]
    while queue and len(seen) < 200:
        item = queue.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, functools.partial):
            queue.append(item.func)
        elif isinstance(item, types.MethodType):
            queue += [item.__func__, item.__self__]
        elif isinstance(item, types.FunctionType):
            if "extern_kernels" in item.__globals__ and "empty_strided_cuda" in item.__globals__:
                found[id(item.__globals__)] = item.__globals__
                continue
            queue += [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
            queue.append(getattr(item, "__wrapped__", None))
        else:
            queue.append(getattr(item, "current_callable", None))
    return list(found.values())


def generated_code(compiled: Any) -> types.FunctionType | types.MethodType | None:
    """The function in a generated module that `compiled` runs, and nothing besides, but for copies that it
    makes of misaligned inputs; None if there is no such thing; seen on 2.13 to 2.15.
    """
    if type(compiled) is not CompiledFxGraph:
        return None
    run: Any = compiled.current_callable
    if getattr(run, "__qualname__", "") == f"{align_inputs_from_check_idxs.__name__}.<locals>.run":
        run = inspect.getclosurevars(run).nonlocals["model"]
    function = run.__func__ if isinstance(run, types.MethodType) else run
    generated = isinstance(function, types.FunctionType) and "extern_kernels" in function.__globals__
    return run if generated else None


def partition_ops() -> set[str]:
    """Names (``ns::op`` or ``ns::op.overload``) that Inductor was told to keep out of CUDA graphs."""
    return set(inductor_config.custom_should_partition_ops)


def _filled(cell: Any) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False
