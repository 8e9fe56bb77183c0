"""The largest batch that trains under a memory cap: eager, Inductor, reduce-overhead and pgraph.

    python bench/largest_batch.py                                  # 16x1024 by blocks, under 4 GB
    python bench/largest_batch.py --config 16x1024@t64 --low 40 --high 80 --ways 3   # in finer steps
    python bench/largest_batch.py --config gpt2-8 --scope model --cap-mb 20000 --ways 3

A binary search over the batch, each trial in a process of its own: what a trial that ran out of memory, or
the graphs of another size, leave behind would count against the next one. The cap bounds what PyTorch's
allocator reserves, private pools of CUDA graphs included; the driver's own memory for graphs is outside it,
so pgraph's (which it counts) is added, and reduce-overhead's is not. Only fitting is judged, no time: trials
run side by side, each under its own cap, and share one compile cache.

A row per backend goes to ``bench/results/largest-batch-<gpu>.json``; it says of every batch that was tried
what it took, or why it did not fit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401  (puts the checkout on sys.path)
import schema
import torch
from configs import without_batch
from workers import Figures, config_name, start_worker

Fits = Callable[[int], bool]
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "CUDA_ERROR_OUT_OF_MEMORY")


class SearchError(RuntimeError):
    """The search cannot go on; the message names the trial and what went wrong."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    backends = list(schema.BACKENDS)
    add("--config", type=config_name, default="16x1024", metavar="NAME", help="its own batch is not used")
    add("--scope", choices=schema.CHOICES["scope"], default="block")
    add("--backends", nargs="+", choices=backends, default=["eager", "inductor", "reduce-overhead", "pgraph"])
    add("--cap-mb", type=float, default=4096.0, help="MB that the allocator may reserve")
    add("--low", type=int, default=1, help="a batch that every backend is expected to fit")
    add("--high", type=int, default=64, help="a batch that none is expected to fit")
    add("--ways", type=int, default=1, help="batches tried at once for each backend")
    add("--steps", type=int, default=6, help="steps after the warm-up that must fit")
    add("--warmup", type=int, default=4, help="steps in which captures happen")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="on a CPU every batch fits: for tests")
    add("--timeout", type=float, default=300.0, help="seconds for one trial")
    add("--out", default=None, help="JSON file or folder for the results")
    args = parser.parse_args(argv)
    if not 1 <= args.low < args.high:
        parser.error(f"--low {args.low} --high {args.high}: give 1 <= low < high")
    if args.ways < 1 or args.steps < 1 or args.warmup < 1:
        parser.error("--ways, --steps and --warmup must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU, and the search is for what fits a GPU's memory; run it on one")
    return args


def probes(low: int, high: int, ways: int) -> list[int]:
    """Up to `ways` sizes strictly between `low` and `high`, evenly spread, ascending."""
    count = min(ways, high - low - 1)
    return [low + (high - low) * (i + 1) // (count + 1) for i in range(count)]


def largest(fits: Callable[[Sequence[int]], list[bool]], low: int, high: int, ways: int) -> int:
    """The largest size below `high` that fits, 0 if not even `low` does.

    Args:
        fits: for each of some sizes, whether it fits; the larger never fits where the smaller does not.
        low: smallest size of interest.
        high: a size taken not to fit, without trying it.
        ways: sizes tried at once.
    """
    if not fits([low])[0]:
        return 0
    while sizes := probes(low, high, ways):
        for size, fit in zip(sizes, fits(sizes), strict=True):
            if not fit:
                high = size
                break
            low = size
    return low


def why_not(figures: Figures, cap_mb: float) -> str | None:
    """Why a trial did not fit; None if it did.

    Raises:
        SearchError: it failed for another reason than memory.
    """
    if figures["status"] != "ok":
        if any(sign in figures["status"] for sign in OUT_OF_MEMORY):
            return str(figures["status"])
        raise SearchError(figures["status"])
    reserved, graphs = figures["peak_reserved_mb"], figures.get("exec_mb", 0.0)
    if reserved is None or reserved + graphs <= cap_mb:
        return None
    return f"{reserved:,.0f} MB reserved and {graphs:,.0f} MB of graphs"


def taken(figures: Figures) -> str:
    """What a trial that fitted took, in words; nothing for a CPU, which does not say."""
    reserved = figures["peak_reserved_mb"]
    return "" if reserved is None else f", {reserved:,.0f} MB reserved"


def in_order(tried: dict[int, str]) -> dict[str, str]:
    """What was tried, by batch, as a JSON file holds it."""
    return {str(batch): tried[batch] for batch in sorted(tried)}


def search(args: argparse.Namespace, backend: str, cache: Path) -> dict[str, Any]:
    """One backend's row."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    fitted: dict[int, Figures] = {}
    tried: dict[int, str] = {}

    def trial(batch: int) -> bool:
        spec = {
            "config": f"{without_batch(args.config)}@b{batch}",
            "scope": args.scope,
            "backend": backend,
            "device": args.device,
            "cap_mb": args.cap_mb,
            "warmup": args.warmup,
            "steps": args.steps,
            "issue_steps": 1,
            "memory_steps": 1,
        }
        began = time.perf_counter()
        figures = start_worker(spec, environment, args.timeout)
        try:
            problem = why_not(figures, args.cap_mb)
        except SearchError as error:
            tried[batch] = str(error)
            raise SearchError(f"{spec['config']} by {backend}: {error}") from error
        if problem is None:
            fitted[batch] = figures
        tried[batch] = problem or "fits" + taken(figures)
        seconds = time.perf_counter() - began
        print(f"{backend} batch {batch}: {tried[batch]} ({seconds:.0f} s)", flush=True)
        return problem is None

    with concurrent.futures.ThreadPoolExecutor(args.ways) as pool:
        try:
            best = largest(lambda sizes: list(pool.map(trial, sizes)), args.low, args.high, args.ways)
        except SearchError as error:
            return {"backend": backend, "status": str(error), "trials": len(tried), "tried": in_order(tried)}
    figures = {**fitted.get(best, {}), "largest_batch": best, "trials": len(tried), "status": "ok"}
    figures["tried"] = in_order(tried)
    if not best:
        figures["status"] = f"batch {args.low} does not fit: lower --low"
    if best == args.high - 1:
        figures["status"] = f"batch {best} still fits: raise --high"
    return {"backend": backend, **figures}


def main(argv: Sequence[str] | None = None) -> Path:
    """Search with every backend at once, and write the result file; returns its path."""
    args = parse_args(argv)
    header = schema.environment(cpu=args.device == "cpu")
    identity = {
        "bench": "largest-batch",
        "config": without_batch(args.config),
        "mode": "train",
        "scope": args.scope,
        "cap_mb": args.cap_mb,
    }
    with (
        tempfile.TemporaryDirectory(prefix="pgraph-bench-cache-") as cache,
        concurrent.futures.ThreadPoolExecutor(len(args.backends)) as pool,
    ):
        found = list(pool.map(lambda backend: search(args, backend, Path(cache)), args.backends))
    path = schema.result_path("largest-batch", header["gpu"], args.out)
    schema.write(path, [{**identity, **row} for row in found], header)
    for row in found:
        print(f"{row['backend']}: {row.get('largest_batch', '-')} ({row['status']})")
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
