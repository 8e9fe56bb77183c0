"""Every private PyTorch interface that pgraph uses above the drivers, in one place.

Each was seen working on torch 2.11.0 (cu130) and 2.13.0 (CPU), but where it says that it was only found in
the sources of 2.11; `tests/test_compat.py` has a test for each, and `tests/test_compat_strides.py`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import logging
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
import torch.autograd.profiler as _profiler
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner, fake_tensor_prop
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized, view_to_reshape
from torch._inductor.utils import BoxedBool
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.graph import _BoxedCodeGen

__all__ = [
    "WRAPPED_MUTATIONS",
    "Strides",
    "assert_size_stride",
    "boxed",
    "boxed_module",
    "compile_graph",
    "compile_model",
    "compiling_again",
    "donated_inputs",
    "donating",
    "eager_backward",
    "evaluate",
    "fake_mode_of",
    "forward_mode",
    "generated_namespaces",
    "graph_break",
    "hearing_graph_breaks",
    "inductor_mode",
    "intercepted",
    "is_compiled",
    "lazily",
    "output_strides",
    "own_output_strides",
    "partition_joint",
    "partition_ops",
    "plain_symbol",
    "profiling",
    "propagate",
    "real_values",
    "reinterpret",
    "restrided",
    "returned_strides",
    "same_counter",
    "same_number",
    "static_inputs",
    "symbol_source",
    "tangents",
    "tensor_layout",
    "tensor_shims",
    "traced_function",
    "tracing",
    "unknown_settings",
    "unwrap_mutations",
]

Strides = tuple[int | torch.SymInt, ...]

assert_size_stride: Callable[..., None] = torch._C._dynamo.guards.assert_size_stride
"""(tensor, size, stride): AssertionError if they differ; 2.11, 2.13."""

# Not in the stub of the module.
reinterpret: Callable[..., torch.Tensor] = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""(tensor, size, stride, offset increment in elements): a view, as Inductor makes them; 2.11, 2.13."""

fake_mode_of = detect_fake_mode

partition_joint = default_partition
"""Cuts a joint graph into forward and backward, as AOTAutograd does if nobody says how; 2.13, and in the
sources of 2.11.
"""

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Not in the stub of the module.
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]


def lazily(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """A view with the bits of a lazy conjugate and a lazy negative set; 2.11, 2.13.

    Note [Lazy conjugates]
    `x.conj()` computes nothing: it is a view with a bit, and so is the imaginary part of one, with another
    bit. Neither shows in size, stride, type or address, and whoever rebuilds a tensor from those must set
    them again, or numbers come out conjugated or with the wrong sign.
    """
    if conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if neg else tensor


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


def unknown_settings(settings: Mapping[str, Any]) -> list[str]:
    """Those that are no settings of Inductor's; 2.13, and in the sources of 2.11."""
    known = inductor_config.get_config_copy() if settings else {}
    return [name for name in settings if name not in known]


def inductor_mode(mode: str | None) -> dict[str, Any]:
    """Inductor settings of a `torch.compile(mode=...)`, less the ones about CUDA graphs.

    Raises:
        RuntimeError: the mode is unknown (the message lists the known ones).
    """
    settings = torch._inductor.list_mode_options(mode) if mode else {}
    return {k: v for k, v in settings.items() if "cudagraph" not in k}


def unwrap_mutations(gm: torch.fx.GraphModule) -> None:
    """Custom ops that write into their arguments, as the clones and calls they stand for; 2.13, and in the
    sources of 2.11.

    Tracing wraps them into a higher-order op, which Inductor takes apart in the same way.
    """
    if any(node.target in WRAPPED_MUTATIONS for node in gm.graph.nodes):
        decompose_auto_functionalized(gm.graph)
        gm.recompile()


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
    # Inductor, too, tells the numbers that the symbols stood for when they were traced.
    number: Callable[[Any], Any] = (lambda n: n) if context.fakify_first_call else _hint
    kept.extend(None if strides is None else tuple(map(number, strides)) for strides in told)


def _hint(number: int | torch.SymInt) -> int:
    return number if isinstance(number, int) else int(number.node.hint)


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


def same_number(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes or strides are equal for certain; asks without adding a guard."""
    return bool(statically_known_true(a == b))


def restrided(value: torch.Tensor, strides: Strides) -> torch.Tensor:
    """A traced value with other strides, as AOTAutograd makes them of those that a forward reported."""
    with torch.no_grad():
        return value.as_strided(value.size(), strides)


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


def donated_inputs() -> tuple[int, ...]:
    """Positions of the backward graph's inputs that only it has, so that its code may overwrite them."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return tuple(getattr(metadata, "bw_donated_idxs", None) or ())


@contextlib.contextmanager
def donating(positions: Sequence[int]) -> Iterator[None]:
    """Compile a part of a backward graph, of whose inputs those at `positions` may be overwritten.

    Note [Donated by position]
    Inductor takes the whole graph's positions for any graph that it compiles for the backward: in a part,
    where they belong to other tensors, its code would write into a parameter or a user's input. Its cache
    does not look at them at all, so they go into the key.
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


def graph_break(gm: torch.fx.GraphModule) -> tuple[str, Sequence[Any]] | None:
    """(Dynamo's text, the user's frames, innermost last) if a graph ends before its function does."""
    found = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    return str(found.reason), tuple(found.user_stack)


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextlib.contextmanager
def hearing_graph_breaks() -> Iterator[list[str]]:
    """Dynamo's messages about graph breaks (as with ``TORCH_LOGS=graph_breaks``), collected in a list.

    Only these tell of breaks that leave no graph behind: a break in a loop skips the whole function.
    """
    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    before = logger.level, logger.propagate
    listener = _Listener()
    if not logger.isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    logger.addHandler(listener)
    try:
        yield listener.heard
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def is_compiled(fn: Any) -> bool:
    """Whether torch.compile made it, or compiled it in place (``module.compile()``)."""
    if isinstance(fn, torch._dynamo.eval_frame.OptimizedModule) or hasattr(fn, "_torchdynamo_orig_callable"):
        return True
    return isinstance(fn, torch.nn.Module) and fn._compiled_call_impl is not None


def plain_symbol(size: torch.SymInt) -> str | None:
    """The name of a symbolic number that is a symbol itself, not an expression of others."""
    expression = size.node.expr
    return str(expression) if expression.is_symbol else None


def evaluate(size: torch.SymInt, numbers: Mapping[str, int]) -> int | None:
    """A symbolic number where its symbols have these values; None if one of them has none; 2.11, 2.13."""
    expression = size.node.expr
    known = {symbol: numbers.get(str(symbol)) for symbol in expression.free_symbols}
    return None if None in known.values() else int(expression.subs(known))


def symbol_source(size: torch.SymInt) -> str | None:
    """Where Dynamo found a symbol, e.g. ``L['x'].size()[0]``."""
    env: Any = size.node.shape_env
    sources = env.var_to_sources.get(size.node.expr) or (None,)
    source = sources[0]
    if source is None:
        return None
    name = source.name
    return str(name() if callable(name) else name)


def tangents(gm: torch.fx.GraphModule) -> list[int]:
    """Positions of a backward graph's inputs that are gradients, told by name (``tangents_1``) as torch's own
    partitioner does. All positions, if it has none by that name; 2.13, and in the sources of 2.11.
    """
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    found = [i for i, name in enumerate(names) if "tangents" in name]
    return found or list(range(len(names)))


@functools.cache
def tensor_shims() -> tuple[Callable[[list[torch.Tensor]], list[Any]], tuple[Any, ...]] | None:
    """How C code reads tensors: the interface that Inductor's ahead-of-time compiled code stands on.

    Returns:
        (tensors -> capsules with a new handle each; C functions that take a handle: dimensions, sizes,
        strides, first address, and the one that deletes it), or None where this torch lacks one.
    """
    library = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    names = ("get_dim", "get_sizes", "get_strides", "get_data_ptr", "delete_tensor_object")
    try:
        shims = ctypes.CDLL(str(library))
        return torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors, tuple(
            getattr(shims, f"aoti_torch_{name}") for name in names
        )
    except (OSError, AttributeError):
        return None


@functools.cache
def tensor_layout() -> tuple[int, int]:
    """Where a tensor's Python object holds the C++ tensor (Note [Handles in place] in `pgraph_call.c`).

    Found by looking for the pointer to the implementation, which a handle of the shims begins with, in
    objects of several kinds.

    Returns:
        (offset in bytes, address of the class's table of functions, with which an implementation begins);
        (0, 0) where the objects do not agree on one offset and one class.
    """
    shims = tensor_shims()
    if shims is None:
        return 0, 0
    handles_of, (*_, delete) = shims
    pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    base = torch.empty(3)
    kinds = (base, base[1:], torch.nn.Parameter(base), torch.empty(3, requires_grad=True) * 2)
    found = set()
    for tensor in kinds:
        handle = ctypes.c_void_p(pointer_in(handles_of([tensor])[0], None))
        implementation = ctypes.c_void_p.from_address(handle.value or 0).value
        delete(handle)
        words = (ctypes.c_void_p * (torch.Tensor.__basicsize__ // 8)).from_address(id(tensor))
        offsets = [8 * i for i, word in enumerate(words) if word == implementation]
        if len(offsets) != 1 or implementation is None:
            return 0, 0
        found.add((offsets[0], int(ctypes.c_uint64.from_address(implementation).value)))
    return found.pop() if len(found) == 1 else (0, 0)


def partition_ops() -> set[str]:
    """Names (``ns::op`` or ``ns::op.overload``) that Inductor was told to keep out of CUDA graphs."""
    return set(inductor_config.custom_should_partition_ops)


def forward_mode() -> bool:
    """Whether derivatives are carried forward; 2.13, and in the sources of 2.11."""
    return _forward_ad._current_level >= 0


def intercepted() -> bool:
    """Whether this thread's ops go to somebody else first: dispatch modes, vmap and its like; 2.11, 2.13."""
    return _dispatch_modes() > 0 or _transforms() is not None


def same_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a change of one tensor in place counts as one of the other; 2.11, 2.13."""
    if a.is_inference() or b.is_inference():
        return False  # they have none
    before = a._version, b._version
    try:
        torch._C._autograd._unsafe_set_version_counter((a,), (before[0] + 1,))
        return bool(b._version != before[1])
    finally:
        torch._C._autograd._unsafe_set_version_counter((a,), (before[0],))


@contextlib.contextmanager
def real_values() -> Iterator[None]:
    """Compute with tensors as they are, in the midst of a compilation: nothing is faked, traced, cast or
    recorded, and what is made can be used anywhere; 2.13, and in the sources of 2.11.
    """
    with (
        torch.utils._python_dispatch._disable_current_modes(),
        torch._C._DisableAutocast(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


def profiling() -> bool:
    """Whether a profiler listens, in whatever thread it was started."""
    return _profiler._is_profiler_enabled


def traced_function() -> str | None:
    """Name of the function that Dynamo compiles, e.g. ``Block.forward``; None outside a compilation.

    Before Python 3.11 code knows no class, and it is ``forward``.
    """
    context = TracingContext.try_get()
    code = context.traced_code[0] if context is not None and context.traced_code else None
    return getattr(code, "co_qualname", code.co_name) if code is not None else None


def _filled(cell: Any) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False
