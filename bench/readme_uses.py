"""The table of the uses benchmark, a line for each use and backend. `readme.py` imports it."""

from __future__ import annotations

from readme_rows import File, ordered
from readme_tables import caption, cell, commit
from tabulate import tabulate

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ms_per_step", "ms/step", ",.2f"),
    ("first_ms", "ms just after a change", ",.2f"),
    ("first_ready_ms", "its memory there", ",.2f"),
    ("tokens_per_s", "tokens/s", ",.0f"),
    ("captures_warm", "recordings warm", ",d"),
    ("captures_end", "at the end", ",d"),
    ("asleep_mb", "asleep: allocator MB", ",.0f"),
    ("asleep_device_mb", "device MB", ",.0f"),
    ("peak_reserved_mb", "peak reserved MB", ",.0f"),
    ("device_used_mb", "device MB at the end", ",.0f"),
)


def uses_table(data: File) -> str:
    """One line for each use and backend; empty if the file has none."""
    rows = ordered([row for row in data["rows"] if row["bench"] == "uses"])
    lines = [
        [
            row["config"],
            row["scope"],
            row["backend"],
            *(cell(row, key, form) for key, _, form in COLUMNS),
            "right" if row["status"] == "ok" else str(row["status"]).replace("|", "/"),
            commit(row),
        ]
        for row in rows
    ]
    if not lines:
        return ""
    head = ["use", "scope", "backend", *(title for _, title, _ in COLUMNS), "result", "commit"]
    align = ["left", "left", "left", *["right"] * len(COLUMNS), "left", "left"]
    return f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"
