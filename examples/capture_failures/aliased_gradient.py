"""Gradients of several micro-batches are kept, and all turn out to be the last one.

What a graph returns is its own memory, and the next replay writes there. Whoever keeps a result, adds it
up later or hands it to an optimizer sees other numbers than it was given. There is no error. What pgraph
returns are ordinary tensors, new at each launch.
"""

from __future__ import annotations

from typing import Any

import torch
from _harness import CAPTURED, Entry, Trial, main, record
from torch import Tensor

BATCHES = 4


def program(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() ** 2).mean()


def start(device: torch.device) -> Trial:
    def step(run: Any, number: int) -> list[Tensor]:
        w = torch.randn(64, 64, device=device, requires_grad=True)
        batches = [torch.randn(32, 64, device=device) for _ in range(BATCHES)]
        grads = [torch.autograd.grad(run(x, w), w)[0] for x in batches]
        return [sum(grads[1:], grads[0]), *grads]

    return Trial(program, step)


def plain() -> None:
    w = torch.randn(64, 64, device="cuda", requires_grad=True)
    x = torch.randn(32, 64, device="cuda")
    graph, (grad,) = record(lambda: torch.autograd.grad(program(x, w), w))
    kept, expected = [], []
    for _ in range(BATCHES):
        batch = torch.randn(32, 64, device="cuda")
        x.copy_(batch)
        graph.replay()
        kept.append(grad)
        expected.append(torch.autograd.grad(program(batch, w), w)[0])
    for number, (got, want) in enumerate(zip(kept, expected, strict=True)):
        print(f"micro-batch {number}:", "right" if torch.allclose(got, want, atol=1e-4) else "wrong gradient")


ENTRY = Entry(
    symptom="wrong gradients and no error, when micro-batches are accumulated",
    cause="results lie in the graph's memory, which the next replay overwrites",
    fix="clone what is kept; with pgraph, nothing",
    shows=r"micro-batch 0: wrong gradient\n(.*wrong gradient\n)*micro-batch 3: right",
    plain=plain,
    program=start,
    fixed=start,
    on_gpu=CAPTURED,
    on_cpu=CAPTURED,
    why_captured="Results are ordinary tensors, allocated for the launch that writes them.",
)

if __name__ == "__main__":
    main(ENTRY)
