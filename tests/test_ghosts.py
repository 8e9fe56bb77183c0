"""What captures ask of PyTorch at each op: the functions in C++ do what those in Python do."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pgraph import compat
from pgraph.native import ghosts, libraries
from pgraph.native.ghosts import GhostCalls


@pytest.fixture(params=["cpp", "python"])
def calls(request: pytest.FixtureRequest) -> GhostCalls:
    if request.param == "python":
        return ghosts.in_python
    if libraries.load_tensors() is None:
        pytest.skip("no C++ compiler")
    assert type(ghosts.calls().ghost).__name__ == "builtin_function_or_method"
    return ghosts.calls()


class Listen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


layouts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=5)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])


@given(layouts, dtypes, st.integers(0, 9), st.booleans())
def test_ghosts_are_alike(
    layout: list[tuple[int, int]], dtype: torch.dtype, offset: int, infer: bool
) -> None:
    """Sizes, strides, bytes, kind: whoever made them."""
    memory = (ctypes.c_char * 16384)()
    address = ctypes.addressof(memory)
    size, stride = [n for n, _ in layout], tuple(step for _, step in layout)
    with torch.inference_mode(infer):
        a, b = (
            c.ghost(address, 16000, -1, size, stride, dtype, offset)
            for c in (ghosts.calls(), ghosts.in_python)
        )
    for t in (a, b):
        assert type(t) is torch.Tensor
        assert (list(t.size()), t.stride(), t.dtype, t.storage_offset()) == (size, stride, dtype, offset)
        assert t.untyped_storage().data_ptr() == address
        assert t.untyped_storage().nbytes() == 16000
        assert t.is_inference() == infer
        assert t.device == torch.device("cpu")
        assert not t.untyped_storage().resizable()
    assert torch._C._dispatch_keys(a) == torch._C._dispatch_keys(b)
    assert a.is_contiguous() == b.is_contiguous()
    assert a.data_ptr() == b.data_ptr()


def test_no_mode_sees_a_ghost(calls: GhostCalls) -> None:
    memory = torch.randn(8)
    with Listen() as mode:
        ghost = calls.ghost(memory.data_ptr(), 32, -1, (4,), (2,), torch.float32, 1)
    assert mode.heard == []
    assert torch.equal(ghost, memory[1::2])


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (0, 4, -1, (1,), (1,), "float32", 0),
        (0, 4, -1, ("one",), (1,), torch.float32, 0),
        (0, -4, -1, (), (), torch.float32, 0),
    ],
)
def test_what_is_no_ghost_is_an_error(calls: GhostCalls, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError, OverflowError)):
        calls.ghost(*arguments)


def test_storages(calls: GhostCalls) -> None:
    """Of a tensor, a view, an empty one, a parameter; of one whose implementation is of another class."""
    x = torch.randn(6)
    with torch.no_grad():
        tensors = [x, x[2:], torch.empty(0), torch.nn.Parameter(x), torch.randn(3).requires_grad_() * 2]
    tensors.append(torch.randn(4, device="meta"))
    tensors.append(torch.randn(2, 2).to_sparse().values())
    for tensor in tensors:
        storage = tensor.untyped_storage()
        assert calls.storage_of(tensor) == (storage._cdata, storage.data_ptr(), storage.nbytes())


def test_what_has_no_storage_is_an_error(calls: GhostCalls) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        calls.storage_of(torch.eye(2).to_sparse())


def test_counters(calls: GhostCalls) -> None:
    """They count together, and do not hold the memory."""
    x = torch.randn(4, dtype=torch.complex64)
    for tensor in (x, x.real, x.conj(), x.conj().imag, x[1:], torch.nn.Parameter(x)):
        counter = calls.counter_of(tensor)
        assert compat.same_counter(counter, tensor.view(-1).detach())
        assert not compat.same_counter(counter, x.clone())
        assert counter.untyped_storage().nbytes() == 0
        assert (counter.numel(), counter.dtype, counter.device) == (0, tensor.dtype, tensor.device)
        assert counter._base is None
        assert not counter.requires_grad


def test_counters_of_inference(calls: GhostCalls) -> None:
    """A tensor made for inference counts nothing; one that was not may be asked there."""
    x = torch.randn(4)
    with torch.inference_mode():
        y = torch.randn(4)
        assert not compat.same_counter(calls.counter_of(y), y)
        calls.counter_of(x)
    assert not compat.same_counter(calls.counter_of(y), y)


def test_without_a_compiler_python_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, lacking in (("load_tensors", lambda: None), ("tensor_layout", lambda: (0, 0))):
        with monkeypatch.context() as m:
            m.setattr(libraries if name == "load_tensors" else ghosts, name, lacking)
            assert ghosts.calls.__wrapped__() is ghosts.in_python
