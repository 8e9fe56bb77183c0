"""Tables of the coverage benchmark: six rows for README.md, all ratios, and one line for each model.

Not a program: `readme.py` imports it.
"""

from __future__ import annotations

from coverage_rows import KINDS, part_commit
from coverage_summary import MODES, TITLES, Counts, Ratio, checked, counts, ratio, share
from readme_rows import File, Row
from readme_tables import caption, figure
from tabulate import tabulate

from pgraph.text import amount

# (figure, over whose, title); time by its mean, sizes by median and worst.
RATIOS = (
    ("ms_per_step", "inductor", "time over Inductor's"),
    ("ms_per_step", "reduce-overhead", "time over reduce-overhead's"),
    ("peak_reserved_mb", "inductor", "reserved memory over Inductor's"),
    ("device_used_mb", "inductor", "device memory over Inductor's"),
    ("device_used_mb", "reduce-overhead", "device memory over reduce-overhead's"),
)


def coverage_table(data: File) -> str:
    """Counts, ratios over the timed models, and every exception; empty if the file has none of it."""
    rows = [row for row in data["rows"] if row["bench"] == "coverage"]
    modes = [mode for mode in MODES if checked(rows, mode)]
    if not modes:
        return ""
    lines = []
    for mode in modes:
        c = counts(rows, mode)
        whole = [c.models, f"{c.right} of {c.models}", _as_inductor(c), c.mostly, c.whole]
        lines.append([TITLES[mode], *map(str, whole)])
    head = ["", "models", "run and are right", AS_INDUCTOR]
    head += ["95 % or more captured, none refused", "nothing stays outside"]
    text = f"{caption(data)}\n\n{_markdown(lines, head, 5)}\n{_ratio_table(rows)}"
    notes: dict[str, list[str]] = {}
    for mode in modes:
        for model, why in counts(rows, mode).exceptions:
            notes.setdefault(why, []).append(f"{model} ({TITLES[mode]})")
    bullets = [f"- {', '.join(models)}: {_plain(why)}" for why, models in notes.items()]
    return text + ("\n" + "\n".join(bullets) + "\n" if bullets else "")


AS_INDUCTOR = "some tensors as far off as Inductor's"


def _as_inductor(found: Counts) -> str:
    """``"7 models (94 tensors)"``: those of the right ones that leave the bounds as plain Inductor does."""
    if not found.as_inductor:
        return "-"
    return f"{amount(found.as_inductor, 'model')} ({amount(found.tensors, 'tensor')})"


# The rows of the short table that are ratios: figure, over whose, what the row says.
SUMMARY = (
    ("ms_per_step", "inductor", "time of a step, over Inductor's"),
    ("ms_per_step", "reduce-overhead", "time of a step, over `reduce-overhead`'s"),
    ("peak_reserved_mb", "inductor", "peak reserved memory, over Inductor's"),
    ("device_used_mb", "reduce-overhead", "device memory, over `reduce-overhead`'s"),
)


def summary_table(data: File) -> str:
    """Up to six rows, training beside inference: models that are right, how many of them as Inductor is, and
    four ratios with their worst.

    What no model has is left out. Empty if the file has no model that was checked.
    """
    rows = [row for row in data["rows"] if row["bench"] == "coverage"]
    if not any(checked(rows, mode) for mode in MODES):
        return ""
    lines = [["models whose results are right", *(_right(rows, mode) for mode in MODES)]]
    differing = [_as_inductor(counts(rows, mode)) for mode in MODES]
    if set(differing) != {"-"}:
        lines.append([AS_INDUCTOR, *differing])
    for key, over, title in SUMMARY:
        found = [ratio(rows, mode, key, over) for mode in MODES]
        if any(found):
            lines.append([title, *map(_ratio_in_words, found)])
    head = ["pgraph", *(TITLES[mode] for mode in MODES)]
    return f"{caption(data)}\n\n{_markdown(lines, head, 2)}"


def _right(rows: list[Row], mode: str) -> str:
    found = counts(rows, mode)
    return f"{found.right} of {found.models}" if found.models else "-"


def _ratio_in_words(found: Ratio | None) -> str:
    """``"0.355 (worst of 11: 0.620)"``; a dash without a model."""
    if found is None:
        return "-"
    return f"{found.mean:.3f} (worst of {found.models}: {found.worst[0]:.3f})"


def _ratio_table(rows: list[Row]) -> str:
    """pgraph against the others over the timed models, a line for each ratio; empty without any."""
    lines = []
    for key, over, title in RATIOS:
        cells = []
        for mode in MODES:
            r = ratio(rows, mode, key, over)
            if r is None:
                cells += ["-"] * 4
                continue
            cells += [str(r.models), f"{r.mean:.3f}", f"{r.median:.3f}", f"{r.worst[0]:.3f} ({r.worst[1]})"]
        if set(cells) != {"-"}:
            lines.append([title, *cells])
    if not lines:
        return ""
    columns = ("models", "mean", "median", "worst")
    head = ["pgraph's", *(f"{TITLES[mode]}: {name}" for mode in MODES for name in columns)]
    return "\n" + _markdown(lines, head, 8)


def models_table(data: File) -> str:
    """How many are right, and one line for each model and mode; empty if the file has none."""
    rows = [row for row in data["rows"] if row["bench"] == "coverage"]
    places = list(dict.fromkeys((row["config"], row["mode"]) for row in rows))
    lines = []
    for config, mode in sorted(places):
        of = {row["backend"]: row for row in rows if (row["config"], row["mode"]) == (config, mode)}
        lines.append([config, TITLES[mode], *_captured(of.get("pgraph")), *_timed(of), *_commit(of)])
    if not lines:
        return ""
    head = ["model", "mode", "result", "captured", "ops", "outside"]
    head += ["ms: eager", "Inductor", "reduce-overhead", "pgraph"]
    head += ["reserved MB: Inductor", "reduce-overhead", "pgraph"]
    head += ["device MB: Inductor", "reduce-overhead", "pgraph", "commit"]
    align = ["left", "left", "left", "right", "right", "left", *["right"] * 10, "left"]
    told = "; ".join(_right_in_words(rows, mode) for mode in MODES if checked(rows, mode))
    text = f"{caption(data)}\n\n{told[0].upper()}{told[1:]}.\n\n" if told else f"{caption(data)}\n\n"
    return text + f"{tabulate(lines, head, 'github', colalign=align, disable_numparse=True)}\n"


def _right_in_words(rows: list[Row], mode: str) -> str:
    """``"training: 113 of 113 are right, 7 models (94 tensors) of them as Inductor's"``."""
    c = counts(rows, mode)
    differing = f", of these {_as_inductor(c)} as Inductor's" if c.as_inductor else ""
    return f"{TITLES[mode]}: {c.right} of {c.models} are right{differing}"


def _captured(row: Row | None) -> list[str]:
    """Result, share, ops and what stays outside."""
    if row is None or not row.get("check_status"):
        return ["not checked", "-", "-", "-"]
    outside = [f"{code} x {count}" for code, count in (row.get("uncaptured") or {}).items()]
    outside += [f"graph break x {row['graph_breaks']}"] if row.get("graph_breaks") else []
    result = _plain(row["check_status"])
    if row.get("inductor_differs"):
        result += f" ({amount(len(row['inductor_differs']), 'tensor')} as Inductor's)"
    if row.get("device_ops") is None:
        return [result, "-", "-", "-"]
    return [result, f"{share(row):.1%}", figure(row["device_ops"], ",d"), ", ".join(outside) or "-"]


def _timed(of: dict[str, Row]) -> list[str]:
    """Times of four backends, reserved and device memory of three."""

    def cells(key: str, form: str, backends: tuple[str, ...]) -> list[str]:
        return [figure(of.get(backend, {}).get(key), form) for backend in backends]

    compiled = ("inductor", "reduce-overhead", "pgraph")
    return [
        *cells("ms_per_step", ",.2f", ("eager", *compiled)),
        *cells("peak_reserved_mb", ",.0f", compiled),
        *cells("device_used_mb", ",.0f", compiled),
    ]


def _commit(of: dict[str, Row]) -> list[str]:
    """The commits that the rows were measured at: first the check's, then the timings'."""
    found = [
        str(one)[:7] for kind in KINDS for row in of.values() if (one := part_commit(row, kind)) is not None
    ]
    return [", ".join(dict.fromkeys(found)) or "-"]


def _plain(text: str) -> str:
    """`text` on one line of a table."""
    return text.replace("|", "/").replace("\n", " ")


def _markdown(lines: list[list[str]], head: list[str], figures: int) -> str:
    align = ["left", *["right"] * figures]
    return tabulate(lines, head, "github", colalign=align, disable_numparse=True) + "\n"
