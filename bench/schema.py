"""Result files: ``bench/results/<bench>-<gpu>.json``, one writer and one reader for every benchmark.

A file holds ``{"gpu", "driver", "torch", "python", "commit", "date", "rows": [...]}``. A row is one
measurement; its identity is (bench, config, mode, scope, backend, alloc_conf, deterministic), and a new row
takes the place of one with the same identity. Times end in ``_ms`` or ``ms_...`` (milliseconds) or ``_s``
(seconds), sizes in ``_mb`` (2**20 bytes). None means "does not apply here".

Not a program: the benchmarks import it.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _paths import REPO, RESULTS

Row = dict[str, Any]

IDENTITY = ("bench", "config", "mode", "scope", "backend", "alloc_conf", "deterministic")
HEADER = ("gpu", "driver", "torch", "python", "commit", "date")
DEFAULT_ALLOC_CONF = "default"
EXPANDABLE = "expandable_segments:True"
COLD_CACHE = "empty at first"

BACKENDS = ("eager", "aot_eager", "inductor", "reduce-overhead", "pgraph")
CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("train", "infer"),
    "scope": ("block", "model"),
    # All but these in launch_rows.py, launch_blocks.py, claims.py, sizes.py and uses.py alone.
    "backend": (
        *BACKENDS,
        *("cudagraphs", "guarded", "replay", "nothing", "results", "graphed", "pgraph-static"),
    ),
}

_COVERAGE = (
    "ms_per_step",
    "ms_p10",
    "ms_p90",
    "cpu_issue_ms",
    "peak_allocated_mb",
    "peak_reserved_mb",
    "device_used_mb",
    "captured_ops",
    "device_ops",
    "uncaptured_parts",
    "fallbacks",  # refused captures
    "captures",
    "compile_s",
    "capture_s",
    "params_mb",
    "batch",
)

# What a row of each benchmark must carry. Figures may be None (a CPU has no reserved memory), but not
# missing; in a row whose status says that it failed they may be missing too.
FIGURES: dict[str, tuple[str, ...]] = {
    "memory": (
        "ms_per_step",
        "cpu_issue_ms",
        "peak_allocated_mb",
        "peak_reserved_mb",
        "device_used_mb",
        "compile_s",
        "capture_s",
    ),
    "coverage": _COVERAGE,
    "seeds": (
        *_COVERAGE,
        "device_allocations",  # cudaMalloc for a step
        "launch_calls",  # the four of `coverage_count`, for a step
        "launch_call_share",
        "device_work",
        "device_busy_ms",
    ),
    "claims": ("us", "nodes", "device_bytes", "host_bytes", "reserved_mb", "layers", "launched_right"),
    "launch": ("us", "least", "most", "changed"),
    "launch-blocks": ("us", "least", "most", "issue_us"),
    "captures": ("nodes", "own_ms", "least_ms", "most_ms", "uncaptured_ms"),
    "uses": (
        "ms_per_step",
        "ms_p10",
        "ms_p90",
        "first_ms",  # a step just after a switch, or after waking
        "tokens_per_s",
        "captures_warm",
        "captures_end",
        "asleep_mb",
        "asleep_device_mb",
        "peak_allocated_mb",
        "peak_reserved_mb",
        "device_used_mb",
        "max_diff",  # over the largest value
    ),
    "sizes": (
        "ms_per_step",
        "ms_p10",
        "ms_p90",
        "early_ms",  # total of a server's first half
        "first_ms",  # a request's first token
        "total_ms",
        "cpu_issue_ms",
        "compile_s",
        "capture_s",
        "captures_warm",
        "captures",
        "computed",  # of them
        "recompiles",
        "launches",
        "uncaptured_runs",
        "refused",
        "compared",  # tensors
        "max_diff",  # root mean square, over the reference's
        "peak_allocated_mb",
        "peak_reserved_mb",
        "device_used_mb",
        "exec_mb",
        "recipe_mb",
        "sizes",
        "exec_bytes_one",
        "exec_bytes",
        "device_mb_one",
        "device_mb",
        "reserved_mb_one",
        "reserved_mb",
        "host_mb_one",
        "host_mb",
        "host_bytes_a_node",  # of each further size: what RAM holds more, and what pgraph counts
        "counted_bytes_a_node",
        "own_bytes_a_node",  # of it the recipes themselves
    ),
    "probes": ("us", "done_us", "first_us", "again_us", "nodes"),
    "largest-batch": ("largest_batch", "cap_mb", "trials"),
    "equality": (
        "steps",
        "tensors_compared",
        "tensors_bit_equal",
        "distinct_addresses",
        "captures_warm",
        "captures_end",
    ),
    "torchtitan": (
        "gpus",
        "tokens_per_s",
        "ms_per_step",
        "ms_p10",
        "ms_p90",
        "cpu_issue_ms",
        "peak_allocated_mb",
        "peak_reserved_mb",
        "device_used_mb",
        "private_pools_mb",
        "compile_s",
        "capture_s",
        "recordings_warm",
        "recordings_timed",
    ),
    "torchtitan-losses": (
        "gpus",
        "steps",
        "losses_compared",
        "losses_equal",
        "max_diff",
        "reference_max_diff",
        "captures_end",
    ),
}
PASSED = ("ok", "equal")


class SchemaError(ValueError):
    """A row or a result file does not follow the schema; the message names the place and the value."""


def with_defaults(row: Mapping[str, Any]) -> Row:
    """`row` as a dict, with the default allocator setting filled in."""
    return {"alloc_conf": DEFAULT_ALLOC_CONF, "deterministic": False, **row}


def identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What makes two rows the same measurement."""
    row = with_defaults(row)
    return tuple(str(row[key]) for key in IDENTITY)


def problems(row: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with `row`, one sentence each; empty for a valid row."""
    row = with_defaults(row)
    found = []
    for key in (*IDENTITY, "status"):
        if key not in row:
            found.append(f"{key} is missing")
        elif key != "deterministic" and (not isinstance(row[key], str) or not row[key]):
            found.append(f"{key}={row[key]!r} must be a non-empty string")
    for key, choices in CHOICES.items():
        if isinstance(row.get(key), str) and row[key] not in choices:
            found.append(f"{key}={row[key]!r} must be one of {', '.join(choices)}")
    figures = FIGURES.get(str(row.get("bench")), ())
    if row.get("status") in PASSED:
        found += [f"{key} is missing" for key in figures if key not in row]
    for key in figures:
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            found.append(f"{key}={value!r} must be a number or None")
        elif not math.isfinite(value) or value < 0:
            found.append(f"{key}={value!r} must be finite and not negative")
    return found


def validate(rows: Iterable[Mapping[str, Any]], where: str) -> None:
    """Raise `SchemaError` with every problem of every row; `where` names the file in the message."""
    rows = list(rows)
    lines = [f"row {index}: {problem}" for index, row in enumerate(rows) for problem in problems(row)]
    if not lines:
        seen: dict[tuple[str, ...], int] = {}
        for index, row in enumerate(rows):
            first = seen.setdefault(identity(row), index)
            if first != index:
                lines.append(
                    f"rows {first} and {index} are the same measurement: {' / '.join(identity(row))}"
                )
    if lines:
        raise SchemaError(f"{where}: " + "; ".join(lines))


def merge(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows of `old` in their order, each replaced by its twin in `new`; then what only `new` has."""
    merged = {identity(row): with_defaults(row) for row in old}
    for row in new:
        merged[identity(row)] = with_defaults(row)
    return list(merged.values())


def read(path: Path) -> dict[str, Any]:
    """Read and check a result file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SchemaError(f"{path}: not JSON ({error}); delete the file and measure again") from error
    missing = [key for key in (*HEADER, "rows") if not isinstance(data, dict) or key not in data]
    if missing:
        raise SchemaError(f"{path}: {', '.join(missing)} missing from the header")
    validate(data["rows"], str(path))
    return data


def write(path: Path, rows: Iterable[Mapping[str, Any]], header: Mapping[str, Any] | None = None) -> Path:
    """Merge `rows` into the file at `path`, made if need be, and return the path.

    The header describes the machine of this writing; each row also keeps the commit and the date it was
    measured at, since a merge mixes measurements of several.
    """
    header = dict(header) if header is not None else environment()
    missing = [key for key in HEADER if key not in header]
    if missing:
        raise SchemaError(f"{path}: {', '.join(missing)} missing from the header")
    stamp = {"commit": header["commit"], "date": header["date"]}
    fresh = [{**row, **{k: v for k, v in stamp.items() if k not in row}} for row in rows]
    validate(fresh, str(path))
    old: Sequence[Mapping[str, Any]] = []
    if path.exists():
        previous = read(path)
        if previous["gpu"] != header["gpu"]:
            raise SchemaError(
                f"{path}: holds results of {previous['gpu']}, not {header['gpu']}; choose another --out"
            )
        old = previous["rows"]
    data = {**{key: header[key] for key in HEADER}, "rows": merge(old, fresh)}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and moved, so that a run stopped half-way leaves a whole file.
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def over_repeats(runs: Sequence[Mapping[str, Any]]) -> Row:
    """What a row says of its repeats: the spread of those that ended well, and how many did not.

    Args:
        runs: one row each; at least one has the status "ok".
    """
    times = [run["ms_per_step"] for run in runs if run["status"] == "ok"]
    row = {"ms_min": min(times), "ms_max": max(times), "repeats": len(times)}
    if len(times) < len(runs):
        bad = next(run["status"] for run in runs if run["status"] != "ok")
        row["status"] = f"{len(runs) - len(times)} of {len(runs)} repeats failed: {bad}"
    return row


def result_path(bench: str, gpu: str, out: str | Path | None = None) -> Path:
    """Where results of `bench` go: `out` if it names a JSON file, else that folder, else bench/results."""
    if out is not None and str(out).endswith(".json"):
        return Path(out)
    return (Path(out) if out is not None else RESULTS) / f"{bench}-{gpu}.json"


def gpu_slug(name: str) -> str:
    """``"NVIDIA H200"`` -> ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _output(*command: str) -> str | None:
    """First line that `command` prints, or None if it cannot be run or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPO, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else ""


def commit() -> str:
    """The commit that changed ``pgraph/`` last, or ``PGRAPH_COMMIT`` if set (a copy without git).

    What is measured is that code: a commit of documents or results leaves measurements as good as they were.
    "unknown" where neither is at hand.
    """
    given = os.environ.get("PGRAPH_COMMIT")
    if given:
        return given
    head = _output("git", "log", "-1", "--format=%h", "--abbrev=12", "--", "pgraph")
    if not head:
        return "unknown"
    # Results themselves change while benchmarks run; they do not make the measured code another one.
    dirty = _output("git", "status", "--porcelain", "-uno", "--", ".", ":!bench/results", ":!README.md")
    return f"{head}+dirty" if dirty else head


def driver_version() -> str | None:
    """Version of the GPU driver, as nvidia-smi or NVML gives it; None without a driver."""
    line = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if line:
        return line
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # absent, or a driver that does not answer: the version is a remark, not a result
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def gpu_name() -> str | None:
    """Name of the first visible GPU, or None.

    Asked in a process of its own: a CUDA context in a benchmark's parent would count in the device memory
    that its workers measure.
    """
    ask = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    return _output(sys.executable, "-c", ask) or None


def environment(cpu: bool = False) -> dict[str, Any]:
    """The header of a result file for this machine. Makes no CUDA context in this process.

    Args:
        cpu: the benchmark runs on the CPU, also where there is a GPU.
    """
    import torch

    name = None if cpu else gpu_name()
    return {
        "gpu": gpu_slug(name) if name else "cpu",
        "driver": driver_version() if name else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
