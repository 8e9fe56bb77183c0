"""What a launch saves of the host's time, told by the times of runs and of launches.

Where the device sets the pace, that is worth nothing: of the uncaptured runs those count as nothing saved
that end before the device has even begun with them. Once some sizes are launched that is so at some calls,
after a few launches in a row. So it is their share that counts. Where most of the latest ones stood for all,
39 of 259 missing recordings were computed in 3,000 steps of training on 241 lengths (H200).

Both are the fastest of the latest ones, since first calls have things to set up.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

__all__ = ["Gain"]

_SAMPLES: Final = 9  # of each kind

_FIRST_FEW: Final = 3
"""Of fewer runs even the fastest may be a slow one."""

_LAUNCH: Final = 0.33
"""What a launch takes of a run, as long as none was timed: nobody times those of sizes computed ahead."""


class Gain:
    """Of one partition. Called with its lock held. All times are seconds of the host.

    Attributes:
        seconds: what a launch saves; 0.0 as long as nothing is known.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._runs: deque[float] = deque(maxlen=_SAMPLES)
        self._behind: deque[bool] = deque(maxlen=_SAMPLES)
        self._launches: deque[float] = deque(maxlen=_SAMPLES)
        self._firsts: deque[float] = deque(maxlen=_SAMPLES)

    @property
    def known(self) -> bool:
        """Whether there was a run that tells."""
        return bool(self._runs)

    def ran(self, seconds: float, behind: bool, first: bool) -> None:
        """The partition's own code was run.

        Args:
            behind: when the host was through with it, the device had not begun.
            first: with a size that it had never been run with. It is slower than those that launches replace.
        """
        if first:
            self._firsts.append(seconds)
            return
        self._runs.append(seconds)
        self._behind.append(behind)
        self._weigh()

    def launched(self, seconds: float) -> None:
        """A capture was launched. Not all launches need be told."""
        self._launches.append(seconds)
        self._weigh()

    def _weigh(self) -> None:
        if not self._runs:
            return
        run = min([*self._runs, *(self._firsts if len(self._runs) < _FIRST_FEW else ())])
        saved = max(run - min(self._launches, default=_LAUNCH * run), 0.0)
        self.seconds = saved * (1.0 - statistics.fmean(self._behind))

    def beside_set_up(self, seconds: float) -> float:
        """Of what was spent on a size that has never run, the part that its first run would not have taken.

        The slowest first run does not count: it may be the one that compiled kernels.
        """
        if len(self._firsts) <= 2 or not self._runs:
            return seconds
        usual = statistics.mean(sorted(self._firsts)[:-1])
        return max(seconds - max(usual - min(self._runs), 0.0), 0.0)
