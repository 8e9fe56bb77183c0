"""Each private PyTorch interface that pgraph uses, one test each: tensors, storages, modes, the dispatcher.

Compilers, strides and versions have files of their own, `test_compat_*.py`. Seen working on torch
2.11.0 (cu130) and 2.13 to 2.15 (CPU). A failure here after an upgrade of torch names what has changed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pgraph import compat

aten = torch.ops.aten

# --- tensors


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
    assert compat.lazy_bits(turned) == (True, False)
    assert turned.data_ptr() == x.data_ptr()
    assert (turned + 0).tolist() == [1 - 2j, 3 + 4j]
    negative = compat.lazily(x.real, conj=False, neg=True)
    assert negative.is_neg()
    assert compat.lazy_bits(negative) == (False, True)
    assert (negative + 0).tolist() == [-1.0, -3.0]
    assert compat.lazily(x, conj=False, neg=False) is x
    assert compat.lazy_bits(x) == (False, False)


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


def test_counters() -> None:
    """They count together, and do not hold the memory."""
    x = torch.randn(4, dtype=torch.complex64)
    for tensor in (x, x.real, x.conj(), x.conj().imag, x[1:]):
        counter = compat.counter_of(tensor)
        assert compat.same_counter(counter, tensor.view(-1))
        assert not compat.same_counter(counter, x.clone())
        assert counter.untyped_storage().nbytes() == 0
        assert counter._base is None
    with torch.inference_mode():
        y = torch.randn(4)
        assert not compat.same_counter(compat.counter_of(y), y)


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


def test_what_a_tensor_is_a_view_of() -> None:
    with torch.no_grad():
        x = torch.ones(2, 3)
        assert compat.base_of(x) is None
        assert compat.base_of(x.view(-1)[:4]) is x
        assert compat.base_of(compat.reinterpret(x, (4,), (1,), 0)) is None
    with torch.inference_mode():
        assert compat.base_of(torch.ones(2, 3).view(-1)) is None


def test_memory_format() -> None:
    """As `Tensor.to` decides whether to copy, also where sizes of 1 leave strides without a meaning."""
    formats = torch.contiguous_format, torch.channels_last
    layouts = (((2, 3, 4, 5), (60, 20, 5, 1)), ((2, 3, 4, 5), (60, 1, 15, 3)))
    layouts += (((2, 3, 1, 1), (3, 1, 1, 1)), ((2, 3, 1, 1), (3, 1, 3, 3)), ((2, 1, 1, 1), (1, 1, 1, 1)))
    for size, strides in layouts:
        x = torch.empty_strided(size, strides)
        kept = [f for f in formats if x.to(memory_format=f) is x]
        assert kept == [compat.memory_format(x)]
    volume = torch.empty(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    assert compat.memory_format(volume) == torch.channels_last_3d


# --- storages


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


def test_an_empty_tensor_has_address_0() -> None:
    """Its storage has one: the reason why results are described by their storage."""
    storage = torch._C._construct_storage_from_data_pointer(1 << 46, torch.device("cpu"), 0)
    empty = torch.empty(0).set_(storage, 0, (0, 3), (3, 1))
    assert empty.data_ptr() == 0
    assert empty.untyped_storage().data_ptr() == 1 << 46


# --- modes


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


def test_who_looks_on_at_a_first_call() -> None:
    """AOTAutograd alone, at a forward's first call. Its mode can be left, transforms cannot."""
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((compat.intercepted(), compat.alone()))
        with compat.unwatched():
            seen.append((compat.intercepted(), compat.alone()))
        return x * 2

    def compiler(gm: Any, inputs: Any) -> Any:
        return make_boxed_func(lambda x: (look(x),))

    torch._dynamo.reset()
    fn = torch.compile(lambda x: x * 2, backend=aot_autograd(fw_compiler=compiler))
    fn(torch.ones(2))
    assert seen == [(True, True), (False, True)]
    seen.clear()
    fn(torch.ones(2))
    assert seen == [(False, True)] * 2
    seen.clear()
    torch.func.vmap(look)(torch.ones(2))
    assert seen == [(True, False)] * 2
    seen.clear()
    with TorchDispatchMode():
        seen.append((compat.intercepted(), compat.alone()))
    assert seen == [(True, False)]


def test_hearing_calls() -> None:
    def inner(x: Tensor) -> Tensor:
        return x + 1

    def outer(x: Tensor) -> Tensor:
        return inner(x) * 2

    def place(fn: Any) -> str:
        return f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"

    torch._dynamo.reset()
    compiled = torch.compile(outer, backend="eager")
    compiled(torch.ones(2))
    with compat.hearing_calls() as heard:
        compiled(torch.ones(2))
    assert place(outer) in heard
    assert place(inner) not in heard  # a part of the other's code
    with compat.hearing_calls() as heard:
        inner(torch.ones(2))
    assert place(inner) in heard


def test_hearing_code_that_has_no_hash() -> None:
    """Dynamo's code around a break has the slices of the user's as constants."""

    def fn(x: Tensor) -> Tensor:
        return x

    code = fn.__code__.replace(co_consts=(*fn.__code__.co_consts, slice(None, 2)))
    with compat.hearing_calls() as heard:
        types.FunctionType(code, {})(torch.ones(2))
    assert f"{__file__}:{code.co_firstlineno}" in heard


def test_settings_and_modes() -> None:
    given = {"max_autotune": True, "triton.cudagraphs": False, "nope": 1, "max_autotunee": True}
    assert compat.unknown_settings(given) == {"nope": None, "max_autotunee": "max_autotune"}
    assert compat.wrong_settings({"max_autotune": 1, "triton.cudagraphs": False}) == [
        ("max_autotune", "bool")
    ]
    assert compat.wrong_settings({"post_grad_custom_pre_pass": print}) == []
    assert not compat.forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert compat.forward_mode()
    assert not compat.forward_mode()


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


# --- CUDA


def test_the_handle_of_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the stream's object, where there is a GPU; 2.11."""
    if torch.cuda.is_available():
        for stream in (torch.cuda.default_stream(0), torch.cuda.Stream(0)):
            with torch.cuda.stream(stream):
                assert compat.current_raw_stream(0) == stream.cuda_stream
    else:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
        assert compat.current_raw_stream(2) == 72


def test_whether_the_allocator_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.13 tells it of a GPU, also where the program has switched it off; before it is a variable alone."""
    monkeypatch.delenv(compat.UNCACHED, raising=False)
    assert compat.caches_memory()
    name = "_cuda_cudaCachingAllocator_is_enabled"
    if torch.cuda.is_available() and hasattr(torch._C, name):
        torch.zeros(1, device="cuda")
        torch.cuda.caching_allocator_enable(False)
        off = compat.caches_memory()
        torch.cuda.caching_allocator_enable(True)
        assert (off, compat.caches_memory()) == (False, True)
    else:
        monkeypatch.setattr(torch._C, name, lambda: False, raising=False)
        assert not compat.caches_memory()
        monkeypatch.setattr(torch._C, name, lambda: True, raising=False)
        assert compat.caches_memory()
    monkeypatch.setenv(compat.UNCACHED, "0")
    assert not compat.caches_memory()


# --- the dispatcher


def test_ops_tell_views_and_randomness() -> None:
    assert aten.view.default.is_view
    assert not aten.clone.default.is_view
    assert torch.Tag.nondeterministic_seeded in aten.rand.default.tags
    assert torch.Tag.nondeterministic_seeded not in aten.mm.default.tags
    assert [a.name for a in aten.mm.default._schema.arguments] == ["self", "mat2"]


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
