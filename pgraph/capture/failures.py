"""Reasons and errors for a capture that stopped."""

from __future__ import annotations

import torch

from pgraph.errors import CaptureError, DriverError, RecountError
from pgraph.reasons import Dispatch, Reason

__all__ = ["may_pass"]


def not_recorded(name: str) -> Reason:
    """Note [Work on another stream]

    An op that launches on a stream of its own choice, one that it remembered or the default stream,
    leaves nothing in the graph: each launch would return memory that no kernel has written. Built-in
    ops use the current stream. A custom op that has a result and no node is refused.
    """
    return Reason(
        "not-recorded",
        f"{name} has a result but left no node in the capture: its kernels went to another stream",
    )


def may_pass(error: BaseException) -> bool:
    """Whether a capture may succeed later: memory ran out or a driver call failed, and no op is at fault.

    Libraries and generated code report a lack of memory with errors of other types, so their text is read.
    """
    if isinstance(error, DriverError | torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)


def failure_of(error: Exception, culprit: Dispatch | None = None) -> CaptureError | DriverError:
    """The error to raise in place of `error`, without the stack frames that it holds."""
    if isinstance(error, RecountError):
        return RecountError(str(error))
    if isinstance(error, CaptureError):
        return CaptureError(error.reason, error.op, culprit=error.culprit or culprit)
    op = culprit.op if culprit is not None else None
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if may_pass(error):
        what = first if isinstance(error, DriverError) else f"{type(error).__name__}: {first}"
        return DriverError(f"{what} (in {op})" if op else what)
    return CaptureError(
        Reason(
            "capture-failed",
            f"the capture stopped{f' in {op}' if op else ''}: {type(error).__name__}: {first}",
        ),
        culprit=culprit,
    )


def library_kept(nbytes: int) -> Reason:
    return Reason("library-keeps-memory", f"a library took {nbytes} bytes during the capture and kept them")
