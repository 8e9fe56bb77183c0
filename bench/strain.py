"""What host time may be due to, beside a run's own work: the kernel's figures and the garbage collector's.

Not a program: `bursts.py` imports it.
"""

from __future__ import annotations

import gc
import resource
import time
from types import TracebackType


class Strain:
    """Of what happens within a ``with`` block.

    Attributes:
        totals: after the block. ``host_cpu_ms`` of all threads, in user and kernel mode; ``page_faults`` that
            needed no disk; ``preemptions``, by other processes; ``gc_ms`` of the garbage collector.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._collecting = 0.0
        self._since = 0.0

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._since = now
        else:
            self._collecting += now - self._since

    def __enter__(self) -> Strain:
        gc.callbacks.append(self._collected)
        self._before = _usage()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after = _usage()
        gc.callbacks.remove(self._collected)
        self.totals = {name: after[name] - self._before[name] for name in after}
        self.totals["gc_ms"] = self._collecting * 1e3


def _usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "host_cpu_ms": (used.ru_utime + used.ru_stime) * 1e3,
        "page_faults": used.ru_minflt,
        "preemptions": used.ru_nivcsw,
    }
