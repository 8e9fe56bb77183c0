"""Calls that a glance at their sizes is enough for.

To find or make a specialization takes longer than a small partition can save: its guards look at all
arguments (0.6 ms for 60 of them, H200). Where no capture could be had just now, whatever the size is, or to
compute this one would not pay, its numbers alone are noted, and the call counts as one with this size.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pgraph.drivers.execs import Computing
from pgraph.runtime.economy import Economy
from pgraph.runtime.met import Met
from pgraph.runtime.sizes import Sizes
from pgraph.runtime.specialization import Specialization

__all__ = ["Glimpse", "Glimpses"]


class Glimpse(enum.Enum):
    """What is known of a call without a specialization: its sizes came for the first time, or had before."""

    NEW = enum.auto()
    KNOWN = enum.auto()


@dataclasses.dataclass(slots=True)
class _Size:
    """What is known of one set of sizes.

    Args:
        runs: calls that a glance was enough for.
        thread: of the latest one before there was a specialization.
        made: whether there was one.
    """

    runs: int = 0
    thread: int | None = None
    made: bool = False


class Glimpses:
    """Of one partition. Called with its lock held.

    Args:
        sizes: of the partition.
        met: which of them came.
        enough: whether a glance may be; else each call gets a closer look.
    """

    def __init__(self, sizes: Sizes, met: Met, enough: bool) -> None:
        self._sizes, self._met = sizes, met
        self._enough = enough and bool(sizes.dimensions)  # else it is layouts that vary
        self._known: dict[tuple[int, ...], _Size] = {}

    def at(
        self, args: Sequence[Any], economy: Economy, calls: int, now: float, computer: Computing | None
    ) -> Glimpse | None:
        """A call for which this is enough; None if it takes a closer look.

        Args:
            economy: of the partition.
            calls: of the partition, before this one.
            now: in seconds, by the economy's clock.
            computer: computes recordings, or will once it has learned to.
        """
        if not self._enough or self._met.more:  # or there are too many sizes to remember
            return None
        sizes = self._sizes.of(args)
        known = self._known.get(sizes)
        learning = computer is not None and computer.learning
        computing = computer is not None and not learning and computer.reason is None
        if not economy.unaffordable(calls, now, known is None, computing, learning):
            if not computing or (known is not None and economy.sizes == 1):
                return None
            if economy.pays(0 if known is None else known.runs + known.made, calls, now, computed=True):
                return None
        self._met.note(sizes)
        self._sizes.note(sizes)
        if known is None:
            economy.met(calls, now)
        found = self._known.setdefault(sizes, _Size())
        found.runs += 1
        if not found.made:
            found.thread = threading.get_ident()
        return Glimpse.NEW if known is None else Glimpse.KNOWN

    def made(self, args: Sequence[Any]) -> int | None:
        """They get a specialization: the thread that has run them, if they came without one until now."""
        if not self._enough or self._met.more:
            return None
        found = self._known.setdefault(self._sizes.of(args), _Size())
        thread, found.thread, found.made = found.thread, None, True
        return thread

    def runs(self, args: Sequence[Any]) -> int:
        """Calls with these sizes that a glance was enough for."""
        known = self._known.get(self._sizes.of(args))
        return known.runs if known is not None else 0

    def rare(self, closer: Iterable[Specialization]) -> tuple[int, int]:
        """How many sizes came once, and how many twice.

        Args:
            closer: those that were looked at more closely; of the glimpses before that one counts as a run.
        """
        came = Counter(s.standing.runs + s.use.launches for s in closer)
        came.update(size.runs for size in self._known.values() if not size.made)
        return came[1], came[2]

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
