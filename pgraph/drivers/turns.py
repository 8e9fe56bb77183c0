"""Execs that take turns: which of several that do the same holds the addresses of a launch.

Note [An exec for each layer]
Layers that share their code share one exec, and each launch finds the addresses of another layer in it: all
nodes are set anew. On an H200's host that took 1 us a node, beside 5 us to launch. So where the same sets of
addresses come again and again, each gets an exec of its own (a replica), whose nodes then hardly ever change.
The addresses tell whose turn it is: the exec that comes after the last one is asked first, since layers have
an order, then all. If none has these addresses, one that holds nothing yet takes them, else the one that
comes next. Any of them would be right: a launch sets what differs.

So it is with sizes that share an exec (Note [Shared execs]) and come in turn: each launch finds another
size's numbers in it. One that is launched often gets an exec of its own, and leaves the shared one to others.

A replica takes the device some kilobytes a node, so `pgraph.runtime.replication` decides who gets some.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Final, Protocol

__all__ = ["SIMILAR", "Turn", "Turns"]

SIMILAR: Final = 8
"""A launch is for the exec that has all but one in so many of its addresses. As in `rebind_turns.h`."""


class Turn(Protocol):
    """A recipe with an exec of its own."""

    def today(self, bases: Sequence[int]) -> list[int]:
        """What is to stand in each slot."""

    def misses(self, today: Sequence[int]) -> int | None:
        """How many slots say otherwise now; None if nobody knows what the exec was set to."""


class Turns:
    """Which of several recipes that do the same serves a launch; the reference for `pg_turns` in C.

    Args:
        room: launches of which the addresses are kept.

    Attributes:
        kept: the words of all slots, of so many launches.
    """

    def __init__(self, room: int = 0) -> None:
        self._room = room
        self._latest = 0
        self.kept: list[bytes] = []

    def next(self, recipes: Sequence[Turn], bases: Sequence[int]) -> int:
        """Number of the one that is to serve a launch. They are the same ones at each call."""
        today = recipes[0].today(bases)
        if len(self.kept) < self._room:
            self.kept.append(array.array("Q", today).tobytes())
        self._latest = self._whose(recipes, today)
        return self._latest

    def _whose(self, recipes: Sequence[Turn], today: Sequence[int]) -> int:
        after = (self._latest + 1) % len(recipes)
        order = [after, *(i for i in range(len(recipes)) if i != after)]
        unused: int | None = None
        best, least = after, len(today) + 1
        for i in order:
            misses = recipes[i].misses(today)
            if misses is None:
                unused = i if unused is None else unused
            elif misses < least:
                best, least = i, misses
            if i == after and least * SIMILAR <= len(today):
                return i
        if least * SIMILAR <= len(today):
            return best
        return unused if unused is not None else after
