"""A progress bar while a program captures many partitions, for whoever waits at a terminal."""

from __future__ import annotations

import threading
from typing import Any, Final

from pgraph.runtime import registry

__all__ = ["MANY", "captured", "close"]

MANY: Final = 20
"""Captures that are made without a bar: they are over before anybody wonders."""

_lock = threading.Lock()  # a backward is captured in a thread of autograd's
_bar: Any = None


def captured() -> None:
    """A partition was captured. The bar counts up to those that had run uncaptured when it began."""
    global _bar
    with _lock:
        if _bar is None:
            live = registry.live_capturable()
            if len(live) < MANY:
                return
            waiting = sum(p.stats.state == "warming up" for p in live)
            if waiting < MANY or (bar := _new_bar(waiting + 1)) is None:
                return
            _bar = bar
        _bar.update()
        done = _bar.n >= _bar.total
    if done:
        close()


def close() -> None:
    """No more captures are expected, or those that were are forgotten."""
    global _bar
    with _lock:
        if _bar is not None:
            _bar.close()
            _bar = None


def _new_bar(total: int) -> Any | None:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:  # it is an extra
        return None
    bar = tqdm(total=total, desc="pgraph captures", unit=" partitions", leave=False, disable=None)
    return None if bar.disable else bar  # None: stderr is no terminal
