"""A tensor is copied from ordinary host memory inside the capture.

Such a copy waits for the device. From pinned memory it would not, but a graph keeps the host address and
copies whatever lies there at each replay. pgraph leaves copies between devices outside; made once, or
before the compiled part, they cut nothing.
"""

from __future__ import annotations

import torch
from _harness import UNSHOWN, Entry, calls, main, record
from torch import Tensor


def program(x: Tensor, table: Tensor) -> Tensor:
    return (x.sin() + table.to(x.device)).cos()


def fixed(x: Tensor, table: Tensor) -> Tensor:
    return (x.sin() + table).cos()


def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(64, 64, device=device), torch.arange(64.0)


def moved(device: torch.device) -> tuple[Tensor, Tensor]:
    x, table = inputs(device)
    return x, table.to(device)


def plain() -> None:
    record(program, *inputs(torch.device("cuda")))


ENTRY = Entry(
    symptom="an error that the copy between CPU and GPU needs pinned memory, or error 900",
    cause="`.to(device)`, `torch.tensor(..., device=...)` or `.cpu()` copies from or to pageable memory",
    fix="copy before the captured part",
    shows=r"(Cannot copy between CPU and CUDA tensors|operation not permitted when stream is capturing)",
    plain=plain,
    program=calls(program, inputs),
    fixed=calls(fixed, moved),
    on_gpu="device-copy",
    on_cpu=UNSHOWN,
)

if __name__ == "__main__":
    main(ENTRY)
