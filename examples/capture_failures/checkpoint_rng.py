"""Activation checkpointing around dropout.

To draw the same numbers twice, checkpointing saves the generator's seed and state on the host, and in a
capture nobody may ask for them. (`torch.utils.checkpoint` itself was seen to get along with
a capture under torch 2.11; checkpointing that keeps its own books does not.) A capture that fails like this
can leave the generator unusable, too.

With Inductor's code (pgraph's default) there is nothing to do: seeds are drawn before the graph, and the
recomputation reads the same seeds. As plain ATen ops, or with another compiler in front, the numbers are
better drawn outside the region and passed in.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from _harness import CAPTURED, Entry, Trial, main, record
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def block(x: Tensor, w: Tensor, noise: Tensor) -> Tensor:
    return functional.dropout(x * w, 0.5, training=True)


def block_with_given_noise(x: Tensor, w: Tensor, noise: Tensor) -> Tensor:
    return torch.where(noise < 0.5, x * w, 0) * 2


def program(x: Tensor, w: Tensor, noise: Tensor) -> Tensor:
    return checkpoint(block, x, w, noise, use_reentrant=False)


def fixed(x: Tensor, w: Tensor, noise: Tensor) -> Tensor:
    return checkpoint(block_with_given_noise, x, w, noise, use_reentrant=False)


def inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    x, noise = torch.randn(64, 64, device=device), torch.rand(64, 64, device=device)
    return x, torch.ones(64, device=device, requires_grad=True), noise


def start(fn: Any, device: torch.device) -> Trial:
    def step(run: Any, number: int) -> list[Tensor]:
        """Compilers draw other numbers than eager; what counts is that forward and backward agree."""
        x, w, noise = inputs(device)
        y = run(x, w, noise)
        (grad,) = torch.autograd.grad(y.sum(), w)
        dropped = (y == 0).float().mean()
        return [torch.isclose(grad, y.sum(0), atol=1e-3).float(), ((dropped - 0.5).abs() < 0.1).float()]

    return Trial(fn, step)


def plain() -> None:
    x, w, noise = inputs(torch.device("cuda"))
    generator = torch.cuda.default_generators[0]

    def with_own_books() -> Tensor:
        """The books that checkpointing by hand keeps: seed and state, to draw the same again later."""
        remembered = torch.cuda.initial_seed(), generator.clone_state()
        y = block(x, w, noise)
        assert remembered
        return y

    record(with_own_books)


ENTRY = Entry(
    symptom="an error that `current_seed` or `clone_impl` cannot be called during a capture",
    cause="checkpointing by hand saves the generator's seed and state on the host",
    fix="draw the numbers outside and pass them in; with Inductor's code, nothing",
    shows=r"(current_seed|clone_impl)",
    plain=plain,
    program=functools.partial(start, program),
    fixed=functools.partial(start, fixed),
    on_gpu=CAPTURED,
    on_cpu="rng-state",
    why_captured="Seeds are drawn before the graph; the recomputation reads the same seeds.",
)

if __name__ == "__main__":
    main(ENTRY)
