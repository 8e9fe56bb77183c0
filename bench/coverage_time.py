"""Speed and memory of one model under one backend, in a process of its own.

Not a program: `coverage.py` forks children that call `measure`.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from backends import pgraph_report
from coverage_check import coverage_of
from coverage_subject import Job, Subject
from worker import Device, quantile

INPUTS = 4  # sets of inputs that the steps take in turn: a new address at each step
WARM_STEPS = 8
WARM_QUIET = 5  # steps without a new capture; one that was refused may be tried again in pieces
WARM_MOST = 40
STEPS = 60
ISSUE_STEPS = 10
SETTLE_STEPS = 2


class Stepper:
    """Steps of one model, on prepared inputs in turn.

    Parameters stay where they are: `reduce-overhead` would record anew for each that moves.
    """

    def __init__(self, job: Job, subject: Subject) -> None:
        self.subject = subject
        self.run = subject.compiled(job)
        self.marks = job.backend == "reduce-overhead"
        self.inputs = itertools.cycle([subject.inputs(seed) for seed in range(INPUTS)])
        self.parameters = list(subject.program.parameters())
        self.last: Any = None

    def __call__(self) -> None:
        """Forward, loss and backward, or one inference; gradients are dropped before the next step."""
        self.last = None  # under reduce-overhead it lies where the next step writes
        if self.marks:
            torch.compiler.cudagraph_mark_step_begin()
        result = self.subject.forward(self.run, next(self.inputs))
        if self.subject.train:
            result.backward()
            for parameter in self.parameters:
                parameter.grad = None
            self.last = result.detach()
        else:
            self.last = result[0]

    def value(self) -> float:
        """Mean of the last result.

        Raises:
            FloatingPointError: it is not finite.
        """
        value = self.last.float().mean().item()
        if not math.isfinite(value):
            raise FloatingPointError(f"the timed steps gave {value}")
        return value


def measure(job: Job, alone: Callable[[], None]) -> dict[str, Any]:
    """Compile, warm up, wait for `alone`, measure; returns the fields of a row."""
    device = Device(job.device)
    subject = Subject(job)
    step = Stepper(job, subject)
    warm_s = warm_up(job, step, device)
    value = step.value()
    alone()
    device.reset_peak()
    began = time.perf_counter()
    for _ in range(SETTLE_STEPS):
        step()
    device.drain()
    took = max(1e-6, (time.perf_counter() - began) / SETTLE_STEPS)
    times = device.timed(step, max(10, min(STEPS, int(job.seconds / took))))
    memory = device.memory()
    issue = device.issue(step, ISSUE_STEPS)
    memory.pop("device_used_mb")  # the whole device's, while others are on it
    steady = statistics.median(times) / 1e3
    capture_s = None
    report = pgraph_report() if job.backend == "pgraph" else None
    if job.backend == "reduce-overhead":
        # Warm-up and recording fill the steps after the compiling one: what they take over a steady step.
        capture_s = sum(max(0.0, seconds - steady) for seconds in warm_s[1:])
    return {
        "status": "ok",
        "batch": subject.entry.batch,
        "params_mb": subject.params_mb,
        "precision": subject.entry.precision,
        "ms_per_step": statistics.median(times),
        "ms_p10": quantile(times, 0.1),
        "ms_p90": quantile(times, 0.9),
        "cpu_issue_ms": statistics.median(issue),
        **memory,
        "timed_steps": len(times),
        "compile_s": warm_s[0],
        "capture_s": capture_s,
        "result": value,
        **(coverage_of(report) if report is not None else {}),
    }


def warm_up(job: Job, step: Stepper, device: Device) -> list[float]:
    """Seconds of each step until nothing is compiled, captured or tried any more."""
    seconds: list[float] = []
    quiet, captures = 0, 0
    while len(seconds) < WARM_STEPS or (quiet < WARM_QUIET and len(seconds) < WARM_MOST):
        began = time.perf_counter()
        step()
        device.drain()
        seconds.append(time.perf_counter() - began)
        report = pgraph_report() if job.backend == "pgraph" else None
        now = int(report.captures) if report is not None else 0
        quiet = quiet + 1 if now == captures and not (report is not None and report.on_trial) else 0
        captures = now
    return seconds
