"""Every part that is in use in this process, and the report of them all."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from pgraph.drivers import choice
from pgraph.partition.facts import GraphFacts, PartFacts
from pgraph.runtime.protocols import Counted
from pgraph.runtime.statistics import Report

__all__ = ["forget", "live_partitions", "live_parts", "register", "renew", "report", "unregister"]


_parts: weakref.WeakSet[Any] = weakref.WeakSet()


def register(part: Counted) -> None:
    """Have a part counted for as long as it lives."""
    _parts.add(part)


def unregister(part: Counted) -> None:
    """Leave a part out from now on: others run in its place."""
    _parts.discard(part)


def renew(graph: GraphFacts) -> None:
    """Have every part of a graph refer to its new facts."""
    for part in list(_parts):
        if part.stats.facts.graph.number == graph.number:
            part.stats.facts = dataclasses.replace(part.stats.facts, graph=graph)


def live_parts() -> list[Any]:
    """Every part that is still in use, in order."""
    return sorted(_parts, key=lambda part: _order(part.stats.facts))


def _order(facts: PartFacts) -> tuple[int, int, int]:
    return facts.graph.number, facts.index or 0, facts.piece or 0


def live_partitions() -> list[Any]:
    """The safe ones among them."""
    return [part for part in live_parts() if part.stats.facts.safe]


def forget() -> None:
    """Leave all parts of today out of reports to come (Dynamo keeps code around graph breaks for long)."""
    _parts.clear()


def report() -> Report:
    """Counters of this process, now."""
    return Report(tuple(part.stats for part in live_parts()), choice.ghost_peaks())
