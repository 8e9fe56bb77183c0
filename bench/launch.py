"""Where a training step's host time goes: forward, backward, optimizer, and pgraph's own part of them.

    python bench/launch.py                                        # 16x1024 by blocks; cpu-tiny without a GPU
    python bench/launch.py --config 4x256 --scope model --backends reduce-overhead pgraph
    python bench/launch.py --turns                                # calls of one size, and of two in turn

Host time, not the device's: the device is drained before each step. Each backend runs in a process of its
own. For pgraph each partition has a row: what it allocates and launches, the microseconds of its calls (the
median), and those of the launch path in C by what they go into (the mean; 0 where there is no such path).
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import _paths
import torch
from backends import register_pgraph
from configs import WORKLOADS
from host_speed import on_fast_cores
from memory import default_backends
from tabulate import tabulate
from worker import Device, Spec, Trainer

PHASES = ("forward", "backward", "optimizer")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--config", choices=list(WORKLOADS), default="16x1024" if on_gpu else "cpu-tiny")
    add("--scope", choices=["block", "model"], default="block")
    add("--backends", nargs="+", default=default_backends(on_gpu))
    add("--steps", type=int, default=30, help="steps of which the median is taken")
    add("--warmup", type=int, default=8)
    add("--turns", action="store_true", help="measure two sizes in turn instead")
    add("--timeout", type=float, default=600.0, help="seconds for one process")
    add("--one", default=None, help=argparse.SUPPRESS)  # measure this backend here, print JSON
    return parser.parse_args(argv)


class Watched:
    """Collects the microseconds of each call, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = collections.defaultdict(list)

    def around(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`call`, timed."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.times[name].append((time.perf_counter() - began) * 1e6)

        return timed

    def median(self, name: str) -> float | None:
        """Microseconds; None if it was never called."""
        return statistics.median(self.times[name]) if self.times[name] else None


def phases(trainer: Trainer, device: Device, steps: int) -> dict[str, float]:
    """Median host ms of each phase of a step."""
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    assert trainer.optimizer is not None
    for _ in range(steps):
        device.drain()
        trainer._begin()
        batch = trainer.batch()
        marks = [time.perf_counter()]
        loss = trainer.task.loss(*batch)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
        trainer.last = loss.detach()
        for i, phase in enumerate(PHASES):
            found[phase].append((marks[i + 1] - marks[i]) * 1e3)
        del loss
    return {phase: statistics.median(times) for phase, times in found.items()}


def partitions(trainer: Trainer, device: Device, steps: int) -> list[dict[str, Any]]:
    """A row for each captured partition of pgraph's, from further steps."""
    from pgraph.runtime import partition_runner, registry

    watched = Watched()
    live = [p for p in registry.live_capturable() if p.template() is not None]
    real = partition_runner.PartitionRunner.__call__

    def call(self: Any, args: list[Any]) -> Any:
        return watched.around(real, self.name)(self, args)

    partition_runner.PartitionRunner.__call__ = call  # type: ignore[method-assign]
    try:
        phases(trainer, device, steps)
    finally:
        partition_runner.PartitionRunner.__call__ = real  # type: ignore[method-assign]
    before = {p.name: p.stats.launches for p in live}
    for partition in live:
        native_times(partition, True)
    phases(trainer, device, steps)
    rows = []
    for partition in live:
        template = partition.template()
        assert template is not None
        launches = partition.stats.launches - before[partition.name]
        spent = native_times(partition, False)
        rows.append(
            {
                "partition": partition.name,
                "inputs": template.n_inputs,
                "results": len(template.outputs),
                "blocks": len(template.plan.blocks),
                "chunks": len(template.plan.chunks),
                "nodes": len(template.nodes),
                "launches/step": launches / steps,
                "us/call": watched.median(partition.name),
                **{f"{phase} us": ns / 1e3 / max(launches, 1) for phase, ns in spent.items()},
            }
        )
    return rows


def native_times(partition: Any, on: bool) -> dict[str, int]:
    """Nanoseconds of a partition's launches in C by phase, since they were timed; times them from now on."""
    from pgraph.launch.native import PHASES, time_calls

    spent: collections.Counter[str] = collections.Counter(dict.fromkeys(PHASES, 0))
    for specialization in partition._cache.captured.specializations:
        if specialization.native is not None:
            spent.update(time_calls(specialization.native, on))
    return dict(spent)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One backend's figures, in this process."""
    device = Device("auto")
    driver = "auto" if device.on_gpu else "host"
    trainer = Trainer(
        Spec(config=args.config, scope=args.scope, backend=args.one, driver=driver, device=device.torch.type),
        device,
    )
    for _ in range(args.warmup):
        trainer.step()
    found: dict[str, Any] = {"backend": args.one, **phases(trainer, device, args.steps)}
    found["sum"] = sum(found[phase] for phase in PHASES)
    trainer.check()
    return found | {"partitions": partitions(trainer, device, args.steps) if args.one == "pgraph" else []}


def turns(calls: int, rounds: int) -> list[dict[str, Any]]:
    """Host microseconds of a call of a model without gradients: one size, and two that take turns.

    Both sizes have one compiled code, and so one partition of pgraph's with two specializations.
    """
    device = Device("auto")
    if not device.on_gpu:
        torch.set_num_threads(1)  # such small products wait for their threads
    layers = [torch.randn(64, 64, device=device.torch) / 8 for _ in range(20)]

    def model(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = torch.relu(x @ layer)
        return x

    register_pgraph()
    rows = []
    for backend in ("inductor", "pgraph"):
        torch._dynamo.reset()
        # Launches of both sizes are to be measured, whether their captures pay or not.
        options: dict[str, Any] = {"step_aside": False}
        if not device.on_gpu:
            options |= {"driver": "host", "codegen": "aten"}
        compiled = torch.compile(
            model, backend=backend, dynamic=True, options=options if backend == "pgraph" else None
        )
        row: dict[str, Any] = {"backend": backend}
        for name, sizes in (("one size", (8,)), ("two in turn", (8, 16))):
            inputs = [torch.randn(sizes[i % len(sizes)], 64, device=device.torch) for i in range(calls)]
            with torch.no_grad():
                for x in inputs[:40]:
                    compiled(x)
                times = on_fast_cores(partial(_us_of_a_call, compiled, inputs, device), rounds)
            row[f"{name}, us"] = statistics.median(times)
            row[f"{name}, least and most"] = f"{min(times):.1f} to {max(times):.1f}"
        rows.append(row)
    return rows


def _us_of_a_call(call: Callable[..., Any], inputs: Sequence[torch.Tensor], device: Device) -> float:
    """Host microseconds of a call with each of these inputs, the mean."""
    spent = 0.0
    for first in range(0, len(inputs), 20):
        device.drain()  # a full queue would make the host wait
        began = time.perf_counter()
        for x in inputs[first : first + 20]:
            call(x)
        spent += time.perf_counter() - began
    return spent / len(inputs) * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each backend in a process of its own and print two tables; 1 if one of them failed."""
    args = parse_args(argv)
    if args.one is not None:
        found = measure(args)
        sys.stdout.flush()
        print(json.dumps(found))
        return 0
    if args.turns:
        print(
            tabulate(
                turns(*((200, 9) if torch.cuda.is_available() else (40, 3))),
                headers="keys",
                floatfmt=".1f",
                tablefmt="github",
            )
        )
        return 0
    own = ["--config", args.config, "--scope", args.scope]
    own += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    rows, partitions, failed = [], [], 0
    for backend in args.backends:
        done = subprocess.run(
            [sys.executable, __file__, *own, "--one", backend],
            capture_output=True,
            text=True,
            timeout=args.timeout,
            cwd=_paths.REPO,
        )
        if done.returncode:
            failed = 1
            print(f"{backend} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        partitions += found.pop("partitions")
        rows.append(found)
    print(f"Host ms of a step, {args.config} per {args.scope}:\n")
    print(tabulate(rows, headers="keys", floatfmt=".2f", tablefmt="github"))
    if partitions:
        print("\npgraph's partitions:\n")
        print(tabulate(partitions, headers="keys", floatfmt=".1f", tablefmt="github", missingval="-"))
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
