"""What the partitions of a running graph have in common, whoever makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from pgraph.reasons import Dispatch, Reason
from pgraph.runtime.statistics import PartitionStats

__all__ = ["Boxed", "Counted", "Resplitting"]

Boxed = Callable[[list[Any]], Any]  # takes one list and empties it


class Counted(Protocol):
    """A partition whose calls are counted."""

    stats: PartitionStats

    @property
    def code(self) -> Boxed:
        """The partition's own code."""


class Resplitting(Protocol):
    """The way back from a partition to the graph that it was compiled from, until it is captured."""

    def captured(self) -> None:
        """It was: there will be no split."""

    def turn(self) -> contextlib.AbstractContextManager[bool]:
        """Whether it may be split now, and not while another thread splits the same graph."""

    def refused(self, reason: Reason, culprit: Dispatch | None) -> Reason | None:
        """Its capture was refused. None if others run in its place now, else why it runs uncaptured."""
