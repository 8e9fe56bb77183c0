"""The charts of the documents: time and memory relative to Inductor, one picture for each result file.

Not a program: `readme.py` imports it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from readme_rows import BACKENDS, File, Row, inductor_of, is_expandable, ordered, place, together

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "eager": "#9a9a9a",
    "aot_eager": "#c4c4c4",
    "inductor": "#4c72b0",
    "reduce-overhead": "#dd8452",
    "pgraph": "#55a868",
}


# Many models stand side by side there: only the two that use graphs get bars.
COVERAGE_BACKENDS = ("reduce-overhead", "pgraph")
WIDE = 10  # groups from which names stand upright


def panels_of(data: File) -> list[tuple[str, list[tuple[str, dict[str, float]]]]]:
    """(title, figures relative to Inductor) of each panel of a machine's chart; empty: no chart."""
    rows = charted(data)
    modes = {"train": "", "infer": ", inference"}
    return [
        (f"{title}{said}", groups)
        for key, title in (("ms_per_step", "ms per step"), ("peak_reserved_mb", "peak reserved memory"))
        for mode, said in modes.items()
        if (groups := relative([row for row in rows if row["mode"] == mode], key))
    ]


def charted(data: File) -> list[Row]:
    """The rows that a machine's chart shows; of the coverage those that were timed, in both modes."""
    return [
        r
        for r in data["rows"]
        if (
            r["bench"] in ("memory", "torchtitan")
            and r["mode"] == "train"
            and r["status"] == "ok"
            and not is_expandable(r)
        )
        or (r["bench"] == "coverage" and r.get("time_status") == "ok")
    ]


def relative(rows: Sequence[Row], key: str) -> list[tuple[str, dict[str, float]]]:
    """For each config and scope the backends' `key` over Inductor's of the same run; the rest is left out."""
    groups: dict[str, dict[str, float]] = {}
    for row in ordered([r for r in rows if r.get(key)]):
        inductor = inductor_of(row, rows)
        if inductor is None or not together(row, inductor):
            continue
        groups.setdefault(place(row).replace(", ", "\n"), {})[row["backend"]] = row[key]
    return [
        (label, {name: value / found["inductor"] for name, value in found.items()})
        for label, found in groups.items()
        if "inductor" in found
    ]


def chart_name(data: File) -> str:
    """The file of a machine's chart; each result file has one."""
    for bench in ("torchtitan", "coverage"):
        if any(row["bench"].startswith(bench) for row in data["rows"]):
            return f"{bench}-{data['gpu']}.svg"
    return f"memory-{data['gpu']}.svg"


def chart_link(data: File, bench: str, folder: str) -> str:
    """The picture of one machine in Markdown; empty if it has none of this benchmark.

    Args:
        bench: how the picture's name begins.
        folder: where it is, seen from the page.
    """
    if not panels_of(data) or not chart_name(data).startswith(bench):
        return ""
    return f"![{data['gpu']}: time and memory relative to Inductor]({folder}/{chart_name(data)})\n"


def digest(rows: Sequence[Row]) -> str:
    """A short mark of the figures that a chart shows; written into it, so that a stale one is known."""
    keys = ("config", "scope", "backend", "ms_per_step", "peak_reserved_mb")
    figures = [[row.get(key) for key in keys] + ["infer"] * (row["mode"] == "infer") for row in rows]
    return hashlib.sha256(repr(figures).encode()).hexdigest()[:16]


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
        wide = max(len(groups) for _, groups in panels) >= WIDE
        size = (12, 3.6 * len(panels) + 0.4) if wide else (9, 2.7 * len(panels) + 0.4)
        shown = COVERAGE_BACKENDS if chart_name(data).startswith("coverage") else BACKENDS
        fig, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False)
        for axis, (title, groups) in zip(axes[:, 0], panels, strict=True):
            backends = [name for name in shown if any(name in values for _, values in groups)]
            width = 0.8 / len(backends)
            for index, name in enumerate(backends):
                places = [i + (index - (len(backends) - 1) / 2) * width for i in range(len(groups))]
                heights = [values.get(name, 0.0) for _, values in groups]
                bars = axis.bar(places, heights, width, label=name, color=COLOURS[name])
                labels = [f"{h:.2f}" if h else "" for h in heights]
                axis.bar_label(bars, labels, fontsize=6, rotation=90 if wide else 0, padding=int(wide))
            axis.axhline(1.0, color="black", linewidth=0.6)
            names = [label for label, _ in groups]
            axis.set_xticks(range(len(groups)), names, rotation=90 if wide else 0)
            axis.set_title(f"{title}, relative to Inductor (lower is better)", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        handles, labels = axes[0][0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="upper right", ncols=len(labels), frameon=False, fontsize=8)
        fig.suptitle(data["gpu"], fontsize=10, x=0.02, ha="left")
        fig.tight_layout(rect=(0, 0, 1, 0.97))
        fig.savefig(path, metadata={"Date": None, "Description": mark})
        plt.close(fig)
    return None
