"""What the workloads of `seeds.py` do not show: launches, the memory of graphs, new addresses, extra graphs.

    python bench/claims.py                                # all, on a GPU
    python bench/claims.py --only launch exec address malloc
    python bench/claims.py --only graphs --layers 8
    python bench/claims.py --device cpu                   # what the host driver can try; for tests

* ``launch``: so many small kernels, launched one by one (eager), as a replayed `torch.cuda.CUDAGraph`, and
  as an exec of pgraph's: host microseconds until all calls have returned, and until the device is through.
* ``exec``: device and host memory of an instantiated graph, and how long instantiating it takes.
* ``address``: one exec whose kernel, copy and fill nodes are given other addresses before each launch. Every
  result is compared.
* ``malloc``: one allocation of the driver.
* ``graphs``: a training step with a Llama of 70B's dimensions and fewer layers, so that it fits one GPU:
  memory without graphs, with `torch.cuda.make_graphed_callables` around each layer, with `reduce-overhead`
  and with pgraph, each in a process of its own.

Results go to ``bench/results/claims-<gpu>.json``. `readme.py` sets them beside what has been claimed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _paths
import schema
import torch
import worker
from torch import Tensor
from workers import Figures, last_error, start_worker

from pgraph.drivers.execs import Recipe
from pgraph.drivers.interface import Driver
from pgraph.template.template import Slot

MEASURES = ("launch", "exec", "address", "malloc", "graphs")
NODES = {"launch": (20, 200, 1000), "exec": (20, 200, 1000), "address": (20, 200, 1000)}
SIZE = 64  # elements of each tensor
REPEATS = 30
EXECS = 32
MALLOC_MB = (2, 20, 200)
REGIONS = 3
# With graphs and without, in turn; eager is what the graphed layers are to be compared with.
GRAPH_BACKENDS = ("eager", "graphed", "inductor", "reduce-overhead", "pgraph")

Row = dict[str, Any]


@functools.cache
def driver_of(device: torch.device) -> Driver:
    """pgraph's driver for a device, the host driver for the CPU."""
    if device.type == "cuda":
        from pgraph.drivers.cuda.driver import CudaDriver

        return CudaDriver(device.index or 0)
    from pgraph.drivers.host.driver import HostDriver

    return HostDriver()


@dataclasses.dataclass(frozen=True)
class Work:
    """Three vectors and what is done with them: z = 0; z += x, again and again; y = z.

    So y is a multiple of x if, and only if, every node had the addresses that belong together.
    """

    x: Tensor
    y: Tensor
    z: Tensor

    @classmethod
    def on(cls, device: torch.device, value: float) -> Work:
        """Fresh vectors, x full of `value`."""
        x, y, z = (torch.full((SIZE,), value if i == 0 else -1.0, device=device) for i in range(REGIONS))
        return cls(x, y, z)

    @property
    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (self.x, self.y, self.z)]

    def right(self, nodes: int) -> bool:
        """Whether y is what `nodes` nodes make of x; waits for the device. Spoils y and z for next time."""
        found = bool((self.y == self.x * (nodes - 2)).all())
        self.y.fill_(-1.0)
        self.z.fill_(-1.0)
        return found


@contextlib.contextmanager
def recorded(driver: Driver, nodes: int) -> Iterator[Callable[[], Recipe]]:
    """The work as a graph on ghost memory, with the three addresses of every node as slots.

    Yields:
        What makes an exec and a recipe of it; ghost memory is still there.
    """
    aten = torch.ops.aten
    with driver.capture_lock(), driver.arena(0) as arena:
        x, y, z = (arena.empty_strided((SIZE,), (1,), torch.float32) for _ in range(REGIONS))
        where = [tensor.data_ptr() for tensor in (x, y, z)]
        with driver.capture(arena) as session:
            if driver.name == "cuda":
                # ATen fills by a kernel; this makes a fill node.
                from cuda.bindings import driver as cu

                stream = torch.cuda.current_stream(driver.device).cuda_stream
                assert cu.cuMemsetD8Async(where[2], 0, SIZE * 4, stream)[0] == cu.CUresult.CUDA_SUCCESS
            else:
                session.run_op(aten.zero_.default, (z,), {})
            for _ in range(nodes - 2):
                session.run_op(aten.add.out, (z, x), {"out": z})
            session.run_op(aten.copy_.default, (y, z), {})
            graph, found, _ = session.end()
        del x, y, z
        assert len(found) == nodes, f"{nodes} nodes were asked for, {len(found)} recorded"
        slots = [
            Slot(i, 8 * k, where.index(word), 0)
            for i, node in enumerate(found)
            for k, (word,) in enumerate(struct.iter_unpack("=Q", node.params))
            if word in where
        ]

        def make() -> Recipe:
            return driver.recipe(driver.instantiate(graph, found, 0, nodes, slots), found, 0, nodes, slots)

        yield make


def exec_of(driver: Driver, nodes: int) -> Recipe:
    """The work as one exec, with its recipe."""
    with recorded(driver, nodes) as make:
        return make()


def timed(call: Callable[[], Any], drain: Callable[[], None]) -> tuple[float, float]:
    """Median host microseconds until `call` has returned, and until the device is through as well."""
    issued, done = [], []
    for _ in range(REPEATS):
        drain()
        began = time.perf_counter()
        call()
        issued.append((time.perf_counter() - began) * 1e6)
        drain()
        done.append((time.perf_counter() - began) * 1e6)
    return statistics.median(issued), statistics.median(done)


def launch(nodes: int, device: worker.Device) -> Iterator[Row]:
    """Host time of launching the work, by eager ops, a replayed graph, and pgraph's exec."""
    driver, work = driver_of(device.torch), Work.on(device.torch, 1.0)

    def eager() -> None:
        work.z.zero_()
        for _ in range(nodes - 2):
            torch.add(work.z, work.x, out=work.z)
        work.y.copy_(work.z)

    eager()  # loads the kernels, which a capture must not do
    assert work.right(nodes), "eager itself is wrong"
    made, addresses = exec_of(driver, nodes), work.addresses
    calls: dict[str, Callable[[], Any]] = {
        "eager": eager,
        "pgraph": lambda: made.launch(addresses, driver.current_stream()),
    }
    if device.on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            eager()
        calls["replay"] = graph.replay
    for backend, call in calls.items():
        call()
        issued, done = timed(call, device.drain)
        figures = {"us": issued, "done_us": done, "nodes": nodes}
        status = "ok" if work.right(nodes) else "the last launch gave a wrong result"
        yield {**row(f"launch-{nodes}", backend, **figures), "status": status}


def resident_bytes() -> int:
    """Bytes of memory that this process has in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def device_bytes(device: worker.Device) -> int | None:
    """Bytes in use on the device beside those that PyTorch's allocator holds; None on a CPU."""
    if not device.on_gpu:
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def exec_memory(nodes: int, device: worker.Device) -> Iterator[Row]:
    """What one exec costs, from many of one graph; ``us`` is the time of instantiating it.

    Host memory includes pgraph's own copy of the parameters.
    """
    driver = driver_of(device.torch)
    work = Work.on(device.torch, 1.0)
    torch.add(work.z, work.x, out=work.z)
    with recorded(driver, nodes) as make:
        made = [make()]  # what comes with the first is not one's own
        device.drain()
        before, resident, began = device_bytes(device), resident_bytes(), time.perf_counter()
        made += [make() for _ in range(EXECS)]
        device.drain()
        took, after, grown = time.perf_counter() - began, device_bytes(device), resident_bytes() - resident
    held = None if before is None or after is None else max(0, after - before) / EXECS
    yield row(
        f"exec-{nodes}",
        "pgraph",
        nodes=nodes,
        device_bytes=held,
        host_bytes=max(0, grown) / EXECS,
        us=took / EXECS * 1e6,
    )


def address(nodes: int, device: worker.Device) -> Iterator[Row]:
    """One exec on two sets of vectors in turn, so that every node changes; and on one, so that none does."""
    driver = driver_of(device.torch)
    sets = [Work.on(device.torch, value) for value in (1.0, 3.0)]
    torch.add(sets[0].z, sets[0].x, out=sets[0].z)
    made = exec_of(driver, nodes)
    right, rewritten = 0, 0
    for count in range(REPEATS):
        work = sets[count % 2]
        rewritten = made.launch(work.addresses, driver.current_stream())
        right += work.right(nodes)
    known, turns = [work.addresses for work in sets], iter(range(10**9))
    same, _ = timed(lambda: made.launch(known[0], driver.current_stream()), device.drain)
    changed, _ = timed(lambda: made.launch(known[next(turns) % 2], driver.current_stream()), device.drain)
    if right < REPEATS:
        status = f"{REPEATS - right} of {REPEATS} launches on other addresses gave wrong results"
    else:
        status = "ok"
    figures = {"launched_right": right, "launches": REPEATS, "rewritten": rewritten, "nodes": nodes}
    yield {**row(f"address-{nodes}", "pgraph", us=changed, unchanged_us=same, **figures), "status": status}


def malloc(device: worker.Device) -> Iterator[Row]:
    """Host time of one cuMemAlloc, each of fresh memory. CUDA only."""
    if not device.on_gpu:
        return
    from cuda.bindings import driver as cu

    torch.zeros(1, device=device.torch)
    for mb in MALLOC_MB:
        times, held = [], []
        for _ in range(REPEATS):
            began = time.perf_counter()
            error, pointer = cu.cuMemAlloc(mb * worker.MB)
            times.append((time.perf_counter() - began) * 1e6)
            assert error == cu.CUresult.CUDA_SUCCESS, error
            held.append(pointer)
        for pointer in held:
            cu.cuMemFree(pointer)
        yield row(f"malloc-{mb}", "eager", us=statistics.median(times))


class GraphedTrainer(worker.Trainer):
    """Each layer's forward and backward as CUDA graphs of PyTorch's own, on fixed buffers. CUDA only."""

    def __init__(self, spec: worker.Spec, device: worker.Device) -> None:
        super().__init__(spec, device)
        model, load = self.task.model, self.task.load
        shape = (load.batch, load.seq, load.llama.dim)
        rope = (model.cos[: load.seq], model.sin[: load.seq])
        samples = [
            (torch.zeros(shape, device=device.torch, dtype=self.task.dtype, requires_grad=True), *rope)
            for _ in model.blocks
        ]
        torch.cuda.make_graphed_callables(tuple(model.blocks), tuple(samples))


def graphs(layers: int, device: worker.Device, timeout: float) -> Iterator[Row]:
    """A training step of a large Llama, each way of graphs in a process of its own."""
    config = f"70b-{layers}" if device.on_gpu else "cpu-tiny"
    told: dict[str, Any] = {"config": config, "scope": "block", "device": device.torch.type}
    told |= {"warmup": 6, "steps": 10, "issue_steps": 5, "memory_steps": 5}
    for backend in GRAPH_BACKENDS:
        if not device.on_gpu and backend in ("graphed", "reduce-overhead", "inductor"):
            continue
        if backend == "graphed":
            figures = start_graphed({**told, "backend": "eager"}, timeout)
        else:
            figures = start_worker({**told, "backend": backend}, dict(os.environ), timeout)
        kept = ("status", "ms_per_step", "peak_allocated_mb", "peak_reserved_mb", "device_used_mb", "exec_mb")
        yield {
            **row(f"graphs-{config}", backend, "train", layers=layers if device.on_gpu else 2),
            **{key: figures[key] for key in kept if key in figures},
            "reserved_mb": figures.get("peak_reserved_mb"),
        }


def start_graphed(told: dict[str, Any], timeout: float) -> Figures:
    """`start_worker` for a `GraphedTrainer`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--graphed", json.dumps(told)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=_paths.REPO)
    except subprocess.TimeoutExpired:
        return {"status": f"timeout: no result after {timeout:.0f} s"}
    if done.returncode:
        return {"status": last_error(done.stderr) or f"exit status {done.returncode}"}
    return {"status": "ok", **json.loads(done.stdout.splitlines()[-1])}


def row(config: str, backend: str, mode: str = "infer", **figures: Any) -> Row:
    """A row with these figures and no others."""
    identity = {"bench": "claims", "config": config, "mode": mode, "scope": "block", "backend": backend}
    return {**identity, "status": "ok", **dict.fromkeys(schema.FIGURES["claims"]), **figures}


def rows(args: argparse.Namespace, device: worker.Device) -> Iterator[Row]:
    """Everything that was asked for."""
    per_size = {"launch": launch, "exec": exec_memory, "address": address}
    for measure in args.only:
        if measure == "malloc":
            yield from malloc(device)
        elif measure == "graphs":
            yield from graphs(args.layers, device, args.timeout)
        else:
            for nodes in args.nodes or NODES[measure]:
                yield from per_size[measure](nodes, device)


def main(argv: Sequence[str] | None = None) -> Path | None:
    """Measure, print, write; returns the result file's path."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    add("--nodes", nargs="+", type=int, default=None, help="sizes of the graphs; default: several")
    add("--layers", type=int, default=8, help="of the large Llama")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--timeout", type=float, default=300.0, help="seconds for one process")
    add("--out", default=None, help="JSON file or folder for the results")
    add("--graphed", default=None, help=argparse.SUPPRESS)  # one measurement of `GraphedTrainer`, as JSON
    args = parser.parse_args(argv)
    if args.graphed is not None:
        worker.Trainer = GraphedTrainer  # type: ignore[misc]
        print(json.dumps(worker.measure(worker.Spec(**json.loads(args.graphed)))))
        return None
    if min(args.nodes or [3]) < 3:
        parser.error("--nodes must be at least 3: a fill, one addition, a copy")
    header = schema.environment(cpu=args.device == "cpu")
    if header["gpu"] == "cpu":
        args.device = "cpu"
    device = worker.Device(args.device)
    path = schema.result_path("claims", header["gpu"], args.out)
    for one in rows(args, device):
        shown = {key: value for key, value in one.items() if value is not None and key not in schema.IDENTITY}
        print(f"{one['config']} {one['backend']}: {shown}", flush=True)
        schema.write(path, [one], header)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
