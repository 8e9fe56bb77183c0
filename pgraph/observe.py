"""Watching parts run: in which order, and how long each call keeps the host busy.

Off, it costs one comparison per launch. On (`pgraph.explain`), every part goes through `Watch.call`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pgraph import stats
from pgraph.facts import PartFacts

__all__ = ["PlainPart", "Run", "Watch", "watching"]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One call of a part.

    Args:
        part: what ran.
        seconds: from handing over the arguments to the results, on the host; the device was idle before.
        launched: whether it was served by a launch.
    """

    part: Any
    seconds: float
    launched: bool


class Watch:
    """Collects the calls of parts, from all threads (the backward has its own)."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._inside = threading.local()

    def outside(self) -> bool:
        """True unless this thread is already in a watched call."""
        return not getattr(self._inside, "yes", False)

    def call(self, part: Any, args: list[Any]) -> Any:
        """Call a part and note it."""
        drain()
        launches = part.stats.launches
        self._inside.yes = True
        start = time.perf_counter()
        try:
            result = part(args)
        finally:
            self._inside.yes = False
        self.runs.append(Run(part, time.perf_counter() - start, part.stats.launches > launches))
        return result


watch: Watch | None = None
"""The one in force; read at every call of a part."""


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Watch every part of this process for the duration of the block; blocks may nest."""
    global watch
    before, watch = watch, Watch()
    try:
        yield watch
    finally:
        watch = before


def drain() -> None:
    """Wait for the device: a full queue would be counted as launch time."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


class PlainPart:
    """Callable in place of the code of a part that is never captured; it only counts.

    Args:
        facts: of the part.
        plain: its code; takes one list and empties it.
    """

    __slots__ = ("__weakref__", "_plain", "stats")

    def __init__(self, facts: PartFacts, plain: Callable[[list[Any]], Any]) -> None:
        self.stats = stats.PartitionStats(facts.name, facts)
        self._plain = plain
        stats.register(self)

    def __call__(self, args: list[Any]) -> Any:
        if watch is not None and watch.outside():
            return watch.call(self, args)
        self.stats.plain_runs += 1
        return self._plain(args)
