"""Gives the framework's cached memory back when captures have settled.

Note [Trimmed once settled]
A partition that runs uncaptured asks for its memory piece by piece; its launch asks for all of a chunk at
once. So what the allocator keeps from the warm-up and from compiling suits the launches badly, and stays
reserved for nothing. CUDA graph trees empty the cache at each recording. To do so costs a wait for the device
and an allocation of each segment that is needed again, so pgraph does it rarely: when the partition that was
captured last has come round again and nothing was captured since, it looks for one round which call finds
the least memory in use, and how much the launches need on top of that. At the next such call it empties the
cache, and takes one segment for all of it (Note [One piece] in `pgraph.drivers.cuda.cache`). If that turns
out to reserve more than it should, other layouts are tried (Note [Layouts on trial] in
`pgraph.runtime.layouts`). The next capture begins this anew.

Not so where sizes vary. No round tells what the next one needs, captures may go on for hours, and after each
trim segments are taken anew in the order of whatever sizes come: an LSTM over 64 lengths reserved 1,178 MB
after two trims, and 880 without graphs. Such a program keeps what its first sizes took, as without captures.
"""

from __future__ import annotations

import logging
import threading

from pgraph.drivers.interface import Driver
from pgraph.runtime import progress
from pgraph.runtime.layouts import SettledLayouts

__all__ = ["Settling", "called", "captured", "pending"]

log = logging.getLogger(__name__)

_ROOM = 1 / 64  # what is larger by no more than this part is as good

_CALLS = 20_000  # after so many without an end of a round the partition captured last is taken for gone
_LOOKS = 256  # calls that a round is looked at: to ask what is in use costs the host time at each

pending: Settling | None = None
"""Captures that have not settled yet; read at each call."""


class Settling:
    """From a capture to the last trim.

    A round ends when the partition captured last is called after another one.

    Args:
        last: name of the partition that was captured.
        driver: whose memory is trimmed.
        before: what had not settled when it was captured.
    """

    def __init__(self, last: str, driver: Driver, before: Settling | None) -> None:
        self._last = last
        self._driver = driver
        self._lock = threading.Lock()
        self._before = last  # the partition called before this one
        # Whether no other partition is called: then each call is a round.
        self._alone: bool = before is None or (before._last == last and before._alone)
        self._calls = self._rounds = self._looks = 0
        self._least: int | None = None  # bytes in use, at most so few at any call of the second round
        self._peak = 0  # bytes in use while one of these was launched
        self._layouts: SettledLayouts | None = None  # once the cache was emptied
        self._due = True  # the layout of now is not made yet
        self._streams: set[int] = set()

    def called(self, name: str, growth: int) -> None:
        """Note a call of any partition, before it is served; trims if it is time.

        Args:
            growth: bytes that its launch needs beyond what is in use then.
        """
        with self._lock:
            if pending is not self:
                return
            self._calls += 1
            self._alone = self._alone and name == self._last
            if name == self._last and (self._alone or self._before != name):
                self._rounds += 1
            self._before = name
            try:
                settled = self._trimmed(growth) or self._calls > _CALLS
            except Exception as e:  # the program does not depend on it
                log.warning("cached memory was not given back: %s: %s", type(e).__name__, e)
                settled = True
            if settled:
                _settled(self)

    def _trimmed(self, growth: int) -> bool:
        if self._rounds == 0 and self._layouts is None:
            return False
        self._looks += 1
        if self._looks > _LOOKS:
            self._rounds, self._looks = self._rounds + 1, 0
        if self._rounds == 0:
            return False
        used = self._driver.in_use()
        self._streams.add(self._driver.current_stream())
        self._peak = max(self._peak, used + growth)
        if self._rounds == 1:
            self._least = used if self._least is None else min(self._least, used)
            return False
        assert self._least is not None
        if self._rounds == 2 and used > self._least * (1 + _ROOM):
            return False
        # Free memory belongs to a stream: what several will need of it cannot be told.
        growth = self._peak - used if len(self._streams) == 1 else 0
        layouts = self._layouts
        if layouts is None:
            layouts = SettledLayouts(growth)
        elif not self._due:
            if layouts.judge(self._driver.reserved(), self._peak):
                return True
            self._due = True
        taken = self._driver.trim(layouts.piece(growth))
        if taken is None:
            return False
        layouts.taken(taken)
        self._layouts, self._due = layouts, False
        self._rounds = self._looks = 0
        return layouts.final


def captured(name: str, driver: Driver) -> None:
    """Note that a partition was captured."""
    global pending
    pending = Settling(name, driver, pending)


def called(name: str, growth: int) -> None:
    """Note that a partition is called; see `Settling.called`."""
    settling = pending
    if settling is not None:
        settling.called(name, growth)


def _settled(settling: Settling) -> None:
    global pending
    if pending is settling:
        pending = None
        progress.close()
