"""Every partition that is in use in this process, and the report of them all."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from pgraph import compat
from pgraph.drivers import choice
from pgraph.native import libraries
from pgraph.partition.facts import GraphFacts, PartitionFacts
from pgraph.runtime import functions
from pgraph.runtime.members import Members
from pgraph.runtime.protocols import Counted
from pgraph.runtime.statistics import Report

__all__ = [
    "all_gone",
    "belongs",
    "forget",
    "live_capturable",
    "live_partitions",
    "register",
    "renew",
    "report",
    "unregister",
]


_partitions: Members[Any] = Members()


def register(partition: Counted) -> None:
    """Have a partition counted for as long as it lives."""
    _partitions.add(partition)


def unregister(partition: Counted) -> None:
    """Leave a partition out from now on: others run in its place."""
    _partitions.discard(partition)


def renew(graph: GraphFacts) -> None:
    """Have every part of a graph refer to its new facts."""
    for partition in _partitions.all():
        if partition.stats.facts.graph.number == graph.number:
            partition.stats.facts = dataclasses.replace(partition.stats.facts, graph=graph)


def belongs(number: int, model: Any) -> None:
    """A graph belongs to this model: when that goes, the report tells.

    Another model of the same class may still run the graph, and then it lives.
    """
    if model is not None:
        weakref.finalize(model, _gone, number).atexit = False


def all_gone() -> None:
    """Dynamo was reset, and calls none of today's partitions again (but where code waits to be resumed)."""
    _gone(None)


def _gone(number: int | None) -> None:
    for partition in _partitions.all():
        if number is None or partition.stats.facts.graph.number == number:
            partition.stats.gone = partition.stats.calls


def live_partitions() -> list[Any]:
    """Every partition that is still in use, in order."""
    return sorted(_partitions.all(), key=lambda partition: _order(partition.stats.facts))


def _order(facts: PartitionFacts) -> tuple[int, int, int]:
    return facts.graph.number, facts.index or 0, facts.piece or 0


def live_capturable() -> list[Any]:
    """The safe ones among them."""
    return [partition for partition in live_partitions() if partition.stats.facts.safe]


def forget() -> None:
    """Leave all partitions of today out of reports to come (Dynamo keeps code around graph breaks for
    long)."""
    _partitions.clear()


def report() -> Report:
    """Counters of this process, now: a report that was kept does not count on."""
    asked = any(getattr(backend, "compiler_name", None) == "pgraph" for backend in compat.known_backends())
    return Report(
        tuple(partition.stats.at_present() for partition in live_partitions()),
        choice.ghost_peaks(),
        functions.live(),
        asked,
        libraries.missing(),
    )
