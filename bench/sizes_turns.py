"""Programs that run in turns in one process. Not a program: `sizes_training.py` and others import it.

Hosts differ from one minute to the next by more than backends do, and so do processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from host_speed import fast_core
from sizes_place import Place
from sizes_run import Run, run

PIECE = 10  # steps of each program in turn


class OwnTime:
    """A clock in seconds, without the time of others.

    Attributes:
        others: seconds that are not counted.
    """

    def __init__(self) -> None:
        self.others = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self.others

    def tells(self) -> None:
        """It is pgraph's clock from now on."""
        from pgraph.runtime import trial

        trial.clock = self


class Program(Protocol):
    """What takes turns."""

    place: Place

    def step(self, number: int) -> None: ...

    def before(self, number: int) -> None: ...

    def after(self, number: int) -> None: ...


def in_turns(
    mine: Program,
    others: Sequence[Program],
    count: int,
    clock: OwnTime,
    checked: Sequence[int] | set[int] = (),
    waits: bool = False,
) -> tuple[Run, list[list[float]]]:
    """So many steps of all, `PIECE` of each in turn. Whoever came first comes last in the next turn.

    A total is of all pieces that have begun by its mark.

    Args:
        clock: stands still while others run.
        checked: steps of `mine`, to be looked at.
        waits: see `run`.

    Returns:
        Times of `mine`, and the totals of each of the others at its marks.
    """
    place, programs = mine.place, [mine, *others]
    mark = min(place.size.mark, count)
    marks = [*range(mark, count, mark), count]
    totals = [[0.0] for _ in programs]
    parts: list[tuple[int, float]] = []
    with fast_core(place.on_gpu) as look:
        for turn, at in enumerate(range(0, count, PIECE)):
            end = min(at + PIECE, count)
            for k in range(len(programs)):
                which = (turn + k) % len(programs)
                each, first = programs[which], which == 0
                began = time.perf_counter()
                timed = run(
                    each.place,
                    end - at,
                    lambda number, each=each, at=at: each.step(at + number),
                    mark=PIECE,
                    checked=[number - at for number in checked if at <= number < end and first],
                    before=lambda number, at=at: mine.before(at + number),
                    after=lambda number, at=at: mine.after(at + number),
                    waits=waits,
                    look=look,
                )
                totals[which].append(totals[which][-1] + timed.totals_ms[-1])
                if first:
                    parts += timed.parts
                else:
                    clock.others += time.perf_counter() - began
    at_marks = [[sums[-(-end // PIECE)] for end in marks] for sums in totals]
    return Run(parts, marks, at_marks[0]), at_marks[1:]
