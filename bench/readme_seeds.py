"""The table of the seeds benchmark, a line for each workload and backend. `readme.py` imports it."""

from __future__ import annotations

from coverage_summary import share
from readme_rows import File, Row, ordered
from readme_tables import caption, cell, commit, figure
from tabulate import tabulate

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ms_per_step", "ms/step", ",.2f"),
    ("spread", "p10 to p90", ",.2f"),
    ("cpu_issue_ms", "CPU issue ms", ",.2f"),
    ("peak_reserved_mb", "peak reserved MB", ",.0f"),
    ("device_used_mb", "device MB", ",.0f"),
    ("launch_calls", "launch calls", ",.0f"),
    ("device_busy_ms", "device busy ms", ",.2f"),
    ("captures", "captures", ",d"),
)


def seeds_table(data: File) -> str:
    """One line for each workload and backend; empty if the file has none."""
    mine = [row for row in data["rows"] if row["bench"] == "seeds"]
    rows = ordered(sorted(mine, key=lambda row: row["config"]))
    lines = [
        [
            row["config"].partition("/")[2],
            row["mode"],
            row["backend"],
            *(cell(row, key, form) for key, _, form in COLUMNS),
            figure(share(row) if row.get("device_ops") else None, ".1%"),
            result(row),
            commit(row),
        ]
        for row in rows
        if not row["config"].startswith("tiny/") or data["gpu"] == "cpu"
    ]
    if not lines:
        return ""
    head = [
        "workload",
        "mode",
        "backend",
        *(title for _, title, _ in COLUMNS),
        "captured",
        "result",
        "commit",
    ]
    align = ["left", "left", "left", *["right"] * (len(COLUMNS) + 1), "left", "left"]
    return f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"


def result(row: Row) -> str:
    """What went wrong; else ``"right"`` of a row that was compared with eager, ``"ran"`` of any other."""
    text = str(row["status"]).replace("|", "/").replace("\n", " ")
    return text if text != "ok" else ("right" if row.get("check_status") == "ok" else "ran")
