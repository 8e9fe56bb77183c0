"""The measured tables of the documents, each from one result file. Not a program: `readme.py` imports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import schema
from readme_rows import File, Row, inductor_of, is_expandable, ordered, place, together
from tabulate import tabulate

from pgraph.reason_codes import CATALOGUE

# What must not be larger than without graphs, and by how much it may be: 1 % or so many MB.
SIZES = (("peak_allocated_mb", "allocated"), ("peak_reserved_mb", "reserved"), ("device_used_mb", "device"))
BOUND, BOUND_MB, TITAN_BOUND_MB = 0.01, 32, 200
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ms_per_step", "ms/step", ",.2f"),
    ("spread", "p10 to p90", ",.2f"),
    ("cpu_issue_ms", "CPU issue ms", ",.2f"),
    ("peak_allocated_mb", "peak allocated MB", ",.0f"),
    ("peak_reserved_mb", "peak reserved MB", ",.0f"),
    ("device_used_mb", "device used MB", ",.0f"),
    ("compile_s", "compile s", ",.1f"),
    ("capture_s", "capture s", ",.2f"),
)

# Per GPU; sizes are those of the rank that has the largest.
TITAN_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tokens_per_s", "tokens/s per GPU", ",.0f"),
    ("ms_per_step", "ms/step", ",.1f"),
    ("cpu_issue_ms", "CPU issue ms", ",.1f"),
    ("compiled_ms", "of it in compiled code", ",.1f"),
    ("peak_allocated_mb", "peak allocated MB", ",.0f"),
    ("peak_reserved_mb", "peak reserved MB", ",.0f"),
    ("device_used_mb", "device used MB", ",.0f"),
    ("private_pools_mb", "private pools MB", ",.0f"),
)
SMALL = "debug"  # how the names of the small model's configs begin
TITAN_NAMES = {"reduce-overhead": "inductor, CUDA graph trees"}


def figure(value: Any, form: str) -> str:
    """A figure as text; a dash where there is none."""
    return "-" if value is None else format(value, form)


def cell(row: Row, key: str, form: str) -> str:
    """One figure of a row; compiling from a filled cache is no compile time.

    ``spread`` stands for the 10th and the 90th percentile of the milliseconds.
    """
    if key == "spread":
        low, high = row.get("ms_p10"), row.get("ms_p90")
        return "-" if low is None or high is None else f"{low:{form}} to {high:{form}}"
    if key == "compile_s" and row.get("inductor_cache", schema.COLD_CACHE) != schema.COLD_CACHE:
        return "-"
    return figure(row.get(key), form)


def against(row: Row, inductor: Row | None, bound_mb: int = BOUND_MB) -> tuple[str, str]:
    """(the three sizes over Inductor's, whether each is within the bound).

    The bound is 1 % or `bound_mb`, whichever is more. Of two runs only what the allocator counts is compared:
    that repeats itself, while the whole device's use depends on the machine.
    """
    if inductor is None or row is inductor:
        return "-", "-"
    ratios, above = [], []
    for key, name in SIZES:
        if key == "device_used_mb" and not together(row, inductor):
            ratios.append("-")
            continue
        mine, theirs = row.get(key), inductor.get(key)
        if mine is None or not theirs:
            return "-", "-"
        ratios.append(f"{mine / theirs:.3f}")
        if mine > max(theirs * (1 + BOUND), theirs + bound_mb):
            above.append(f"{name} +{mine - theirs:,.0f} MB")
    return " / ".join(ratios), "no: " + ", ".join(above) if above else "yes"


def commit(row: Row) -> str:
    """The commit that the row was measured at."""
    return str(row.get("commit") or "-")[:7]


def caption(data: File) -> str:
    """One line about the machine."""
    driver = f", driver {data['driver']}" if data["driver"] else ""
    return f"**{data['gpu']}**{driver}, torch {data['torch']}, Python {data['python']}, {data['date']}"


def memory_table(data: File, keep: Callable[[Row], bool]) -> str:
    """The table of one machine; empty if nothing of it is kept."""
    rows = ordered([row for row in data["rows"] if row["bench"] == "memory" and keep(row)])
    if not rows:
        return ""
    # A column that no row fills (device memory on a CPU) is left out.
    columns = [column for column in COLUMNS if any(cell(row, column[0], column[2]) != "-" for row in rows)]
    if data["gpu"] == "cpu":
        columns.append(("peak_rss_mb", "max RSS MB", ",.0f"))
    modes = len({row["mode"] for row in rows}) > 1
    compared = any(against(row, inductor_of(row, rows))[0] != "-" for row in rows)
    lines, notes = [], []
    for row in rows:
        where = place(row) + (f", {row['mode']}" if modes else "")
        figures = [cell(row, key, form) for key, _, form in columns]
        verdict = against(row, inductor_of(row, rows)) if compared else ()
        lines.append([where, row["backend"], *figures, *verdict, commit(row)])
        if row["status"] != "ok":
            notes.append(f"- {where}, {row['backend']}: {row['status']}")
        if row.get("fallbacks"):
            why = "; ".join(row.get("plain", ())) or "the run did not note why"
            refused = f"{row['fallbacks']} of {row['partitions']} partitions"
            notes.append(f"- {where}, {row['backend']}: {refused} were refused and ran uncaptured ({why})")
    ratios = ["allocated / reserved / device over Inductor's", "within 1 % or 32 MB"] if compared else []
    alignment = ["right"] * len(columns) + ["left"] * len(ratios)
    head = ["config", "backend", *(title for _, title, _ in columns), *ratios, "commit"]
    align = ["left", "left", *alignment, "left"]
    text = f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"
    return text + ("\n" + "\n".join(notes) + "\n" if notes else "")


def batch_table(data: File) -> str:
    """The largest batches of one machine; empty if it has none."""
    rows = ordered([row for row in data["rows"] if row["bench"] == "largest-batch"])
    lines = [
        [
            place(row),
            row["backend"],
            figure(row.get("cap_mb"), ",.0f"),
            figure(row.get("largest_batch"), ",d"),
            figure(row.get("peak_reserved_mb"), ",.0f"),
            row["status"],
            commit(row),
        ]
        for row in rows
    ]
    if not lines:
        return ""
    head = ["config", "backend", "cap MB", "largest batch", "peak reserved MB", "result", "commit"]
    align = ["left", "left", "right", "right", "right", "left", "left"]
    return f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"


def equality_table(data: File) -> str:
    """The correctness table of one machine; empty if it has none."""
    rows = ordered([row for row in data["rows"] if row["bench"] == "equality"])
    if not rows:
        return ""
    lines = []
    for row in rows:
        compared, equal = row.get("tensors_compared"), row.get("tensors_bit_equal")
        grew = "-" if row.get("captures_end") is None else f"{row['captures_warm']} -> {row['captures_end']}"
        lines.append(
            [
                place(row),
                f"{row['backend']} against {row.get('reference', '-')}",
                figure(row.get("steps"), ",d"),
                figure(compared, ",d"),
                figure(equal, ",d"),
                figure(row.get("tensors_reference_bit_equal"), ",d"),
                figure(row.get("distinct_addresses"), ",d"),
                grew,
                row["status"],
                commit(row),
            ]
        )
    head = ["config", "backends", "steps", "tensors", "bit-equal", "reference to itself", "addresses"]
    head += ["captures", "result", "commit"]
    align = ["left", "left", *["right"] * 6, "left", "left"]
    return f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"


def titan_table(data: File, keep: Callable[[Row], bool]) -> str:
    """torchtitan's runs on one machine; empty if nothing of them is kept."""
    rows = ordered([row for row in data["rows"] if row["bench"] == "torchtitan" and keep(row)])
    if not rows:
        return ""
    columns = [c for c in TITAN_COLUMNS if any(row.get(c[0]) is not None for row in rows)]
    lines, notes = [], []
    for row in rows:
        inductor = inductor_of(row, rows)
        lines.append(
            [
                row["config"],
                TITAN_NAMES.get(row["backend"], row["backend"]),
                *(titan_cell(row, key, form) for key, _, form in columns),
                recaptures(row),
                speed(row, inductor),
                *against(row, inductor, TITAN_BOUND_MB),
                commit(row),
            ]
        )
        if row["status"] != "ok":
            notes.append(f"- {row['config']}, {row['backend']}: {row['status']}")
    head = ["config", "backend", *(title for _, title, _ in columns), "recordings", "speed over Inductor's"]
    head += ["allocated / reserved / device over Inductor's", f"within 1 % or {TITAN_BOUND_MB} MB", "commit"]
    align = ["left", "left", *["right"] * (len(columns) + 3), "left", "left"]
    text = f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"
    return text + ("\n" + "\n".join(notes) + "\n" if notes else "")


def saved_table(data: File) -> str:
    """What pgraph saves of the small model's steps, in compiled code and in all; then CUDA graph trees where
    they record nothing in the measured steps. Empty if it has no such steps of pgraph's.
    """
    rows = ordered([row for row in data["rows"] if row["bench"] == "torchtitan" and row["status"] == "ok"])
    lines, notes = [], []
    for row in rows:
        where = row["config"] + (", expandable segments" if is_expandable(row) else "")
        base = inductor_of(row, rows)
        if row["backend"] == "reduce-overhead" and row.get("recordings_timed") == 0:
            same = (r for r in rows if r["backend"] == "pgraph" and inductor_of(r, rows) is base)
            beside = [f"pgraph's {titan_cell(r, 'ms_per_step', ',.1f')} ms" for r in same]
            mine = f"{titan_cell(row, 'ms_per_step', ',.1f')} ms"
            notes.append(f"- {where}: steps of CUDA graph trees take {'; '.join([mine, *beside])}")
        if not row["config"].startswith(SMALL) or row["backend"] != "pgraph" or base is None:
            continue
        if not together(row, base) or None in (row.get("compiled_ms"), base.get("compiled_ms")):
            continue
        cells = [where]
        for key in ("compiled_ms", "ms_per_step"):
            before, after = base[key], row[key]
            cells += [figure(before, ",.1f"), figure(after, ",.1f"), figure(before - after, ",.1f")]
        lines.append(cells)
    head = ["config", "in compiled code, ms: Inductor", "pgraph", "saved"]
    head += ["step, ms: Inductor", "pgraph", "saved"]
    if not lines:
        return ""
    align = ["left", *["right"] * 6]
    text = f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"
    return text + ("\n" + "\n".join(notes) + "\n" if notes else "")


def titan_cell(row: Row, key: str, form: str) -> str:
    """One figure of a row; of several rounds the step of the median run is followed by the runs' spread."""
    text = figure(row.get(key), form)
    if key == "ms_per_step" and row.get("repeats", 1) > 1:
        text += f" ({row['ms_min']:{form}} to {row['ms_max']:{form}})"
    return text


def speed(row: Row, inductor: Row | None) -> str:
    """Tokens per second over Inductor's of the same run: ``"1.204 x"``; a dash where there is none."""
    if inductor is None or row is inductor or not together(row, inductor):
        return "-"
    mine, theirs = row.get("tokens_per_s"), inductor.get("tokens_per_s")
    return f"{mine / theirs:.3f} x" if mine and theirs else "-"


def recaptures(row: Row) -> str:
    """Recordings until the measured steps, and in them: ``"4 + 0"``."""
    if row.get("captures_warm") is not None:
        return f"{row['captures_warm']} + {row['captures_end'] - row['captures_warm']}"
    if row.get("recordings_timed") is not None:
        return f"{row['recordings_warm']} + {row['recordings_timed']}"
    return "-"


def losses_table(data: File) -> str:
    """Comparisons of losses on one machine; empty if it has none."""
    rows = ordered([row for row in data["rows"] if row["bench"] == "torchtitan-losses"])
    if not rows:
        return ""
    lines = [
        [
            place(row),
            f"{row['backend']} against {row['reference']}",
            figure(row.get("steps"), ",d"),
            figure(row.get("losses_compared"), ",d"),
            figure(row.get("losses_equal"), ",d"),
            figure(row.get("max_diff"), ".2g"),
            figure(row.get("reference_max_diff"), ".2g"),
            row["status"],
            commit(row),
        ]
        for row in rows
    ]
    head = ["config", "backends", "steps", "losses", "bit-equal", "largest difference"]
    head += ["reference to itself", "result", "commit"]
    align = ["left", "left", *["right"] * 5, "left", "left"]
    return f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"


def gpu_tests_table(records: Mapping[str, File], folder: str) -> str:
    """The runs of `tests/gpu`, one line for each record, which `folder` holds."""
    lines = []
    for name, record in records.items():
        machine = [record[key] for key in ("gpu", "torch", "python")]
        outcomes = [str(record[key]) for key in ("passed", "failed", "skipped")]
        outcomes[0] += " until it was stopped" * record.get("interrupted", False)
        lines.append([f"[{name}]({folder}/{name})", *machine, *outcomes, commit(record)])
    head = ["record", "GPU", "torch", "Python", "passed", "failed", "skipped", "commit"]
    align = ["left", "left", "left", "left", "right", "right", "right", "left"]
    return tabulate(lines, head, "github", colalign=align, disable_numparse=True) + "\n"


def reasons_table() -> str:
    """Every reason code, from the catalogue in the source."""
    lines = [f"| `{entry.code}` | {entry.meaning} | {entry.fix} |" for entry in CATALOGUE.values()]
    return "\n".join(["| code | meaning | what to change |", "|---|---|---|", *lines]) + "\n"
