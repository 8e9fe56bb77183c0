"""Uses that moving addresses serve: `generate()`, many adapters, sleep and wake, a denoising loop.

    python bench/uses.py                                   # all, on a GPU
    python bench/uses.py --only generate sleep --resume
    python bench/uses.py --size tiny --device cpu --backends aot_eager pgraph     # on the host driver

* ``generate-bN``: transformers' `generate()` with a static cache, N sequences. `ms_per_step` is one decoding
  step. ``-fresh``: each request brings a cache of its own.
* ``adapters-N``: calls with one of N LoRA adapters. `first_ms` is a call just after a switch, `ms_per_step`
  one with the same adapter as before.
* ``sleep``: inference, and weights that are released and come back elsewhere. `first_ms` is the first call
  after waking, `ms_per_step` a warm one; `asleep_mb` is what PyTorch's allocator holds meanwhile, its cache
  emptied. `first_device_allocations`: how often that first call asks the device for memory;
  `first_ready_ms`: one whose memory had been asked for before.
* ``diffusion``: a denoising step of a video transformer whose repeated blocks are compiled.

Floors of `generate` and `sleep`, by ``--backends guarded replay``, with the same kernels in a
`torch.cuda.CUDAGraph`. ``guarded``: behind Dynamo's guards, which every backend of `torch.compile` has; in
`sleep` it is captured anew on the woken weights, before the clock starts. ``replay``: with nothing around it;
in `sleep` its weights stay where they are and are only written anew.

`captures_warm` and `captures_end` count recordings: pgraph's captures, or what CUDA graph trees record. Each
row is measured in a process of its own, and compared with the same calls uncompiled (`max_diff`, over the
largest value). On a GPU it runs on a core that is fast (`host_speed.py`). Results go to
``bench/results/uses-<gpu>.json``. Sizes: `uses_place.SIZES`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401  (puts the checkout on sys.path)
import schema
from uses_place import NEEDS, SIZES, USES, Spec
from workers import start_worker

PROGRAM = Path(__file__).resolve().with_name("uses_worker.py")
BATCHES = (1, 8)
# Without graphs and with, in turn.
BACKENDS = ("eager", "inductor", "reduce-overhead", "pgraph")
FLOORS = ("guarded", "replay")
REPLAYED = ("generate", "sleep")

Row = dict[str, Any]


def specs(use: str, backend: str, args: argparse.Namespace) -> Iterator[tuple[str, Spec]]:
    """(config, settings) of the rows of a use."""
    told = {"size": args.size, "device": args.device, "driver": args.driver, "codegen": args.codegen}
    size = SIZES[args.size]
    if backend in FLOORS and use not in REPLAYED:
        return
    if use == "generate":
        for batch in args.batches:
            yield f"generate-b{batch}", Spec(use, backend, **told, batch=batch)
        if backend in FLOORS:
            return  # its cache must stay where it is
        yield (
            f"generate-b{args.batches[0]}-fresh",
            Spec(use, backend, **told, batch=args.batches[0], fresh=True),
        )
    elif use == "diffusion":
        yield "diffusion", Spec(use, backend, **told, scope="block")
    else:
        name = f"adapters-{size.adapters}" if use == "adapters" else "sleep"
        for scope in args.scopes:
            yield name, Spec(use, backend, **told, scope=scope)


def row(config: str, spec: Spec, timeout: float) -> Row:
    """One row: what the worker found, or why there is nothing."""
    identity = {"bench": "uses", "config": config, "mode": "infer", "scope": spec.scope}
    missing = [name for name in NEEDS[spec.use] if importlib.util.find_spec(name) is None]
    if missing:
        figures = {"status": f"not installed: {', '.join(missing)}; bash .ci/setup ecosystem"}
    else:
        figures = start_worker(dataclasses.asdict(spec), dict(os.environ), timeout, PROGRAM)
    blank = dict.fromkeys(schema.FIGURES["uses"])
    return {**identity, "backend": spec.backend, "size": spec.size, **blank, **figures}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=USES, default=list(USES))
    add("--backends", nargs="+", choices=(*schema.BACKENDS, *FLOORS), default=list(BACKENDS))
    add("--size", choices=list(SIZES), default="1b")
    add("--batches", nargs="+", type=int, default=list(BATCHES), help="sequences of a request")
    add("--scopes", nargs="+", choices=schema.CHOICES["scope"], default=["model"])
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--driver", choices=["auto", "cuda", "host"], default="auto")
    add("--codegen", choices=["auto", "inductor", "aten"], default="auto")
    add("--timeout", type=float, default=300.0, help="seconds for one process")
    add("--deadline", type=float, default=None, help="seconds after which nothing new is begun")
    add("--resume", action="store_true", help="skip rows of this commit that ended well")
    add("--out", default=None, help="JSON file or folder for the results")
    args = parser.parse_args(argv)
    if min(args.batches) < 1:
        parser.error(f"--batches {args.batches}: give at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure, print, write; returns the result file's path."""
    args = parse_args(argv)
    began = time.monotonic()
    header = schema.environment(cpu=args.device == "cpu")
    if header["gpu"] == "cpu":
        args.device = "cpu"
    path = schema.result_path("uses", header["gpu"], args.out)
    done = set()
    if args.resume and path.exists():
        kept = schema.read(path)["rows"]
        done = {
            (r["config"], r["scope"], r["backend"])
            for r in kept
            if r["status"] == "ok" and r.get("size") == args.size and r["commit"] == header["commit"]
        }
    for use in args.only:
        for backend in args.backends:
            for config, spec in specs(use, backend, args):
                if (config, spec.scope, backend) in done:
                    continue
                if args.deadline is not None and time.monotonic() - began > args.deadline:
                    print("out of time: run it again with --resume")
                    return path
                one = row(config, spec, args.timeout)
                shown = {k: v for k, v in one.items() if v is not None and k not in schema.IDENTITY}
                print(f"{config} {spec.scope} {backend}: {shown}", flush=True)
                schema.write(path, [one], header)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
