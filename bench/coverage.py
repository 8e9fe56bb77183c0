"""Which models pgraph runs right, what it captures of them, and how fast they are beside other backends.

    python bench/coverage.py                                  # everything: checks of all, timings of some
    python bench/coverage.py --checks-only --resume --deadline 560
    python bench/coverage.py --timed-only --resume --deadline 560
    python bench/coverage.py --models 'timm/*' hf/bert --modes train --backends pgraph
    python bench/coverage.py --models 'own/*' --device cpu --driver host --codegen aten --backends pgraph

About 110 published architectures (``bench/zoo``) with random weights. Every model and mode is checked: each
step of pgraph's against eager's loss, gradients, buffers or outputs (`coverage_judge.py` says by which rule),
inputs at other addresses at every step, parameters at every second. Those of the zoo that are ``timed`` are
then run by all backends, one process each, alone on the GPU (`coverage_pool.py`); their parameters stay where
they are, which `reduce-overhead` needs, and inputs come from four sets in turn.

Results go to ``bench/results/coverage-<gpu>.json`` after every process, so a stopped run keeps what it has;
``--memory-only`` measures the timed ones' memory again, with fewer steps. ``--resume`` leaves out what went
well at the same commit, or at one that changed nothing that is measured (``--as-good``). Processes are
forked from one that has imported torch and the collections. What each prints lies in ``--logs``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401  (puts the checkout on sys.path)
import schema
import torch
import zoo
from backends import CODEGENS, DRIVERS, register_pgraph
from coverage_check import check
from coverage_count import count
from coverage_nvml import DeviceMemory, visible
from coverage_pool import Pool
from coverage_rows import Row, Rows
from coverage_subject import Job
from coverage_summary import summary
from coverage_time import measure, measure_memory

BACKENDS = ("pgraph", "reduce-overhead", "inductor", "eager")
PACKAGES = {"hf": "transformers", "timm": "timm", "tv": "torchvision"}
# Imported before forking, so that no child has to: seconds each.
PRELOAD = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
    "timm",
    "torchvision",
)


@dataclasses.dataclass(frozen=True)
class Suite:
    """What a program runs; `bench/seeds.py` has another one.

    Args:
        bench: name of the benchmark, of its rows and of its result file.
        about: what ``--help`` says.
        select: the models that patterns mean.
    """

    bench: str
    about: str
    select: Callable[[Sequence[str]], list[zoo.Entry]]


COVERAGE = Suite("coverage", __doc__.split("\n", 1)[0], zoo.select)


def parse_args(argv: Sequence[str] | None = None, suite: Suite = COVERAGE) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    parser = argparse.ArgumentParser(
        description=suite.about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", default=[], metavar="PATTERN", help="names such as hf/bert or 'timm/*'")
    add("--modes", nargs="+", choices=schema.CHOICES["mode"], default=["train", "infer"])
    add(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=list(BACKENDS),
        help="to be timed; pgraph is checked",
    )
    which = parser.add_mutually_exclusive_group()
    kinds = (("checks", "check"), ("timed", "time"), ("counts", "count"))
    for name, kind in (*kinds, ("memory", "memory")):
        flag = f"--{name}-only"
        which.add_argument(
            flag, dest="kinds", action="store_const", const=(kind,), help=f"kind of process: {kind}"
        )
    parser.set_defaults(kinds=tuple(kind for _, kind in kinds))
    add("--resume", action="store_true", help="leave out what went well at this commit")
    add("--as-good", nargs="+", default=[], metavar="COMMIT", help="what --resume leaves out at these, too")
    add("--deadline", type=float, default=None, metavar="SECONDS", help="kill what still runs then")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    add(
        "--gpus", type=int, default=None, help="spread checks over so many of those that CUDA sees; None: all"
    )
    add("--timeout", type=float, default=240.0, help="seconds for one process")
    add("--steps", type=int, default=9, help="steps of each check")
    add("--seconds", type=float, default=0.5, help="how long a timing's steps may take")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--driver", choices=DRIVERS, default="auto", help="pgraph's driver")
    add("--codegen", choices=CODEGENS, default="auto", help="pgraph's code generator")
    add("--logs", type=Path, default=Path(tempfile.gettempdir()) / f"pgraph-{suite.bench}", help="folder")
    add("--out", default=None, help="JSON file or folder for the results")
    args = parser.parse_args(argv)
    if min(args.jobs, args.steps, args.gpus or 1) < 1:
        parser.error("--jobs, --steps and --gpus must be at least 1")
    try:
        args.entries, args.bench = suite.select(args.models), suite.bench
    except ValueError as error:
        parser.error(str(error))
    return args


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """All jobs in the order in which they start: the longest compile first.

    The jobs of one model and mode follow one another, so that its backends are measured close in time; which
    of them wait for the first one is the pool's affair. A check comes last, since nobody waits for it.
    """
    settings = {
        key: getattr(args, key) for key in ("device", "driver", "codegen", "steps", "seconds", "bench")
    }
    backends = {
        "check": [name for name in ("pgraph",) if name in args.backends],
        "time": [name for name in BACKENDS if name in args.backends],
    }
    backends["count"] = backends["memory"] = backends["time"]
    kinds = [kind for kind in ("time", "count", "memory", "check") if kind in args.kinds]
    groups = [
        [
            Job(kind, entry.name, mode, backend, **settings)
            for kind in kinds
            if has(entry, kind)
            for backend in backends[kind]
        ]
        for entry in args.entries
        for mode in args.modes
        if mode in entry.modes
    ]
    # Mates start when the first is ready: a group takes about twice as long as its first.
    groups.sort(key=lambda group: -max((job.cost for job in group), default=0) * min(len(group), 2))
    return [job for group in groups for job in group]


def has(entry: zoo.Entry, kind: str) -> bool:
    """Whether a model is run in that way."""
    if kind == "check":
        return entry.check_batch != 0
    return entry.counted if kind == "count" else entry.timed


def threads_of(jobs: int, side_by_side: int, cores: int) -> int:
    """With how many a child may compile: the other cores have children of their own, if there are so many."""
    return max(1, cores // max(min(jobs, side_by_side), 1))


def work(job: Job, alone: Callable[[], None], threads: int = 1) -> dict[str, Any]:
    """What a child does.

    Args:
        threads: with which it compiles.
    """
    torch.set_num_threads(1)
    if importlib.util.find_spec("torch._inductor.config"):
        importlib.import_module("torch._inductor.config").compile_threads = threads
    if job.kind == "check":
        return check(job)
    return {"time": measure, "count": count, "memory": measure_memory}[job.kind](job, alone)


def prepare(args: argparse.Namespace) -> None:
    """Import what children need, without touching CUDA; leave out models of packages that are missing.

    Raises:
        SystemExit: forked children could not use the GPU; it says why.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # here: what forked children find must have no threads
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check would make children unable to
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    packages = {"torch"}
    for package in sorted({package_of(entry) for entry in args.entries} - {""}):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: its models are left out")
            args.entries = [e for e in args.entries if package_of(e) != package]
        else:
            packages.add(package)
    for name in PRELOAD:
        if name.split(".")[0] in packages and importlib.util.find_spec(name.split(".")[0]):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    if "pgraph" in args.backends:
        register_pgraph()
    if args.device == "cuda":
        probe = multiprocessing.get_context("fork").Process(target=_probe)
        probe.start()
        probe.join()
        if probe.exitcode:
            raise SystemExit("bench/coverage.py: a forked process cannot use the GPU (see above)")


def package_of(entry: zoo.Entry) -> str:
    """What an entry needs beside torch; empty: nothing."""
    return entry.package or PACKAGES.get(entry.name.split("/")[0], "")


def _probe() -> None:
    torch.zeros(1, device="cuda").item()


def tell(job: Job, row: Row, fields: dict[str, Any], done: int, total: int, began: float) -> None:
    """One line about a child."""
    parts = [fields["status"][:160]]
    if fields.get("device_ops") is not None:
        parts.append(f"{fields['captured_ops']}/{fields['device_ops']} ops captured")
    if fields.get("ms_per_step") is not None:
        parts.append(f"{fields['ms_per_step']:.2f} ms, {fields['peak_reserved_mb'] or 0:,.0f} MB reserved")
    if fields.get("launch_calls") is not None:
        parts.append(f"{fields['launch_calls']:,.0f} launch calls a step")
    parts += [f"{code} x {count}" for code, count in fields.get("uncaptured", {}).items()]
    at = time.monotonic() - began
    print(
        f"[{at:4.0f} s {done}/{total}] {job.name}: {', '.join(parts)} ({fields['child_s']:.0f} s)",
        flush=True,
    )


def main(argv: Sequence[str] | None = None, suite: Suite = COVERAGE) -> Path:
    """Check and measure; returns the result file's path."""
    began = time.monotonic()
    args = parse_args(argv, suite)
    prepare(args)
    header = schema.environment(cpu=args.device == "cpu")
    rows = Rows(schema.result_path(suite.bench, header["gpu"], args.out), header, args.as_good)
    jobs = [job for job in jobs_of(args) if not (args.resume and rows.done(job))]
    memory = DeviceMemory() if args.device == "cuda" else None
    threads = threads_of(len(jobs), args.jobs, os.cpu_count() or 1) if args.device == "cuda" else 1
    pool = Pool(
        work=functools.partial(work, threads=threads),
        size=args.jobs,
        timeout=args.timeout,
        deadline=None if args.deadline is None else began + args.deadline,
        logs=args.logs,
        device_used_mb=memory.used_mb if memory is not None else lambda: None,
        gpus=visible()[: args.gpus] if args.device == "cuda" else (),
    )
    print(f"{len(jobs)} processes, {args.jobs} side by side; logs in {args.logs}", flush=True)
    done = 0
    for done, (job, fields) in enumerate(pool.run(jobs), 1):
        tell(job, rows.add(job, fields), fields, done, len(jobs), began)
    if done < len(jobs):
        print(f"stopped with {len(jobs) - done} processes to go: run again with --resume")
    print(summary(rows.all()))
    if rows.path.exists():
        print(f"wrote {rows.path}")
    return rows.path


def run(suite: Suite) -> None:
    """A whole program."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are killed as well
    main(suite=suite)


if __name__ == "__main__":
    run(COVERAGE)
