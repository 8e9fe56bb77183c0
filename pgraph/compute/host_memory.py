"""Where the memory of this process lies."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

__all__ = ["upper_halves"]

log = logging.getLogger(__name__)

_MAPS: Final = Path("/proc/self/maps")

_LOW: Final = 1 << 46
"""Bytes. Programs, libraries, heaps and stacks lie above. Below lies what a GPU's driver reserves, with upper
halves as small as any number."""


def upper_halves() -> frozenset[int]:
    """The upper four bytes of the addresses of all mapped memory; none if that cannot be read."""
    try:
        text = _MAPS.read_text()
    except OSError as e:
        log.debug("which memory is mapped cannot be read: %s", e)
        return frozenset()
    found: set[int] = set()
    for line in text.splitlines():
        first, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
        if _LOW <= first < 1 << 47:
            found.update(range(first >> 32, ((end - 1) >> 32) + 1))
    return frozenset(found)
