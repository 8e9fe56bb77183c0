"""The processes of one torchtitan run, from start to end. Not a program: `torchtitan.py` imports it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _paths
import schema
from titan_plans import Entry

WORKER = Path(__file__).resolve().parent / "titan" / "worker.py"
# A worker answers this signal with the stacks of its threads, in its log.
TELL_STACKS = signal.SIGUSR1
TELLING_S = 1.0


class Ranks:
    """The processes of one run: they import at once, and train when told to.

    Used as a context, it leaves no process behind, however it is left.
    """

    def __init__(self, entry: Entry, position: int, out: Path, cache: Path, saved: Path) -> None:
        self.entry, self.out = entry, out
        out.mkdir(parents=True, exist_ok=True)
        spec = json.dumps(specification(entry, position, out, cache, saved))
        environment = environment_of(entry, entry.backends[position], cache)
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

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def go(self) -> None:
        """Let them train; they meet at a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{port}\n")
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
        """End what still runs, children included; each log then says where its rank was."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(TELL_STACKS)
        if running:
            time.sleep(TELLING_S)
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for process, log in zip(self.processes, self.logs, strict=True):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            log.close()


def environment_of(entry: Entry, backend: str, cache: Path) -> dict[str, str]:
    """What every rank of a run finds in its environment, but for its rank."""
    environment = dict(os.environ) | {
        "WORLD_SIZE": str(entry.gpus),
        "LOCAL_WORLD_SIZE": str(entry.gpus),
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(_paths.REPO)) if p),
        "PYTHONUNBUFFERED": "1",
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    if backend == "reduce-overhead":
        environment["TORCHINDUCTOR_CUDAGRAPHS"] = "1"
    if entry.expandable:
        environment["PYTORCH_ALLOC_CONF"] = schema.EXPANDABLE
    return environment


# torchtitan's own rate is eight times that and grows to the last of so few steps. The losses of large models
# with random weights then part from run to run, too far to tell a wrong one.
LEARNING = ("--optimizer.lr", "1e-4", "--lr_scheduler.warmup_steps", "2")


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
        "extra": ["--training.gc_freq", "1000000", "--metrics.disable_color_printing", *LEARNING],
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
