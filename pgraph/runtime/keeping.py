"""Which captures are kept when more sizes or layouts come than `max_captures` lets in.

Note [Taking turns]
With room for one capture and two sizes in turn, "the least recently used goes" would capture at
every call, or (if a size must be seen twice first) never. A capture costs as much as thousands of
launches, so the one that is there stays until another has shown that it is worth more:

* the work has moved on: nothing was launched during its last few uncaptured runs. How many is asked for
  grows with the captures dropped so far, up to `PATIENCE`;
* or it was run uncaptured `PATIENCE` times while the least recently used capture rested, or while the
  captures were launched half as often as it was run, on average.

All others run uncaptured. Captures are so made at most once per a few calls, and hardly ever when sizes
keep taking turns.
"""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["PATIENCE", "WAITING", "Keeper", "Use"]

PATIENCE: Final = 8
WAITING: Final = 64
"""Sizes without a capture that are remembered per partition."""


@dataclasses.dataclass(slots=True)
class Use:
    """When a specialization was used, in calls that were not served at once by the capture in use.

    Args:
        first: its first uncaptured run, since it lost its capture if it had one; 0 before it.
        latest: its latest use.
        before: launches of the partition before its first uncaptured run.
        mark: launches of the partition before its latest uncaptured run.
        streak: uncaptured runs with no launch of the partition in between.
    """

    first: int = 0
    latest: int = 0
    before: int = 0
    mark: int = 0
    streak: int = 0


class Keeper:
    """Decides for one partition. Called with the partition's lock held.

    Args:
        limit: option `max_captures`.
        warmup: option `warmup`.
    """

    __slots__ = ("_clock", "_dropped", "_limit", "_warmup")

    def __init__(self, limit: int, warmup: int) -> None:
        self._limit, self._warmup = limit, warmup
        self._clock = self._dropped = 0

    def used(self, use: Use) -> None:
        """A capture was launched."""
        self._clock += 1
        use.latest = self._clock

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
        patience = min(self._dropped // self._limit, PATIENCE)
        if use.mark == launches and use.streak >= self._warmup + patience:
            return True
        if not self.patient(runs):
            return False
        return oldest.latest < use.first or runs * captures > 2 * (launches - use.before)

    def patient(self, runs: int) -> bool:
        """Whether a specialization has waited long enough to be compared with the captures."""
        return runs >= self._warmup + PATIENCE
