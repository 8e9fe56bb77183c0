"""Milliseconds of a capture, by its parts and by the nodes of the partition.

    python bench/captures.py                       # partitions of 100, 300, 1,000 and 3,000 nodes
    python bench/captures.py --nodes 1000 --profile
    python bench/captures.py --models timm/resnet50 hf/bert --modes train   # and those of real models

The partition is a chain of small ops with 20 inputs: temporaries, views, products, and a result saved after
each tenth node. `pgraph.capture.build` captures it twice, matches, plans and instantiates. All its nodes are
ops that PyTorch dispatches; partitions of real models, those of `coverage.py`, hold kernels that Inductor's
code launches by itself, too. Each moment counts for the innermost part only:

- ops: what a driver does to record the ops (the host driver imitates them, at hundreds of times their cost)
- record: the program's own code, PyTorch's dispatch of it, and watching ops and allocations
- code: what of that is there without pgraph: two runs of the chain's code in a dispatch mode that does
  nothing, its ops left out
- read: the nodes of both graphs as bytes
- match, plan, instantiate: as they are called
- memory: ghost memory, the allocator's state
- garbage: Python's collections meanwhile, mostly of what the imitated ops leave behind
- rest: what is none of these

*own* is all of them but the ops and the garbage, *net* that without the code (of a model the code is not
measured). *uncaptured* is one ordinary run of the chain's code, which a capture runs twice. Times are medians
of several captures, each on a core that is fast then; a model's are without the program that launches run.
Results go to ``bench/results/captures-<gpu>.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _paths  # noqa: F401  (puts the checkout on sys.path)
import schema
import torch
import zoo
from backends import CODEGENS, register_pgraph
from coverage_subject import Job, Subject
from coverage_time import Stepper, warm_up
from host_speed import on_fast_cores
from tabulate import tabulate
from torch import Tensor
from worker import Device

from pgraph.capture.recorder import uncollected
from pgraph.compat import UnwrappedMode

NODES = (100, 300, 1000, 3000)
INPUTS = 20
SAVED = 10  # a result for so many nodes
PARTS = ("ops", "record", "read", "match", "plan", "instantiate", "memory", "garbage", "rest")
FOREIGN = ("ops", "garbage")
SUMS = ("own", "least", "most", "code", "net", "uncaptured")


def program(nodes: int) -> Callable[[list[Any]], list[Tensor]]:
    """The code of a partition: takes a list of `INPUTS` 8x8 float32 tensors and empties it."""

    def run(args: list[Any]) -> list[Tensor]:
        given, results = list(args), []
        args.clear()
        last = given[0]
        for node in range(nodes):
            other = given[node % INPUTS]
            match node % 5:
                case 0:
                    last = torch.add(last, other)
                case 1:
                    last = torch.relu(last)
                case 2:
                    last = torch.mul(last.t(), other.view(64)[:8])
                case 3:
                    last = torch.mm(last, other)
                case _:
                    last = torch.sub(last, other, alpha=2)
            if node % SAVED == SAVED - 1:
                results.append(last)
        return [*results, last]

    return run


class Clock:
    """Seconds by part; a part that begins within another one interrupts it."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._stack = ["rest"]
        self._since = time.perf_counter()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def stop(self) -> dict[str, float]:
        """The seconds of each part."""
        self._turn()
        return self.seconds

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block counts for this part."""
        self._turn()
        self._stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def collecting(self, phase: str, info: dict[str, int]) -> None:
        """What `gc.callbacks` calls before and after each collection."""
        self._turn()
        if phase == "start":
            self._stack.append("garbage")
        elif self._stack[-1] == "garbage":
            self._stack.pop()

    def around(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`call`, counted for this part."""
        now = time.perf_counter

        # Once for each op: `_turn` written out twice takes half the time.
        def timed(*args: Any, **kwargs: Any) -> Any:
            seconds, stack, began = self.seconds, self._stack, now()
            seconds[stack[-1]] += began - self._since
            self._since = began
            stack.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                ended = now()
                seconds[stack.pop()] += ended - self._since
                self._since = ended

        return timed


@contextlib.contextmanager
def watched(driver: Any, clock: Clock) -> Iterator[None]:
    """Have the clock see the parts of captures by this driver."""
    from pgraph.capture import build

    if driver.name == "cuda":
        from pgraph.drivers.cuda.ghost import CudaArena as Arena
        from pgraph.drivers.cuda.session import CudaSession as Session
    else:
        from pgraph.drivers.host.arena import HostArena as Arena
        from pgraph.drivers.host.driver import HostSession as Session

    places: list[tuple[Any, str, str]] = [
        (build, "record", "record"),
        (build, "match", "match"),
        (build, "_template", "plan"),
        (Session, "run_op", "ops"),
        (Session, "end", "read"),
        (Arena, "__init__", "memory"),
        (Arena, "close", "memory"),
        (type(driver), "instantiate", "instantiate"),
        (type(driver), "framework_ranges", "memory"),
        (type(driver), "workspaces", "memory"),
        (type(driver), "lends_workspace", "memory"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, part in places:
            real = getattr(owner, name)
            stack.callback(setattr, owner, name, real)
            setattr(owner, name, clock.around(real, part))
        gc.callbacks.append(clock.collecting)
        stack.callback(gc.callbacks.remove, clock.collecting)
        yield


def capture(driver: Any, code: Any, inputs: Sequence[Tensor]) -> tuple[Any, dict[str, float]]:
    """One capture; the seconds of its parts."""
    from pgraph.capture.build import build
    from pgraph.drivers.execs import Shelf
    from pgraph.launch.guards import guards_of
    from pgraph.launch.native import native_program
    from pgraph.launch.program import program_of

    guards = guards_of(inputs, driver.device, driver.alignment, {})
    assert guards is not None
    alignments = [guard.mask + 1 for guard in guards.tensors]
    clock = Clock()
    with torch.no_grad(), watched(driver, clock):
        clock.start()
        built = build(driver, code, inputs, alignments, shelf=Shelf())
        with clock.part("instantiate"):
            native_program(program_of(built, guards))
        return built, clock.stop()


class Idle(UnwrappedMode):
    """Calls each op, as a part of its own for the clock, and does no more."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._call = clock.around(lambda func, args, kwargs: func(*args, **kwargs), "ops")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


@torch.compiler.disable  # as a capture is
def idle(code: Any, inputs: Sequence[Tensor]) -> float:
    """Seconds of two runs of the code in a dispatch mode, those of its ops left out."""
    clock = Clock()
    with torch.no_grad(), uncollected():
        clock.start()
        for _ in range(2):
            given = list(inputs)
            with Idle(clock):
                code(given)
        return clock.stop()["rest"]


def measure(driver: Any, nodes: int, rounds: int) -> dict[str, Any]:
    """A row of figures: milliseconds, medians of so many captures."""
    code = program(nodes)
    inputs = [torch.randn(8, 8, device=driver.device) for _ in range(INPUTS)]

    def uncaptured() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            code(list(inputs))
        return time.perf_counter() - began

    def captured() -> tuple[int, dict[str, float]]:
        built, seconds = capture(driver, code, inputs)
        return len(built.template.nodes), seconds

    uncaptured()  # cuBLAS's handle cannot be made within a capture
    capture(driver, code, inputs)  # whatever is made once is made now
    plain = on_fast_cores(uncaptured, rounds)
    idle(code, inputs)
    code_ms = statistics.median(on_fast_cores(lambda: idle(code, inputs), rounds)) * 1e3
    made = on_fast_cores(captured, rounds)
    uncaptured_ms = statistics.median(plain) * 1e3
    return figures(f"chain of {nodes}", made, uncaptured_ms, code_ms)


def figures(
    partition: str,
    made: Sequence[tuple[int, dict[str, float]]],
    uncaptured_ms: float | None = None,
    code_ms: float | None = None,
) -> dict[str, Any]:
    """A row: milliseconds, medians of captures of one partition.

    Args:
        made: its nodes, and the seconds of each part.
    """
    recorded, found = made[0][0], [seconds for _, seconds in made]
    parts = {part: statistics.median(one[part] for one in found) * 1e3 for part in PARTS}
    own = [sum(seconds for part, seconds in one.items() if part not in FOREIGN) * 1e3 for one in found]
    return {
        "partition": partition,
        "nodes": recorded,
        **parts,
        "own": statistics.median(own),
        "least": min(own),
        "most": max(own),
        "own us per node": statistics.median(own) * 1e3 / recorded,
        "code": code_ms,
        "net": statistics.median(own) - code_ms if code_ms is not None else None,
        "uncaptured": uncaptured_ms,
    }


def profiled(capture: Callable[[], object], shown: int = 40) -> None:
    """Print the functions of one further capture by their own time."""
    with cProfile.Profile() as profile:
        capture()
    pstats.Stats(profile).sort_stats("tottime").print_stats(shown)


def of_model(job: Job, rounds: int, profile: bool = False) -> list[dict[str, Any]]:
    """A row for each partition of a model that is captured while it warms up, in that order."""
    from pgraph.drivers.execs import Shelf
    from pgraph.errors import PgraphError
    from pgraph.runtime import admission

    real, found = admission.build, list[dict[str, Any]]()

    def build(driver: Any, *args: Any, **settings: Any) -> Any:
        def again() -> tuple[int, dict[str, float]]:
            clock = Clock()
            with watched(driver, clock):
                clock.start()
                made = real(driver, *args, **{**settings, "shelf": Shelf()})  # nothing is known of it
                return len(made.template.nodes), clock.stop()

        built = real(driver, *args, **settings)
        if built is not None and not built.computed:
            with contextlib.suppress(PgraphError):
                name = f"{job.model} {job.mode} {len(found)}"
                found.append(figures(name, on_fast_cores(again, rounds)))
                if profile:
                    profiled(again)
        return built

    admission.build = build
    try:
        warm_up(job, Stepper(job, Subject(job)), Device(job.device))
    finally:
        admission.build = real
    return found


def stored(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as a result file has them."""
    return [
        {
            "bench": "captures",
            "config": row["partition"],
            "mode": "infer",
            "scope": "block",
            "backend": "pgraph",
            "status": "ok",
            "nodes": row["nodes"],
            **{f"{name}_ms": row[name] for name in (*PARTS, *SUMS)},
        }
        for row in rows
    ]


def device_driver() -> Any:
    """The driver of the first GPU, or the host's."""
    if torch.cuda.is_available():
        from pgraph.drivers.cuda.driver import CudaDriver

        return CudaDriver(0)
    from pgraph.drivers.host.driver import HostDriver

    return HostDriver()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", nargs="+", type=int, default=list(NODES))
    add("--rounds", type=int, default=5, help="captures of which the median is taken")
    add("--profile", action="store_true", help="list the functions of a further capture by their own time")
    add("--out", default=None, help="JSON file or folder for the results")
    add(
        "--models", nargs="+", default=[], metavar="PATTERN", help="models whose partitions are measured, too"
    )
    add("--modes", nargs="+", choices=schema.CHOICES["mode"], default=["train"], help="of the models")
    add("--codegen", choices=CODEGENS, default="auto", help="pgraph's code generator for the models")
    args = parser.parse_args(argv)
    driver = device_driver()
    rows = [measure(driver, nodes, args.rounds) for nodes in args.nodes]
    where = {"device": driver.device.type, "driver": driver.name, "codegen": args.codegen}
    if args.models:
        register_pgraph()
    for entry in zoo.select(args.models) if args.models else ():
        for mode in args.modes:
            torch._dynamo.reset()
            rows += of_model(Job("time", entry.name, mode, "pgraph", **where), args.rounds, args.profile)
    print(tabulate(rows, headers="keys", floatfmt=".2f", tablefmt="github"))
    header = schema.environment(cpu=not torch.cuda.is_available())
    path = schema.write(schema.result_path("captures", header["gpu"], args.out), stored(rows), header)
    print(f"wrote {path}")
    if args.profile:
        inputs = [torch.randn(8, 8, device=driver.device) for _ in range(INPUTS)]
        profiled(lambda: capture(driver, program(args.nodes[-1]), inputs))


if __name__ == "__main__":
    main()
