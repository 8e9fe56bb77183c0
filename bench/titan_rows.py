"""Rows of the torchtitan benchmark from what its ranks wrote. Not a program: `torchtitan.py` imports it.

A run's outcome, `found`, is ``{"status", "ranks": [figures]}``, the figures as `titan/worker.py` writes them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import schema
from titan_plans import Entry

LARGEST = ("peak_allocated_mb", "peak_reserved_mb", "device_used_mb", "private_pools_mb")


def row(entry: Entry, backend: str, found: dict[str, Any], first: bool) -> dict[str, Any]:
    """One row of the result file from what the ranks wrote."""
    base = {**identity(entry, "torchtitan", backend), "status": found["status"], "gpus": entry.gpus}
    ranks = found["ranks"]
    if not ranks or not ranks[0].get("times_ms"):
        return base if base["status"] != "ok" else base | {"status": "no figures"}
    slowest = max(ranks, key=lambda r: statistics.median(r["times_ms"]))
    times = sorted(slowest["times_ms"])
    ms = statistics.median(times)
    end, before, after = (ranks[0][key] for key in ("end", "before", "after"))
    # The host's time and its part in compiled code are those of one rank.
    busiest = max(ranks, key=lambda r: r["issue_ms"] or 0.0)
    tokens = entry.batch * entry.accumulate * entry.seq / entry.tp
    figures: dict[str, Any] = {
        "tokens_per_s": tokens / ms * 1e3,
        "ms_per_step": ms,
        "ms_p10": times[len(times) // 10],
        "ms_p90": times[min(len(times) - 1, len(times) * 9 // 10)],
        "cpu_issue_ms": busiest["issue_ms"],
        "compiled_ms": busiest["compiled_ms"],
        "compile_s": max(r["warm_s"][0] for r in ranks),
        "compile_cache": "empty at first" if first else "filled by a run before",
        "capture_s": end.get("capture_s"),
        "recordings_warm": before["recordings"],
        "recordings_timed": after["recordings"] - before["recordings"]
        if backend == "reduce-overhead"
        else None,
        "steps": len(times),
        "warmup": entry.warmup,
        "host_slowdown": statistics.median(slowest["slowdowns"]) if slowest.get("slowdowns") else None,
        "run_s": max((r["run_s"] for r in ranks if "run_s" in r), default=None),
        "torn_down": all(r.get("finished") for r in ranks),
        "losses": whole_losses(ranks),
    }
    for key in LARGEST:
        values = [r[key] for r in ranks if r[key] is not None]
        figures[key] = max(values, default=None)
    figures["per_rank"] = [{key: r[key] for key in LARGEST} for r in ranks]
    figures["expandable_seen"] = ranks[0].get("expandable")
    figures["alloc_retries"] = ranks[0].get("alloc_retries")
    if backend == "pgraph":
        launches = after["launches"] - before["launches"]
        rewritten = after["rewritten_nodes"] - before["rewritten_nodes"]
        figures |= {"captures_warm": before["captures"], "captures_end": end["captures"]}
        figures |= {"launches_per_step": launches / entry.steps, "fallbacks": end["refused"]}
        figures |= {"rewritten_per_launch": rewritten / launches if launches else 0.0}
        figures |= {key: end[key] for key in ("nodes", "slots", "exec_mb", "summary", "report")}
    return base | figures


# Of the first repeat only, which compiles; later ones find its kernels.
FIRST_ONLY = ("compile_s", "compile_cache")


def median_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One backend's row of several rounds: that of the run with the median step, and the spread of all.

    `rows` are those of `row`, in their order; of an even number the faster of the middle two counts.
    """
    good = [line for line in rows if line["status"] == "ok"]
    if not good:
        return rows[-1]
    chosen = sorted(good, key=lambda line: line["ms_per_step"])[(len(good) - 1) // 2]
    return chosen | {key: good[0][key] for key in FIRST_ONLY} | schema.over_repeats(rows)


def identity(entry: Entry, bench: str, backend: str) -> dict[str, Any]:
    """The fields that tell a row from the others."""
    return {
        "bench": bench,
        "config": entry.config,
        "mode": "train",
        "scope": "block",
        "backend": backend,
        "alloc_conf": schema.EXPANDABLE if entry.expandable else schema.DEFAULT_ALLOC_CONF,
        "deterministic": entry.deterministic,
    }


def whole_losses(ranks: Sequence[dict[str, Any]]) -> list[float]:
    """The loss of each step: the ranks' shares, summed."""
    return [sum(shares) for shares in zip(*(r["losses"] for r in ranks), strict=True)]


def compared(entry: Entry, runs: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The row of a comparison: the last run's losses against the first one's, rank by rank and step by step.

    Without deterministic algorithms two Inductor runs differ, too; pgraph may then differ by twice as much.
    """
    base = identity(entry, "torchtitan-losses", runs[-1][0]) | {"reference": runs[0][0], "gpus": entry.gpus}
    broken = [f"{name}: {found['status']}" for name, found in runs if not found["ranks"]]
    if broken:
        return base | {"status": "; ".join(broken)}
    first, *others = (found["ranks"] for _, found in runs)
    mine = others[-1]
    pairs = [p for a, b in zip(first, mine, strict=True) for p in zip(a["losses"], b["losses"], strict=True)]
    equal = sum(a == b for a, b in pairs)
    diff = spread_of(first, mine)
    spread = spread_of(first, others[0]) if len(others) > 1 else None
    if equal == len(pairs):
        status = "equal"
    elif spread is not None and diff <= 2 * spread:
        status = "ok"
    else:
        status = f"losses differ by up to {diff:.3g}"
    return base | {
        "status": status,
        "steps": entry.steps,
        "losses_compared": len(pairs),
        "losses_equal": equal,
        "max_diff": diff,
        "reference_max_diff": spread,
        "captures_end": mine[0]["end"].get("captures"),
        "summary": mine[0]["end"].get("summary"),
        "losses": whole_losses(mine),
        "reference_losses": whole_losses(first),
    }


def resumed(entry: Entry, runs: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The row of a run that was stopped and resumed: its losses against those of the run that went on.

    Both ran with deterministic algorithms, so nothing but equality will do.
    """
    (backend, went_on), (_, again) = runs
    left = entry.steps - entry.saved_at
    trained = [len(rank["losses"]) for rank in again["ranks"]]
    if again["status"] == "ok" and any(steps != left for steps in trained):
        again = {"status": f"resumed, it trained {min(trained)} steps instead of {left}", "ranks": []}
    rest = [rank | {"losses": rank["losses"][entry.saved_at :]} for rank in went_on["ranks"]]
    # A run that trained and did not end well is no resumed run.
    pair = [
        (backend, r if r["status"] == "ok" else r | {"ranks": []}) for r in (went_on | {"ranks": rest}, again)
    ]
    line = compared(entry, pair)
    line["config"] += f", resumed after {entry.saved_at} steps"
    return line | ({"steps": left} if "steps" in line else {})


def spread_of(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> float:
    """The largest difference of the losses of two runs."""
    return max(abs(x - y) for x, y in zip(whole_losses(a), whole_losses(b), strict=True))


def brief(found: dict[str, Any], line: dict[str, Any]) -> str:
    """One line about one run."""
    if "ms_per_step" not in line:
        return str(line.get("status", found["status"]))
    sizes = [line[key] for key in ("peak_allocated_mb", "peak_reserved_mb", "device_used_mb")]
    spread = f" ({line['ms_min']:.2f} to {line['ms_max']:.2f})" if line.get("repeats", 1) > 1 else ""
    memory = "/".join("-" if size is None else f"{size:,.0f}" for size in sizes)
    text = f"{line['ms_per_step']:.2f}{spread} ms/step, {line['tokens_per_s']:,.0f} tokens/s per GPU, "
    text += f"{memory} MB (allocated/reserved/device), compile {line['compile_s']:.1f} s, "
    text += f"loss {line['losses'][-1]:.5f}"
    if line["recordings_timed"] is not None:
        text += f", recordings {line['recordings_warm']} + {line['recordings_timed']}"
    return text + (f"\n    {line['summary']}" if "summary" in line else "")
