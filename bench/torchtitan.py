"""Real torchtitan on 1, 2 or 4 GPUs: eager, Inductor, Inductor with CUDA graph trees, and pgraph.

    python bench/torchtitan.py --plan gpu2                        # a named list of configurations
    python bench/torchtitan.py --plan flavor=70B,layers=4,gpus=2,seq=4096,batch=1,ac=selective
    python bench/torchtitan.py --plan gpus=2,compare,deterministic       # losses of 200 steps, bit for bit
    python bench/torchtitan.py --plan gpus=2,compare              # within the spread of two Inductor runs?
    python bench/torchtitan.py --plan gpus=2,resume,steps=20      # saved after ten steps, and resumed
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
from titan_rows import brief, compared, resumed, row

WORKER = Path(__file__).resolve().parent / "titan" / "worker.py"


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

    def __init__(self, entry: Entry, position: int, out: Path, cache: Path, saved: Path) -> None:
        backend = entry.backends[position]
        self.entry, self.out = entry, out
        out.mkdir(parents=True, exist_ok=True)
        spec = json.dumps(specification(entry, position, out, cache, saved))
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
            environment["PYTORCH_ALLOC_CONF"] = schema.EXPANDABLE
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


def specification(entry: Entry, position: int, out: Path, cache: Path, saved: Path) -> dict[str, Any]:
    """What the worker reads."""
    backend = entry.backends[position]
    if entry.untimed:
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
    if entry.resume:
        settings["extra"] += checkpointing(entry, position, saved)
    spec = {"settings": settings, "warmup": warmup, "timed": timed, "issue": issue}
    return spec | {"cache": str(cache), "out": str(out), "cudagraphs": backend == "reduce-overhead"}


def checkpointing(entry: Entry, position: int, folder: Path) -> list[str]:
    """torchtitan's arguments for the run that saves in the middle, and for the one that goes on from it."""
    words = ["--checkpoint.enable", "--checkpoint.folder", str(folder)]
    words += ["--checkpoint.interval", str(entry.saved_at)]
    return [*words, "--checkpoint.load_step", str(entry.saved_at)] if position else words


def last_error(path: Path) -> str:
    """The line of a log that names the exception, at most 300 characters."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith((" ", "[")) and "Error" in line.split(":", 1)[0]]
    return (named or lines or ["no output"])[-1].strip()[:300]


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
        entry, position, backend = jobs[index]
        saved = logs / f"{index - position:02d}-checkpoint"  # by the first run of the entry
        if not position:
            shutil.rmtree(saved, ignore_errors=True)
        return Ranks(entry, position, logs / f"{index:02d}-{backend}", cache, saved)

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
        if not entry.untimed:
            schema.write(path, [line], header)
        else:
            runs = [*(runs if position else []), (backend, found)]
            line = {"status": found["status"]}
            if position == len(entry.backends) - 1:
                line = resumed(entry, runs) if entry.resume else compared(entry, runs)
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
