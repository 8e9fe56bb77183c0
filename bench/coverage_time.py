"""Speed and memory of one model under one backend, in a process of its own.

Not a program: `coverage.py` forks children that call `measure`; `coverage_count.py` takes the same steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from backends import pgraph_report, pgraph_settled
from bursts import SETTLE_STEPS, Burst, bursts, fastest, settle
from coverage_check import coverage_of
from coverage_subject import Job, Subject
from host_speed import Cores
from torch import Tensor
from worker import Device, quantile

WARM_STEPS = 8
WARM_QUIET = 5  # steps without a new capture; one that was refused may be tried again in pieces
WARM_MOST = 40  # or twice through all sets of inputs
STEPS = 120
TURNS = 4
BURSTS = 3  # of each turn
MEMORY_STEPS = 30  # where only memory is measured


class Updater:
    """What follows the loss of a timed training step.

    With an optimizer the weights are updated, in fp16 with the loss scaled as `torch.amp.GradScaler` does it.
    Without one the gradients are dropped.
    """

    def __init__(self, subject: Subject) -> None:
        self.parameters = list(subject.program.parameters())
        on_gpu = subject.device.type == "cuda"
        self.optimizer: torch.optim.Optimizer | None = None
        if subject.entry.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4, momentum=0.9, fused=on_gpu)
        elif subject.entry.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=on_gpu)
        self.scaler: torch.amp.GradScaler | None = None
        if subject.entry.precision == "fp16 autocast":
            # Not fused: the host waits for the device, and then knows whether to step.
            self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4, momentum=0.9)
            self.scaler = torch.amp.GradScaler(subject.device.type)

    def __call__(self, loss: Tensor) -> None:
        """Backward and update; no gradient is left."""
        if self.optimizer is None:
            loss.backward()
            for parameter in self.parameters:
                parameter.grad = None
            return
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


class Stepper:
    """Steps of one model, on prepared inputs in turn: a new address at each step.

    Parameters stay where they are: `reduce-overhead` would record anew for each that moves.
    """

    def __init__(self, job: Job, subject: Subject) -> None:
        self.subject = subject
        self.run = subject.compiled(job)
        self.marks = job.backend == "reduce-overhead"
        self.inputs = itertools.cycle([subject.inputs(seed) for seed in range(subject.entry.input_sets)])
        self.update = Updater(subject) if subject.train else None
        self.last: Any = None
        self.count = 0

    def __call__(self) -> None:
        """Forward, loss, backward and update; or one inference, which a served model gives back."""
        self.count += 1
        self.last = None  # under reduce-overhead it lies where the next step writes
        if self.marks:
            torch.compiler.cudagraph_mark_step_begin()
        result = self.subject.forward(self.run, next(self.inputs))
        if self.update is not None:
            self.update(result)
            self.last = result.detach()
        elif self.subject.entry.served:
            self.last = result[0].cpu()
        else:
            self.last = result[0]

    def value(self) -> float:
        """Mean of the last result. No copy of it is made: that memory would stay reserved.

        Raises:
            FloatingPointError: it is not finite.
        """
        value = self.last.mean(dtype=torch.float32).item()
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
    settle(step, device)
    took = max(1e-6, (time.perf_counter() - began) / SETTLE_STEPS)
    allocations, rewritten = device_allocations(device), rewritten_nodes(job)
    before = step.count
    sets = subject.entry.input_sets if subject.entry.dynamic else 1
    steps = min(STEPS, int(job.seconds / took))
    taken = take_turns(step, device, steps, alone, round_of=sets)
    done = step.count - before
    allocated, again = device_allocations(device), rewritten_nodes(job)
    memory = device.memory()
    memory.pop("device_used_mb")  # the whole device's, while others are on it
    fast = fastest(taken, TURNS * bursts_of_a_turn(steps, sets))
    # Where sizes vary a burst is a round of all of them, and its mean one figure.
    times = [ms for burst in fast for ms in (burst.times if sets == 1 else [statistics.mean(burst.times)])]
    strained = sum(len(burst.times) + 1 for burst in fast)
    strain = {name: sum(burst.strain[name] for burst in fast) / strained for name in fast[0].strain}
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
        "cpu_issue_ms": statistics.median(burst.issue for burst in fast),
        **memory,
        "device_allocations": None if allocated is None else (allocated - (allocations or 0)) / done,
        "timed_steps": sum(len(burst.times) for burst in fast),
        **strain,
        "host_slowdown": max(burst.slowdown for burst in fast),
        "bursts": len(taken),
        "rewritten": None if again is None else (again - (rewritten or 0)) / done,
        "compile_s": warm_s[0],
        "capture_s": capture_s,
        "result": value,
        **(coverage_of(report) if report is not None else {}),
    }


def measure_memory(job: Job, alone: Callable[[], None]) -> dict[str, Any]:
    """Warm up, wait for `alone`, and take some steps; returns peaks in MB."""
    device = Device(job.device)
    step = Stepper(job, Subject(job))
    warm_up(job, step, device)
    alone()
    device.reset_peak()
    for _ in range(MEMORY_STEPS):
        step()
    device.drain()
    return {"status": "ok", **device.memory()}  # the whole device's is replaced: see `Pool`


def take_turns(
    step: Callable[[], Any], device: Device, steps: int, alone: Callable[[], None], round_of: int = 1
) -> list[Burst]:
    """Bursts, so many steps in all, in turns with whoever else is measured.

    Args:
        round_of: steps after which the sizes of inputs come again: where sizes vary, each turn is one burst,
            and each burst one round, however few steps were asked for.
    """
    count = bursts_of_a_turn(steps, round_of)
    each = max(2, steps // (TURNS * count)) if round_of == 1 else round_of
    cores, taken = Cores(), list[Burst]()
    for turn in range(TURNS):
        if turn:
            alone()
        taken += bursts(step, device, each, count, cores, round_of)
    cores.release()
    return taken


def bursts_of_a_turn(steps: int, round_of: int) -> int:
    """One where there is no time for a step of each turn, or where sizes vary."""
    return BURSTS if round_of == 1 and steps >= TURNS else 1


def rewritten_nodes(job: Job) -> int | None:
    """Nodes that pgraph's launches have set so far; None for other backends."""
    report = pgraph_report() if job.backend == "pgraph" else None
    return None if report is None else int(report.rewritten_nodes)


def device_allocations(device: Device) -> int | None:
    """How often the caching allocator has asked the driver for memory (cudaMalloc); None on a CPU."""
    return int(torch.cuda.memory_stats()["num_device_alloc"]) if device.on_gpu else None


def warm_up(job: Job, step: Stepper, device: Device) -> list[float]:
    """Seconds of each step, until all inputs were used and nothing is compiled, captured or tried."""
    seconds: list[float] = []
    quiet, captures = 0, 0
    sets = step.subject.entry.input_sets
    least, most = max(WARM_STEPS, sets), max(WARM_MOST, 2 * sets)
    while len(seconds) < least or (quiet < WARM_QUIET and len(seconds) < most):
        began = time.perf_counter()
        step()
        device.drain()
        seconds.append(time.perf_counter() - began)
        report = pgraph_report() if job.backend == "pgraph" else None
        now = int(report.captures) if report is not None else 0
        quiet = quiet + 1 if now == captures and pgraph_settled() else 0
        captures = now
    return seconds
