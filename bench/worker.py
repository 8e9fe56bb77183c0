"""One measurement in one process: `memory.py` starts it, and reads the JSON on the last line it prints.

    python bench/worker.py '{"config": "4x256", "scope": "block", "backend": "inductor"}'

One process for each backend keeps one backend's pools, caches and graphs out of the other's figures.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import _paths  # noqa: F401  (puts examples/ on sys.path)
import torch
from backends import as_count, compile_kwargs, peak_rss_mb, pgraph_report, pgraph_settled
from bursts import bursts, fastest
from configs import workload
from host_speed import Cores, on_fast_cores
from llama import count_parameters
from tasks import task
from torch import Tensor

MB = 2**20
BURSTS = 6
SETTLE_MOST = 40  # steps more, while pgraph still tries layouts of memory


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to measure.

    Args:
        config: name of the workload.
        scope: ``"block"`` or ``"model"``: what is compiled as one piece.
        backend: name of the backend.
        mode: ``"train"`` or ``"infer"``.
        device: ``"auto"``, ``"cuda"`` or ``"cpu"``.
        driver, codegen: pgraph's options.
        warmup: steps before anything is measured.
        steps: timed in bursts, those of each back to back.
        issue_steps: steps timed one by one on the host's clock.
        memory_steps: steps over which growth of memory is watched.
        seed: of the weights and the tokens.
        cap_mb: MB that the caching allocator may hold; 0 for no cap.
        prepare: only compile, by one step, which may run out of memory once everything is compiled.
    """

    config: str = "cpu-tiny"
    scope: str = "block"
    backend: str = "eager"
    mode: str = "train"
    device: str = "auto"
    driver: str = "auto"
    codegen: str = "auto"
    warmup: int = 10
    steps: int = 50
    issue_steps: int = 20
    memory_steps: int = 50
    seed: int = 0
    cap_mb: float = 0.0
    prepare: bool = False


class Device:
    """Clock and memory counters of a GPU or a CPU under one set of names."""

    def __init__(self, name: str) -> None:
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        self.torch = torch.device(name)
        self.on_gpu = self.torch.type == "cuda"

    def cap(self, mb: float) -> None:
        """Let the caching allocator hold no more than `mb` MB; a CPU has no such cap.

        It bounds what PyTorch allocates. What the driver holds (context, recorded graphs) is not in it.
        """
        if self.on_gpu and mb > 0:
            share = mb * MB / torch.cuda.get_device_properties(self.torch).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))

    def drain(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, step: Callable[[], Any], steps: int) -> list[float]:
        """ms of each of `steps` steps issued back to back; on a GPU by events, without waiting between."""
        self.drain()
        if not self.on_gpu:
            marks = [time.perf_counter()]
            for _ in range(steps):
                step()
                marks.append(time.perf_counter())
            return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        self.drain()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def issue(self, step: Callable[[], Any], steps: int) -> list[float]:
        """Host ms until a step's calls have returned, the device drained before each."""
        times = []
        for _ in range(steps):
            self.drain()
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1e3)
        self.drain()
        return times

    def reset_peak(self) -> None:
        """Start the peak counters anew."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float | None]:
        """Peak and current sizes in MB; None for what a CPU lacks."""
        if not self.on_gpu:
            return dict.fromkeys(("peak_allocated_mb", "peak_reserved_mb", "device_used_mb"), None) | {
                "peak_rss_mb": peak_rss_mb()
            }
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_allocated_mb": torch.cuda.max_memory_allocated() / MB,
            "peak_reserved_mb": torch.cuda.max_memory_reserved() / MB,
            # Everything on the device: pools, graphs, library workspaces, the context.
            "device_used_mb": (total - free) / MB,
            "peak_rss_mb": peak_rss_mb(),
        }

    def held_mb(self) -> float:
        """What the allocator holds right now, in MB; the process's peak RSS on a CPU."""
        return torch.cuda.memory_reserved() / MB if self.on_gpu else (peak_rss_mb() or 0.0)


class Trainer:
    """A model, its optimizer, and fresh random data at every step."""

    def __init__(self, spec: Spec, device: Device) -> None:
        torch.manual_seed(spec.seed)
        self.spec = spec
        self.task = task(workload(spec.config), device.torch, spec.seed + 1)
        self.parameters = count_parameters(self.task.model)
        kwargs = compile_kwargs(spec.backend, device.torch, spec.driver, spec.codegen)
        if kwargs is not None:
            self.task.compile(spec.scope, **kwargs)
        training = spec.mode == "train"
        self.task.model.train(training)
        self.optimizer = (
            torch.optim.AdamW(self.task.model.parameters(), lr=1e-4, fused=device.on_gpu)
            if training
            else None
        )
        self.recent: collections.deque[tuple[Tensor, ...]] = collections.deque(maxlen=self.task.recent)
        self.addresses: set[int] = set()
        self.last: Tensor | None = None

    def batch(self) -> tuple[Tensor, ...]:
        """A batch at a fresh address."""
        made = self.task.batch()
        self.recent.append(made)
        self.addresses.add(made[0].data_ptr())
        return made

    def step(self) -> None:
        """One training or inference step; leaves its loss or logits in `last`."""
        if self.optimizer is None:
            self._begin()
            with torch.no_grad():
                self.last = self.task.predict(self.batch()[0])
            return
        pieces = self.task.load.accumulate
        self._begin()  # once: reduce-overhead keeps the gradients of earlier parts in its pool until the next
        for _ in range(pieces):
            loss = self.task.loss(*self.batch())
            (loss / pieces if pieces > 1 else loss).backward()
            self.last = loss.detach()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _begin(self) -> None:
        if self.spec.backend == "reduce-overhead":
            self.last = None  # lives in the graph's pool, which the next step overwrites
            torch.compiler.cudagraph_mark_step_begin()

    def check(self) -> float:
        """Value of the last step's result (its mean in inference); raises if it is not finite."""
        assert self.last is not None
        value = self.last.mean(dtype=torch.float32).item()
        if not math.isfinite(value):
            raise FloatingPointError(f"result {value} after training with {self.spec.backend} is not finite")
        return value


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of `values` lie, by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def prepare(spec: Spec) -> dict[str, Any]:
    """Fill the compile cache for `spec`."""
    device = Device(spec.device)
    device.cap(spec.cap_mb)
    began = time.perf_counter()
    full = False
    try:
        Trainer(spec, device).step()
        device.drain()
    except torch.OutOfMemoryError:
        # Forward and backward of static shapes are compiled before the first of them runs.
        full = True
    return {"prepare_s": time.perf_counter() - began, "out_of_memory": full}


def measure(spec: Spec) -> dict[str, Any]:
    """Run `spec` and return the figures of one row."""
    device = Device(spec.device)
    device.cap(spec.cap_mb)
    trainer = Trainer(spec, device)

    warm_s: list[float] = []
    least = max(1, spec.warmup)
    while len(warm_s) < least or (len(warm_s) < least + SETTLE_MOST and not pgraph_settled()):
        began = time.perf_counter()
        trainer.step()
        device.drain()
        warm_s.append(time.perf_counter() - began)
        trainer.check()

    # Ghost allocations and recordings count in the statistics while they happen: from here on, none does.
    device.reset_peak()
    cores = Cores()
    taken = bursts(trainer.step, device, max(1, spec.steps // BURSTS), BURSTS, cores)
    times = [ms for burst in fastest(taken, BURSTS) for ms in burst.times]
    trainer.check()
    memory = device.memory()
    issue = on_fast_cores(lambda: device.issue(trainer.step, 1)[0], spec.issue_steps, cores)
    held = []
    for _ in range(spec.memory_steps):
        trainer.step()
        held.append(device.held_mb())
    device.drain()
    final = trainer.check()

    steady_s = statistics.median(times) / 1e3
    capture_s: float | None = None
    extra: dict[str, Any] = {}
    report = pgraph_report() if spec.backend == "pgraph" else None
    if report is not None:
        capture_s = float(report.capture_s)
        counts = ("captures", "nodes", "slots", "launches", "rewritten_nodes")
        extra = {key: as_count(getattr(report, key)) for key in counts}
        extra["fallbacks"] = as_count(report.refused)
        extra["partitions"] = as_count(report.capturable)
        extra |= {"exec_mb": as_count(report.exec_bytes) / MB, "summary": report.summary()}
        extra["plain"] = [
            f"{partition.name}: {reason}" for partition in report.partitions for reason in partition.reasons
        ]
    elif spec.backend == "reduce-overhead":
        # Warm-up and recording fill the steps after the compiling one: what they take over a steady step.
        capture_s = sum(max(0.0, seconds - steady_s) for seconds in warm_s[1:])
    return {
        "ms_per_step": statistics.median(times),
        "ms_p10": quantile(times, 0.1),
        "ms_p90": quantile(times, 0.9),
        "cpu_issue_ms": statistics.median(issue),
        "cpu_issue_p10": quantile(issue, 0.1),
        "cpu_issue_p90": quantile(issue, 0.9),
        **memory,
        "growth_mb": held[-1] - held[0] if held else 0.0,
        "compile_s": warm_s[0],
        "warmup_s": sum(warm_s),
        "capture_s": capture_s,
        "final_loss": final,
        "parameters": trainer.parameters,
        "token_addresses": len(trainer.addresses),
        "steps": len(times),
        **extra,
    }


def main() -> None:
    """Measure what the first argument says; print one JSON line last."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        sys.exit(__doc__)
    spec = Spec(**json.loads(sys.argv[1]))
    figures = prepare(spec) if spec.prepare else measure(spec)
    sys.stdout.flush()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
