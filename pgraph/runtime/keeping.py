"""Which captures are kept when more sizes or layouts come than `capture_memory_mb` or `max_captures` lets in.

Note [Taking turns]
With room for one capture and two sizes in turn, "the least recently used goes" would capture at
every call, or (if a size must be seen twice first) never. A capture costs as much as thousands of
launches, so the one that is there stays until another has shown that it is worth more:

* the work has moved on: nothing was launched during its last few uncaptured runs. How many is asked for
  grows with the captures dropped so far, up to `PATIENCE`;
* or it was run uncaptured `PATIENCE` times while the least recently used capture rested, or while the
  captures were launched half as often as it was run, on average.

A capture of another partition (see `pgraph.runtime.budget`) goes only if it was not launched while the new
one was run uncaptured a few times in a row; how often is asked for grows likewise.

All others run uncaptured. Captures are so made at most once per a few calls, and hardly ever when sizes
keep taking turns.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Final

__all__ = ["PATIENCE", "WAITING", "Keeper", "Use"]

PATIENCE: Final = 8
WAITING: Final = 256
"""Sizes without a capture that are remembered per partition."""
_SELDOM: Final = 16 * PATIENCE


@dataclasses.dataclass(slots=True)
class Use:
    """When a specialization was used, in calls that were not served at once by the capture in use.

    Args:
        first: its first uncaptured run, since it lost its capture if it had one; 0 before it.
        latest: its latest use.
        before: launches of the partition before its first uncaptured run.
        mark: launches of the partition before its latest uncaptured run.
        streak: uncaptured runs with no launch of the partition in between.
        launches: of its capture.
        since, window: a few uncaptured runs: when they began, and how many there were.
        declined: how often it was not given the memory of others.
    """

    first: int = 0
    latest: int = 0
    before: int = 0
    mark: int = 0
    streak: int = 0
    launches: int = 0
    since: int = 0
    window: int = 0
    declined: int = 0


class Keeper:
    """Decides for one partition. Called with the partition's lock held.

    Args:
        limit: option `max_captures`.
        warmup: option `warmup`.
        clock: what tells the time, if captures of other partitions are compared with; a number that grows.
    """

    __slots__ = ("_clock", "_dropped", "_limit", "_warmup")

    def __init__(self, limit: int | None, warmup: int, clock: Callable[[], int] | None = None) -> None:
        self._limit, self._warmup = limit, warmup
        self._clock = clock or itertools.count(1).__next__
        self._dropped = 0

    def used(self, use: Use) -> None:
        """A capture was launched."""
        use.latest = self._clock()

    def ran(self, use: Use, launches: int) -> None:
        """A specialization without a capture ran uncaptured.

        Args:
            launches: of the partition so far.
        """
        self.used(use)
        if not use.first:
            use.first, use.before = use.latest, launches
        use.streak = use.streak + 1 if use.mark == launches else 1
        use.mark = launches
        if not use.window:
            use.since = use.latest
        use.window += 1

    def dropped(self) -> None:
        """A capture was given up for another."""
        self._dropped += 1

    def admits(self, use: Use, runs: int, oldest: Use, captures: int, launches: int) -> bool:
        """Whether a specialization may take the place of the least recently used capture.

        Args:
            use: of the specialization.
            runs: its uncaptured runs.
            oldest: use of the capture that would go.
            captures: how many there are.
            launches: of the partition so far.
        """
        patience = min(self._dropped // (self._limit or max(captures, 1)), PATIENCE)
        if use.mark == launches and use.streak >= self._warmup + patience:
            return True
        if not self.patient(runs):
            return False
        return oldest.latest < use.first or runs * captures > 2 * (launches - use.before)

    def may_ask(self, use: Use, patience: int) -> bool:
        """Whether a specialization may ask for the memory of others. To look for some takes time, so that
        one that got none asks less often.

        Args:
            patience: runs that are asked for, beyond the warm-up.
        """
        return use.window >= self._warmup + max(patience, min(use.declined, _SELDOM))

    @staticmethod
    def declined(use: Use) -> None:
        """It got none: it waits anew."""
        use.window = 0
        use.declined += 1

    @staticmethod
    def rests(use: Use, other: Use) -> bool:
        """Whether a capture of another partition was not launched while a specialization waited."""
        return other.latest < use.since

    def patient(self, runs: int) -> bool:
        """Whether a specialization has waited long enough to be compared with the captures."""
        return runs >= self._warmup + PATIENCE
