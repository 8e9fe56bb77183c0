"""Real torchtitan on 1, 2 or 4 GPUs: eager, Inductor, Inductor with CUDA graph trees, and pgraph.

    python bench/torchtitan.py --plan gpu2                        # a named list of configurations
    python bench/torchtitan.py --plan flavor=70B,layers=4,gpus=2,seq=4096,batch=1,ac=selective
    python bench/torchtitan.py --plan gpus=2,compare,deterministic       # losses of 200 steps, bit for bit
    python bench/torchtitan.py --plan gpus=2,compare              # within the spread of two Inductor runs?
    python bench/torchtitan.py --plan gpus=2,resume,steps=20      # saved after ten steps, and resumed
    python bench/torchtitan.py --plan gpus=2,batch=1,repeats=3    # three rounds; the median run counts
    python bench/torchtitan.py --plan gpu4 --budget 200           # start nothing new after 200 s

Each backend of each configuration runs in processes of its own, one per GPU, as torchrun would start them.
The next run's processes import everything while the current one measures, and all share one compile cache
(pgraph and Inductor compile the same code), so compile_s is a cold one only where a row says so. Rows go to
``bench/results/torchtitan-<gpu>.json`` after every run. Figures are those of the rank that has the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401  (puts the checkout and examples/torchtitan on sys.path)
import schema
import titan_setup
import torch
from titan_plans import PLANS, Entry, PlanError, parse
from titan_ranks import Ranks
from titan_rows import brief, compared, median_of, resumed, row


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


class Runs:
    """The runs of the plans in their order; while one measures, the next one's processes get ready.

    Used as a context, it leaves no process behind.
    """

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.began = time.monotonic()
        self.budget = args.budget
        self.cache, self.logs = args.cache or scratch / "cache", args.logs or scratch / "logs"
        self.jobs = [
            (entry, position, backend)
            for entry in args.entries
            for _ in range(entry.repeats)
            for position, backend in enumerate(entry.backends)
        ]
        self._ready: Ranks | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Runs:
        self._ready = self._start(0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def run(self, index: int, timeout: float) -> dict[str, Any] | None:
        """Run job `index`, one after the other, and return what it found; None if there is no time for it."""
        ranks = self._ready
        if ranks is None or self._late():
            return None
        ranks.go()
        self._ready = self._start(index + 1)
        return ranks.wait(timeout)

    def _late(self) -> bool:
        return time.monotonic() - self.began > self.budget

    def _start(self, index: int) -> Ranks | None:
        if index >= len(self.jobs) or self._late():
            return None
        entry, position, backend = self.jobs[index]
        saved = self.logs / f"{index - position:02d}-checkpoint"  # by the first run of the entry
        if not position:
            shutil.rmtree(saved, ignore_errors=True)
        ranks = Ranks(entry, position, self.logs / f"{index:02d}-{backend}", self.cache, saved)
        return self._open.enter_context(ranks)


class Account:
    """Makes rows of what the runs found, and writes each one as soon as it is whole."""

    def __init__(self, out: str | None, cold: bool) -> None:
        self.header = schema.environment()
        self.path = schema.result_path("torchtitan", self.header["gpu"], out)
        self.cold = cold
        self._compiled: set[tuple[Any, ...]] = set()
        self._compared: list[tuple[str, dict[str, Any]]] = []
        self._rounds: dict[tuple[Entry, str], list[dict[str, Any]]] = {}

    def add(self, entry: Entry, position: int, found: dict[str, Any]) -> dict[str, Any]:
        """The row of a run; of a comparison the last run has it, and the others only their status."""
        backend = entry.backends[position]
        code = (entry.flavor, entry.layers, entry.seq, entry.batch, entry.ac, entry.gpus, entry.deterministic)
        first = self.cold and code not in self._compiled
        self._compiled.add(code)
        if not entry.untimed:
            rounds = self._rounds.setdefault((entry, backend), [])
            rounds.append(row(entry, backend, found, first))
            line = median_of(rounds)
        else:
            self._compared = [*(self._compared if position else []), (backend, found)]
            if position < len(entry.backends) - 1:
                return {"status": found["status"]}
            line = (resumed if entry.resume else compared)(entry, self._compared)
        schema.write(self.path, [line], self.header)
        return line


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the plan and write the result file after every run; returns its path."""
    args = parse_args(argv)
    if problem := unable(args.plan):
        sys.exit(f"bench/torchtitan.py: {problem}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the ranks on the way
    scratch = Path(tempfile.mkdtemp(prefix="pgraph-titan-"))
    with Runs(args, scratch) as runs:
        account = Account(args.out, cold=args.cache is None)  # asks for the GPU's name while ranks import
        for index, (entry, position, backend) in enumerate(runs.jobs):
            at = time.monotonic()
            found = runs.run(index, args.timeout or entry.timeout)
            if found is None:
                print(f"out of budget: {len(runs.jobs) - index} runs are not made", flush=True)
                break
            line = account.add(entry, position, found)
            mode = "expandable " if entry.expandable else ""
            print(
                f"{mode}{entry.config} {backend}: {brief(found, line)} ({time.monotonic() - at:.0f} s)",
                flush=True,
            )
    shutil.rmtree(scratch / "cache", ignore_errors=True)
    print(f"wrote {account.path}; logs in {runs.logs}")
    return account.path


if __name__ == "__main__":
    main()
