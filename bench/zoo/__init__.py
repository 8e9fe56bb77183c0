"""The models that ``bench/coverage.py`` tries: published architectures with random weights.

``entry.py`` says what an entry is; ``hf.py``, ``text.py`` and ``media.py`` are transformers' (two to four
layers of real width), ``images.py`` timm's and torchvision's (as they are published), ``own.py`` two small
ones that need torch alone. Collections are imported only when a model of theirs is built.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from zoo import images, media, own, text
from zoo.entry import Entry

__all__ = ["ALL", "PUBLISHED", "Entry", "find", "select"]

PUBLISHED: tuple[Entry, ...] = (*text.ENTRIES, *media.ENTRIES, *images.ENTRIES)
ALL: dict[str, Entry] = {entry.name: entry for entry in (*PUBLISHED, *own.ENTRIES)}


def find(name: str) -> Entry:
    """The entry called `name`; KeyError if there is none."""
    return ALL[name]


def select(patterns: Sequence[str]) -> list[Entry]:
    """Entries whose name matches one of `patterns` (``"hf/bert"``, ``"timm/*"``), in the zoo's order.

    Without patterns all published ones.

    Raises:
        ValueError: a pattern matches nothing; it says what there is.
    """
    if not patterns:
        return list(PUBLISHED)
    for pattern in patterns:
        if not fnmatch.filter(ALL, pattern):
            raise ValueError(f"no model is called {pattern!r}; there are {', '.join(ALL)}")
    return [e for e in ALL.values() if any(fnmatch.fnmatch(e.name, pattern) for pattern in patterns)]
