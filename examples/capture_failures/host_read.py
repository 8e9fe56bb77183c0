"""A value is read on the host in the middle of the program.

`.item()`, `.tolist()`, `.cpu()` and an `if` on a tensor wait for the device. A stream that is being
captured has run nothing yet, so there is nothing to wait for: error 900. Kept in a tensor, the value
never leaves the device.
"""

from __future__ import annotations

import torch
from _harness import Entry, calls, main, record
from torch import Tensor


def program(x: Tensor) -> Tensor:
    peak = x.abs().max().item()
    return (x / peak).sin()


def fixed(x: Tensor) -> Tensor:
    peak = x.abs().max()
    return (x / peak).sin()


def inputs(device: torch.device) -> tuple[Tensor]:
    return (torch.randn(64, 64, device=device),)


def plain() -> None:
    record(program, *inputs(torch.device("cuda")))


ENTRY = Entry(
    symptom="error 900, operation not permitted when stream is capturing",
    cause="`.item()`, `.cpu()`, `.tolist()` or an `if` on a tensor makes the host wait",
    fix="keep the value in a tensor",
    shows=r"operation not permitted when stream is capturing",
    plain=plain,
    program=calls(program, inputs),
    fixed=calls(fixed, inputs),
    on_gpu="graph-break",
    on_cpu="graph-break",
)

if __name__ == "__main__":
    main(ENTRY)
