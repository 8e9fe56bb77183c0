"""Ranges for the profiler: which partition runs, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch.autograd.profiler import record_function

__all__ = ["Step", "in_range"]


Step = Literal["uncaptured", "capture", "launch"]


def in_range(step: Step, label: str, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` under a range of the profiler.

    Args:
        step: what is being done with the partition.
        label: of the partition, see `PartFacts.label`.
    """
    with record_function(f"pgraph::{step} {label}"):
        return fn(*args)
