"""Ranges for the profiler: which partition runs, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch.autograd.profiler import record_function

__all__ = ["Activity", "in_range"]


Activity = Literal["uncaptured", "capture", "launch"]


def in_range(activity: Activity, label: str, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` under a range of the profiler.

    Args:
        activity: what is being done with the partition.
        label: of the partition, see `pgraph.partition.facts.PartitionFacts.label`.
    """
    with record_function(f"pgraph::{activity} {label}"):
        return fn(*args)
