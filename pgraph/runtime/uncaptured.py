"""A part of a graph that is never captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pgraph import compat
from pgraph.partition.facts import PartitionFacts
from pgraph.runtime import observe, registry, statistics
from pgraph.runtime.profiler import in_range

__all__ = ["UncapturedPartition"]


class UncapturedPartition:
    """Callable in place of the code of a partition that is never captured; it only counts.

    Args:
        facts: of the partition.
        plain: its code; takes one list and empties it.
    """

    __slots__ = ("__weakref__", "_plain", "stats")

    def __init__(self, facts: PartitionFacts, plain: Callable[[list[Any]], Any]) -> None:
        self.stats = statistics.PartitionStats(facts.name, facts)
        self._plain = plain
        registry.register(self)

    @property
    def code(self) -> Callable[[list[Any]], Any]:
        """The partition's own code."""
        return self._plain

    def __call__(self, args: list[Any]) -> Any:
        if (watch := observe.watch) is not None and watch.outside():
            return watch.call(self, args)
        self.stats.uncaptured_runs += 1
        if compat.profiling():
            return in_range("uncaptured", self.stats.facts.label, self._plain, args)
        return self._plain(args)
