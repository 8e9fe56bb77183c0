"""Rows are assigned through a mask.

`y[mask] = row` looks like one kernel. It turns the mask into positions first, and how many there are is
read on the host: error 900. `torch.where` does the same with a shape that is known.
"""

from __future__ import annotations

import torch
from _harness import Entry, calls, main, record
from torch import Tensor


def program(x: Tensor, row: Tensor) -> Tensor:
    y = x.sin()
    y[x[:, 0] > 0] = row
    return y * 2


def fixed(x: Tensor, row: Tensor) -> Tensor:
    y = torch.where(x[:, :1] > 0, row, x.sin())
    return y * 2


def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(64, 64, device=device), torch.randn(64, device=device)


def plain() -> None:
    record(program, *inputs(torch.device("cuda")))


ENTRY = Entry(
    symptom="error 900 in an indexed assignment, with no read in sight",
    cause="a mask as index hides a `nonzero`, whose size the host has to know",
    fix="`torch.where`, `masked_fill`, or integer indices",
    shows=r"operation not permitted when stream is capturing",
    plain=plain,
    program=calls(program, inputs),
    fixed=calls(fixed, inputs),
    on_gpu="bool-index",
    on_cpu="bool-index",
)

if __name__ == "__main__":
    main(ENTRY)
