"""One rank of one torchtitan run: `torchtitan.py` one folder up starts it and reads the file that it writes.

In a folder of its own, because that program's name would hide the package called torchtitan.

Everything is imported first; then the rank waits for a line on its standard input, the port where the ranks
meet, so that the next run's ranks can get ready while this run measures. Steps are, in order: `warmup`,
`timed` back to back, `issue` with the device drained before each. Each rank looks for a fast core before and
while it is timed (Note [Fast cores] in `host_speed.py`); the slowest host of all ranks decides what counts.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: it holds a program called torchtitan, too
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "torchtitan"))

import titan_setup
import torch
from host_speed import SLOW, Cores

MB = 2**20
BURST = 10  # timed steps between two looks at the host's speed


class Device:
    """What is asked of the GPU; a CPU answers None."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()

    def drain(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """A point in time on the device's clock."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """ms between two marks."""
        return first.elapsed_time(second) if self.on_gpu else (second - first) * 1e3

    def reset_peak(self) -> None:
        """Start the peak counters anew."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, Any]:
        """Sizes in MB; None on a CPU."""
        if not self.on_gpu:
            keys = ("peak_allocated_mb", "peak_reserved_mb", "device_used_mb", "private_pools_mb")
            return dict.fromkeys(keys)
        free, total = torch.cuda.mem_get_info()
        segments = torch.cuda.memory_snapshot(include_traces=False)
        private = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))
        return {
            "peak_allocated_mb": torch.cuda.max_memory_allocated() / MB,
            "peak_reserved_mb": torch.cuda.max_memory_reserved() / MB,
            "device_used_mb": (total - free) / MB,
            "private_pools_mb": private / MB,
            "expandable": any(s.get("is_expandable") for s in segments),
            "alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        }


class Recordings:
    """Counts what CUDA graph trees record, by step: every move of an address is a new recording."""

    def __init__(self) -> None:
        self.count = 0
        from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

        record = CUDAGraphTreeManager.record_function

        def counted(manager: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return record(manager, *args, **kwargs)

        CUDAGraphTreeManager.record_function = counted


class Inside:
    """Host time within compiled code; no graph can save the rest (FSDP2, autograd, clipping, optimizer).

    Only the outermost call counts: what pgraph runs may be Inductor's code.
    """

    def __init__(self, backend: str) -> None:
        self.seconds = 0.0
        self._deep = threading.local()
        from torch._inductor.output_code import CompiledFxGraph

        kinds: list[type] = [CompiledFxGraph]
        if backend == "pgraph":
            from pgraph.runtime.graph_runner import GraphRunner
            from pgraph.runtime.partition_runner import PartitionRunner
            from pgraph.runtime.uncaptured import UncapturedPartition

            kinds += [GraphRunner, PartitionRunner, UncapturedPartition]
        for kind in kinds:
            kind.__call__ = self._around(kind.__call__)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if getattr(self._deep, "inside", False):
                return call(*args)
            self._deep.inside = True
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - began
                self._deep.inside = False

        return timed


class FastCores:
    """Has timed steps run on the core that is fastest then, and tells which of them count.

    Args:
        steps: that are timed.
        cores: None where nothing is timed.
        slowest: this rank's slowdown to that of all ranks, which wait for the slowest of them in each step.

    Attributes:
        slowdowns: of the slowest rank's host at the end of each burst, see `Cores.slowdown`.
    """

    def __init__(
        self, steps: int, cores: Cores | None, slowest: Callable[[float], float] = lambda own: own
    ) -> None:
        self._steps, self._cores, self._slowest = steps, cores, slowest
        self.slowdowns: list[float] = []

    def look(self, step: int) -> None:
        """Called at the beginning of each timed step, with its number, and of the one after them. The device
        waits meanwhile.
        """
        if self._cores is None or step > self._steps or (step % BURST and step < self._steps):
            return
        if step:
            self.slowdowns.append(self._slowest(self._cores.slowdown()))
        if not step or self.slowdowns[-1] > SLOW:
            self._cores.choose()

    def counted(self, times: Sequence[float]) -> list[float]:
        """Of the times of all steps those of bursts in which the host was fast, but of half of them at least.

        The first step of a burst, for which the device waited, does not count.
        """
        if self._cores is None:
            return list(times)
        self._cores.release()
        by_speed = sorted(range(len(self.slowdowns)), key=lambda i: (self.slowdowns[i], i))
        fast = sum(slowdown <= SLOW for slowdown in self.slowdowns)
        chosen = sorted(by_speed[: max(fast, (len(by_speed) + 1) // 2)])
        counted = [ms for i in chosen for ms in times[i * BURST + 1 : (i + 1) * BURST]]
        return counted or list(times)


def slowest_rank(own: float) -> float:
    """The largest of what all ranks pass; each of them must call this."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return own
    largest = torch.tensor(own, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest.item()


def counters(backend: str, recordings: Recordings | None) -> dict[str, Any]:
    """How often something was captured, recorded or launched so far."""
    found: dict[str, Any] = {"recordings": recordings.count if recordings else None}
    if backend == "pgraph":
        import pgraph

        report = pgraph.report()
        keys = ("captures", "nodes", "slots", "launches", "rewritten_nodes", "refused", "capture_s")
        found |= {key: getattr(report, key) for key in keys}
        found["exec_mb"] = report.exec_bytes / MB
        found["summary"] = report.summary()
        found["report"] = str(report)
    return found


def trainer_class(spec: dict[str, Any], recordings: Recordings | None, inside: Inside) -> type:
    """The Trainer that measures itself; made after torchtitan has been imported."""
    from titan_trainer import RecordingTrainer

    warmup, timed, issue = spec["warmup"], spec["timed"], spec["issue"]
    backend = spec["settings"]["backend"]

    class Measuring(RecordingTrainer):
        """Adds the device's clock, memory and counters."""

        def __init__(self, config: Any) -> None:
            self.dev = Device()
            self.warm_s: list[float] = []
            self.marks: list[Any] = []
            self.issue_ms: list[float] = []
            self.compiled_ms: list[float] = []
            self.figures: dict[str, Any] = {}
            cores = Cores(part=int(os.environ["RANK"]), parts=spec["settings"]["ranks"]) if timed else None
            self.fast = FastCores(timed, cores, slowest_rank)
            super().__init__(config, write)

        def batch_generator(self, iterable: Any) -> Iterator[Any]:
            """Batches drawn before the clock starts: tokenizing is in nobody's time."""
            source = super().batch_generator(iterable)
            count = (warmup + timed + issue) * self.gradient_accumulation_steps if timed else 0
            ready = collections.deque(next(source) for _ in range(count))
            while ready:
                yield ready.popleft()
            yield from source

        def train_step(self, data_iterator: Any) -> None:
            i = self.step - 1
            if i == warmup:
                self.dev.drain()
                self.figures["before"] = counters(backend, recordings)
                # Ghost allocations and recordings count in the statistics while they happen.
                self.dev.reset_peak()
            if i >= warmup + timed:
                self.dev.drain()
            elif i >= warmup:
                self.marks.append(self.dev.mark())
            if i >= warmup:
                self.fast.look(i - warmup)
            within = inside.seconds
            began = time.perf_counter()
            super().train_step(data_iterator)
            if i < warmup:
                self.dev.drain()
                self.warm_s.append(time.perf_counter() - began)
            elif i >= warmup + timed:
                self.issue_ms.append((time.perf_counter() - began) * 1e3)
                self.compiled_ms.append((inside.seconds - within) * 1e3)
            elif i == warmup + timed - 1:
                self.marks.append(self.dev.mark())
                self.dev.drain()
                self.figures |= self.dev.memory()
                self.figures["after"] = counters(backend, recordings)

    def write(trainer: Measuring) -> None:
        trainer.dev.drain()
        times = [trainer.dev.between(a, b) for a, b in zip(trainer.marks, trainer.marks[1:], strict=False)]
        save(
            spec,
            {
                **trainer.figures,
                "end": counters(backend, recordings),
                "times_ms": trainer.fast.counted(times),
                "slowdowns": trainer.fast.slowdowns,
                "issue_ms": statistics.median(trainer.issue_ms) if trainer.issue_ms else None,
                "compiled_ms": statistics.median(trainer.compiled_ms) if any(trainer.compiled_ms) else None,
                "warm_s": trainer.warm_s,
                "losses": [float(x) for x in trainer.local_losses().tolist()],
            },
        )

    return Measuring


def save(spec: dict[str, Any], figures: dict[str, Any]) -> None:
    """This rank's file; whole or not at all."""
    path = Path(spec["out"]) / f"rank{os.environ['RANK']}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(figures), encoding="utf-8")
    partial.replace(path)


def main() -> None:
    """Import, wait, train, write."""
    # `titan_ranks.py` asks for the stacks of a rank that it is about to end.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    spec = json.loads(sys.argv[1])
    cache = Path(spec["cache"])
    titan_setup.environment(cache)
    fields = dict(spec["settings"], extra=tuple(spec["settings"]["extra"]))
    settings = titan_setup.Settings(**fields)
    # torchtitan takes the command line of the moment when it is imported.
    sys.argv[1:] = titan_setup.arguments(settings, cache, Path(spec["out"]))
    titan_setup.prepare(settings)
    import torch._inductor.compile_fx  # noqa: F401  (slow to import, so it is now)
    import torchtitan.train

    recordings = Recordings() if spec["cudagraphs"] else None
    trainer = trainer_class(spec, recordings, Inside(settings.backend))
    print("ready", flush=True)
    port = sys.stdin.readline().strip()
    if not port:
        return  # the parent is gone
    os.environ["MASTER_PORT"] = port
    # torchtitan sleeps two seconds at the end, for its log lines' sake.
    torchtitan.train.time = type(
        "Time", (), {"perf_counter": time.perf_counter, "sleep": lambda seconds: None}
    )
    began = time.perf_counter()
    torchtitan.train.main(trainer)
    path = Path(spec["out"]) / f"rank{os.environ['RANK']}.json"
    done = json.loads(path.read_text(encoding="utf-8"))
    save(spec, done | {"finished": True, "run_s": time.perf_counter() - began})


if __name__ == "__main__":
    main()
