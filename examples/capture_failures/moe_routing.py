"""A mixture of experts sends each token to its expert.

How many tokens an expert gets depends on the data, and the host has to know it to size the tensors:
`nonzero` waits for the device. With every expert applied to every token and a mask over the results, all
shapes are fixed. (Where that costs too much: a capacity per expert, with padding.)
"""

from __future__ import annotations

import torch
from _harness import Entry, calls, main, record
from torch import Tensor

EXPERTS = 4


def program(x: Tensor, gate: Tensor, experts: Tensor) -> Tensor:
    choice = (x @ gate).argmax(-1)
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        tokens = (choice == number).nonzero().squeeze(1)
        out = out.index_add(0, tokens, (x[tokens] @ experts[number]).relu())
    return out


def fixed(x: Tensor, gate: Tensor, experts: Tensor) -> Tensor:
    choice = (x @ gate).argmax(-1)
    every = torch.matmul(x, experts).relu()
    mine = choice == torch.arange(EXPERTS, device=x.device)[:, None]
    return torch.where(mine[:, :, None], every, 0).sum(0)


def inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((48, 16), (16, EXPERTS), (EXPERTS, 16, 16))
    x, gate, experts = (torch.randn(shape, device=device) for shape in shapes)
    return x, gate, experts


def plain() -> None:
    record(program, *inputs(torch.device("cuda")))


ENTRY = Entry(
    symptom="error 900 where tokens are routed",
    cause="a shape depends on data (`nonzero`, `masked_select`, `unique`)",
    fix="masks, padding or a fixed capacity",
    shows=r"operation not permitted when stream is capturing",
    plain=plain,
    program=calls(program, inputs),
    fixed=calls(fixed, inputs),
    on_gpu="graph-break",
    on_cpu="graph-break",
)

if __name__ == "__main__":
    main(ENTRY)
