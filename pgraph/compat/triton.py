"""Triton's kernels as Inductor keeps them."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Launcher", "awaits_tuning", "handle_of", "is_triton_kernel", "launcher_of", "only_launcher"]

_AUTOTUNER = "torch._inductor.runtime.triton_heuristics"
_OTHERS = 5  # the function, the kernel's metadata, the launch's, a hook before and one behind
_POINTER = "O"
# As the static launcher names them.
_KINDS = {
    "constexpr": "-",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "l",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "K",
    "fp32": "f",
    "fp64": "d",
}


def is_triton_kernel(value: Any) -> bool:
    """Whether this global of a generated module is a Triton kernel, launched by ``value.run(...)``; in the
    sources of 2.11, seen on 2.13 to 2.15.
    """
    module = sys.modules.get(_AUTOTUNER)  # not imported by us: it imports Triton
    return module is not None and type(value) is module.CachingAutotuner


def awaits_tuning(namespace: Mapping[str, Any]) -> bool:
    """Whether there is a kernel among the globals of a generated module whose next run measures which of its
    launchers is the fastest; in the sources of 2.11, 2.13 and 2.15.
    """
    return any(len(value.launchers) > 1 for value in namespace.values() if is_triton_kernel(value))


@dataclasses.dataclass(frozen=True, slots=True)
class Launcher:
    """How a compiled Triton kernel is launched.

    Args:
        name: of the kernel.
        launch: computes the grid, and calls its global ``runner(x, y, z, stream, *others, *parameters)``.
        kinds: a character for the C type of each parameter; ``"O"`` for a pointer, ``"-"`` for what the
            kernel is not given.
        nulls: null pointers that follow the parameters; None: as many as the kernel has places left.
        others: how many there are.
        code: what it was compiled to. Inductor compiles a kernel for several sizes of blocks, and goes on
            with the fastest.
    """

    name: str
    launch: types.FunctionType
    kinds: str
    nulls: int | None
    code: Any
    others: int = 0


def only_launcher(kernel: Any) -> types.FunctionType | None:
    """What launches a kernel; None where that is not yet decided. As long as it is the same function, all
    else that `launcher_of` tells stays as it is.
    """
    launchers: Sequence[Any] = getattr(kernel, "launchers", ())
    found = launchers[0] if len(launchers) == 1 else None
    return found if isinstance(found, types.FunctionType) else None


def launcher_of(kernel: Any) -> Launcher | None:
    """How a kernel is launched: by Inductor's static launcher, or by Triton's own, which serves kernels with
    assertions, say. None where it is launched otherwise, or that is not yet decided; in the sources of 2.11,
    seen on 2.13 to 2.15.
    """
    launch = only_launcher(kernel)
    if launch is None:
        return None
    names = launch.__globals__
    owner = getattr(names.get("runner"), "__self__", None)
    kinds = getattr(owner, "arg_tys", None)
    if isinstance(kinds, str):
        scratch = (getattr(owner, name, False) for name in ("has_global_scratch", "has_profile_scratch"))
        return Launcher(str(getattr(owner, "name", "")), launch, kinds, sum(map(bool, scratch)), owner)
    binary = names.get("bin")
    signature = getattr(getattr(binary, "src", None), "signature", None)
    if not isinstance(signature, dict):
        return None
    named = [_kind(type_name) for type_name in signature.values()]
    if None in named:
        return None
    kinds = "".join(filter(None, named))
    return Launcher(str(getattr(binary, "name", "")), launch, kinds, None, binary, _OTHERS)


def handle_of(code: Any) -> int | None:
    """The driver's handle of the function that a launcher's code was loaded as; None where it is not loaded,
    or that is not told. Both kinds of code name it so, in the sources of 2.11 to 2.15 and of Triton.
    """
    handle = getattr(code, "function", None)
    return handle if isinstance(handle, int) and handle else None


def _kind(type_name: Any) -> str | None:
    """A character for a type of Triton's; None if a launch does more than to pass the value on."""
    if not isinstance(type_name, str):
        return None
    return _POINTER if type_name.startswith("*") else _KINDS.get(type_name)
