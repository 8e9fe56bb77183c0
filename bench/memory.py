"""Speed and memory of a training step: eager, Inductor, reduce-overhead and pgraph side by side.

    python bench/memory.py                                   # everything this machine can run
    python bench/memory.py --quick --out out/                # one small config, few steps
    python bench/memory.py --configs 4x256 16x1024 --scopes block --repeats 3
    python bench/memory.py --expandable-segments --out results/
    PGRAPH_COMMIT=$(git rev-parse HEAD) python bench/memory.py   # for a copy that has no git
    python bench/memory.py --configs 70b-fit 70b-fit-ac vit-b16-1024 gpt2-8 --parallel-warm 6 --repeats 1

Each backend runs in a process of its own; the processes of one config take turns (all backends once, then
all again), so that a drift of the machine's clock meets each of them. Figures are medians over the repeats;
``ms_p10``/``ms_p90`` are the spread over the steps, ``ms_min``/``ms_max`` that over the repeats. Results go
to ``bench/results/memory-<gpu>.json`` whenever each backend has had its turn, so a stopped run keeps that.

Without a GPU a tiny config runs on the CPU, pgraph with its host driver. That takes some minutes, with
``--quick`` too, shows that the program works, and says nothing of a GPU. `readme.py` makes a table of every
file in ``bench/results``: give ``--out out/`` where that is not wanted.

Compiling takes most of a short run. ``--parallel-warm N`` first compiles everything into one cache, N
processes at a time, and times nothing meanwhile; the measured processes then find it there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401  (puts the checkout on sys.path)
import schema
import torch
from configs import PATTERNS, WORKLOADS, resolve, scopes_of
from workers import config_name, device_bytes, last_error, prepare, start_worker

__all__ = ["last_error", "main", "measure", "parse_args", "start_worker", "summarise"]

GPU_CONFIGS = ["4x256", "16x1024", "8x4096"]
# Of the first repeat only, which compiles from an empty cache; later ones find its kernels.
FIRST_ONLY = ("compile_s", "warmup_s")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    backends = list(schema.BACKENDS)
    names = f"any of {', '.join(WORKLOADS)}, or {PATTERNS}"
    default = GPU_CONFIGS if on_gpu else ["cpu-tiny"]
    add("--configs", nargs="+", type=config_name, metavar="NAME", default=default, help=names)
    add("--scopes", nargs="+", choices=schema.CHOICES["scope"], help="default: those that the config is for")
    add("--backends", nargs="+", choices=backends, default=default_backends(on_gpu))
    add("--modes", nargs="+", choices=schema.CHOICES["mode"], default=["train"])
    add("--steps", type=int, default=50, help="steps timed back to back")
    add("--warmup", type=int, default=10, help="steps before the clock counts")
    add("--repeats", type=int, default=3, help="processes for each backend")
    add("--issue-steps", type=int, default=20, help="steps timed one by one on the host's clock")
    add("--memory-steps", type=int, default=50, help="steps over which growth of memory is watched")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--driver", choices=["auto", "cuda", "host"], default="auto", help="pgraph's driver")
    add("--codegen", choices=["auto", "inductor", "aten"], default="auto", help="pgraph's code generator")
    add("--expandable-segments", action="store_true", help=f"run with PYTORCH_ALLOC_CONF={schema.EXPANDABLE}")
    add(
        "--warm-cache", action="store_true", help="use the machine's Inductor cache: compile_s is no cold one"
    )
    add("--parallel-warm", type=int, default=0, metavar="N", help="compile all first, N processes at once")
    add("--timeout", type=float, default=900.0, help="seconds for one process")
    add("--out", default=None, help="JSON file or folder for the results; bench/results if not given")
    quick = "first config only, 5 warm-up and 10 timed steps, one repeat; some minutes without a GPU"
    add("--quick", action="store_true", help=quick)
    args = parser.parse_args(argv)
    if args.quick:
        args.configs, args.repeats = args.configs[:1], 1
        args.steps, args.memory_steps = min(args.steps, 10), min(args.memory_steps, 10)
        args.warmup = min(args.warmup, 5)
    if min(args.steps, args.warmup, args.repeats) < 1:
        parser.error("--steps, --warmup and --repeats must be at least 1")
    if args.parallel_warm < 0:
        parser.error(f"--parallel-warm {args.parallel_warm}: give a number of processes, or 0")
    return args


def default_backends(on_gpu: bool) -> list[str]:
    """All four on a GPU; on a CPU no CUDA graphs, and Inductor only with a C++ compiler."""
    if on_gpu:
        return ["eager", "inductor", "reduce-overhead", "pgraph"]
    compiler = any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)
    return ["eager", *(["inductor"] if compiler else []), "pgraph"]


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row's figures from the repeats: medians, with the spread of ms per step over the repeats."""
    good = [run for run in runs if run["status"] == "ok"]
    if not good:
        return dict(runs[0])
    row: dict[str, Any] = {}
    for key, first in good[0].items():
        values = [run.get(key) for run in good]
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        row[key] = statistics.median(values) if numeric and key not in FIRST_ONLY else first  # type: ignore[type-var]
    return row | schema.over_repeats(runs)


def spec_of(args: argparse.Namespace, config: str, mode: str, scope: str, backend: str) -> dict[str, Any]:
    """What one worker is told."""
    return {
        "config": config,
        "scope": scope,
        "backend": backend,
        "mode": mode,
        "device": args.device,
        "driver": args.driver,
        "codegen": args.codegen,
        "warmup": args.warmup,
        "steps": args.steps,
        "issue_steps": min(args.steps, args.issue_steps),
        "memory_steps": args.memory_steps,
    }


def scopes(args: argparse.Namespace, config: str) -> Sequence[str]:
    """What of a config is compiled as one piece: as asked, or as the config is meant."""
    return args.scopes or scopes_of(config)


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """The environment of every worker."""
    environment = dict(os.environ)
    if args.expandable_segments:
        environment["PYTORCH_ALLOC_CONF"] = schema.EXPANDABLE
    return environment


def measure(
    args: argparse.Namespace, config: str, mode: str, scope: str, filled: Path | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Rows of all backends for one config, whose processes take turns; anew after each round.

    Args:
        filled: a compile cache that has been filled beforehand, for all backends.
    """
    identity = {"bench": "memory", "config": config, "mode": mode, "scope": scope}
    alloc = {"alloc_conf": schema.EXPANDABLE if args.expandable_segments else schema.DEFAULT_ALLOC_CONF}
    alloc["inductor_cache"] = (
        "the machine's" if args.warm_cache else "filled beforehand" if filled else schema.COLD_CACHE
    )
    runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in args.backends}
    with tempfile.TemporaryDirectory(prefix="pgraph-bench-") as cache:
        for repeat in range(args.repeats):
            for backend in args.backends:
                environment = environment_of(args)
                # An empty compile cache for each backend: the first repeat's compile time is a cold one.
                if not args.warm_cache:
                    environment["TORCHINDUCTOR_CACHE_DIR"] = str(filled or Path(cache) / backend)
                began = time.perf_counter()
                spec = spec_of(args, config, mode, scope, backend)
                figures = start_worker(spec, environment, args.timeout)
                runs[backend].append(figures)
                print(
                    f"{config} {mode} {scope} {backend} {repeat + 1}/{args.repeats}: {brief(figures)} "
                    f"({time.perf_counter() - began:.0f} s)",
                    flush=True,
                )
            yield [{**identity, "backend": name, **alloc, **summarise(found)} for name, found in runs.items()]


def brief(figures: dict[str, Any]) -> str:
    """One line about one process."""
    if figures["status"] != "ok":
        return str(figures["status"])
    reserved = figures["peak_reserved_mb"]
    memory = (
        f"{reserved:,.0f} MB reserved" if reserved is not None else f"{figures['peak_rss_mb']:,.0f} MB RSS"
    )
    plain = "".join(f"\n    runs uncaptured: {reason}" for reason in figures.get("plain", ()))
    return (
        f"{figures['ms_per_step']:.2f} ms/step, issue {figures['cpu_issue_ms']:.2f} ms, {memory}, "
        f"compile {figures['compile_s']:.1f} s, loss {figures['final_loss']:.4f}{plain}"
    )


def notices(args: argparse.Namespace, path: Path) -> list[str]:
    """What to know before the run: that it is none of a GPU, and that the documents show what it writes."""
    found = []
    if args.device == "cpu" or not torch.cuda.is_available():
        found.append(
            f"no GPU is used: {', '.join(args.configs)} on the CPU, for some minutes, to try the program"
        )
    if path.parent.resolve() == schema.RESULTS.resolve():
        found.append(
            f"rows go to {path}, and bench/readme.py makes tables of them; --out out/ puts them elsewhere"
        )
    return found


def tell(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure, and write the result file; returns its path."""
    args = parse_args(argv)
    if args.driver == "host":
        args.device = "cpu"
    header = schema.environment(cpu=args.device == "cpu")
    path = schema.result_path("memory", header["gpu"], args.out)
    for line in notices(args, path):
        tell(line)
    memory = device_bytes() if args.device != "cpu" else None
    try:
        configs = [resolve(config, memory) for config in args.configs]
    except ValueError as error:
        sys.exit(f"bench/memory.py: {error}")
    combos = [(c, m, s) for c in configs for m in args.modes for s in scopes(args, c)]
    with tempfile.TemporaryDirectory(prefix="pgraph-bench-cache-") as cache:
        filled = None
        if args.parallel_warm:
            specs = [spec_of(args, *combo, backend) for combo in combos for backend in args.backends]
            environment = environment_of(args)
            if not args.warm_cache:
                filled = Path(cache)
                environment["TORCHINDUCTOR_CACHE_DIR"] = cache
            prepare(specs, environment, args.timeout, args.parallel_warm, memory, tell)
        for config, mode, scope in combos:
            for rows in measure(args, config, mode, scope, filled):
                schema.write(path, rows, header)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
