"""Whether one more capture pays, where a partition's sizes vary.

A capture costs as much as hundreds of launches save. That is nothing for a program that runs a few sizes for
hours, and too much for one whose sizes hardly ever come back. So once a partition has met a second size, a
size is captured if both of these hold:

* what it is expected to save is more than its capture costs: ``saved per launch * launches >= cost``.
  Expected are as many launches as the size had runs, or as many as there are calls between two new sizes,
  whichever is more;
* all captures of the partition together have cost no more than its launches have saved, one capture, and
  `CREDIT` of the time that has passed. So that is the most that a program can lose, whatever its sizes do.

A recording that is computed (`pgraph.compute`) costs less, and this very call is launched in the place of a
run. If that alone pays for it, nothing can be lost.

A launch saves host time. Where the device sets the pace that is worth nothing: if most uncaptured runs end
before the device has even begun with them, launches count as saving nothing.

Sizes stand for all that a specialization is about: layouts and alignments, too.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from pgraph.reasons import Reason

__all__ = ["CREDIT", "Economy", "not_worth"]

CREDIT: Final = 0.02
"""Share of the time since the partition's first call that captures may cost beyond what they save."""

_WINDOW: Final = 64.0  # calls over which the share of new sizes is averaged
_SAMPLES: Final = 9  # of each kind; the fastest counts, since first calls have things to set up


class Economy:
    """Of one partition. Called with its lock held. All times are seconds of the host."""

    def __init__(self) -> None:
        self._own: deque[float] = deque(maxlen=_SAMPLES)
        self._behind: deque[bool] = deque(maxlen=_SAMPLES)
        self._launches: deque[float] = deque(maxlen=_SAMPLES)
        self._costs: deque[float] = deque(maxlen=_SAMPLES)
        self._computed: deque[float] = deque(maxlen=_SAMPLES)
        self._spent = 0.0
        self._began: float | None = None
        self._new = self._weight = 0.0
        self._calls = 0

    def met(self, calls: int, now: float) -> None:
        """A size came for the first time.

        Args:
            calls: of the partition before this one.
            now: by the clock that all other times are taken from.
        """
        if self._began is None:
            self._began = now
        self._fade(calls + 1)
        self._new += 1.0

    def ran(self, seconds: float, behind: bool = False) -> None:
        """The partition's own code was run.

        Args:
            behind: when the host was through with it, the device had not begun.
        """
        self._own.append(seconds)
        self._behind.append(behind)

    def launched(self, seconds: float) -> None:
        """A capture was launched. Not all launches need be told."""
        self._launches.append(seconds)

    def captured(self, seconds: float, computed: bool = False) -> None:
        """A capture was made, or computed."""
        (self._computed if computed else self._costs).append(seconds)
        self._spent += seconds

    def wasted(self, seconds: float) -> None:
        """Time was spent on a size, and no capture came of it."""
        self._spent += seconds

    def saves(self) -> float:
        """Seconds that a launch saves."""
        if not self._own or 2 * sum(self._behind) > len(self._behind):
            return 0.0
        return max(min(self._own) - min(self._launches, default=0.0), 0.0)

    def pays(self, runs: int, launches: int, calls: int, now: float, computed: bool = False) -> bool:
        """Whether to capture a size, or to compute its recording.

        Args:
            runs: uncaptured runs of this size.
            launches: of the partition so far.
            calls: of the partition so far.
            now: as for `met`.
        """
        costs = self._computed if computed else self._costs
        if not costs:
            return True  # what it costs is not known before it was done once
        cost, saves = statistics.median(costs), self.saves()
        if computed and saves >= cost:
            return True
        self._fade(calls)
        share = self._new / self._weight if self._weight else 1.0
        between = (1.0 - share) / share if share else float("inf")
        elapsed = now - self._began if self._began is not None else 0.0
        affordable = self._spent <= saves * launches + CREDIT * elapsed
        return affordable and saves * max(runs, between) >= cost

    def _fade(self, calls: int) -> None:
        """Calls have passed: what came before them counts less."""
        keep = (1.0 - 1.0 / _WINDOW) ** max(calls - self._calls, 0)
        self._weight = self._weight * keep + _WINDOW * (1.0 - keep)
        self._new *= keep
        self._calls = max(calls, self._calls)


def not_worth() -> Reason:
    """Why a size waits."""
    return Reason(
        "sizes-vary", "so many sizes or layouts come that to capture them takes longer than launches save"
    )
