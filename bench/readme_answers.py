"""What the rows of the result files say of claims about CUDA graphs. Not a program: `readme_claims.py` asks.

Each answer is a text, or None without the rows that it takes. Only rows measured together are compared. What
failed or gave wrong results is said, and no figure of it is shown.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from readme_rows import Row, is_expandable, together

LAYERS_70B = 80
GRAPHS = ("reduce-overhead", "pgraph")
COMPILED = ("inductor", *GRAPHS)
# How a figure that others are compared with is written.
FORMS = {
    "ms_per_step": "{:,.2f} ms",
    "peak_reserved_mb": "{:,.0f} MB reserved",
    "device_used_mb": "{:,.0f} MB of the device",
    "launch_calls": "{:,.0f} launch calls",
}
# Their steps wait for the device, so the time until their calls return is more than the host's own.
HOST_WAITS = ("server-b1", "resnet50-fp16", "gpt2-attention")


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one machine."""

    rows: Sequence[Row]

    def all(self, bench: str) -> list[Row]:
        """All rows of a benchmark that are shown: none of the small twins of workloads."""
        return [row for row in self.rows if row["bench"] == bench and not row["config"].startswith("tiny/")]

    def seed(self, config: str, backend: str, mode: str = "train", key: str = "ms_per_step") -> Row | None:
        """A workload's row, if it has that figure and nothing is wrong with it."""
        row = self.tried(config, backend, mode)
        return row if row is not None and row.get(key) is not None and wrong(row, key) is None else None

    def tried(self, config: str, backend: str, mode: str) -> Row | None:
        """A workload's row, however it ended."""
        wanted = (f"seeds/{config}", backend, mode)
        found = (r for r in self.all("seeds") if (r["config"], r["backend"], r["mode"]) == wanted)
        return next(found, None)

    def claim(self, config: str, backend: str, key: str) -> Row | None:
        """A row of `claims.py`, if it has that figure and ended well."""
        for row in self.all("claims"):
            if (row["config"], row["backend"], row["status"]) == (config, backend, "ok"):
                return row if row.get(key) is not None else None
        return None


Answer = Callable[[Rows], str | None]


def wrong(row: Row, key: str) -> str | None:
    """What is wrong with a workload's figure: its process failed, or results are not eager's."""
    part = "count" if key.startswith(("launch", "device_work", "device_busy")) else "time"
    if row.get(f"{part}_status", "ok") != "ok":
        return "failed"
    return "gave wrong results" if row.get("check_status", "ok") != "ok" else None


def percent(share: float) -> str:
    """``"+3.1 %"``."""
    return f"{100 * share:+.1f} %"


def changes(config: str, key: str = "ms_per_step", mode: str = "train", of: Sequence[str] = GRAPHS) -> Answer:
    """A workload's figure by each of `of`, against eager's and Inductor's."""

    def against(row: Row, rows: Rows, bases: Sequence[str]) -> list[str]:
        others = {base: rows.seed(config, base, mode, key) for base in bases if base != row["backend"]}
        return [
            f"{percent(row[key] / other[key] - 1)} ({base} {FORMS[key].format(other[key])})"
            for base, other in others.items()
            if other is not None and other[key] and together(row, other)
        ]

    def measured(rows: Rows) -> str | None:
        parts = []
        for backend in of:
            tried, row = rows.tried(config, backend, mode), rows.seed(config, backend, mode, key)
            if row is not None and (found := against(row, rows, ("eager", "inductor"))):
                parts.append(f"{backend} {', '.join(found)}")
            elif tried is not None and (problem := wrong(tried, key)):
                parts.append(f"{backend} {problem}")
        return f"{config}: {'; '.join(parts)}" if parts else None

    return measured


def several(*answers: Answer) -> Answer:
    """All answers that there are."""

    def measured(rows: Rows) -> str | None:
        found = [text for answer in answers if (text := answer(rows)) is not None]
        return "; ".join(found) if found else None

    return measured


def launch_cost(rows: Rows) -> str | None:
    """Microseconds of one eager launch, in a sequence of each size."""
    found = [row for row in rows.all("claims") if row["config"].startswith("launch-") and row.get("us")]
    parts = [
        f"{row['us'] / row['nodes']:.1f} us in a row of {row['nodes']:,}"
        for row in found
        if (row["backend"], row["status"]) == ("eager", "ok")
    ]
    return f"eager, small kernels: {', '.join(parts)}" if parts else None


def one_launch(rows: Rows) -> str | None:
    """200 kernels launched one by one, and as one graph."""
    names = {"eager": "one by one", "replay": "`CUDAGraph.replay`", "pgraph": "pgraph's exec"}
    found = {name: rows.claim("launch-200", name, "us") for name in names}
    parts = [f"{names[name]} {row['us']:,.1f} us" for name, row in found.items() if row is not None]
    return f"200 kernels, host time: {', '.join(parts)}" if parts else None


def address_update(rows: Rows) -> str | None:
    """Launches with every address changed."""
    row = next((r for r in rows.all("claims") if r["config"] == "address-200"), None)
    if row is None or row.get("launched_right") is None:
        return None
    if row["status"] != "ok":
        return str(row["status"])
    return (
        f"{row['launched_right']} of {row['launches']} launches right, with new addresses for all "
        f"{row['nodes']} nodes of one exec before each (kernels, a fill, a copy): {row['us']:,.0f} us of "
        f"host time, {row['unchanged_us']:,.0f} us with none changed"
    )


def exec_memory(rows: Rows) -> str | None:
    """Device and host memory of a graph of 200 nodes, and of a node in the largest."""
    parts = []
    for nodes in (200, 1000):
        row = rows.claim(f"exec-{nodes}", "pgraph", "device_bytes")
        if row is not None:
            sizes = [f"{row[key] / 2**20:.2f} MB" for key in ("device_bytes", "host_bytes")]
            each = [f"{row[key] / nodes / 1024:.1f}" for key in ("device_bytes", "host_bytes")]
            parts.append(
                f"{nodes} nodes: device {sizes[0]}, host {sizes[1]} ({each[0]} and {each[1]} KB a node)"
            )
    return "; ".join(parts) if parts else None


def malloc_cost(rows: Rows) -> str | None:
    """Milliseconds of cuMemAlloc."""
    found = [row for row in rows.all("claims") if row["config"].startswith("malloc-") and row.get("us")]
    parts = [f"{row['us'] / 1e3:.2f} ms for {row['config'].removeprefix('malloc-')} MB" for row in found]
    return ", ".join(parts) if parts else None


def counted(config: str, key: str, form: str, backends: Sequence[str]) -> Answer:
    """A counted figure of a workload, by backend; `form` writes one."""

    def measured(rows: Rows) -> str | None:
        found = {name: rows.seed(config, name, key=key) for name in backends}
        parts = [f"{name} {form.format(row[key])}" for name, row in found.items() if row is not None]
        return f"{config}: {', '.join(parts)}" if parts else None

    return measured


def allocations(rows: Rows) -> str | None:
    """Calls of cudaMalloc in 100 warm steps of ResNet-50."""
    key = "device_allocations"
    found = {name: rows.seed("resnet50-amp", name, key=key) for name in ("eager", *COMPILED)}
    parts = [f"{name} {100 * row[key]:,.0f}" for name, row in found.items() if row is not None]
    return f"resnet50-amp, PyTorch's allocator, 100 warm steps: {', '.join(parts)}" if parts else None


def places(rows: Rows) -> list[tuple[str, str]]:
    """(workload, mode) of all workloads that were tried."""
    return list(dict.fromkeys((r["config"].partition("/")[2], r["mode"]) for r in rows.all("seeds")))


def best_issue(rows: Rows) -> str | None:
    """The largest saving of host time over the workloads."""
    parts = []
    for backend in GRAPHS:
        savings = []
        for name, mode in places(rows):
            row, eager = (rows.seed(name, one, mode, "cpu_issue_ms") for one in (backend, "eager"))
            if row is not None and eager is not None and name not in HOST_WAITS and together(row, eager):
                savings.append((row["cpu_issue_ms"] / eager["cpu_issue_ms"] - 1, name))
        if savings:
            least, config = min(savings)
            middle = statistics.median(share for share, _ in savings)
            parts.append(f"{backend} {percent(least)} at best ({config}), median {percent(middle)}")
    return f"host time of a step against eager's: {'; '.join(parts)}" if parts else None


def capture_cost(rows: Rows) -> str | None:
    """Capturing, in eager steps; and after how many steps it is paid back against Inductor."""
    parts = []
    for backend in GRAPHS:
        steps, until, never = [], [], 0
        for name, mode in places(rows):
            row, eager, inductor = (rows.seed(name, one, mode) for one in (backend, "eager", "inductor"))
            if row is None or eager is None or inductor is None or not row.get("capture_s"):
                continue
            if not (together(row, eager) and together(row, inductor)):
                continue
            steps.append(row["capture_s"] * 1e3 / eager["ms_per_step"])
            saved = inductor["ms_per_step"] - row["ms_per_step"]
            if saved > 0:
                until.append(row["capture_s"] * 1e3 / saved)
            never += saved <= 0
        if steps:
            text = (
                f"{backend}: {statistics.median(steps):,.0f} eager steps (median of {len(steps)} workloads)"
            )
            if until:
                text += f", paid back against Inductor after {statistics.median(until):,.0f} (median)"
            parts.append(text + (f", never in {never}" if never else ""))
    return "; ".join(parts) if parts else None


def busy(rows: Rows) -> str | None:
    """The share of a step in which the device works."""
    parts = []
    for config in ("mlp-loop", "efficientnet-b0"):
        found = {name: rows.seed(config, name, key="device_busy_ms") for name in ("eager", *COMPILED)}
        shares = [
            f"{name} {row['device_busy_ms'] / row['ms_per_step']:.0%}"
            for name, row in found.items()
            if row is not None and row.get("ms_per_step")
        ]
        parts += [f"{config}: {', '.join(shares)}"] if shares else []
    return "; ".join(parts) if parts else None


def extra_graphs(rows: Rows) -> str | None:
    """Reserved memory beyond a run without graphs, of a part of Llama 70B on one GPU."""
    pairs = (("graphed", "eager"), ("reduce-overhead", "inductor"), ("pgraph", "inductor"))
    parts = []
    for row in rows.all("claims"):
        base = next((b for backend, b in pairs if backend == row["backend"]), None)
        other = rows.claim(row["config"], base, "reserved_mb") if base is not None else None
        if not row["config"].startswith("graphs-") or other is None or not together(row, other):
            continue
        if row["status"] != "ok":
            parts.append(f"{row['backend']} failed with {row['layers']} layers")
            continue
        more = row["reserved_mb"] - other["reserved_mb"]
        scaled = more * LAYERS_70B / row["layers"] / 1024
        parts.append(
            f"{row['backend']} {more:+,.0f} MB on {base} with {row['layers']} layers "
            f"({scaled:+.1f} GB if {LAYERS_70B} add as much each)"
        )
    return f"one GPU, 70B's dimensions: {'; '.join(parts)}" if parts else None


def beyond_inductor(bench: str, config: str) -> Answer:
    """Reserved memory beyond Inductor's in another benchmark (of each GPU), in training.

    Args:
        config: how the names of its configs begin.
    """

    def measured(rows: Rows) -> str | None:
        found = [r for r in rows.all(bench) if r["config"].startswith(config) and r["mode"] == "train"]
        bases = [r for r in found if r["backend"] == "inductor" and r.get("peak_reserved_mb")]
        parts = []
        for row in found:
            base = next((b for b in bases if together(row, b)), None)
            if row["backend"] not in GRAPHS or base is None:
                continue
            more = "failed"
            if row["status"] == "ok":
                mb, all_mb = row["peak_reserved_mb"] - base["peak_reserved_mb"], base["peak_reserved_mb"]
                more = f"{mb:+,.0f} MB ({percent(mb / all_mb)})"
            where = row["config"] + (" (expandable segments)" if is_expandable(row) else "")
            parts.append(f"{row['backend']} {more} with {where}")
        return f"bench/{bench}.py, reserved: {'; '.join(parts)}" if parts else None

    return measured
