"""What rows of one coverage benchmark say together: counts, exceptions, geometric means. Not a program.

`coverage.py` prints it, `readme_coverage.py` makes tables of it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

MOSTLY = 0.95
MODES = ("train", "infer")
TITLES = {"train": "training", "infer": "inference"}


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of one mode, over the rows of pgraph that were checked.

    Args:
        models: how many.
        right: ran and were right.
        as_inductor: of these, how many have tensors outside the bounds, as plain Inductor has them
            (Note [Right against eager]).
        tensors: how many such tensors.
        mostly: of these, at least 95 % of device ops captured and no fallback.
        whole: of these, no uncaptured part and no graph break.
        exceptions: (model, what is wrong or stays outside) of all others.
    """

    models: int
    right: int
    as_inductor: int
    tensors: int
    mostly: int
    whole: int
    exceptions: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """pgraph's figures over another backend's, over the timed models of one mode.

    Args:
        mean: geometric mean.
        median: the median.
        worst: the largest, and its model.
        models: how many.
    """

    mean: float
    median: float
    worst: tuple[float, str]
    models: int


def share(row: Row) -> float:
    """Captured device ops over all; 1 where there are none."""
    return row["captured_ops"] / row["device_ops"] if row.get("device_ops") else 1.0


def is_mostly(row: Row) -> bool:
    """At least 95 % captured, no fallback."""
    return share(row) >= MOSTLY and not row.get("fallbacks")


def is_whole(row: Row) -> bool:
    """Nothing that is compiled stays outside, and no graph break cuts it."""
    return row.get("captured_ops") is not None and not (
        row.get("uncaptured_parts") or row.get("graph_breaks")
    )


def checked(rows: Iterable[Row], mode: str) -> list[Row]:
    """pgraph's rows that were checked."""
    return [r for r in rows if (r["mode"], r["backend"]) == (mode, "pgraph") and r.get("check_status")]


def counts(rows: Iterable[Row], mode: str) -> Counts:
    """Counts of one mode."""
    found = checked(rows, mode)
    right = [r for r in found if r["check_status"] == "ok"]
    differing = [len(r["inductor_differs"]) for r in right if r.get("inductor_differs")]
    exceptions = [(r["config"], why(r)) for r in found if r["check_status"] != "ok" or not is_whole(r)]
    return Counts(
        len(found),
        len(right),
        len(differing),
        sum(differing),
        sum(is_mostly(r) for r in right),
        sum(is_whole(r) for r in right),
        tuple(sorted(exceptions)),
    )


def why(row: Row) -> str:
    """What is wrong with a row or stays outside in it: codes with counts, then the first sentence."""
    if row["check_status"] != "ok":
        return str(row["check_status"])
    codes = [f"{code} x {count}" for code, count in (row.get("uncaptured") or {}).items()]
    if row.get("graph_breaks"):
        codes.append(f"graph break x {row['graph_breaks']}")
    sentence = next(iter(row.get("reasons") or ()), "")
    return f"{share(row):.0%} captured; {', '.join(codes)}" + (f": {sentence}" if sentence else "")


def ratio(rows: Sequence[Row], mode: str, key: str, over: str, backend: str = "pgraph") -> Ratio | None:
    """`backend`'s `key` over that of the backend `over`; None without a model that has both."""
    figures: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["mode"] == mode and row.get("time_status") == "ok" and row.get(key):
            figures.setdefault(row["config"], {})[row["backend"]] = row[key]
    values = {m: f[backend] / f[over] for m, f in figures.items() if backend in f and over in f}
    if not values:
        return None
    worst = max(values, key=lambda m: values[m])
    mean = math.exp(statistics.mean(math.log(v) for v in values.values()))
    return Ratio(mean, statistics.median(values.values()), (values[worst], worst), len(values))


def summary(rows: Sequence[Row]) -> str:
    """A short text about all rows; the last thing that `coverage.py` prints."""
    lines = []
    for mode in MODES:
        c = counts(rows, mode)
        if c.models:
            lines.append(
                f"{TITLES[mode]}: {c.right} of {c.models} run and are right; {c.mostly} with at least "
                f"{MOSTLY:.0%} captured and no fallback; {c.whole} with nothing uncaptured"
            )
            lines += [f"  {model}: {text}" for model, text in c.exceptions]
        failed = [r for r in rows if r["mode"] == mode and r.get("time_status", "ok") != "ok"]
        lines += [f"  timing of {r['config']} by {r['backend']}: {r['time_status']}" for r in failed]
        for key, title in (
            ("ms_per_step", "time"),
            ("peak_reserved_mb", "reserved memory"),
            ("device_used_mb", "device memory"),
        ):
            for over in ("inductor", "reduce-overhead", "eager"):
                r = ratio(rows, mode, key, over)
                if r is not None:
                    lines.append(
                        f"{TITLES[mode]}, {title} over {over}'s ({r.models} models): "
                        f"geometric mean {r.mean:.3f}, median {r.median:.3f}, "
                        f"worst {r.worst[0]:.3f} ({r.worst[1]})"
                    )
    return "\n".join(lines) or "no rows"
