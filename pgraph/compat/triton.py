"""Triton's kernels as Inductor keeps them."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Sequence
from typing import Any

__all__ = ["Launcher", "is_triton_kernel", "launcher_of"]

_AUTOTUNER = "torch._inductor.runtime.triton_heuristics"


def is_triton_kernel(value: Any) -> bool:
    """Whether this global of a generated module is a Triton kernel, launched by ``value.run(...)``; in the
    sources of 2.11, seen on 2.13 to 2.15.
    """
    module = sys.modules.get(_AUTOTUNER)  # not imported by us: it imports Triton
    return module is not None and type(value) is module.CachingAutotuner


@dataclasses.dataclass(frozen=True, slots=True)
class Launcher:
    """How a compiled Triton kernel is launched.

    Args:
        name: of the kernel.
        launch: computes the grid, and calls its global ``runner(x, y, z, stream, *parameters)``.
        kinds: a character for the C type of each parameter; ``"O"`` for a pointer.
        nulls: null pointers that follow the parameters.
    """

    name: str
    launch: types.FunctionType
    kinds: str
    nulls: int


def launcher_of(kernel: Any) -> Launcher | None:
    """How a kernel is launched; None where that is not by Inductor's static launcher, or not yet decided; in
    the sources of 2.11, seen on 2.13 to 2.15.
    """
    launchers: Sequence[Any] = getattr(kernel, "launchers", ())
    if len(launchers) != 1 or not isinstance(launchers[0], types.FunctionType):
        return None
    owner = getattr(launchers[0].__globals__.get("runner"), "__self__", None)
    kinds = getattr(owner, "arg_tys", None)
    if owner is None or not isinstance(kinds, str):
        return None
    scratch = (getattr(owner, name, False) for name in ("has_global_scratch", "has_profile_scratch"))
    return Launcher(str(owner.name), launchers[0], kinds, sum(map(bool, scratch)))
