"""What a model costs whose captures are all refused: ms of a step beside Inductor's, in turns in one process.

    python bench/refused.py --models timm/resnet50 hf/bert --modes train infer

Each capture is made, compared, and refused, however often pgraph splits the graph, until all of the model
runs uncaptured. Models are those of `coverage.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import _paths  # noqa: F401  (puts the checkout on sys.path)
import torch
import zoo
from backends import pgraph_report, register_pgraph
from coverage_subject import Job, Subject
from host_speed import Cores
from tabulate import tabulate
from worker import Device

ROUNDS = 9
SECONDS = 0.4  # of one backend in one round


def refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """In the place of the proof.

    Raises:
        MatchError: always.
    """
    from pgraph.errors import MatchError
    from pgraph.reasons import Reason

    raise MatchError(Reason("ambiguous-word", "refused for the measurement's sake"), node=0)


def stepper(subject: Subject, run: Callable[..., Any]) -> Callable[[], None]:
    """Steps on four sets of inputs in turn; gradients are dropped after each."""
    inputs = [subject.inputs(seed) for seed in range(4)]
    parameters = list(subject.program.parameters())
    count = 0

    def step() -> None:
        nonlocal count
        result = subject.forward(run, inputs[count % len(inputs)])
        count += 1
        if subject.train:
            result.backward()
            for parameter in parameters:
                parameter.grad = None

    return step


def measure(job: Job) -> dict[str, Any]:
    """A row of the table.

    Raises:
        RuntimeError: something was captured.
    """
    from pgraph.capture import build

    device, subject = Device(job.device), Subject(job)
    real, build.match = build.match, refuse
    try:
        steps = {name: stepper(subject, subject.compiled(job, name)) for name in ("inductor", "pgraph")}
        for step in steps.values():
            for _ in range(12):
                step()
        times: dict[str, list[float]] = {name: [] for name in steps}
        cores = Cores()
        for _ in range(ROUNDS):
            for name, step in steps.items():
                cores.choose()
                times[name].append(_ms(device, step))
        cores.release()
    finally:
        build.match = real
    report = pgraph_report()
    if report is None or report.captures or not report.refused:
        raise RuntimeError(f"{job.model} {job.mode}: nothing was refused, or something captured: {report}")
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "model": job.model,
        "mode": job.mode,
        **{f"{name}, ms": round(value, 3) for name, value in medians.items()},
        **{f"{n}, least and most": f"{min(t):.3f} to {max(t):.3f}" for n, t in times.items()},
        "ratio": round(medians["pgraph"] / medians["inductor"], 3),
        "refused": report.refused,
    }


def _ms(device: Device, step: Callable[[], None]) -> float:
    device.drain()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        for _ in range(4):
            step()
        device.drain()
        count += 4
    return (time.perf_counter() - began) / count * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--models", nargs="+", default=["timm/resnet50", "hf/bert"], choices=list(zoo.ALL))
    parser.add_argument("--modes", nargs="+", default=["train", "infer"], choices=["train", "infer"])
    parser.add_argument("--codegen", default="auto", help="pgraph's code generator")
    args = parser.parse_args(argv)
    register_pgraph()
    rows = []
    for model in args.models:
        for mode in args.modes:
            torch._dynamo.reset()
            job = Job(
                "time",
                model,
                mode,
                "pgraph",
                device="cuda" if on_gpu else "cpu",
                driver="auto" if on_gpu else "host",
                codegen=args.codegen,
            )
            rows.append(measure(job))
    print(tabulate(rows, headers="keys", tablefmt="github"))


if __name__ == "__main__":
    main()
