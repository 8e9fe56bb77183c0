"""The models that ``bench/coverage.py`` and ``bench/seeds.py`` run: with random weights, nothing downloaded.

``entry.py`` says what an entry is; ``hf.py``, ``text.py`` and ``media.py`` are transformers' (two to four
layers of real width), ``images.py`` timm's and torchvision's (as they are published), ``own.py`` two small
ones that need torch alone. ``seeds.py`` has workloads as they are met in practice, whole models of named
sizes, for ``bench/seeds.py``. Collections are imported only when a model of theirs is built.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from zoo import images, media, own, seeds, text
from zoo.entry import Entry

__all__ = ["ALL", "PUBLISHED", "SEEDS", "TINY_SEEDS", "Entry", "find", "select"]

PUBLISHED: tuple[Entry, ...] = (*text.ENTRIES, *media.ENTRIES, *images.ENTRIES)
ALL: dict[str, Entry] = {entry.name: entry for entry in (*PUBLISHED, *own.ENTRIES)}
SEEDS: dict[str, Entry] = {entry.name: entry for entry in seeds.ENTRIES}
TINY_SEEDS: dict[str, Entry] = {entry.name: entry for entry in seeds.TINY}


def find(name: str) -> Entry:
    """The entry called `name`; KeyError if there is none."""
    return {**ALL, **SEEDS, **TINY_SEEDS}[name]


def select(
    patterns: Sequence[str],
    among: Mapping[str, Entry] = ALL,
    usual: Sequence[Entry] = PUBLISHED,
) -> list[Entry]:
    """Entries whose name matches one of `patterns` (``"hf/bert"``, ``"timm/*"``), in the zoo's order.

    Args:
        among: what is searched.
        usual: what no pattern at all means.

    Raises:
        ValueError: a pattern matches nothing; it says what there is.
    """
    if not patterns:
        return list(usual)
    for pattern in patterns:
        if not fnmatch.filter(among, pattern):
            raise ValueError(f"no model is called {pattern!r}; there are {', '.join(among)}")
    return [e for e in among.values() if any(fnmatch.fnmatch(e.name, pattern) for pattern in patterns)]
