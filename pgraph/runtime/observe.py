"""Watching partitions run: in which order, and how long each call keeps the host busy.

Off, it costs one comparison per launch. On (`pgraph.explain`), every partition goes through `Watch.call`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pgraph.ops.fx import VIEWS

__all__ = ["TimedCall", "Watch", "count_ops", "watching"]


@dataclasses.dataclass(frozen=True, slots=True)
class TimedCall:
    """One call of a partition.

    Args:
        partition: what ran.
        seconds: from handing over the arguments to the results, on the host; the device was idle before.
        launched: whether it was served by a launch.
    """

    partition: Any
    seconds: float
    launched: bool


class Watch:
    """Collects the calls of partitions, from all threads (the backward has its own).

    Args:
        mark: show each call to the profiler, see `count_ops`.
        uncaptured: run the partitions' own code, also of those that are captured.
    """

    def __init__(self, mark: bool = False, uncaptured: bool = False) -> None:
        self.runs: list[TimedCall] = []
        self._mark = mark
        self._uncaptured = uncaptured
        self._inside = threading.local()

    def outside(self) -> bool:
        """True unless this thread is already in a watched call."""
        return not getattr(self._inside, "yes", False)

    def call(self, partition: Any, args: list[Any]) -> Any:
        """Call a partition and note it."""
        drain()
        launches = partition.stats.launches
        run = partition.code if self._uncaptured else partition
        self._inside.yes = True
        start = time.perf_counter()
        try:
            with torch.autograd.profiler.record_function(_MARK) if self._mark else contextlib.nullcontext():
                result = run(args)
        finally:
            self._inside.yes = False
        self.runs.append(
            TimedCall(partition, time.perf_counter() - start, partition.stats.launches > launches)
        )
        return result


watch: Watch | None = None
"""The one in force; read at every call of a partition."""


_MARK = "pgraph::partition"
_FREE = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "item", "result_type"))


@contextlib.contextmanager
def watching(mark: bool = False, uncaptured: bool = False) -> Iterator[Watch]:
    """Watch every part of this process for the duration of the block; blocks may nest. See `Watch`."""
    global watch
    before, watch = watch, Watch(mark, uncaptured)
    try:
        yield watch
    finally:
        watch = before


def count_ops(fn: Callable[[], Any]) -> Counter[str]:
    """Ops that run outside every partition while `fn` runs: what Dynamo left to Python, and the optimizer.

    Views and allocations do not count; an op that calls others counts as one.
    """
    with watching(mark=True), torch.autograd.profiler.profile() as profile:
        fn()
    found: Counter[str] = Counter()
    for event in profile.function_events or ():
        if not event.name.startswith("aten::") or event.name in VIEWS or event.name in _FREE:
            continue
        parent = event.cpu_parent
        while parent is not None and parent.name != _MARK and not parent.name.startswith("aten::"):
            parent = parent.cpu_parent
        if parent is None:
            found[event.name] += 1
    return found


def drain() -> None:
    """Wait for the device: a full queue would be counted as launch time."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
