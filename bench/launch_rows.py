"""Host microseconds of one launch: by inputs, results and nodes, and by how many addresses have changed.

    python bench/launch_rows.py                          # the three sizes, and growth from 10 to 10,000 nodes
    python bench/launch_rows.py --sizes 300,100,1000 --growth

The work is a graph of one small kernel per node, the same for all: `pgraph` (ATen code), CUDA graph trees
(``cudagraphs``), and a `torch.cuda.CUDAGraph` that is replayed, which copies nothing in and returns nothing
new. ``nothing`` is a backend whose code gives back the same tensors at every call: what its calls take is
torch's own (Dynamo's guards, AOTAutograd's wrappers), and no backend can take less. What of pgraph's time
lies outside its own calls is torch's as well. ``results`` is a backend whose code computes nothing either,
and makes its results anew, as Inductor's code does. What it takes beyond ``nothing`` goes into their memory
and tensors, and a backend whose results are the caller's can hardly take less.

The device is drained before each group of calls. Changed addresses: between two calls so many of the inputs
are other tensors, and so many of the last results are kept, so that new ones lie elsewhere. A backend that
takes more than `SLOW_US` for a call, as one that records anew each time, is measured in few groups of two.

Results go to ``bench/results/launch-<gpu>.json``, the chart of growth beside them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401  (puts the checkout on sys.path)
import matplotlib
import schema
import torch
from backends import register_pgraph
from host_speed import on_fast_cores
from launch import Watched, native_times
from tabulate import tabulate
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from worker import Device

SIZES = ((10, 13, 13), (30, 20, 100), (300, 100, 1000))
CHANGED = (0, 10, 100)
GROWTH = (10, 30, 100, 300, 1000, 3000, 10000)
GROUP = 10  # calls between two drains
GROUPS, FEWEST = 30, 3
SLOW_US = 5000.0
SETS = 211
PRIMES = (2, 3, 5, 7)  # tensors of each input but the first, which has one in each set

Call = Callable[[Sequence[Tensor]], Any]


def program(inputs: int, results: int, nodes: int) -> Callable[..., tuple[Tensor, ...]]:
    """A function of so many tensors that runs one kernel per node and returns so many of their results."""
    returned = {(k + 1) * nodes // results - 1 for k in range(results)}

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        found, last = [], given[0]
        for node in range(nodes):
            last = torch.add(given[node % inputs], last)
            if node in returned:
                found.append(last)
        return tuple(found)

    return run


class Work:
    """Sets of inputs of which some tensors differ, taken in turn.

    They are more than pgraph takes for layers with an exec each: no launch finds what an earlier one found.

    Args:
        changed: per cent of the inputs, and of the results, that lie elsewhere at the next call.
    """

    def __init__(self, size: tuple[int, int, int], changed: int, device: torch.device) -> None:
        inputs, results, _ = size
        first = [torch.randn(64, device=device) for _ in range(inputs)]
        others = -(-inputs * changed // 100)
        pools = [
            [tensor, *(torch.randn(64, device=device) for _ in range(many - 1))]
            for tensor, many in zip(
                first[:others], itertools.chain([SETS], itertools.cycle(PRIMES)), strict=False
            )
        ]
        turns = range(SETS if changed else 1)
        self.sets = [[*(pool[turn % len(pool)] for pool in pools), *first[others:]] for turn in turns]
        self.kept = -(-results * changed // 100)

    def timed(self, call: Call, device: Device, groups: int) -> list[float]:
        """Host microseconds of a call, for each group of calls; a call that takes long is in few groups."""
        held: tuple[Tensor, ...] = ()
        count = 0

        def group(size: int = GROUP) -> float:
            nonlocal held, count
            device.drain()
            began = time.perf_counter()
            for _ in range(size):
                held = tuple(call(self.sets[count % len(self.sets)]) or ())[: self.kept]
                count += 1
            return (time.perf_counter() - began) / size * 1e6

        if min(group(2), group(2)) > SLOW_US:  # the better of two: the first call of all may compile
            return [group(2) for _ in range(FEWEST)]
        group()
        return on_fast_cores(group, groups)


def computed_once(again: Callable[[list[Any]], Any]) -> Any:
    """A compiler whose code computes its results at its first call.

    Args:
        again: what each call gives of them.
    """

    def compiler(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        made: list[Any] = []

        def code(args: list[Any]) -> Any:
            if not made:
                made.extend(graph(*args))
            args.clear()
            return again(made)

        code._boxed_call = True  # type: ignore[attr-defined]
        return code

    return compiler


def nothing(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Call:
    """A backend whose code computes its results once."""
    compiler = computed_once(lambda made: made)
    return aot_autograd(fw_compiler=compiler, inference_compiler=compiler)(gm, inputs)


def results(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Call:
    """A backend whose code computes its results once, and makes tensors like them at each call."""
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in inputs)
    empty = (
        torch._C._dynamo.guards._empty_strided_cuda if on_gpu else torch._C._dynamo.guards._empty_strided_cpu
    )
    layouts: list[Any] = []

    def again(made: list[Any]) -> list[Any]:
        if not layouts:
            layouts.extend((tuple(x.size()), x.stride(), x.dtype) for x in made)
        return [empty(*layout) for layout in layouts]

    compiler = computed_once(again)
    return aot_autograd(fw_compiler=compiler, inference_compiler=compiler)(gm, inputs)


def calls(size: tuple[int, int, int], device: Device, backends: Sequence[str]) -> dict[str, Call]:
    """Each backend's way to run the program, warmed up."""
    work = Work(size, 100, device.torch)
    run, made = program(*size), dict[str, Call]()
    torch._dynamo.reset()
    for name in backends:
        if name == "replay":
            graph = torch.cuda.CUDAGraph()
            run(*work.sets[0])
            with torch.cuda.graph(graph):
                kept = run(*work.sets[0])
            made[name] = lambda given, graph=graph, kept=kept: graph.replay()
            continue
        options = {"codegen": "aten"} | ({} if device.on_gpu else {"driver": "host"})
        compiled = torch.compile(
            run,
            backend={"nothing": nothing, "results": results}.get(name, name),
            dynamic=False,
            options=options if name == "pgraph" else None,
        )
        made[name] = lambda given, compiled=compiled: compiled(*given)
        for count in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            made[name](work.sets[count])
    return made


def measure(
    size: tuple[int, int, int], changes: Sequence[int], device: Device, backends: Sequence[str]
) -> list[dict[str, Any]]:
    """A row of figures for each backend and each share of addresses that change."""
    from pgraph.runtime import partition_runner, registry

    rows = []
    with torch.no_grad():
        made = calls(size, device, backends)
        for changed, (name, call) in itertools.product(changes, made.items()):
            work = Work(size, changed, device.torch)
            work.timed(call, device, 2)
            times = work.timed(call, device, GROUPS)
            row = {
                "size": size,
                "changed": changed,
                "backend": name,
                "us": statistics.median(times),
                "least": min(times),
                "most": max(times),
            }
            if name == "pgraph":
                row |= split(work, call, device, partition_runner.PartitionRunner, registry)
            rows.append(row)
    return rows


def split(work: Work, call: Call, device: Device, runner: Any, registry: Any) -> dict[str, float]:
    """What pgraph's time goes into, from further calls; each part is timed by itself."""
    live = [p for p in registry.live_capturable() if p.template() is not None]
    watched, real = Watched(), runner.__call__
    runner.__call__ = lambda self, args: watched.around(real, "runner")(self, args)
    try:
        outside = statistics.median(work.timed(call, device, GROUPS))
    finally:
        runner.__call__ = real
    before = sum(p.stats.launches for p in live), sum(p.stats.rewritten_nodes for p in live)
    for partition in live:
        native_times(partition, True)
    work.timed(call, device, GROUPS)
    launches = max(1, sum(p.stats.launches for p in live) - before[0])
    spent: dict[str, float] = {}
    for partition in live:
        for phase, ns in native_times(partition, False).items():
            spent[f"{phase} us"] = spent.get(f"{phase} us", 0.0) + ns / 1e3 / launches
    own = statistics.mean(watched.times["runner"]) if watched.times["runner"] else 0.0
    return {
        "torch us": max(0.0, outside - own),
        "runner us": max(0.0, own - sum(spent.values())),
        **spent,
        "rewritten": (sum(p.stats.rewritten_nodes for p in live) - before[1]) / launches,
    }


def stored(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as a result file has them."""
    return [
        {
            "bench": "launch",
            "config": "-".join(map(str, row["size"])) + f"-changed-{row['changed']}",
            "mode": "infer",
            "scope": "block",
            "backend": row["backend"],
            "status": "ok",
            **{key.replace(" ", "_"): value for key, value in row.items() if key not in ("size", "backend")},
        }
        for row in rows
    ]


def chart(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Microseconds over nodes, a line for each backend."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == name]
        axes.plot([row["size"][2] for row in mine], [row["us"] for row in mine], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="host microseconds of a call")
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the results."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--sizes",
        nargs="*",
        default=[",".join(map(str, size)) for size in SIZES],
        help="inputs,results,nodes",
    )
    add("--growth", nargs="*", type=int, default=list(GROWTH), help="nodes; 10 inputs and 10 results")
    add(
        "--backends",
        nargs="+",
        default=["replay", "nothing", "results", "cudagraphs", "pgraph"]
        if on_gpu
        else ["nothing", "results", "pgraph"],
    )
    add("--out", default=None, help="JSON file or folder for the results")
    args = parser.parse_args(argv)
    register_pgraph()
    device = Device("auto")
    header = schema.environment(cpu=not on_gpu)
    path = schema.result_path("launch", header["gpu"], args.out)
    rows: list[dict[str, Any]] = []
    grown: list[dict[str, Any]] = []
    wanted = [(tuple(int(n) for n in size.split(",")), CHANGED, rows) for size in args.sizes]
    wanted += [((10, min(10, nodes), nodes), (0,), grown) for nodes in args.growth]
    for size, changes, table in wanted:
        found = measure(size, changes, device, args.backends)
        print(tabulate(found, headers="keys", floatfmt=".1f", tablefmt="github", missingval="-"), flush=True)
        table += found
        schema.write(path, stored([*rows, *grown]), header)  # a stopped run keeps what it has
    if grown:
        chart(grown, path.with_suffix(".svg"))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
