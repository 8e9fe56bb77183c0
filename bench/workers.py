"""Start ``worker.py`` in processes of its own, one by one or (to fill the compile cache) many at once.

Not a program: the benchmarks import it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import _paths
from configs import prepared_by, resolve, workload

WORKER = Path(__file__).resolve().with_name("worker.py")
MB = 2**20

Figures = dict[str, Any]


def start_worker(
    spec: dict[str, Any], environment: dict[str, str], timeout: float, program: Path = WORKER
) -> Figures:
    """Run one worker and return its figures; a failing one gives ``{"status": the error's last line}``."""
    try:
        done = subprocess.run(
            [sys.executable, str(program), json.dumps(spec)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            cwd=_paths.REPO,
        )
    except subprocess.TimeoutExpired:
        return {"status": f"timeout: no result after {timeout:.0f} s"}
    if done.returncode:
        return {"status": last_error(done.stderr) or f"exit status {done.returncode}"}
    try:
        return {"status": "ok", **json.loads(done.stdout.splitlines()[-1])}
    except (IndexError, json.JSONDecodeError):
        return {"status": "the worker printed no JSON on its last line"}


def last_error(stderr: str) -> str:
    """The line of a traceback that names the exception, at most 300 characters; no path of the machine."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    # Dynamo appends advice below its errors, so the last line that looks like "SomeError: text" is wanted.
    named = [line for line in lines if not line.startswith(" ") and "Error" in line.split(":", 1)[0]]
    return (named or lines or [""])[-1].replace(f"{_paths.REPO}{os.sep}", "").strip()[:300]


def prepare(
    specs: Iterable[dict[str, Any]],
    environment: dict[str, str],
    timeout: float,
    jobs: int,
    device_bytes: int | None,
    tell: Callable[[str], None],
) -> list[Figures]:
    """Compile what `specs` need into the cache that `environment` names, `jobs` processes at a time.

    Nothing may be timed meanwhile. Each process may hold its share of the device's memory; one that needs
    more stops when all is compiled, and that is enough.

    Returns:
        What each process reported, in the order of the distinct specs.
    """
    distinct: dict[str, dict[str, Any]] = {}
    for spec in specs:
        if spec["backend"] == "eager":
            continue
        config = prepared_by(spec["config"], spec["scope"])
        chosen = {key: spec[key] for key in ("scope", "backend", "mode", "device", "driver", "codegen")}
        chosen |= {"config": config, "prepare": True}
        if device_bytes is not None:
            chosen["cap_mb"] = 0.9 * device_bytes / MB / jobs
        distinct.setdefault(json.dumps(chosen, sort_keys=True), chosen)
    threads = str(max(2, (os.cpu_count() or 2) // jobs))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads, **environment}

    def one(spec: dict[str, Any]) -> Figures:
        figures = start_worker(spec, environment, timeout)
        what = f"{figures['prepare_s']:.0f} s" if figures["status"] == "ok" else figures["status"]
        tell(f"prepared {spec['config']} {spec['mode']} {spec['scope']} {spec['backend']}: {what}")
        return figures

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, distinct.values()))


def device_bytes() -> int | None:
    """Memory of the first visible GPU in bytes, or None. Asked in a process of its own, as in `schema`."""
    ask = "import torch; c = torch.cuda; "
    ask += "print(c.get_device_properties(0).total_memory if c.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120)
    return int(done.stdout) if done.stdout.strip() else None


def config_name(name: str) -> str:
    """`name` if there is such a config (``fit`` included); for `argparse`.

    Raises:
        argparse.ArgumentTypeError: there is none; it says what there is.
    """
    try:
        workload(resolve(name, 80 * 2**30))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name
