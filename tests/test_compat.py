"""Each private PyTorch interface that pgraph uses, one test each.

Seen working on torch 2.11.0 (cu130) and 2.13.0 (CPU). A failure here after an upgrade of torch names
what has changed.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import sys
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import get_donated_idxs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pgraph import compat

aten = torch.ops.aten


def traced(n: int = 4) -> torch.fx.GraphModule:
    """An ATen graph of fake tensors, as AOTAutograd would hand it over."""
    return make_fx(lambda x: (x.sin() + 1, x.cos()), tracing_mode="fake")(torch.randn(n))


def test_assert_size_stride() -> None:
    """AssertionError for another size or stride; None for the same."""
    x = torch.randn(2, 3)
    assert compat.assert_size_stride(x, (2, 3), (3, 1)) in (None, True)
    for size, stride in (((3, 2), (2, 1)), ((2, 3), (1, 2)), ((2, 3, 1), (3, 1, 1))):
        with pytest.raises(AssertionError):
            compat.assert_size_stride(x, size, stride)


def test_reinterpret_tensor() -> None:
    """A view in the same storage; the offset counts in elements from the tensor's own start."""
    x = torch.arange(12.0)[2:]
    view = compat.reinterpret(x, (2, 2), (4, 1), 3)
    assert view.storage_offset() == 5
    assert view.tolist() == [[5.0, 6.0], [9.0, 10.0]]
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_lazy_bits() -> None:
    """A conjugate and a negative are views with a bit, which can be set and is seen by every op."""
    x = torch.tensor([1 + 2j, 3 - 4j])
    turned = compat.lazily(x, conj=True, neg=False)
    assert turned.is_conj()
    assert turned.data_ptr() == x.data_ptr()
    assert (turned + 0).tolist() == [1 - 2j, 3 + 4j]
    negative = compat.lazily(x.real, conj=False, neg=True)
    assert negative.is_neg()
    assert (negative + 0).tolist() == [-1.0, -3.0]
    assert compat.lazily(x, conj=False, neg=False) is x


def test_detect_fake_mode() -> None:
    with FakeTensorMode() as mode:
        assert compat.fake_mode_of([torch.empty(2)]) is mode
    assert compat.fake_mode_of([torch.empty(2)]) is None


def test_numbers_for_symbols() -> None:
    gm = make_fx(lambda x: x.reshape(-1, 2), tracing_mode="symbolic")(torch.randn(6, 5, 2))
    x = next(n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder")
    rows, columns = (compat.plain_symbol(size) for size in x.size()[:2])
    sizes = [n.meta["val"].size(0) for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert compat.evaluate(sizes[-1], {str(rows): 7, str(columns): 3}) == 21
    assert compat.evaluate(sizes[-1], {str(rows): 7}) is None


def test_boxed_code_generation() -> None:
    """One list, emptied by the call; values die after their last use."""
    run = compat.boxed_module(traced())
    assert run._boxed_call
    x = torch.randn(4)
    args = [x]
    a, b = run(args)
    assert args == []
    assert torch.equal(a, x.sin() + 1)
    assert torch.equal(b, x.cos())


def test_boxed_marks_survive_disable() -> None:
    """What AOTAutograd wraps around a backward."""
    run = torch._dynamo.disable(compat.boxed(lambda args: (args.pop(),)))
    assert run._boxed_call
    assert run([1]) == (1,)


@pytest.mark.usefixtures("inductor_cache")
def test_compile_inner_and_the_names_it_allocates_by() -> None:
    """Inductor's code for one graph is boxed, and its module's globals can be found."""
    gm = traced()
    fakes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    with torch._guards.tracing(TracingContext(compat.fake_mode_of(fakes))):
        compiled = compat.compile_graph(gm, fakes, {})
    args: list[Any] = [x := torch.randn(4)]
    out = compiled(args)
    assert args == []
    torch.testing.assert_close(list(out), [x.sin() + 1, x.cos()])
    (namespace,) = compat.generated_namespaces(compiled)
    assert {"empty_strided_cpu", "empty_strided_cuda", "extern_kernels", "reinterpret_tensor"} <= set(
        namespace
    )
    assert compat.generated_namespaces(functools.partial(lambda: None)) == []


@pytest.mark.usefixtures("inductor_cache")
def test_compile_model_calls_the_inner_compiler() -> None:
    """Forward and backward graphs come with the words that tell them apart."""
    seen: list[dict[str, Any]] = []

    def inner(gm: torch.fx.GraphModule, inputs: Any, *unused: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return compat.boxed_module(gm)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compat.compile_model(gm, inputs, inner, {}, lambda joint: None)

    x = torch.randn(4, requires_grad=True)
    torch.compile(lambda x: x.sin() * 2, backend=backend)(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos() * 2)
    assert [bool(k.get("is_backward")) for k in seen] == [False, True]
    assert "static_input_idxs" in seen[0]


def test_a_joint_graph_is_cut_as_autograd_does_by_itself() -> None:
    """With another function in its place, forward and backward are the same."""

    def graphs(**how: Any) -> list[str]:
        found: list[str] = []

        def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            found.append(gm.code)
            return gm

        torch._dynamo.reset()
        run = torch.compile(lambda x: x.sin().tanh(), backend=aot_autograd(fw_compiler=keep, **how))
        run(torch.randn(4, requires_grad=True)).sum().backward()
        return found

    assert graphs(partition_fn=lambda *args, **kwargs: compat.partition_joint(*args, **kwargs)) == graphs()


@pytest.mark.usefixtures("inductor_cache")
@pytest.mark.parametrize("train", [False, True])
def test_joint_graphs_can_be_changed_after_inductors_passes(train: bool) -> None:
    """Ours comes last, behind the user's own; what it changes is compiled, attributes included."""
    heard: list[str] = []

    def ours(gm: torch.fx.GraphModule) -> None:
        heard.append("ours")
        for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
            with compat.real_values():
                gm.register_buffer("held", torch.full((4,), 2.0))
            with gm.graph.inserting_before(node):
                fresh = gm.graph.call_function(aten.lift_fresh_copy.default, (gm.graph.get_attr("held"),))
            fresh.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(fresh)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        settings = {"joint_custom_post_pass": lambda graph: heard.append("the user's")}
        return compat.compile_model(gm, inputs, inductor_compile, settings, ours)

    def inductor_compile(gm: torch.fx.GraphModule, inputs: Any, *unused: Any, **kwargs: Any) -> Any:
        return compat.compile_graph(gm, inputs, {}, **kwargs)

    compiled = torch.compile(lambda x: x.sin() * x, backend=backend)
    for _ in range(2):
        x = torch.randn(4, requires_grad=train)
        torch.testing.assert_close(compiled(x), 2 * x)
    assert heard == ["the user's", "ours"]


def test_passes_of_the_users_that_have_no_name_are_not_cached() -> None:
    """As with Inductor alone."""

    class Named(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "mine"

    def uuid(chosen: Any) -> Any:
        return compat.inductor._AfterJointPasses(chosen, lambda gm: None).uuid()

    assert uuid(None)
    assert uuid(Named())
    assert uuid(Named()) != uuid(None)
    assert uuid(lambda graph: None) is None
    assert uuid([Named(), lambda graph: None]) is None


def test_real_values_in_the_midst_of_tracing() -> None:
    """Numbers are computed, and what is made is neither fake nor for inference only."""
    with FakeTensorMode(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        with compat.real_values():
            made = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
            assert made.tolist() == [[2.0, 2.0], [2.0, 2.0]]
        assert type(torch.ones(2)) is not Tensor
    assert made.dtype == torch.float32
    assert not made.is_inference()
    assert not made.requires_grad


def test_modes_come_without_cuda_graphs() -> None:
    assert compat.inductor_mode(None) == {}
    assert compat.inductor_mode("max-autotune")["max_autotune"] is True
    assert not any("cudagraph" in k for k in compat.inductor_mode("reduce-overhead"))


# --- what the drivers and the capture use


def test_storage_from_a_pointer() -> None:
    """A storage over memory that it does not own, at any address, never read."""
    owner = torch.arange(4.0)
    storage = torch._C._construct_storage_from_data_pointer(owner.data_ptr(), torch.device("cpu"), 16)
    alias = torch.empty(0).set_(storage, 1, (3,), (1,))
    assert alias.tolist() == [1.0, 2.0, 3.0]
    ghost = torch._C._construct_storage_from_data_pointer(1 << 46, torch.device("cpu"), 1 << 40)
    assert (ghost.data_ptr(), ghost.nbytes()) == (1 << 46, 1 << 40)
    assert torch.empty(0).set_(ghost, 0, (1 << 38,), (1,)).data_ptr() == 1 << 46


def test_storage_weak_references() -> None:
    """Expire with the last owner; views are owners; `cdata` names the storage."""
    x = torch.randn(4)
    ref = StorageWeakRef(x.untyped_storage())
    view = x[1:]
    assert StorageWeakRef(view.untyped_storage()).cdata == ref.cdata
    del x
    assert not ref.expired()
    del view
    assert ref.expired()


def test_weak_references_without_an_object() -> None:
    """The address of a storage, which is nobody else's while it is asked about."""
    x = torch.randn(4)
    storage = x.untyped_storage()
    reference = compat.weak_storage(storage)
    assert reference == storage._cdata == x[1:].untyped_storage()._cdata
    del storage
    assert not compat.storage_is_gone(reference)
    del x
    assert compat.storage_is_gone(reference)
    others = [torch.randn(4).untyped_storage() for _ in range(1000)]
    assert reference not in {other._cdata for other in others}
    compat.forget_storage(reference)


def test_dispatch_can_be_switched_off() -> None:
    """Inside a dispatch mode, helper tensors are made unheard."""

    class Listen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
            self.heard.append(func)
            return func(*args, **(kwargs or {}))

    with Listen() as mode:
        torch.empty(2)
        assert mode.heard
        mode.heard.clear()
        with torch._C._DisableTorchDispatch():
            torch.empty(2)
        assert mode.heard == []


def test_an_empty_tensor_has_address_0() -> None:
    """Its storage has one: the reason why results are described by their storage."""
    storage = torch._C._construct_storage_from_data_pointer(1 << 46, torch.device("cpu"), 0)
    empty = torch.empty(0).set_(storage, 0, (0, 3), (3, 1))
    assert empty.data_ptr() == 0
    assert empty.untyped_storage().data_ptr() == 1 << 46


def test_ops_tell_views_and_randomness() -> None:
    assert aten.view.default.is_view
    assert not aten.clone.default.is_view
    assert torch.Tag.nondeterministic_seeded in aten.rand.default.tags
    assert torch.Tag.nondeterministic_seeded not in aten.mm.default.tags
    assert [a.name for a in aten.mm.default._schema.arguments] == ["self", "mat2"]


def test_gradients_are_told_by_name() -> None:
    """Placeholders of a backward that stand for incoming gradients; all of them where no name tells."""
    found: list[tuple[list[int], list[str]]] = []

    def backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        found.append((compat.tangents(gm), names))
        return compat.boxed_module(gm)

    compiler = aot_autograd(fw_compiler=lambda gm, inputs: compat.boxed_module(gm), bw_compiler=backward)
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    first, second = torch.compile(lambda a, b: (a * b, a.sin()), backend=compiler)(a, b)
    (first + second).sum().backward()
    ((positions, names),) = found
    assert len(names) == 4  # two saved, two gradients
    assert [names[i] for i in positions] == ["tangents_1", "tangents_2"]
    nameless = torch.fx.symbolic_trace(lambda a, b: a + b)
    assert compat.tangents(nameless) == [0, 1]
    kept = weakref.ref(nameless)
    del nameless
    gc.collect()
    assert kept() is None, "a graph that was looked at lives on"


def test_settings_and_modes() -> None:
    assert compat.unknown_settings({"max_autotune": True, "triton.cudagraphs": False, "nope": 1}) == ["nope"]
    assert not compat.forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert compat.forward_mode()
    assert not compat.forward_mode()


def test_intercepted() -> None:
    """A dispatch mode, vmap and grad stand between this thread and its ops; their end is seen, too."""
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(compat.intercepted())
        return x * 2

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    with TorchDispatchMode():
        seen.append(compat.intercepted())
    look(torch.ones(2))
    assert seen == [False, True, True, True, False]


def test_a_mode_that_is_called_as_it_is() -> None:
    """PyTorch puts a function of its own around the method of other dispatch modes."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    wrapped = type("Wrapped", (TorchDispatchMode,), {"__torch_dispatch__": dispatch})
    bare = type("Bare", (compat.UnwrappedMode,), {"__torch_dispatch__": dispatch})
    assert wrapped.__torch_dispatch__ is not dispatch, "the class for it is needed no more"
    assert bare.__torch_dispatch__ is dispatch
    x = torch.ones(2)
    with bare():
        assert (x + 1).tolist() == [2, 2]
    assert seen == [aten.add.Tensor]


def test_same_counter() -> None:
    """Views count together with what they are views of, and nothing is left changed."""
    x = torch.randn(4)
    assert compat.same_counter(x, x.detach())
    assert compat.same_counter(x, x[1:])
    assert not compat.same_counter(x, x.clone())
    assert not compat.same_counter(x, compat.reinterpret(x, (4,), (1,), 0))
    assert x._version == 0
    with torch.inference_mode():
        y = torch.randn(4)
        assert not compat.same_counter(y, y)


def test_tensor_shims() -> None:
    """C functions that read a tensor through a handle: dimensions, sizes, strides, address; and delete it."""
    shims = compat.tensor_shims()
    assert shims is not None
    assert shims is compat.tensor_shims(), "looked up at each capture"
    handles_of, (dim, sizes, strides, data_ptr, delete) = shims
    x = torch.randn(3, 5).t()
    count = sys.getrefcount(x)
    (capsule,) = handles_of([x])
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    handle = ctypes.c_void_p(pointer(capsule, None))
    n, address, numbers = ctypes.c_int64(), ctypes.c_void_p(), ctypes.POINTER(ctypes.c_int64)()
    assert dim(handle, ctypes.byref(n)) == 0
    assert n.value == 2
    assert sizes(handle, ctypes.byref(numbers)) == 0
    assert numbers[:2] == [5, 3]
    assert strides(handle, ctypes.byref(numbers)) == 0
    assert numbers[:2] == [1, 5]
    assert data_ptr(handle, ctypes.byref(address)) == 0
    assert address.value == x.data_ptr()
    assert delete(handle) == 0
    assert sys.getrefcount(x) == count


def test_tensor_layout() -> None:
    """The C++ tensor within the Python object, where the shims read it: 2.13; on a GPU 2.11."""
    shims = compat.tensor_shims()
    assert shims is not None
    _, (_, sizes, strides, data_ptr, _) = shims
    offset, table = compat.tensor_layout()
    assert 0 < offset < torch.Tensor.__basicsize__
    leaf = torch.randn(3, 5, requires_grad=True)
    kinds = (leaf, leaf.t(), torch.nn.Parameter(leaf), leaf.detach()[1:], torch.ones(2, dtype=torch.int8))
    for x in kinds:
        handle = ctypes.c_void_p(id(x) + offset)
        implementation = ctypes.c_uint64.from_address(handle.value or 0).value
        assert ctypes.c_uint64.from_address(implementation).value == table
        address, numbers = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_int64)()
        assert data_ptr(handle, ctypes.byref(address)) == 0
        assert address.value == x.data_ptr()
        assert sizes(handle, ctypes.byref(numbers)) == 0
        assert tuple(numbers[: x.dim()]) == x.shape
        assert strides(handle, ctypes.byref(numbers)) == 0
        assert tuple(numbers[: x.dim()]) == x.stride()


def test_profiling() -> None:
    """Seen in every thread, whichever profiler it is; False again when it has stopped."""
    kinds: list[Any] = [
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        torch.autograd.profiler.profile,
    ]
    for kind in kinds:
        assert not compat.profiling()
        found: list[bool] = []
        with kind():
            thread = threading.Thread(target=lambda: found.append(compat.profiling()))  # noqa: B023
            thread.start()
            thread.join()
            found.append(compat.profiling())
        assert found == [True, True]
        assert not compat.profiling()


def test_traced_function() -> None:
    """The compiled function comes first, whatever it calls."""
    found: list[Any] = []

    def inner(x: Tensor) -> Tensor:
        return x + 1

    def outer(x: Tensor) -> Tensor:
        return inner(x) * 2

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(compat.traced_function())
        return gm

    assert compat.traced_function() is None
    torch.compile(outer, backend=backend)(torch.randn(3))
    assert found[0].endswith("outer")


def test_partition_ops() -> None:
    assert compat.partition_ops() == set()
    with torch._inductor.config.patch(custom_should_partition_ops=["my::op"]):
        assert compat.partition_ops() == {"my::op"}


def test_donated_inputs() -> None:
    """What a backward may overwrite stands in the tracing context, which the compiler of a part reads."""
    assert compat.donated_inputs() == ()
    with compat.donating([3]):
        assert compat.donated_inputs() == ()
    context = TracingContext(FakeTensorMode())
    with tracing(context):
        context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=[2, 4])  # type: ignore[assignment]
        assert compat.donated_inputs() == (2, 4)
        tag = torch.compiler.config.cache_key_tag
        with compat.donating([0]):
            assert get_donated_idxs() == [0]
            assert torch.compiler.config.cache_key_tag == f"{tag} donated [0]"
        assert get_donated_idxs() == [2, 4]
        assert torch.compiler.config.cache_key_tag == tag


def test_compiling_again() -> None:
    """Outside of any compilation, in the traced values' fake mode, whatever is in force around it."""
    gm = make_fx(lambda x: (x.sin() + 1,), tracing_mode="symbolic")(torch.randn(4, 3))
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    kept = compat.tracing([value for value in inputs if isinstance(value, Tensor)])
    assert kept.fake_mode is compat.fake_mode_of(inputs)
    assert kept.metadata is None
    size = next(value for value in inputs if isinstance(value, Tensor)).size(0)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    with torch.autocast("cpu"), torch.enable_grad():
        with compat.compiling_again(kept) as assumes_more:
            assert TracingContext.get().fake_mode is kept.fake_mode
            assert not torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
            torch.rand(3)
            assert not assumes_more()
            assert size > 3  # a guard
            assert assumes_more()
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert TracingContext.try_get() is None
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_frozen_shape_env_counts_what_it_ignores() -> None:
    """Once Dynamo has its guards, more of them only show in a counter."""
    gm = make_fx(lambda x: (x.sin(),), tracing_mode="symbolic")(torch.randn(4, 3))
    x = next(n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor))
    kept = compat.tracing([x])
    kept.fake_mode.shape_env.freeze()
    with compat.compiling_again(kept) as assumes_more:
        assert x.size(0) > 3
        assert assumes_more()


def test_tracing_keeps_a_copy_of_the_metadata() -> None:
    """Donated inputs are set in it for each part, and not in AOTAutograd's own."""
    context = TracingContext(FakeTensorMode())
    metadata = types.SimpleNamespace(bw_donated_idxs=[1])
    context.fw_metadata = metadata  # type: ignore[assignment]
    with tracing(context):
        kept = compat.tracing([])
    assert kept.fake_mode is context.fake_mode
    with compat.compiling_again(kept), compat.donating([0]):
        assert get_donated_idxs() == [0]
    assert metadata.bw_donated_idxs == [1]


def test_propagate() -> None:
    """Values follow the strides that the inputs have today, and a view that they rule out becomes a copy."""
    gm = make_fx(lambda x: (aten.view.default(x + 1, [12]),), tracing_mode="fake")(torch.randn(4, 3))
    (x,) = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    with x.fake_mode:
        turned = torch.empty_strided((4, 3), (1, 4))
    compat.propagate(gm, [turned])
    added = next(node for node in gm.graph.nodes if node.target is aten.add.Tensor)
    assert added.meta["val"].stride() == (1, 4)


def test_output_strides(inductor_cache: Any) -> None:
    """Inductor's code tells the strides of its results, as text."""
    gm = make_fx(lambda x: (x.permute(1, 0) + 1, 3), tracing_mode="fake")(torch.randn(4, 3))
    gm.graph.output_node().meta["user_visible_output_idxs"] = [0]
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    compiled = compat.compile_graph(gm, inputs, {})
    assert compat.output_strides(compiled) == [("1", "3"), None]
    assert compat.output_strides(lambda args: args) is None


def test_compilations_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every function: its end, what it was compiled for, why Dynamo gave up, and the limit; 2.13."""
    ended: list[compat.Compilation] = []
    stopped: list[compat.Compilation] = []
    handler = torch._dynamo.callback.callback_handler
    logger = logging.getLogger("torch._dynamo.convert_frame")
    monkeypatch.setattr(handler, "end_callbacks", [])
    monkeypatch.setattr(handler, "clear", type(handler).clear.__get__(handler))
    monkeypatch.setattr(logger, "handlers", [])
    resets = []
    compat.hear_compilations(ended.append, stopped.append, lambda: resets.append(1))

    def backend(gm: torch.fx.GraphModule, inputs: Any, options: Any = None) -> Any:
        return gm

    def times(x: Tensor, n: int) -> Tensor:
        return x * n

    def looping(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
        return x + 1

    with torch._dynamo.config.patch(recompile_limit=2):
        compiled = torch.compile(times, backend=backend, options={"a": 1}, dynamic=False)
        for n in (3, 4, 5):
            compiled(torch.randn(3), n)
    assert [one.name.split(".")[-1] for one in ended] == ["times", "times"]
    assert all(one.backend is backend and one.options == {"a": 1} for one in (*ended, *stopped))
    assert ended[0].where == f"{__file__}:{times.__code__.co_firstlineno}"
    assert (ended[0].guard, "n == 3" in str(ended[1].guard)) == (None, True)
    (limited,) = stopped
    assert limited.limit == ("recompile_limit", 2)
    assert "n == 4" in str(limited.guard)
    assert compat.known_backends().count(backend) == 1
    torch._dynamo.reset()
    assert resets == [1]
    assert not compat.known_backends()
    ended.clear()
    torch.compile(looping, backend=backend)(torch.randn(3))
    torch.compile(torch.nn.LSTM(2, 2), backend=backend)(torch.randn(3, 1, 2))
    first, lstm = ended
    assert "graph_break()" in str(first.error)
    assert first.frames[-1] == (__file__, looping.__code__.co_firstlineno + 2)
    assert (lstm.name, lstm.where) == ("LSTM", None)
    try:
        raise torch._dynamo.exc.Unsupported("the caller's own")
    except torch._dynamo.exc.Unsupported:
        torch.compile(times, backend=backend, dynamic=False)(torch.randn(3), 1)
    assert ended[-1].error is None


def test_the_dispatcher_tells_composite_ops() -> None:
    assert [compat.is_registered(name) for name in ("aten::sin", "aten::sinn", "no::such")] == [
        True,
        False,
        False,
    ]
    for name in ("aten::linear", "aten::matmul", "aten::einsum", "aten::scaled_dot_product_attention"):
        assert compat.is_composite(name), name
    for name in ("aten::addmm", "aten::sin", "aten::native_dropout", "aten::_foreach_add", "no::such"):
        assert not compat.is_composite(name), name


def test_a_forward_and_its_backward_know_of_each_other() -> None:
    """What is saved are the results after those of the program, and both compilations find one object."""
    seen: dict[str, Any] = {}

    def compiler(kind: str) -> Any:
        def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            seen[kind] = compat.joint_of(), compat.saved_results(gm), len(gm.graph.output_node().args[0])
            return compat.boxed_module(gm)

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    compiled = torch.compile(lambda x: (x.sin().exp(), x.cos()), backend=backend)
    first, second = compiled(torch.randn(3, requires_grad=True))
    (first.sum() + second.sum()).backward()
    joint, saved, results = seen["forward"]
    assert joint is not None
    assert not joint.plain
    assert seen["backward"][0] is joint
    assert saved == frozenset(range(2, results))
    assert compat.joint_of() is None


def test_hooks_on_saved_tensors_are_seen() -> None:
    assert not compat.packed_by_others()
    with torch.autograd.graph.save_on_cpu():
        assert not compat.packed_by_others()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert compat.packed_by_others()
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.packed_by_others())
        return x.sin()

    torch.utils.checkpoint.checkpoint(fn, torch.randn(3, requires_grad=True), use_reentrant=False)
    assert seen == [False]


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.11.0+cu130", True),
        ("2.13.0+cpu", True),
        ("2.15.3", True),
        ("2.10.1", False),
        ("2.16.0a0+gitabc", False),
        ("3.0.0", False),
    ],
)
def test_versions_that_are_known(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    told = compat.untested()
    assert (told is None) == known
    if told is not None:
        assert told.startswith(f"pgraph is made for torch 2.11 to 2.15, and this is {version}, whose")


def test_an_unknown_version_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pgraph import backend

    backend._tell_of_version.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    for size in (3, 4):
        torch.compile(lambda x: x + 1, backend="pgraph", dynamic=False)(torch.ones(size))
    backend._tell_of_version.cache_clear()
    assert sum("this is 2.16.0" in record.getMessage() for record in caplog.records) == 1
