"""What is said of a capture or a launch that failed for no fault of an op's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pgraph.errors import LaunchMemoryError
from pgraph.launch.interpreter import Launcher
from pgraph.reasons import Reason

__all__ = ["before_all", "device_failed", "launch_failed", "unexpected"]


def before_all(error: Exception, launcher: Launcher | None, args: Sequence[Any]) -> Exception:
    """A want of memory as a `LaunchMemoryError` if nothing has run: then the arguments are whole again."""
    if not isinstance(error, torch.OutOfMemoryError) or launcher is None or not launcher.positions:
        return error
    if any(args[position] is None for position in launcher.positions):
        return error
    return LaunchMemoryError(str(error))


def device_failed(error: Exception, times: int) -> Reason:
    return Reason("device-failed", f"the device refused {times} times while capturing: {error}")


def launch_failed(error: Exception) -> Reason:
    return Reason("launch-failed", f"a captured graph could not be launched: {error}")


def unexpected(error: Exception) -> Reason:
    return Reason(
        "internal-error", f"the capture stopped in an unforeseen way: {type(error).__name__}: {error}"
    )
