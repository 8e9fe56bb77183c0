"""Who else looks on: dispatch modes, transforms, forward-mode derivatives, profilers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.autograd.forward_ad as _forward_ad
import torch.autograd.profiler as _profiler
from torch._functorch._aot_autograd import runtime_wrappers
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["UnwrappedMode", "alone", "forward_mode", "intercepted", "profiling", "unwatched"]


class UnwrappedMode(TorchDispatchMode):
    """A dispatch mode whose ``__torch_dispatch__`` is called as it is; 2.13, and in the sources of 2.11.

    PyTorch would switch Dynamo off and on again around each call, which takes as long as all else that it
    does for a mode. Whoever enters one sees to it once, with `torch.compiler.disable`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


# Not in the stub of the module.
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]


def forward_mode() -> bool:
    """Whether derivatives are carried forward; 2.13, and in the sources of 2.11."""
    return _forward_ad._current_level >= 0


def intercepted() -> bool:
    """Whether this thread's ops go to somebody else first: dispatch modes, vmap and its like; 2.11, 2.13."""
    return _dispatch_modes() > 0 or _transforms() is not None


_first_call: type | None = getattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", None)


def alone() -> bool:
    """Whether nobody looks on but AOTAutograd, as it does at a forward's first call; 2.11, 2.13, 2.15."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return _transforms() is None and all(type(mode) is _first_call for mode in modes)


def unwatched() -> AbstractContextManager[object]:
    """For the block, this thread's ops go to no dispatch mode; 2.11, 2.13, 2.15."""
    return _python_dispatch._disable_current_modes()


def profiling() -> bool:
    """Whether a profiler listens, in whatever thread it was started."""
    return _profiler._is_profiler_enabled
