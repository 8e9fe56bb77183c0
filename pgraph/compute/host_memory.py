"""Where the memory of this process lies."""

from __future__ import annotations

import bisect
import dataclasses
import logging
from pathlib import Path
from typing import Final

__all__ = ["HostMemory", "mapped"]

log = logging.getLogger(__name__)

_MAPS: Final = Path("/proc/self/maps")

_LOW: Final = 1 << 46
"""Bytes. Programs, libraries, heaps and stacks lie above. Below lies what a GPU's driver reserves, with upper
halves as small as any number."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the host that no GPU is told of.

    Args:
        ranges: (first byte, end) of each, in order.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, address: int) -> bool:
        at = bisect.bisect_right(self.ranges, (address, 1 << 64)) - 1
        return at >= 0 and address < self.ranges[at][1]

    def has_upper(self, half: int) -> bool:
        """Whether the upper four bytes of an address in it are these."""
        at = bisect.bisect_left(self.ranges, ((half + 1) << 32, 0)) - 1
        return at >= 0 and self.ranges[at][1] > half << 32


def mapped() -> HostMemory:
    """What is mapped now, but for devices; nothing if that cannot be read."""
    try:
        text = _MAPS.read_text()
    except OSError as e:
        log.debug("which memory is mapped cannot be read: %s", e)
        return HostMemory()
    found: list[tuple[int, int]] = []
    for line in text.splitlines():
        first, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
        if _LOW <= first < 1 << 47 and "/dev/" not in line:
            found.append((first, end))
    return HostMemory(tuple(sorted(found)))
