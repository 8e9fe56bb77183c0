"""What the captures of several partitions may cost together (see `pgraph.runtime.economy`)."""

from __future__ import annotations

from typing import Final, Protocol

from pgraph.runtime.members import Members

__all__ = ["OF_THE_PROCESS", "START_S", "Purse"]

START_S: Final = 3.0
"""Seconds that captures may cost, once, where that is enough for all sizes that are to be expected. It is
little beside the compilation that came before."""

_STALE_S: Final = 0.05  # how old a sum of debts may be


class Indebted(Protocol):
    """Whose captures count."""

    @property
    def debt(self) -> float:
        """Seconds that they have cost beyond what launches have saved. Any thread may ask."""


class Purse:
    """What the captures of several partitions may cost together. Used by any thread.

    Args:
        start: seconds that they may cost whatever they save.
    """

    def __init__(self, start: float = START_S) -> None:
        self.start = start
        self._economies: Members[Indebted] = Members()
        self._debts, self._told = 0.0, float("-inf")

    def join(self, economy: Indebted) -> None:
        """From now on it counts."""
        self._economies.add(economy)

    def spent(self) -> None:
        """A partition has spent something: what was told of debts is no longer true."""
        self._told = float("-inf")

    def debts(self, now: float) -> float:
        """Seconds that captures have cost beyond what they have saved, of all that have joined."""
        if not 0.0 <= now - self._told < _STALE_S:
            self._debts = sum(economy.debt for economy in self._economies.all())
            self._told = now
        return self._debts


OF_THE_PROCESS: Final = Purse()
