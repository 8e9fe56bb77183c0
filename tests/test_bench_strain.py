"""What a run's host time may be due to."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from typing import Any

PAGE = mmap.PAGESIZE


def test_what_happens_within_the_block_counts(load: Callable[[str], Any]) -> None:
    strain = load("strain").Strain
    gc.disable()
    try:
        with strain() as quiet:
            pass
        with strain() as busy:
            gc.collect()
            with mmap.mmap(-1, 4096 * PAGE) as memory:
                for page in range(4096):
                    memory[page * PAGE] = 1
    finally:
        gc.enable()
    assert quiet.totals["gc_ms"] == 0.0
    assert busy.totals["gc_ms"] > 0.0
    assert busy.totals["page_faults"] > quiet.totals["page_faults"] + 4000
    assert busy.totals["host_cpu_ms"] > 0.0
    assert busy.totals["preemptions"] >= 0


def test_a_block_that_fails_leaves_no_callback(load: Callable[[str], Any]) -> None:
    before = list(gc.callbacks)
    try:
        with load("strain").Strain():
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert gc.callbacks == before
