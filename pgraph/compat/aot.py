"""AOTAutograd and the compilation that is under way: what a forward and its backward tell each other."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, detect_fake_mode
from torch.fx.graph import _BoxedCodeGen
from torch.torch_version import TorchVersion

from pgraph.compat.tensors import Strides

__all__ = [
    "Joint",
    "Tracing",
    "aot_autograd",
    "boxed",
    "boxed_module",
    "compiling_again",
    "donated_inputs",
    "donating",
    "eager_backward",
    "fake_mode_of",
    "joint_of",
    "own_output_strides",
    "packed_by_others",
    "partition_joint",
    "saved_results",
    "static_inputs",
    "tangents",
    "tokens",
    "tracing",
]

fake_mode_of = detect_fake_mode


partition_joint = default_partition
"""Cuts a joint graph into forward and backward, as AOTAutograd does if nobody says how; 2.13, and in the
sources of 2.11.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Tracing:
    """What compiling needs of the compilation that is under way, less the user's model.

    Args:
        fake_mode: of the traced values.
        metadata: AOTAutograd's of the forward; None outside of it.
    """

    fake_mode: Any
    metadata: Any


def tracing(inputs: Sequence[Any]) -> Tracing:
    """That of today; 2.13, and in the sources of 2.11.

    Args:
        inputs: example inputs of the graph.
    """
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    metadata = context.fw_metadata if context is not None else None
    return Tracing(mode or detect_fake_mode(list(inputs)), copy.copy(metadata))


@contextlib.contextmanager
def compiling_again(kept: Tracing) -> Iterator[Callable[[], bool]]:
    """Compile part of a graph once more, when its program runs already; 2.13, and in the sources of 2.11.

    One at a time, as Dynamo compiles. The generator's state, autocast and grad mode stay out of it. Inside,
    whoever enters gets a function that tells whether the compiler has assumed more of the sizes than
    Dynamo's guards promise: nobody would check that any more, so its code must not be used.
    """
    context = TracingContext(kept.fake_mode)
    context.fw_metadata = kept.metadata
    env = getattr(kept.fake_mode, "shape_env", None)

    def assumed() -> tuple[int, int]:
        return (env.counter["ignored_backward_guard"], len(env.guards)) if env is not None else (0, 0)

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.convert_frame.compile_lock)
        stack.enter_context(torch._dynamo.utils.preserve_rng_state())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch._guards.tracing(context))
        before = assumed()
        yield lambda: assumed() != before


def boxed_module(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module's forward as a function of one list, which it empties; values die after last use.

    It runs without autocast: the graph says its casts, and whether somebody's `torch.autocast` is in force
    around the backward differs from call to call, while a capture would keep what it found; 2.13, and in the
    sources of 2.11.
    """
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    @functools.wraps(forward)
    def call(args: list[Any]) -> Any:
        with torch._C._DisableAutocast():
            return forward(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A function that AOTAutograd takes for boxed (one list, which it empties).

    A function and not the callable object itself: `torch._dynamo.disable`, which AOTAutograd wraps
    around the backward, copies a function's attributes and drops an object's.
    """

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def own_output_strides() -> Iterator[list[Strides | None]]:
    """Compile several graphs for one: each would report its output strides as the whole's.

    Inductor asserts that nobody reported before. What is reported is what the list holds in the end: the
    strides of each output, None where it is no tensor or where it has those of the trace.
    """
    told: list[Strides | None] = []
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        yield told
        return
    kept, context.output_strides = context.output_strides, None
    try:
        yield told
    finally:
        context.output_strides = kept
    # Before 2.15 Inductor tells the numbers that the symbols stood for when they were traced. Later a
    # backward would be compiled for these numbers alone.
    symbols = context.fakify_first_call or TorchVersion(torch.__version__) >= "2.15"
    number: Callable[[Any], Any] = (lambda n: n) if symbols else _hint
    kept.extend(None if strides is None else tuple(map(number, strides)) for strides in told)


def _hint(number: int | torch.SymInt) -> int:
    return number if isinstance(number, int) else int(number.node.hint)


def static_inputs(gm: torch.fx.GraphModule, is_backward: bool) -> frozenset[int]:
    """Placeholder positions of parameters and buffers: memory that the caller keeps.

    A forward graph's inputs are AOTAutograd's flat arguments; a backward graph names the ones that
    it got from the forward's inputs after them (``primals_1`` is argument 0).
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    static = frozenset(getattr(metadata, "static_input_indices", None) or ())
    if not is_backward:
        return static
    names = {f"primals_{i + 1}" for i in static}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return frozenset(i for i, n in enumerate(placeholders) if n.name in names)


@dataclasses.dataclass(slots=True)
class Joint:
    """What a forward and its backward know of each other.

    Args:
        plain: whether the backward has been compiled, and looks at what was saved by address alone.
        deaths: for each input of the backward, by name, the place of its last use among the graph's nodes.
            What a forward saves has the same name in both graphs.
        small: bytes of a result that may share memory with others.
    """

    plain: bool = False
    deaths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    small: int = 0


def joint_of() -> Joint | None:
    """That of the forward or backward that is being compiled; None outside of it; 2.13, and in the sources of
    2.11. AOTAutograd keeps one object for both, which carries it.
    """
    context = TracingContext.try_get()
    metadata: Any = context.fw_metadata if context is not None else None
    if metadata is None:
        return None
    if not hasattr(metadata, "pgraph_joint"):
        metadata.pgraph_joint = Joint()
    found: Joint = metadata.pgraph_joint
    return found


def saved_results(gm: torch.fx.GraphModule) -> dict[int, str]:
    """Positions of a forward graph's results that are saved for its backward, and their names, which are
    those of the backward's inputs; they may be the program's, too; 2.13, and in the sources of 2.11.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    first = getattr(metadata, "num_forward", None)
    if first is None or getattr(metadata, "tokens", None):
        return {}
    results: list[Any] = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    return {
        i: value.name for i, value in enumerate(results) if i >= first and isinstance(value, torch.fx.Node)
    }


def parameter_gradients(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Positions of a backward graph's results that are gradients of parameters, or of what else the caller
    keeps; 2.13, and in the sources of 2.11.

    There is a result for each of the forward's inputs. With what else a backward may return (the effects of
    ordered ops, say) there are more: then none is told.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    results: Any = gm.graph.output_node().args[0]
    if metadata is None or len(results) != len(metadata.input_info):
        return frozenset()
    return frozenset(i for i in metadata.static_input_indices if isinstance(results[i], torch.fx.Node))


def packed_by_others() -> bool:
    """Whether hooks get what autograd saves now, and they are not PyTorch's own; 2.11, 2.13.

    Checkpointing drops what it gets, and `save_on_cpu` copies it.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not (getattr(hooks[0], "__module__", None) or "").startswith("torch.")


def donated_inputs() -> tuple[int, ...]:
    """Positions of the backward graph's inputs that only it has, so that its code may overwrite them."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return tuple(getattr(metadata, "bw_donated_idxs", None) or ())


@contextlib.contextmanager
def donating(positions: Sequence[int]) -> Iterator[None]:
    """Compile a part of a backward graph, of whose inputs those at `positions` may be overwritten.

    Note [Donated by position]
    Inductor takes the whole graph's positions for any graph that it compiles for the backward: in a
    partition, where they belong to other tensors, its code would write into a parameter or a user's input.
    Its cache does not look at them at all, so they go into the key.
    """
    if not donated_inputs():
        yield
        return
    metadata: Any = TracingContext.get().fw_metadata
    kept, metadata.bw_donated_idxs = metadata.bw_donated_idxs, list(positions)
    tag = f"{torch.compiler.config.cache_key_tag} donated {list(positions)}"
    try:
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            yield
    finally:
        metadata.bw_donated_idxs = kept


def eager_backward() -> contextlib.AbstractContextManager[Any]:
    """Have AOTAutograd compile a backward together with its forward, and not when it first runs."""
    return torch._functorch.config.patch(force_non_lazy_backward_lowering=True)


def tokens() -> int:
    """How many of the results of the graph that is compiled, the first ones, are tokens of ordered effects;
    none where Inductor's front end has them made within the graph; 2.13, 2.15.
    """
    context = TracingContext.try_get()
    return len(getattr(context.fw_metadata if context is not None else None, "tokens", None) or ())


def tangents(gm: torch.fx.GraphModule) -> list[int]:
    """Positions of a backward graph's inputs that are gradients, told by name (``tangents_1``) as torch's own
    partitioner does. All positions, if it has none by that name; 2.13, and in the sources of 2.11.
    """
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    found = [i for i, name in enumerate(names) if "tangents" in name]
    return found or list(range(len(names)))
