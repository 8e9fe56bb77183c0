"""What is said of a capture or a launch that failed for no fault of an op's."""

from __future__ import annotations

import dataclasses

from pgraph.reasons import Reason

__all__ = ["LaunchFailure", "device_failed", "launch_failed", "unexpected"]


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchFailure:
    """A launch that failed before anything had run.

    Args:
        reason: why there will be no more launches; None if it may go well next time.
    """

    reason: Reason | None


def device_failed(error: Exception, times: int) -> Reason:
    return Reason("device-failed", f"the device refused {times} times while capturing: {error}")


def launch_failed(error: Exception) -> Reason:
    return Reason("launch-failed", f"a captured graph could not be launched: {error}")


def unexpected(error: Exception) -> Reason:
    return Reason(
        "internal-error", f"the capture stopped in an unforeseen way: {type(error).__name__}: {error}"
    )
