"""Memory runs out while capturing, although eager fits easily.

Each CUDA graph keeps the peak of its own program for itself, besides the pool that eager uses: here one
graph per shape, and a limit that eager never comes near. pgraph captures on addresses without memory
behind them, and allocates at each launch from the allocator that eager uses; what a recording keeps is
the driver's few kilobytes per node.
"""

from __future__ import annotations

from typing import Any

import torch
from _harness import CAPTURED, Entry, Trial, main, record
from torch import Tensor

SHAPES = 6
LIMIT = 448 << 20  # bytes; eager needs about 130 MiB


def program(x: Tensor) -> Tensor:
    h = x.sin()
    h = h.cumsum(0)
    h = h.cos()
    return h.sum(0)


def batch(device: torch.device, number: int) -> Tensor:
    """About 32 MiB on a GPU, and another shape for each number."""
    rows = 1024 if device.type == "cuda" else 16
    return torch.randn(rows, 8192 - 32 * number, device=device)


def start(device: torch.device) -> Trial:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        limit_memory(torch.cuda.memory_reserved() + LIMIT)

    def step(run: Any, number: int) -> list[Tensor]:
        return [run(batch(device, shape)) for shape in range(SHAPES)]

    return Trial(program, step)


def limit_memory(nbytes: int) -> None:
    """Only this process's allocator is limited: others on the GPU keep their memory."""
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)


def finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)


def plain() -> None:
    device = torch.device("cuda")
    limit_memory(LIMIT)
    for shape in range(SHAPES):
        program(batch(device, shape))
    print(f"eager peak: {torch.cuda.max_memory_reserved() >> 20} MiB of {LIMIT >> 20}")
    graphs = []
    for shape in range(SHAPES):
        graphs.append((*record(program, x := batch(device, shape)), x))
        print(f"{len(graphs)} graphs: {torch.cuda.memory_reserved() >> 20} MiB reserved")


ENTRY = Entry(
    symptom="out of memory while capturing",
    cause="every graph keeps a pool of its own, and the warm-up's memory is not given back to it",
    fix="share a pool, free what the warm-up left; with pgraph, nothing",
    shows=r"out of memory",
    plain=plain,
    program=start,
    fixed=start,
    on_gpu=CAPTURED,
    on_cpu=CAPTURED,
    finish=finish,
    why_captured="A recording holds no memory for tensors; a launch allocates what eager would.",
)

if __name__ == "__main__":
    main(ENTRY)
