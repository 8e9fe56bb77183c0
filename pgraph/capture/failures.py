"""What is said of a capture that stopped."""

from __future__ import annotations

import torch

from pgraph.errors import CaptureError, DriverError
from pgraph.reasons import Dispatch, Reason

__all__ = ["may_pass"]


def not_recorded(name: str) -> Reason:
    """Note [Work on another stream]

    An op that launches on a stream of its own choice, one that it remembered or the default stream,
    leaves nothing in the graph: each launch would hand out memory that nobody wrote. PyTorch's own
    ops use the current stream; of others, one that has a result and no node is refused.
    """
    return Reason(
        "not-recorded",
        f"{name} has a result but left no node in the capture: its kernels went to another stream",
    )


def may_pass(error: BaseException) -> bool:
    """Whether a failure says something of the moment (no memory, a driver call) and not of the op.

    Libraries and generated code report a want of memory in other types, so their text is read.
    """
    if isinstance(error, DriverError | torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)


def failure_of(error: Exception, culprit: Dispatch | None = None) -> CaptureError | DriverError:
    """What to raise for it, without the frames that it came through."""
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
