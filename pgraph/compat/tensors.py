"""Tensors as C code and generated code see them, and bits that neither size nor address shows."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = [
    "Strides",
    "assert_size_stride",
    "base_of",
    "counter_of",
    "forget_storage",
    "lazily",
    "lazy_bits",
    "memory_format",
    "real_values",
    "reinterpret",
    "restrided",
    "same_counter",
    "same_number",
    "storage_is_gone",
    "tensor_layout",
    "tensor_shims",
    "weak_storage",
]

Strides = tuple[int | torch.SymInt, ...]


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is a view of, as autograd sees it; None if it is no view; 2.13, 2.15."""
    return tensor._base


memory_format: Callable[[torch.Tensor], torch.memory_format] = suggest_memory_format
"""The format that ATen takes a tensor's strides for, those of single elements included; 2.13, 2.15."""


assert_size_stride: Callable[..., None] = torch._C._dynamo.guards.assert_size_stride
"""(tensor, size, stride): AssertionError if they differ; 2.11, 2.13."""


# Not in the stub of the module.
reinterpret: Callable[..., torch.Tensor] = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""(tensor, size, stride, offset increment in elements): a view, as Inductor makes them; 2.11, 2.13."""


_Storage: Any = torch.UntypedStorage  # the stub has these three otherwise

weak_storage: Callable[[torch.UntypedStorage], int] = _Storage._weak_ref
"""A weak reference to a storage: its address (`_cdata`), and no other's until it is forgotten; 2.11, 2.13."""

storage_is_gone: Callable[[int], bool] = _Storage._expired
"""Whether nobody owns the storage of such a reference any more; 2.11, 2.13."""

forget_storage: Callable[[int], None] = _Storage._free_weak_ref
"""Gives such a reference back; 2.11, 2.13."""


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


def lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """(conjugated, negated) when it is read: Note [Lazy conjugates] in `pgraph.compat`."""
    return tensor.is_conj(), tensor.is_neg()


def same_number(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes or strides are equal for certain; asks without adding a guard."""
    return bool(statically_known_true(a == b))


def restrided(value: torch.Tensor, strides: Strides) -> torch.Tensor:
    """A traced value with other strides, as AOTAutograd makes them of those that a forward reported."""
    with torch.no_grad():
        return value.as_strided(value.size(), strides)


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
    """Where a tensor's Python object holds the C++ tensor (Note [Handles in place] in `launch.c`).

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


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor with another one's version counter, and not its memory; seen on 2.13 to 2.15."""
    # Not `new_empty`, which reads a lazy negative.
    nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_inference():
        return nothing
    counter = tensor.detach()
    counter.data = nothing
    return counter


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
