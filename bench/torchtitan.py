"""Real torchtitan on 1, 2 or 4 GPUs: eager, Inductor, Inductor with CUDA graph trees, and pgraph.

    python bench/torchtitan.py --plan gpu2                        # a named list of configurations
    python bench/torchtitan.py --plan flavor=70B,layers=4,gpus=2,seq=4096,batch=1,ac=selective
    python bench/torchtitan.py --plan gpus=2,compare,deterministic       # losses of 200 steps, bit for bit
    python bench/torchtitan.py --plan gpus=2,compare              # within the spread of two Inductor runs?
    python bench/torchtitan.py --plan gpu4 --budget 200           # start nothing new after 200 s

Each backend of each configuration runs in processes of its own, one per GPU, as torchrun would start them.
The next run's processes import everything while the current one measures, and all share one compile cache
(pgraph and Inductor compile the same code), so compile_s is a cold one only where a row says so. Rows go to
``bench/results/torchtitan-<gpu>.json`` after every run. Figures are those of the rank that has the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _paths
import schema
import titan_setup
import torch
from titan_plans import PLANS, Entry, PlanError, parse

WORKER = Path(__file__).resolve().parent / "titan" / "worker.py"
EXPANDABLE = "expandable_segments:True"
LARGEST = ("peak_allocated_mb", "peak_reserved_mb", "device_used_mb", "private_pools_mb")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--plan", nargs="+", required=True, help="names of plans, or configurations as key=value,key=value")
    add("--backends", nargs="+", default=None, help="instead of the plan's own")
    add("--timeout", type=float, default=None, help="seconds for one run, instead of the plan's own")
    add("--budget", type=float, default=float("inf"), help="seconds after which no run is started")
    add("--out", default=None, help="JSON file or folder for the results")
    add(
        "--cache",
        type=Path,
        default=None,
        help="for tokenizer, text and compiled code; a fresh one if not given",
    )
    add("--logs", type=Path, default=None, help="folder for the ranks' output; a temporary one if not given")
    args = parser.parse_args(argv)
    try:
        args.entries = [entry for text in args.plan for entry in parse(text)]
    except PlanError as e:
        parser.error(str(e))
    if args.backends:
        args.entries = [dataclasses.replace(e, backends=tuple(args.backends)) for e in args.entries]
    return args


class Ranks:
    """The processes of one run: they import at once, and train when told to."""

    def __init__(self, entry: Entry, backend: str, out: Path, cache: Path) -> None:
        self.entry, self.backend, self.out = entry, backend, out
        out.mkdir(parents=True, exist_ok=True)
        spec = json.dumps(specification(entry, backend, out, cache))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = dict(os.environ) | {
            "WORLD_SIZE": str(entry.gpus),
            "LOCAL_WORLD_SIZE": str(entry.gpus),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(_paths.REPO)) if p),
            "PYTHONUNBUFFERED": "1",
        }
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
        if backend == "reduce-overhead":
            environment["TORCHINDUCTOR_CUDAGRAPHS"] = "1"
        if entry.expandable:
            environment["PYTORCH_ALLOC_CONF"] = EXPANDABLE
        self.logs = [(out / f"rank{rank}.log").open("w", encoding="utf-8") for rank in range(entry.gpus)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), spec],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,
                text=True,
            )
            for rank, log in enumerate(self.logs)
        ]

    def go(self) -> None:
        """Let them train."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write("go\n")
                process.stdin.flush()
            except BrokenPipeError:
                return  # it has failed already, `wait` will say so

    def wait(self, timeout: float) -> dict[str, Any]:
        """``{"status", "ranks": [figures]}``; on a failure all ranks are ended, and the status says why."""
        end = time.monotonic() + timeout
        status = "ok"
        while any(p.poll() is None for p in self.processes):
            if any(p.poll() for p in self.processes):
                time.sleep(2)  # let the others say what they have to
                break
            if time.monotonic() > end:
                status = f"timeout: not done after {timeout:.0f} s"
                break
            time.sleep(0.05)
        failed = [rank for rank, p in enumerate(self.processes) if p.poll()]
        self.end()
        if failed:
            status = f"rank {failed[0]}: {last_error(self.out / f'rank{failed[0]}.log')}"
        paths = [self.out / f"rank{rank}.json" for rank in range(self.entry.gpus)]
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
        if len(ranks) == self.entry.gpus and status != "ok":
            status = f"trained, then: {status}"
        return {"status": status, "ranks": ranks if len(ranks) == self.entry.gpus else []}

    def end(self) -> None:
        """End what still runs, children included."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for log in self.logs:
            log.close()


def specification(entry: Entry, backend: str, out: Path, cache: Path) -> dict[str, Any]:
    """What the worker reads."""
    if entry.compare:
        warmup, timed, issue = entry.steps, 0, 0
    else:
        warmup, timed, issue = entry.warmup, entry.steps, entry.issue
    same = ("flavor", "layers", "seq", "batch", "accumulate", "ac", "tp", "ddp", "reshard", "deterministic")
    settings = {key: getattr(entry, key) for key in same} | {
        "backend": "inductor" if backend == "reduce-overhead" else backend,
        "ranks": entry.gpus,
        "steps": warmup + timed + issue,
        "log_freq": 1_000_000,
        # A collection in the middle of the measured steps would be an outlier.
        "extra": ["--training.gc_freq", "1000000", "--metrics.disable_color_printing"],
    }
    spec = {"settings": settings, "warmup": warmup, "timed": timed, "issue": issue}
    return spec | {"cache": str(cache), "out": str(out), "cudagraphs": backend == "reduce-overhead"}


def last_error(path: Path) -> str:
    """The line of a log that names the exception, at most 300 characters."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith((" ", "[")) and "Error" in line.split(":", 1)[0]]
    return (named or lines or ["no output"])[-1].strip()[:300]


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
    tokens = entry.batch * entry.accumulate * entry.seq / entry.tp
    figures: dict[str, Any] = {
        "tokens_per_s": tokens / ms * 1e3,
        "ms_per_step": ms,
        "ms_p10": times[len(times) // 10],
        "ms_p90": times[min(len(times) - 1, len(times) * 9 // 10)],
        "cpu_issue_ms": max((r["issue_ms"] for r in ranks if r["issue_ms"] is not None), default=None),
        "compile_s": max(r["warm_s"][0] for r in ranks),
        "compile_cache": "empty at first" if first else "filled by a run before",
        "capture_s": end.get("capture_s"),
        "recordings_warm": before["recordings"],
        "recordings_timed": after["recordings"] - before["recordings"]
        if backend == "reduce-overhead"
        else None,
        "steps": entry.steps,
        "warmup": entry.warmup,
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
        figures |= {"launches_per_step": launches / entry.steps, "fallbacks": end["fallbacks"]}
        figures |= {"rewritten_per_launch": rewritten / launches if launches else 0.0}
        figures |= {key: end[key] for key in ("nodes", "slots", "exec_mb", "summary", "report")}
    return base | figures


def identity(entry: Entry, bench: str, backend: str) -> dict[str, Any]:
    """The fields that tell a row from the others."""
    return {
        "bench": bench,
        "config": entry.config,
        "mode": "train",
        "scope": "block",
        "backend": backend,
        "alloc_conf": EXPANDABLE if entry.expandable else schema.DEFAULT_ALLOC_CONF,
        "deterministic": entry.deterministic,
    }


def whole_losses(ranks: Sequence[dict[str, Any]]) -> list[float]:
    """The loss of each step: the ranks' shares, summed."""
    return [sum(shares) for shares in zip(*(r["losses"] for r in ranks), strict=True)]


def compared(entry: Entry, runs: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The row of a comparison: pgraph's losses against the first run's, rank by rank and step by step.

    Without deterministic algorithms two Inductor runs differ, too; pgraph may then differ by twice as much.
    """
    base = identity(entry, "torchtitan-losses", "pgraph") | {"reference": runs[0][0], "gpus": entry.gpus}
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


def spread_of(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> float:
    """The largest difference of the losses of two runs."""
    return max(abs(x - y) for x, y in zip(whole_losses(a), whole_losses(b), strict=True))


def brief(found: dict[str, Any], line: dict[str, Any]) -> str:
    """One line about one run."""
    if "ms_per_step" not in line:
        return str(line.get("status", found["status"]))
    sizes = [line[key] for key in ("peak_allocated_mb", "peak_reserved_mb", "device_used_mb")]
    memory = "/".join("-" if size is None else f"{size:,.0f}" for size in sizes)
    text = f"{line['ms_per_step']:.2f} ms/step, {line['tokens_per_s']:,.0f} tokens/s per GPU, {memory} MB "
    text += f"(allocated/reserved/device), compile {line['compile_s']:.1f} s, loss {line['losses'][-1]:.5f}"
    if line["recordings_timed"] is not None:
        text += f", recordings {line['recordings_warm']} + {line['recordings_timed']}"
    return text + (f"\n    {line['summary']}" if "summary" in line else "")


def unable(plans: Sequence[str]) -> str | None:
    """Why this machine cannot run these plans at all; None if it can."""
    if lacking := titan_setup.missing():
        return lacking
    wanted = max(
        (entry.gpus for name in plans if name.startswith("gpu") for entry in PLANS.get(name, ())), default=0
    )
    if wanted and (there := torch.cuda.device_count()) < wanted:
        return f"{' '.join(plans)} needs {wanted} GPUs, this machine has {there}. Fix: choose --plan cpu"
    return None


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the plan and write the result file after every run; returns its path."""
    args = parse_args(argv)
    if problem := unable(args.plan):
        sys.exit(f"bench/torchtitan.py: {problem}")
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="pgraph-titan-"))
    cache, logs = args.cache or scratch / "cache", args.logs or scratch / "logs"
    jobs = [
        (entry, position, backend)
        for entry in args.entries
        for position, backend in enumerate(entry.backends)
    ]

    def start(index: int) -> Ranks | None:
        if index >= len(jobs) or time.monotonic() - began > args.budget:
            return None
        entry, _, backend = jobs[index]
        return Ranks(entry, backend, logs / f"{index:02d}-{backend}", cache)

    header: dict[str, Any] | None = None
    path: Path | None = None
    ready = start(0)
    compiled: set[tuple[Any, ...]] = set()
    runs: list[tuple[str, dict[str, Any]]] = []
    for index, (entry, position, backend) in enumerate(jobs):
        ranks = ready
        if ranks is None or time.monotonic() - began > args.budget:
            print(f"out of budget: {len(jobs) - index} runs are not made", flush=True)
            break
        at = time.monotonic()
        ranks.go()
        ready = start(index + 1)
        if header is None:  # asks a process of its own for the GPU's name, while the first ranks train
            header = schema.environment()
            path = schema.result_path("torchtitan", header["gpu"], args.out)
        found = ranks.wait(args.timeout or entry.timeout)
        code = (entry.flavor, entry.layers, entry.seq, entry.batch, entry.ac, entry.gpus, entry.deterministic)
        line = row(entry, backend, found, first=code not in compiled and args.cache is None)
        compiled.add(code)
        if not entry.compare:
            schema.write(path, [line], header)
        else:
            runs = [*(runs if position else []), (backend, found)]
            line = {"status": found["status"]}
            if position == len(entry.backends) - 1:
                line = compared(entry, runs)
                schema.write(path, [line], header)
        mode = "expandable " if entry.expandable else ""
        print(
            f"{mode}{entry.config} {backend}: {brief(found, line)} ({time.monotonic() - at:.0f} s)",
            flush=True,
        )
    if ready is not None:
        ready.end()
    shutil.rmtree(scratch / "cache", ignore_errors=True)
    print(f"wrote {path}; logs in {logs}")
    assert path is not None
    return path


if __name__ == "__main__":
    main()
