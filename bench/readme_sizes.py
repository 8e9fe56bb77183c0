"""The tables of the benchmark of varying sizes (times of sequences, memory) and of the driver's answers.

Not a program: `readme.py` imports it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import schema
from readme_rows import File, Row, together
from readme_tables import caption, cell, commit, figure
from tabulate import tabulate

BOUND = 1.02  # of a total over Inductor's, at every mark
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ms_per_step", "ms/step", ",.3f"),
    ("spread", "p10 to p90", ",.2f"),
    ("cpu_issue_ms", "CPU issue ms", ",.3f"),
    ("early_ms", "first half: total ms", ",.0f"),
    ("first_ms", "first token ms", ",.2f"),
    ("total_ms", "total ms", ",.0f"),
)
COUNTS: tuple[tuple[str, str, str], ...] = (
    ("captures_warm", "captures before", ",d"),
    ("captures", "at the end", ",d"),
    ("computed", "of them computed", ",d"),
    ("capture_s", "capture s", ",.2f"),
    ("launches", "launches", ",d"),
    ("uncaptured_runs", "uncaptured runs", ",d"),
    ("recompiles", "recompiled", ",d"),
)
# (name, title, form, unit), of one size and of all.
HELD: tuple[tuple[str, str, str, int], ...] = (
    ("exec_bytes", "execs MB", ",.2f", 2**20),
    ("device_mb", "device MB", ",.1f", 1),
    ("reserved_mb", "reserved MB", ",.1f", 1),
    ("host_mb", "host MB", ",.1f", 1),
)
A_NODE: tuple[tuple[str, str], ...] = (
    ("host_bytes_a_node", "host bytes for a node and size"),
    ("counted_bytes_a_node", "as counted"),
    ("own_bytes_a_node", "of it recipes"),
    ("traced_bytes_a_node", "that Python allocated"),
)


def sizes_table(data: File) -> str:
    """A line for each sequence and backend, then one for each backend's memory; empty if there is none."""
    rows = [row for row in data["rows"] if row["bench"] == "sizes"]
    configs, backends = list(dict.fromkeys(row["config"] for row in rows)), schema.CHOICES["backend"]
    rows.sort(key=lambda row: (configs.index(row["config"]), backends.index(row["backend"])))
    tables = [times(rows), memory([row for row in rows if row["config"] == "memory"])]
    if not rows:
        return ""
    return "\n".join([f"{caption(data)}\n", *(table for table in tables if table)])


def times(rows: list[Row]) -> str:
    """Of the sequences."""
    lines = [
        [
            row["config"],
            row["backend"],
            *(cell(row, key, form) for key, _, form in COLUMNS),
            *against(row, rows),
            late_over_trees(row, rows),
            *(cell(row, key, form) for key, _, form in COUNTS),
            result(row),
            commit(row),
        ]
        for row in rows
        if row["config"] != "memory"
    ]
    titles = [title for _, title, _ in COLUMNS]
    over = ["largest total over Inductor's", f"at most {BOUND}", "second half over reduce-overhead's"]
    head = ["sizes of", "backend", *titles, *over, *(title for _, title, _ in COUNTS), "result", "commit"]
    align = ["left", "left", *["right"] * (len(head) - 4), "left", "left"]
    return tabulate(lines, head, "github", colalign=align, disable_numparse=True) + "\n" if lines else ""


def against(row: Row, rows: list[Row]) -> tuple[str, str]:
    """(the largest total over Inductor's at the same mark, and where; whether it is within the bound).

    Only totals of one run are compared; where Inductor ran beside a backend, those of that run, as the median
    of all programs that came so far (`again`).
    """
    beside = row.get("beside_ms")
    if beside and row["status"] == "ok":
        programs = [row, *(row.get("again") or ())]
        ratios: dict[int, list[float]] = {}
        for one in programs:
            for mark, mine, theirs in zip(one["marks"], one["totals_ms"], one["beside_ms"], strict=True):
                ratios.setdefault(mark, []).append(mine / theirs)
        return within([statistics.median(found) for found in ratios.values()], [1.0] * len(ratios), [*ratios])
    for other in rows:
        if other["backend"] != "inductor" or other is row or not together(row, other):
            continue
        mine, theirs = row.get("totals_ms"), other.get("totals_ms")
        well = row["status"] == other["status"] == "ok"
        if not well or row.get("marks") != other.get("marks"):
            continue
        if mine and theirs:
            return within(mine, theirs, row["marks"])
    return "-", "-"


def late_over_trees(row: Row, rows: list[Row]) -> str:
    """A server's second half, over that of CUDAGraph Trees: beside it, or in the same run."""
    if row["status"] != "ok" or row["backend"] == "reduce-overhead" or row.get("early_ms") is None:
        return "-"
    at = row["totals_ms"].index(row["early_ms"])
    totals = row.get("trees_ms")
    for other in rows:
        if other["backend"] == "reduce-overhead" and other["status"] == "ok" and together(row, other):
            totals = totals or other["totals_ms"]
    if not totals:
        return "-"
    return f"{(row['totals_ms'][-1] - row['early_ms']) / (totals[-1] - totals[at]):.3f}"


def within(mine: Sequence[float], theirs: Sequence[float], marks: Sequence[int]) -> tuple[str, str]:
    """What `against` says, of two lists of totals."""
    ratio, mark = max((a / b, mark) for a, b, mark in zip(mine, theirs, marks, strict=True))
    return f"{ratio:.3f} after {mark:,d}", "yes" if ratio <= BOUND else "no"


def memory(rows: list[Row]) -> str:
    """Of many sizes beside one."""
    lines = [
        [
            row["backend"],
            *(figure(row.get(key), ",d") for key in ("sizes", "captures", "execs", "nodes_one")),
            *(both(row, name, form, unit) for name, _, form, unit in HELD),
            *(cell(row, key, ",.0f") for key, _ in A_NODE),
            result(row),
            commit(row),
        ]
        for row in rows
    ]
    counts = ["sizes", "captures", "execs", "nodes of one size"]
    held = [f"{title}, one size to all" for _, title, _, _ in HELD]
    head = ["backend", *counts, *held, *(title for _, title in A_NODE), "result", "commit"]
    align = ["left", *["right"] * (len(head) - 3), "left", "left"]
    return tabulate(lines, head, "github", colalign=align, disable_numparse=True) + "\n" if lines else ""


def both(row: Row, name: str, form: str, unit: int) -> str:
    """What one size takes, and all."""
    one, all_of_them = row.get(f"{name}_one"), row.get(name)
    if one is None or all_of_them is None:
        return "-"
    return f"{one / unit:{form}} to {all_of_them / unit:{form}}"


def result(row: Row) -> str:
    """``"right"``, or what went wrong."""
    return "right" if row["status"] == "ok" else str(row["status"]).replace("|", "/").replace("\n", " ")


def probes_table(data: File) -> str:
    """A line for each question that was put to the driver; empty if there was none."""
    times = (
        ("us", "us"),
        ("done_us", "us until done"),
        ("first_us", "the first time"),
        ("again_us", "again"),
    )
    lines = [
        [
            row["config"],
            row.get("answer") if row["status"] == "ok" else result(row),
            *(cell(row, key, ",.1f") for key, _ in times),
            commit(row),
        ]
        for row in data["rows"]
        if row["bench"] == "probes"
    ]
    head = ["question", "answer", *(title for _, title in times), "commit"]
    align = ["left", "left", *["right"] * len(times), "left"]
    if not lines:
        return ""
    return f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"
