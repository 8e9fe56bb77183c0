"""How many calls launch one step's work, and how long the device and these calls take, by the profiler.

A process of its own: the profiler takes memory, and makes each call slower. Only counts, the device's own
times and shares of profiled time are kept.

Not a program: `coverage.py` forks children that call `count`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from backends import pgraph_report
from coverage_subject import Job, Subject
from coverage_time import Stepper, warm_up
from worker import Device

STEPS = 5
# Each begins the name of a call that gives the device something to do. Triton launches through the driver.
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
# (name, whether it ran on the device, microseconds)
Event = tuple[str, bool, float]


def count(job: Job, alone: Callable[[], None]) -> dict[str, Any]:
    """Warm up, wait for `alone`, profile some steps; returns the fields of a row. On a CPU there are none."""
    device = Device(job.device)
    step = Stepper(job, Subject(job))
    warm_up(job, step, device)
    alone()
    step()
    device.drain()
    if not device.on_gpu:
        return {"status": "ok", **per_step((), 0.0, 0.0, 0)}
    before = graph_launches(job)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        device.drain()
        wall_us = (time.perf_counter() - began) * 1e6
    graphs = graph_launches(job) - before
    found = [
        (event.name, event.device_type == torch.autograd.DeviceType.CUDA, event.time_range.elapsed_us())
        for event in profile.events()
        if not getattr(event, "is_user_annotation", False)  # a range with a name, on the device as well
    ]
    if not any(on_device for _, on_device, _ in found):
        return {"status": "the profiler saw nothing of the device", **per_step((), 0.0, 0.0, 0)}
    return {"status": "ok", **per_step(found, wall_us, graphs, STEPS)}


def per_step(events: Iterable[Event], wall_us: float, graphs: float, steps: int) -> dict[str, float | None]:
    """The figures of one step.

    Args:
        events: of all profiled steps.
        wall_us: that these took.
        graphs: launches of graphs that the profiler does not see (pgraph's, through the driver).
        steps: how many there were; 0: nothing is known.
    """
    keys = ("launch_calls", "launch_call_share", "device_work", "device_busy_ms")
    if not steps:
        return dict.fromkeys(keys)
    calls = [us for name, on_device, us in events if not on_device and name.startswith(LAUNCHES)]
    work = [us for _, on_device, us in events if on_device]
    figures = (
        (len(calls) + graphs) / steps,
        sum(calls) / wall_us,
        len(work) / steps,
        sum(work) / 1e3 / steps,
    )
    return dict(zip(keys, figures, strict=True))


def graph_launches(job: Job) -> float:
    """Graphs that pgraph has launched so far: its launches, each of so many chunks as a capture has."""
    report = pgraph_report() if job.backend == "pgraph" else None
    if report is None:
        return 0.0
    return sum(p.launches * p.chunks / p.captures for p in report.partitions if p.captures)
