"""Microseconds of a small compiled block where many are called in a row, beside what no backend can go below.

    python bench/launch_blocks.py                  # 48 Llama blocks 256 wide, inference, bf16
    python bench/launch_blocks.py --mode train     # training steps of 4 such blocks, optimizer included
    python bench/launch_blocks.py --config cpu-tiny --backends nothing pgraph

One process; each backend compiles the blocks of a model of its own with the same weights, and steps of all
backends take turns. Rows beside the backends:

- ``nothing``: a backend whose code gives back the same tensors at every call. What its calls take is torch's
  own: the module's call, Dynamo's guards, AOTAutograd's wrappers.
- ``replay``: Inductor's kernels in a `torch.cuda.CUDAGraph` for each block, replayed one after the other:
  no guards, no wrappers, no new memory.

"us" is the time of a step on the host's clock, from a drained device to a drained device, over the number
of blocks; "issue" until its calls have returned. In inference both are of the blocks alone: the embedding and
the head are left out. A step's first block gets another input each time. In training a step is forward, loss,
backward and AdamW on new data, and there is no ``replay``. Results go to
``bench/results/launch-blocks-<gpu>.json``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import _paths  # noqa: F401  (puts examples/ on sys.path)
import schema
import torch
from backends import compile_kwargs
from configs import WORKLOADS, workload
from launch_rows import computed_once, nothing
from llama import Llama
from tabulate import tabulate
from tasks import born
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from worker import Device, Spec, Trainer, quantile

INPUTS = 7  # in turn
SETTLE = 30  # steps before anything is timed

Step = Callable[[Tensor], Tensor]
CONFIGS = {"infer": "48x256", "train": "4x256"}
BACKENDS = {"infer": ["inductor", "reduce-overhead", "pgraph", "nothing", "replay"]}
BACKENDS["train"] = BACKENDS["infer"][:-1]


def model_of(config: str, device: Device) -> Llama:
    """The config's Llama, with the same weights each time."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.on_gpu else torch.float32
    with born(device.torch, dtype):
        return Llama(workload(config).llama).to_training(device.torch).eval()


def in_a_row(blocks: Sequence[Any], cos: Tensor, sin: Tensor, mark: bool) -> Step:
    """A step through all blocks."""

    def step(x: Tensor) -> Tensor:
        if mark:
            torch.compiler.cudagraph_mark_step_begin()
        for block in blocks:
            x = block(x, cos, sin)
        return x

    return step


def replayed(blocks: Sequence[Any], x: Tensor, cos: Tensor, sin: Tensor) -> Step:
    """A graph for each block, each reading what the one before has written."""
    graphs = []
    for block in blocks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x = block(x, cos, sin)
        graphs.append(graph)

    def step(_: Tensor) -> Tensor:
        for graph in graphs:
            graph.replay()
        return x

    return step


def steps(config: str, device: Device, backends: Sequence[str], inputs: Sequence[Tensor]) -> dict[str, Step]:
    """Each backend's step, warmed up; its result is compared with the uncompiled model's."""
    seq = workload(config).seq
    made: dict[str, Step] = {}
    plain = model_of(config, device)
    wanted = in_a_row(plain.blocks, plain.cos[:seq], plain.sin[:seq], False)(inputs[0])
    for name in backends:
        model = model_of(config, device)
        cos, sin = model.cos[:seq], model.sin[:seq]
        if name == "nothing":
            kwargs: Any = {"backend": nothing, "dynamic": False}
        else:
            kwargs = compile_kwargs("inductor" if name == "replay" else name, device.torch)
        for block in model.blocks:
            block.compile(**kwargs)
        step = in_a_row(model.blocks, cos, sin, name == "reduce-overhead")
        for count in range(SETTLE):
            step(inputs[count % INPUTS])
        if name == "replay":
            step = replayed(model.blocks, inputs[0], cos, sin)
        if name != "nothing":  # it gives back what the first block gave
            torch.testing.assert_close(step(inputs[0]), wanted, rtol=0.05, atol=0.05)
        made[name] = step
    return made


def nothing_in_training(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """As `nothing`, but each call gives new tensors on that memory: gradients are taken over, not copied."""
    compiler = computed_once(lambda made: [v.detach() if isinstance(v, Tensor) else v for v in made])
    return aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )(gm, inputs)


def training_steps(config: str, device: Device, backends: Sequence[str]) -> dict[str, Step]:
    """Each backend's training step, warmed up."""
    made: dict[str, Step] = {}
    for name in backends:
        idle = name == "nothing"
        trainer = Trainer(Spec(config=config, backend="eager" if idle else name), device)
        if idle:
            trainer.task.compile("block", backend=nothing_in_training, dynamic=False)
        for _ in range(SETTLE):
            trainer.step()
        if not idle:
            trainer.check()

        def step(_: Tensor, trainer: Trainer = trainer) -> Tensor:
            trainer.step()
            assert trainer.last is not None
            return trainer.last

        made[name] = step
    return made


def timed(made: dict[str, Step], inputs: Sequence[Tensor], device: Device, rounds: int) -> dict[str, Any]:
    """For each backend the seconds of its steps: (until it has returned, until the device has ended)."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for count in range(rounds):
        for name, step in made.items():
            for again in range(3):  # the first two warm what the other backends have pushed out
                x = inputs[(count + again) % INPUTS]
                device.drain()
                began = time.perf_counter()
                held = step(x)
                issued = time.perf_counter()
                device.drain()
                ended = time.perf_counter()
                del held
            times[name].append((issued - began, ended - began))
    return times


def rows_of(times: dict[str, Any], config: str, mode: str) -> list[dict[str, Any]]:
    """A row for each backend; microseconds of one block."""
    layers = workload(config).llama.layers
    rows = []
    for name, found in times.items():
        issue, whole = ([one[k] * 1e6 / layers for one in found] for k in (0, 1))
        rows.append(
            {
                "bench": "launch-blocks",
                "config": config,
                "mode": mode,
                "scope": "block",
                "backend": name,
                "status": "ok",
                "us": statistics.median(whole),
                "least": min(whole),
                "most": quantile(whole, 0.9),
                "issue_us": statistics.median(issue),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the results."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--mode", choices=list(CONFIGS), default="infer")
    add("--config", choices=list(WORKLOADS), default=None, help="default: 48x256 or 4x256; cpu-tiny on a CPU")
    add("--backends", nargs="+", default=None)
    add("--rounds", type=int, default=100, help="steps of each backend that are timed")
    add("--out", default=None, help="JSON file or folder for the results")
    args = parser.parse_args(argv)
    device = Device("auto")
    config = args.config or (CONFIGS[args.mode] if on_gpu else "cpu-tiny")
    backends = args.backends or (BACKENDS[args.mode] if on_gpu else ["nothing", "pgraph"])
    torch._dynamo.config.recompile_limit = 8 * len(backends)  # they share the blocks' code
    load = workload(config)
    dtype = torch.bfloat16 if device.on_gpu else torch.float32
    shape = (load.batch, load.seq, load.llama.dim)
    inputs = [torch.randn(shape, device=device.torch, dtype=dtype) for _ in range(INPUTS)]
    if args.mode == "train":
        times = timed(training_steps(config, device, backends), inputs, device, args.rounds)
    else:
        with torch.no_grad():
            times = timed(steps(config, device, backends, inputs), inputs, device, args.rounds)
    rows = rows_of(times, config, args.mode)
    shown = [{key: row[key] for key in ("backend", "us", "least", "most", "issue_us")} for row in rows]
    print(tabulate(shown, headers="keys", floatfmt=".1f", tablefmt="github"))
    header = schema.environment(cpu=not on_gpu)
    path = schema.result_path("launch-blocks", header["gpu"], args.out)
    schema.write(path, rows, header)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
