"""What the measured tables and charts share: rows of result files, their order, what belongs together.

Not a program: `readme.py` imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import schema

File = dict[str, Any]
Row = dict[str, Any]

BACKENDS = schema.BACKENDS
_MEASUREMENT = ("config", "mode", "scope", "alloc_conf", "deterministic")
_RUN = (*_MEASUREMENT, "commit", "date")


def place(row: Row) -> str:
    """What was compiled, in words: ``"4x256, per block"``."""
    more = ", deterministic" if row.get("deterministic") else ""
    # Times and sizes with expandable segments have tables of their own.
    if row["bench"] in ("equality", "torchtitan-losses") and is_expandable(row):
        more += ", expandable segments"
    if row["bench"].startswith(("torchtitan", "coverage")):
        return f"{row['config']}{more}"
    scope = "per block" if row["scope"] == "block" else "whole model"
    return f"{row['config']}, {scope}{more}"


def is_expandable(row: Row) -> bool:
    """Whether the row was measured with expandable segments."""
    return row["alloc_conf"] != schema.DEFAULT_ALLOC_CONF


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows by config as first met, then mode and scope, then backend in the usual order."""
    configs = list(dict.fromkeys(row["config"] for row in rows))
    return sorted(
        rows,
        key=lambda r: (
            *(configs.index(r["config"]), r["mode"], r["scope"], is_expandable(r)),
            schema.CHOICES["backend"].index(r["backend"]),
        ),
    )


def together(a: Row, b: Row) -> bool:
    """Whether two rows were measured together, but for the backend."""
    return _values(a, _RUN) == _values(b, _RUN)


def inductor_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Inductor's row of the same measurement: of the same run if there is one, else of another commit."""
    same = _values(row, _MEASUREMENT)
    others = [r for r in rows if r["backend"] == "inductor" and _values(r, _MEASUREMENT) == same]
    return next((other for other in others if together(row, other)), next(iter(others), None))


def _values(row: Row, keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in keys)
