"""The process hangs when it leaves, because a graph with a collective is still alive.

A graph that has recorded NCCL work keeps the communicator busy; `destroy_process_group` waits for the
graph, and the graph for the end of the process. pgraph records no collective: it runs between two
launches, and recordings do not keep the process group. Reduced outside the compiled part, it does not
cut it either.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from _harness import Entry, Trial, main, record
from torch import Tensor

RANK = "CAPTURE_FAILURES_RANK"
PORT = "CAPTURE_FAILURES_PORT"


def program(x: Tensor) -> Tensor:
    y = x.sin()
    dist.all_reduce(y)
    return y.cos()


def before(x: Tensor) -> Tensor:
    return x.sin()


def alone(device: torch.device) -> None:
    """A process group of one."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def start(device: torch.device) -> Trial:
    alone(device)
    return Trial(program, lambda run, number: [run(torch.randn(64, 64, device=device))])


def repaired(device: torch.device) -> Trial:
    def step(run: Any, number: int) -> list[Tensor]:
        y = run(torch.randn(64, 64, device=device))
        dist.all_reduce(y)
        return [y.cos()]

    alone(device)
    return Trial(before, step)


def finish() -> None:
    """With every recording of pgraph alive."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank(number: int) -> None:
    """One of two processes: capture a collective, and leave in the usual order."""
    torch.cuda.set_device(number)
    address = f"tcp://127.0.0.1:{os.environ[PORT]}"
    dist.init_process_group("nccl", init_method=address, rank=number, world_size=2)
    x = torch.ones(1024, device="cuda")
    graph, _ = record(dist.all_reduce, x)
    graph.replay()
    torch.cuda.synchronize()
    print(f"rank {number}: replayed, leaving", flush=True)
    dist.destroy_process_group()
    print(f"rank {number}: left", flush=True)


def plain() -> None:
    if RANK in os.environ:
        rank(int(os.environ[RANK]))
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment = {**os.environ, PORT: str(probe.getsockname()[1])}
    command = [sys.executable, __file__, "--plain"]
    ranks = [subprocess.Popen(command, env={**environment, RANK: str(n)}) for n in range(2)]
    for process in ranks:
        process.wait()  # whoever started this one sees to the time


ENTRY = Entry(
    symptom="the process does not end (`destroy_process_group` waits for ever)",
    cause="a graph with a collective in it is alive when the process group goes",
    fix="drop the graphs first; with pgraph nothing, or reduce outside the compiled part",
    shows=r"it hangs",
    plain=plain,
    program=start,
    fixed=repaired,
    on_gpu="collective",
    on_cpu="collective",
    gpus=2,
    seconds=90,
    finish=finish,
)

if __name__ == "__main__":
    main(ENTRY)
