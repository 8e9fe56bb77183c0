"""Write the README's measured tables and the charts from ``bench/results/*.json``.

    python bench/readme.py            # rewrite README.md and bench/results/*.svg in place
    python bench/readme.py --check    # exit 1 if the README or a chart is not what the results say

A table goes between ``<!-- table:NAME -->`` and ``<!-- /table -->``; names: memory, memory-expandable,
largest-batch, equality, chart, and torchtitan, torchtitan-expandable, torchtitan-losses,
torchtitan-chart. A name may end in ``@GPU`` (``memory@nvidia-h200``) to show one machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import schema
from _paths import REPO, RESULTS
from tabulate import tabulate

matplotlib.use("Agg")
import matplotlib.pyplot as plt

File = dict[str, Any]
Row = dict[str, Any]

MARKERS = re.compile(r"(<!-- table:(?P<name>[\w@.-]+) -->\n)(?P<body>.*?)(<!-- /table -->)", re.DOTALL)
BACKENDS = schema.CHOICES["backend"]
COLOURS = {
    "eager": "#9a9a9a",
    "aot_eager": "#c4c4c4",
    "inductor": "#4c72b0",
    "reduce-overhead": "#dd8452",
    "pgraph": "#55a868",
}
# What must not be larger than without graphs, and by how much it may be.
SIZES = (("peak_allocated_mb", "allocated"), ("peak_reserved_mb", "reserved"), ("device_used_mb", "device"))
BOUND, BOUND_MB = 0.01, 32
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
TITAN_NAMES = {"reduce-overhead": "inductor, CUDA graph trees"}


def place(row: Row) -> str:
    """What was compiled, in words: ``"4x256, per block"``."""
    if row["bench"].startswith("torchtitan"):
        return str(row["config"])
    scope = "per block" if row["scope"] == "block" else "whole model"
    more = ", deterministic" if row.get("deterministic") else ""
    if row["bench"] == "equality" and is_expandable(row):  # memory has a table of its own for these
        more += ", expandable segments"
    return f"{row['config']}, {scope}{more}"


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


def twin_key(row: Row) -> tuple[Any, ...]:
    """Equal for the rows of all backends that were measured together."""
    same = ("config", "mode", "scope", "alloc_conf", "deterministic", "commit", "date")
    return tuple(row.get(key) for key in same)


def inductor_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Inductor's row of the same measurement: of the same run if there is one, else of another commit."""
    others = [
        other for other in rows if other["backend"] == "inductor" and twin_key(other)[:5] == twin_key(row)[:5]
    ]
    return next((other for other in others if twin_key(other) == twin_key(row)), next(iter(others), None))


def against(row: Row, inductor: Row | None) -> tuple[str, str]:
    """(the three sizes over Inductor's, whether each is within the bound).

    The bound is 1 % or 32 MB, whichever is more. Of two runs only what the allocator counts is compared: that
    repeats itself, while the whole device's use depends on the machine.
    """
    if inductor is None or row is inductor:
        return "-", "-"
    ratios, above = [], []
    for key, name in SIZES:
        if key == "device_used_mb" and twin_key(row) != twin_key(inductor):
            ratios.append("-")
            continue
        mine, theirs = row.get(key), inductor.get(key)
        if mine is None or not theirs:
            return "-", "-"
        ratios.append(f"{mine / theirs:.3f}")
        if mine > max(theirs * (1 + BOUND), theirs + BOUND_MB):
            above.append(f"{name} +{mine - theirs:,.0f} MB")
    return " / ".join(ratios), "no: " + ", ".join(above) if above else "yes"


def commit(row: Row) -> str:
    """The commit that the row was measured at."""
    return str(row.get("commit") or "-")[:7]


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows by config as first met, then mode and scope, then backend in the usual order."""
    configs = list(dict.fromkeys(row["config"] for row in rows))
    return sorted(
        rows,
        key=lambda r: (
            *(configs.index(r["config"]), r["mode"], r["scope"], is_expandable(r)),
            BACKENDS.index(r["backend"]),
        ),
    )


def is_expandable(row: Row) -> bool:
    """Whether the row was measured with expandable segments."""
    return row["alloc_conf"] != schema.DEFAULT_ALLOC_CONF


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
            parts = f"{row['fallbacks']} of {row['partitions']} parts"
            notes.append(f"- {where}, {row['backend']}: {parts} fell back to plain running ({why})")
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
    lines, notes = [], []
    for row in rows:
        lines.append(
            [
                row["config"],
                TITAN_NAMES.get(row["backend"], row["backend"]),
                *(figure(row.get(key), form) for key, _, form in TITAN_COLUMNS),
                recaptures(row),
                commit(row),
            ]
        )
        if row["status"] != "ok":
            notes.append(f"- {row['config']}, {row['backend']}: {row['status']}")
    head = ["config", "backend", *(title for _, title, _ in TITAN_COLUMNS), "recordings", "commit"]
    align = ["left", "left", *["right"] * (len(TITAN_COLUMNS) + 1), "left"]
    text = f"{caption(data)}\n\n{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"
    return text + ("\n" + "\n".join(notes) + "\n" if notes else "")


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
            row["config"] + (", deterministic" if row.get("deterministic") else ""),
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


def panels_of(data: File) -> list[tuple[str, list[tuple[str, dict[str, float]]]]]:
    """(title, figures relative to Inductor) of each panel of a machine's chart; empty: no chart."""
    rows = charted(data)
    return [
        (title, groups)
        for key, title in (("ms_per_step", "ms per step"), ("peak_reserved_mb", "peak reserved memory"))
        if (groups := relative(rows, key))
    ]


def charted(data: File) -> list[Row]:
    """The rows that a machine's chart shows."""
    return [
        r
        for r in data["rows"]
        if r["bench"] in ("memory", "torchtitan")
        and r["mode"] == "train"
        and r["status"] == "ok"
        and not is_expandable(r)
    ]


def chart_name(data: File) -> str:
    """The file of a machine's chart; each result file has one."""
    bench = "torchtitan" if any(row["bench"].startswith("torchtitan") for row in data["rows"]) else "memory"
    return f"{bench}-{data['gpu']}.svg"


def chart_link(data: File, bench: str) -> str:
    """The picture of one machine, as the README shows it; empty if it has none."""
    if not panels_of(data) or not chart_name(data).startswith(bench):
        return ""
    return f"![{data['gpu']}: time and memory relative to Inductor](bench/results/{chart_name(data)})\n"


TABLES: dict[str, Callable[[File], str]] = {
    "memory": lambda data: memory_table(data, lambda row: not is_expandable(row)),
    "memory-expandable": lambda data: memory_table(data, is_expandable),
    "equality": equality_table,
    "largest-batch": batch_table,
    "chart": lambda data: chart_link(data, "memory"),
    "torchtitan": lambda data: titan_table(data, lambda row: not is_expandable(row)),
    "torchtitan-expandable": lambda data: titan_table(data, is_expandable),
    "torchtitan-losses": losses_table,
    "torchtitan-chart": lambda data: chart_link(data, "torchtitan"),
}


def table(name: str, files: Sequence[File]) -> str:
    """The Markdown of the table called `name`, with a blank line around it."""
    kind, _, gpu = name.partition("@")
    if kind not in TABLES:
        raise ValueError(
            f"table:{name} is unknown; choose one of {', '.join(TABLES)}, with @GPU behind it or not"
        )
    chosen = [data for data in files if not gpu or data["gpu"] == gpu]
    parts = [text for data in chosen if (text := TABLES[kind](data))]
    return "\n" + "\n".join(parts or ["No results yet.\n"]) + "\n"


def rewrite(text: str, files: Sequence[File]) -> str:
    """`text` with every marked table written anew."""
    return MARKERS.sub(lambda match: match[1] + table(match["name"], files) + match[4], text)


def relative(rows: Sequence[Row], key: str) -> list[tuple[str, dict[str, float]]]:
    """For each config and scope the backends' `key` over Inductor's of the same run; the rest is left out."""
    groups: dict[str, dict[str, float]] = {}
    inductors = {twin_key(row) for row in rows if row["backend"] == "inductor"}
    for row in ordered([r for r in rows if r.get(key) and twin_key(r) in inductors]):
        groups.setdefault(place(row).replace(", ", "\n"), {})[row["backend"]] = row[key]
    return [
        (label, {name: value / found["inductor"] for name, value in found.items()})
        for label, found in groups.items()
        if "inductor" in found
    ]


def digest(rows: Sequence[Row]) -> str:
    """A short mark of the figures that a chart shows; written into it, so that a stale one is known."""
    keys = ("config", "scope", "backend", "ms_per_step", "peak_reserved_mb")
    return hashlib.sha256(repr([[row.get(key) for key in keys] for row in rows]).encode()).hexdigest()[:16]


def chart(data: File, path: Path, check: bool) -> str | None:
    """Draw time and memory relative to Inductor; with `check` only say what is wrong with the chart there."""
    panels = panels_of(data)
    if not panels:
        return None
    mark = f"figures {digest(charted(data))}"
    if check:
        return None if path.exists() and mark in path.read_text(encoding="utf-8") else f"{path.name} is stale"
    # A fixed salt and no date: the same figures give the same file.
    with plt.rc_context({"svg.hashsalt": "pgraph", "font.size": 9}):
        fig, axes = plt.subplots(len(panels), 1, figsize=(9, 2.7 * len(panels) + 0.4), squeeze=False)
        for axis, (title, groups) in zip(axes[:, 0], panels, strict=True):
            backends = [name for name in BACKENDS if any(name in values for _, values in groups)]
            width = 0.8 / len(backends)
            for index, name in enumerate(backends):
                places = [i + (index - (len(backends) - 1) / 2) * width for i in range(len(groups))]
                heights = [values.get(name, 0.0) for _, values in groups]
                bars = axis.bar(places, heights, width, label=name, color=COLOURS[name])
                axis.bar_label(bars, [f"{h:.2f}" if h else "" for h in heights], fontsize=6)
            axis.axhline(1.0, color="black", linewidth=0.6)
            axis.set_xticks(range(len(groups)), [label for label, _ in groups])
            axis.set_title(f"{title}, relative to Inductor (lower is better)", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        handles, labels = axes[0][0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="upper right", ncols=len(labels), frameon=False, fontsize=8)
        fig.suptitle(data["gpu"], fontsize=10, x=0.02, ha="left")
        fig.tight_layout(rect=(0, 0, 1, 0.97))
        fig.savefig(path, metadata={"Date": None, "Description": mark})
        plt.close(fig)
    return None


def load(folder: Path) -> list[File]:
    """All result files of a folder, in order of their names."""
    # The record of the GPU tests lies there too; it is no benchmark's.
    paths = [path for path in sorted(folder.glob("*.json")) if not path.name.startswith("gpu-tests-")]
    return [schema.read(path) for path in paths]


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check; returns 1 if something is stale or missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is stale")
    parser.add_argument("--readme", type=Path, default=REPO / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)

    files = load(args.results)
    old = args.readme.read_text(encoding="utf-8")
    if not MARKERS.search(old):
        print(
            f"{args.readme}: no table markers; "
            "add <!-- table:memory --> and <!-- /table --> on lines of their own"
        )
        return 1
    new = rewrite(old, files)
    stale = [f"{args.readme.name} is stale"] if new != old else []
    for data in files:
        problem = chart(data, args.results / chart_name(data), args.check)
        stale += [problem] if problem else []
    if args.check:
        if stale:
            print("; ".join(stale) + ": run python bench/readme.py and commit what it writes")
        return bool(stale)
    args.readme.write_text(new, encoding="utf-8")
    print(f"{args.readme}: {'rewritten' if stale else 'unchanged'}, {len(files)} result file(s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
