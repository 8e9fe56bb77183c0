"""How many of a partition's calls bring sizes that never came before."""

from __future__ import annotations

from typing import Final

__all__ = ["Novelty"]

_WINDOW, _FEW = 64.0, 8.0
"""Calls that were looked at, over which the share of new sizes is averaged."""

_NONE: Final = 1.0  # the share before there was a call


class Novelty:
    """Of one partition. Called with its lock held.

    Of the calls that nothing serves only some are looked at. The others' sizes are not known: no larger part
    of the launches may count, or it would seem as if hardly any new sizes came.

    Attributes:
        looks: calls that were looked at.
    """

    def __init__(self) -> None:
        self.looks = 0
        self._lately, self._latest_few = _Share(_WINDOW), _Share(_FEW)
        self._launches = self._looked = 0  # and looks, when calls have passed
        self._fresh = 0  # launches since then at a size's first call

    @property
    def lately(self) -> float:
        """Of the calls of late that were looked at or launched, those with a new size."""
        return self._lately.now

    @property
    def latest_few(self) -> float:
        """Of the latest few. A launch counts as one with a known size, also at a size's first call: where
        sizes are captured as they come, that few have come before tells nothing.
        """
        return self._latest_few.now

    def came(self) -> None:
        """A size came for the first time."""
        self._seen(1, new=1)

    def ran(self, first: bool) -> None:
        """A call was looked at, and run.

        Args:
            first: with a size that came for the first time, as was told.
        """
        self.looks += 1
        self._seen(not first)

    def launched_first(self) -> None:
        """A size is launched at its first call."""
        self._fresh += 1

    def passed(self, calls: int, launches: int) -> None:
        """So many calls have passed.

        Args:
            launches: so far.
        """
        launched, looked = launches - self._launches, self.looks - self._looked
        self._launches, self._looked = launches, self.looks
        other = max(calls - launched, looked)
        told = launched * looked / other if other else launched
        self._seen(told, known=told - self._fresh)
        self._fresh = 0

    def _seen(self, calls: float, new: int = 0, known: float | None = None) -> None:
        """Sizes of so many more calls were seen, and how many of them were new.

        Args:
            known: calls with sizes that had come before; None for all of them.
        """
        self._latest_few.seen(calls, new)
        self._lately.seen(calls if known is None else max(known, 0.0), new)


class _Share:
    """Of the calls that were looked at, those with a new size.

    Args:
        window: calls over which it is averaged.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._new = self._weight = 0.0

    def seen(self, more: float, new: int) -> None:
        """So many more calls, the last ones of them new."""
        keep = (1.0 - 1.0 / self._window) ** more
        self._weight = self._weight * keep + self._window * (1.0 - keep)
        self._new = self._new * keep + new

    @property
    def now(self) -> float:
        return min(self._new / self._weight, 1.0) if self._weight else _NONE
