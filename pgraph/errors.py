"""Every exception that pgraph raises, in one place.

A message names the thing, its value and the fix. Failures of a capture never reach the user as
exceptions (the partition runs uncaptured, with a `Reason`); what is raised here is a wrong call or a
broken promise.
"""

from __future__ import annotations

from pgraph.reasons import Dispatch, Reason

__all__ = [
    "CaptureError",
    "DriverError",
    "FullCaptureError",
    "MatchError",
    "OptionError",
    "PgraphError",
    "PlanError",
    "RecountError",
]


class PgraphError(Exception):
    """Base of all pgraph exceptions."""


class OptionError(PgraphError, ValueError):
    """An option is unknown, ill-typed or out of range."""


class DriverError(PgraphError, RuntimeError):
    """A call of the CUDA driver failed, or the driver asked for is not available."""


class RecountError(DriverError):
    """Nodes of a capture were miscounted, and will not be when it is made again. Internal: that is done."""


class PlanError(PgraphError, ValueError):
    """The lifetimes handed to the memory planner contradict each other."""


class _Refused(PgraphError):  # noqa: N818 - a base, never raised itself
    def __init__(
        self,
        reason: Reason,
        op: str | None = None,
        *,
        node: int | None = None,
        culprit: Dispatch | None = None,
    ) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.op = op or (culprit.op if culprit is not None else None)  # "ns::name" of the op at fault
        self.node = node  # position in the recording of the node at fault
        self.culprit = culprit  # the call at fault


class CaptureError(_Refused):
    """A partition could not be captured. Internal: turned into a fallback with `reason`."""


class MatchError(_Refused):
    """Two captures of a partition could not be matched. Internal: turned into a fallback."""


class FullCaptureError(PgraphError, RuntimeError):
    """`require_full_capture` is set and part of the model stays outside every graph."""
