"""What varying sizes cost: a server's batches, lengths in training, generated text, memory of many sizes.

    python bench/sizes.py --resume                             # all, on a GPU
    python bench/sizes.py --only serving lengths --steps 500 --resume --deadline 560
    python bench/sizes.py --device cpu --driver host           # tiny, on the host driver

One model, compiled once for all sizes (``dynamic=True``), and the same random sequence of sizes for each
backend, each in a process of its own:

* ``serving``: batches of 1 to 32, each call answered before the next. `ms_per_step` is of the second half of
  the calls, `early_ms` the total of the first half. ``serving-beside``: Inductor's code (`beside_ms`) and
  CUDAGraph Trees' (`trees_ms`) in turns in the same process.
* ``lengths``: training on lengths of 16 to 256, without cuDNN's attention, which plans anew for each length;
  ``lengths-flash``: with it. `totals_ms` after every 100 steps (`marks`).
* ``lengths-beside``, ``lengths-flash-beside``: as these, and Inductor's code in turns in the same process
  (`beside_ms`); before that, some shorter programs of the same steps (`again`).
* ``lengths-seen``: training on 16 lengths, all of them warm.
* ``turns``: inference, 16 lengths in turn. Beside the backends: ``replay``, a `torch.cuda.CUDAGraph` for each
  length, its input copied in; ``pgraph-static``, pgraph with ``dynamic=False`` for each length.
* ``generate-static``, ``generate-dynamic``: transformers' `generate()` with a static cache and with a
  `DynamicCache`, prompts of random lengths; `ms_per_step` of a token, `first_ms` of the first one. With the
  latter pgraph has captured nearly all lengths before.
* ``memory``: what 64 captured sizes take, and one (`_one`).

The models' floats, such as each norm's ``eps``, never change, and are constants for all backends
(`torch._dynamo.config.specialize_float`), as they are by default where ``dynamic=True`` is not given. With it
Dynamo would make a tensor of each at every call, and look at sizes in Python: for a Llama of 16 layers 84
tensors and 0.6 ms of the host's time a token (H200), whatever the backend is.

On a GPU sequences run on a core that is fast (`host_speed.py`), but for ``generate-*``.
Compilation is excluded (`compile_s`), and whatever is compiled anew within the timed sequence is not:
`recompiles` says whether there was any. Some calls of each sequence are compared with Inductor's
(``sizes_place.py`` says how); a wrong number makes a row of an error. Results go to
``bench/results/sizes-<gpu>.json`` after every process. Sizes: `sizes_place.SIZES`.
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
from sizes_place import COMPILER, SIZES, Spec
from workers import start_worker

PROGRAM = Path(__file__).resolve().with_name("sizes_worker.py")
CONFIGS = (
    *("serving", "serving-beside", "lengths", "lengths-flash", "lengths-beside", "lengths-flash-beside"),
    *("lengths-seen", "turns"),
    *("generate-static", "generate-dynamic", "memory"),
)
BACKENDS = {"cuda": ("inductor", "reduce-overhead", "pgraph"), "cpu": ("aot_eager", "pgraph")}
# One capture for each length, beside those.
STATIC = {"cuda": ("replay", "pgraph-static"), "cpu": ("pgraph-static",)}
LEAST_S = 20.0  # a process that has less is not begun

Row = dict[str, Any]


def mode_of(config: str) -> str:
    """``"train"`` or ``"infer"``."""
    return "train" if config.startswith("lengths") else "infer"


def specs(args: argparse.Namespace) -> Iterator[Spec]:
    """All processes, those of one config after one another."""
    told = {key: getattr(args, key) for key in ("size", "device", "driver", "codegen", "steps", "calls")}
    for config in args.only:
        backends = args.backends or BACKENDS[args.device]
        if config.endswith("-beside") and not args.backends:
            backends = ("pgraph",)
        if config == "turns" and not args.backends:
            backends = (*backends, *STATIC[args.device])
        for backend in backends:
            if config == "turns" or backend not in COMPILER:
                yield Spec(config, backend, **told)


def row(spec: Spec, timeout: float) -> Row:
    """One row: what the worker found, or why there is nothing."""
    identity = {"bench": "sizes", "config": spec.config, "mode": mode_of(spec.config), "scope": "model"}
    if spec.config.startswith("generate") and importlib.util.find_spec("transformers") is None:
        figures: Row = {"status": "not installed: transformers; bash .ci/setup ecosystem"}
    else:
        figures = start_worker(dataclasses.asdict(spec), dict(os.environ), timeout, PROGRAM)
    told = {"size": spec.size, "asked": [spec.steps, spec.calls]}
    return {**identity, "backend": spec.backend, **told, **dict.fromkeys(schema.FIGURES["sizes"]), **figures}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    known = schema.CHOICES["backend"]
    add("--backends", nargs="+", choices=known, default=None, help="default: those of the tables")
    add("--size", choices=list(SIZES), default=None, help="default: full; tiny on a CPU")
    add("--steps", type=int, default=None, help="of training on random lengths; default: the size's")
    add("--calls", type=int, default=None, help="of the server; default: the size's")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--driver", choices=["auto", "cuda", "host"], default="auto")
    add("--codegen", choices=["auto", "inductor", "aten"], default="auto")
    add("--timeout", type=float, default=540.0, help="seconds for one process")
    add("--deadline", type=float, default=None, metavar="SECONDS", help="stop what still runs then")
    add("--resume", action="store_true", help="skip rows of this commit and size that ended well")
    add("--out", default=None, help="JSON file or folder for the results")
    args = parser.parse_args(argv)
    for name in ("steps", "calls"):
        if (getattr(args, name) or 1) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give at least 1")
    return args


def finished(path: Path, header: Row, args: argparse.Namespace) -> set[tuple[str, str]]:
    """(config, backend) of what ended well at this commit, as it is asked for now."""
    if not args.resume or not path.exists():
        return set()
    told = {"size": args.size, "asked": [args.steps, args.calls], "commit": header["commit"], "status": "ok"}
    return {
        (r["config"], r["backend"])
        for r in schema.read(path)["rows"]
        if r["bench"] == "sizes" and all(r.get(key) == value for key, value in told.items())
    }


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure, print, write; returns the result file's path."""
    args = parse_args(argv)
    began = time.monotonic()
    header = schema.environment(cpu=args.device == "cpu")
    args.device = "cpu" if header["gpu"] == "cpu" else "cuda"
    args.size = args.size or ("tiny" if args.device == "cpu" else "full")
    path = schema.result_path("sizes", header["gpu"], args.out)
    done = finished(path, header, args)
    for spec in specs(args):
        if (spec.config, spec.backend) in done:
            continue
        left = float("inf") if args.deadline is None else args.deadline - (time.monotonic() - began)
        one = row(spec, min(args.timeout, left)) if left > LEAST_S else None
        if one is None or (one["status"].startswith("timeout") and left < args.timeout):
            print("out of time: run it again with --resume")
            return path
        totals = ("marks", "totals_ms", "beside_ms", "trees_ms", "again")
        hidden = (*schema.IDENTITY, *totals, "asked", "summary")
        shown = {k: v for k, v in one.items() if v is not None and k not in hidden}
        print(f"{spec.config} {spec.backend}: {shown}", flush=True)
        schema.write(path, [one], header)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
