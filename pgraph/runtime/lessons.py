"""A partition's lessons: at its first call it is captured at sizes that are made up.

Note [Lessons]
Recordings of new sizes are computed once three captures came out as computed (Note [Computed recordings]).
Made of a program's own sizes, these cost its first steps as much as some hundred launches save, and a program
that meets a few hundred sizes may never earn them. Yet a capture runs nothing and uses no memory, so any
sizes will do for which the code was compiled. So it is captured at the sizes of the first call and at two
others, right after that call. That is part of the compilation, beside which it is short, and no more than a
share of its time is spent on it. Nothing is launched that came of it: sizes that come are recorded anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from pgraph import compat
from pgraph.compute.computer import Computer
from pgraph.compute.errors import NotComputableError
from pgraph.compute.stand_ins import ArgumentSizes, Family, operands
from pgraph.drivers.interface import Driver
from pgraph.launch.guards import Guards
from pgraph.runtime.ahead import Ahead
from pgraph.runtime.statistics import PartitionStats
from pgraph.text import amount

__all__ = ["Lessons", "Teach"]

log = logging.getLogger(__name__)

Teach = Callable[[Sequence[Any], Sequence[Any], Sequence[int]], None]
"""(stand-ins, these as a capture takes them, alignments); see `pgraph.capture.build.teach`."""

_SHARE: Final = 0.1
"""Of the time that Inductor took for a partition, which is about a third of what the program waited."""

_LEAST_S: Final = 1.5
"""Seconds that lessons may take however soon it was compiled: code may come from a cache, and Inductor makes
the kernels of all layers once. Of fewer lessons than there are sizes nothing is learned."""


class Lessons:
    """Of one partition. Called with its lock held, but for `due`, which is read without it.

    Args:
        family: of the sizes of its arguments.
        compile_s: seconds that it took to compile the partition.
        ahead: sizes to compute once there is nothing more to learn, if that is wanted.

    Attributes:
        due: they can be given once the call is over.
    """

    def __init__(self, family: Family, compile_s: float, ahead: Ahead | None = None) -> None:
        self._family, self._ahead = family, ahead
        self._sizes: tuple[ArgumentSizes, ...] | None = None  # as they were traced, then others
        self._limit_s = max(_LEAST_S, _SHARE * compile_s)
        self._stand_ins: list[list[Any]] = []
        self._guards: Guards | None = None
        self._learner: Computer | None = None

    @property
    def due(self) -> bool:
        return bool(self._stand_ins)

    def prepare(self, args: Sequence[Any], guards: Guards, driver: Driver, computer: Computer | None) -> bool:
        """Note what there is to know of a first call's arguments, which are gone after it.

        Returns:
            Whether there will be lessons.
        """
        if self.due:
            return True
        if not self._family.symbols:
            return False
        if not compat.alone():
            return True  # later; numbers may be symbols
        if self._sizes is None:  # not before now: compiling is over
            self._sizes = self._family.made_up()
        if not self._sizes or computer is None or not computer.begin(args):
            return False
        if not self._sizes[0].are_of(args):
            return True
        sizes, self._sizes = self._sizes, ()
        try:
            self._stand_ins = [made.stand_ins(args, driver.device) for made in sizes]
        except NotComputableError as e:
            log.debug("no lessons: %s", str(e))
        self._guards, self._learner = guards, computer
        return self.due

    def give(self, stats: PartitionStats, teach: Teach) -> Ahead | None:
        """Give them, as far as there is time for it, and unless nothing can be computed.

        Returns:
            What computes sizes ahead, if it can from now on.
        """
        stand_ins, self._stand_ins = self._stand_ins, []
        learner, guards, start, given = self._learner, self._guards, time.perf_counter(), 0
        if learner is None or guards is None or not compat.alone():
            return None
        try:
            with compat.unwatched():
                for arguments in stand_ins:
                    late = given and time.perf_counter() - start > self._limit_s
                    if late or learner.reason is not None:
                        break
                    teach(arguments, operands(arguments), guards.alignments)
                    given += 1
        except Exception as e:  # the program's own sizes may teach better
            log.debug("%s: a lesson failed: %s: %s", stats.name, type(e).__name__, str(e))
        seconds = time.perf_counter() - start
        told = amount(given, "made-up size")
        log.info("%s was captured at %s, to learn from, in %.0f ms", stats.name, told, seconds * 1e3)
        if self._ahead is None or learner.learning or learner.reason is not None:
            return None
        self._ahead.begin(stand_ins[0], guards)
        return self._ahead
