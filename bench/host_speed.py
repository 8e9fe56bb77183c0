"""How fast the host's cores are at the moment, and having a process run on the fastest one.

Note [Fast cores]: On a shared machine a core may run at half speed for milliseconds or seconds, and the next
core may not. A step whose host time counts then takes up to one and a half times as long, whichever backend
it is. So before it is measured a process looks for the fastest core and stays on it with all its threads, of
which one runs at a time; and afterwards it looks again: what was measured on a slow core does not count. How
fast a core is is told by a loop that has nothing to do with what is measured.

Not a program: whatever measures host time imports it.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

LOOP = 20_000
LOOKS = 8  # cores that are looked at: each takes a millisecond or two, while others may be waiting
SLOW = 1.15
"""Times as slow as the host has been seen: what was measured then is measured once more."""

T = TypeVar("T")


def loop_us() -> float:
    """Microseconds of a loop that does nothing; the better of two, since an interrupt is no slow core."""
    took = []
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(LOOP):
            pass
        took.append(time.perf_counter() - began)
    return min(took) * 1e6


class Cores:
    """The cores that this process may use.

    Where the system has no affinity (only Linux has) it runs where it is put, and its speed is still told.

    Args:
        measure: microseconds of a fixed amount of work, done on the core that it is called on.
        part, parts: of processes that run side by side each takes cores of its own, if there is one for
            each of them: the one numbered `part` takes that part of `parts`.
    """

    def __init__(self, measure: Callable[[], float] = loop_us, part: int = 0, parts: int = 1) -> None:
        self._measure = measure
        self._allowed = (
            frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
        )
        each = len(self._allowed) // parts
        mine = sorted(self._allowed)[part * each : (part + 1) * each]
        self._mine = mine or sorted(self._allowed)
        self._best = float("inf")

    def choose(self) -> int | None:
        """Have all threads of this process run on the fastest core now, of `LOOKS` of them; returns it."""
        found = {}
        for core in random.sample(self._mine, min(LOOKS, len(self._mine))):
            _use({core}, threads=(0,))
            found[core] = self._measure()
        if not found:
            self._best = min(self._best, self._measure())
            return None
        fastest = min(found, key=lambda core: (found[core], core))
        self._best = min(self._best, found[fastest])
        _use({fastest}, threads=_threads())
        return fastest

    def slowdown(self) -> float:
        """What the core that this runs on takes now, over the least seen so far; 1 for no slowdown."""
        now = self._measure()
        self._best = min(self._best, now)
        return now / self._best

    def release(self) -> None:
        """Have all threads run wherever they might at first."""
        _use(self._allowed, threads=_threads())


def on_fast_cores(run: Callable[[], T], rounds: int, cores: Cores | None = None) -> list[T]:
    """What so many runs return, each on the core that is fastest then.

    A run during which the host became slow is made again; but there are at most four times as many as asked
    for, of which those on the fastest hosts count.
    """
    cores, made = cores or Cores(), list[tuple[float, int, T]]()
    while sum(slowdown <= SLOW for slowdown, *_ in made) < rounds and len(made) < 4 * rounds:
        cores.choose()
        result = run()
        made.append((cores.slowdown(), len(made), result))
    cores.release()
    return [result for *_, result in sorted(made, key=lambda one: one[:2])[:rounds]]


def _use(cores: set[int] | frozenset[int], threads: tuple[int, ...]) -> None:
    for thread in threads:
        with contextlib.suppress(OSError):  # a thread may have ended, and a container may forbid it
            os.sched_setaffinity(thread, cores)


def _threads() -> tuple[int, ...]:
    """All of this process."""
    tasks = Path("/proc/self/task")
    return tuple(int(task.name) for task in tasks.iterdir()) if tasks.exists() else (0,)


@contextlib.contextmanager
def fast_core(on_gpu: bool) -> Iterator[Callable[[], None]]:
    """On a GPU's host, have the process run on the core that is fastest now; what it gives looks for another
    one if that has become slow. A CPU's kernels want all cores.
    """
    if not on_gpu:
        yield lambda: None
        return
    cores = Cores()
    cores.choose()

    def look() -> None:
        if cores.slowdown() > SLOW:
            cores.choose()

    try:
        yield look
    finally:
        cores.release()
