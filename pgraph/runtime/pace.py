"""How a partition's calls follow one another: the time between two, and how long its program has run.

A program that waits does not run, nor one that compiles: of the time between two calls no more counts than is
usual (`_IDLE`), never more than a second, and nothing between the first ones. Else a server would spend on
its first requests what it saved up over night.

How often a partition is called is told by plain calls alone. One that brings a new size or is captured takes
ten times as long, and after a few dozen of them in a row a busy server would seem to be called seldom.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

__all__ = ["Pace"]

_LATE: Final = 9  # of the latest gaps
_GAPS: Final = 65
"""Those that tell what is usual. Of a few the median may by chance be a third of what it should be, where
every eighth step or so calls a partition."""

_LEAST: Final = 33
"""So many have to be known for that."""

_IDLE: Final = 10.0  # times the shortest of the latest; what is longer was spent waiting
_IDLE_S: Final = 1.0  # and what is longer than this


class Pace:
    """Of one partition. Called with its lock held. All times are seconds of the host.

    Attributes:
        ran: how long the program has run.
    """

    def __init__(self) -> None:
        self.ran = 0.0
        self._latest: float | None = None
        self._late: deque[float] = deque(maxlen=_LATE)
        self._plain: deque[float] = deque(maxlen=_GAPS)
        self._set_up = False

    def set_up(self) -> None:
        """In the latest call something was made that later ones find: it is no plain one."""
        self._set_up = True

    def passed(self, more: int, now: float) -> None:
        """So many further calls came until now."""
        if self._latest is not None:
            gap = max(now - self._latest, 0.0) / more
            if len(self._late) == _LATE:  # between the first ones code is compiled
                self.ran += more * min(gap, _IDLE * min(self._late), _IDLE_S)
            self._late.append(gap)
            if not self._set_up:
                self._plain.append(gap)
        self._latest, self._set_up = now, False

    @property
    def lately(self) -> float | None:
        """The time between two of the latest plain calls; None before there were two."""
        return statistics.median(list(self._plain)[-_LATE:]) if self._plain else None

    @property
    def usual(self) -> float | None:
        """The time between two calls; None as long as there were too few to tell."""
        if len(self._plain) < _LEAST:
            return None
        most = _IDLE * statistics.median(self._plain)
        return min(statistics.fmean(min(gap, most) for gap in self._plain), _IDLE * min(self._late))
