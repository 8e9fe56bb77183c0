"""What a change did: rows of this checkout beside those of another one, measured in turns on one machine.

    python bench/beside.py --other ../before                # three rounds
    python bench/beside.py --other ../before --rounds 5 --only memory

Both checkouts run their own benchmarks: Llama 16x1024 and 4x256 by block and as a whole, and torchtitan's
debug model where torchtitan is installed. One round measures each of them once. On two GPUs both checkouts
measure at once, each on a GPU and on half of the cores, and change places after each round; on one GPU they
take turns. They share Inductor's cache, torchtitan has one for each; the first round fills them. Rows of
each run go to ``OUT/beside/<this or other>-<round>``; the table of medians over the rounds is printed, with
least and most.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _paths import REPO
from tabulate import tabulate

CONFIGS = ("16x1024", "4x256")
FIGURES = {"ms_per_step": "ms", "peak_reserved_mb": "reserved MB", "device_used_mb": "device MB"}
NAMES = ("other", "this")


def commands(cache: Path, only: str) -> list[list[str]]:
    """What each checkout runs in a round, without the folder for its rows."""
    found = []
    if only in ("memory", "all"):
        what = ["--scopes", "block", "model", "--backends", "pgraph", "--warm-cache", "--repeats", "1"]
        found += [["bench/memory.py", "--configs", config, *what] for config in CONFIGS]
    if only == "torchtitan" or (only == "all" and importlib.util.find_spec("torchtitan")):
        found.append(
            ["bench/torchtitan.py", "--plan", "gpus=1", "--backends", "pgraph", "--cache", str(cache)]
        )
    return found


def places(gpus: int, cores: Sequence[int], number: int) -> list[tuple[str, Sequence[int]]]:
    """For each checkout its GPU and its cores; the same for both where there is one GPU."""
    if gpus < 2 or len(cores) < 4:
        return [("0", cores)] * 2
    half = len(cores) // 2
    halves = [("0", cores[:half]), ("1", cores[half:])]
    return halves if number % 2 else halves[::-1]


def run(checkout: Path, to: Path, place: tuple[str, Sequence[int]], work: Sequence[Sequence[str]]) -> None:
    """One checkout's part of a round.

    Raises:
        SystemExit: a benchmark failed; it says which.
    """
    gpu, cores = place
    paths = [str(checkout), str(checkout / "examples"), os.environ.get("PYTHONPATH", "")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": visible[int(gpu)] if int(gpu) < len(visible) and visible[0] else gpu,
    }
    if checkout != REPO:
        env.pop("PGRAPH_COMMIT", None)  # it names this checkout's
    mine = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    for command in work:
        done = subprocess.run([*mine, sys.executable, *command, "--out", str(to)], cwd=checkout, env=env)
        if done.returncode:
            raise SystemExit(f"bench/beside.py: {command[0]} of {checkout} ended with {done.returncode}")


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A table: for each row and figure the medians of both checkouts, and the ratio this / other.

    Args:
        runs: by checkout, the rows of all rounds.
    """
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name, rows in runs.items():
        for row in rows:
            for key in FIGURES:
                if row.get(key) is not None:
                    place = (f"{row['bench']} {row['config']}, {row['scope']}", key)
                    found.setdefault(place, {}).setdefault(name, []).append(row[key])
    lines = []
    for (what, key), values in found.items():
        if len(values) < len(NAMES):
            continue
        other, this = (statistics.median(values[name]) for name in NAMES)
        spread = (f"{min(values[name]):,.2f} to {max(values[name]):,.2f}" for name in NAMES)
        figures = (f"{other:,.2f}", f"{this:,.2f}", f"{this / other:.3f}")
        lines.append([what, FIGURES[key], *figures, *spread, min(map(len, values.values()))])
    head = ["row", "figure", *NAMES, "ratio", *(f"{name}, range" for name in NAMES), "rounds"]
    return tabulate(lines, head, "github", disable_numparse=True)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, whichever version of the schema wrote it."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--other", type=Path, required=True, help="folder of the other checkout")
    add("--rounds", type=int, default=3)
    add("--only", choices=["memory", "torchtitan", "all"], default="all", help="these benchmarks")
    add("--out", type=Path, default=REPO / "out", help="folder for the rows")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if not (args.other / "bench" / "memory.py").exists():
        parser.error(f"--other {args.other}: there is no bench/memory.py in it")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table after each round."""
    args = parse_args(argv)
    out = args.out.resolve() / "beside"
    checkouts = {"other": args.other.resolve(), "this": REPO}
    gpus, cores = torch.cuda.device_count(), sorted(os.sched_getaffinity(0))
    rows: dict[str, list[Mapping[str, Any]]] = {name: [] for name in NAMES}
    for number in range(1, args.rounds + 1):
        to = {name: out / f"{name}-{number}" for name in NAMES}
        where = dict(zip(NAMES, places(gpus, cores, number), strict=True))
        work = {name: commands(out / f"titan-{name}", args.only) for name in NAMES}
        with ThreadPoolExecutor(2 if where["this"][0] != where["other"][0] else 1) as pool:
            for done in [
                pool.submit(run, checkouts[name], to[name], where[name], work[name]) for name in NAMES
            ]:
                done.result()
        for name in NAMES:
            rows[name] += [row for path in sorted(to[name].glob("*.json")) for row in _rows(path)]
        print(compared(rows), flush=True)


if __name__ == "__main__":
    main()
