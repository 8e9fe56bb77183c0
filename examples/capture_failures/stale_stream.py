"""A launcher remembers the stream that was current when it was made.

In a capture the current stream is another one. The kernel goes to the old stream, runs once and is not
recorded; PyTorch warns that the graph is empty, and every replay hands out what the capture left. pgraph
sees that the op has a result and left no node. A launcher has to ask for the stream at each launch.
"""

from __future__ import annotations

import functools

import torch
from _harness import UNSHOWN, Entry, calls, main
from torch import Tensor


@functools.cache
def remembered(device: torch.device) -> torch.cuda.Stream:
    """The mistake: only the first call asks."""
    return torch.cuda.current_stream(device)


@torch.library.custom_op("capture_failures::tripled_on_old_stream", mutates_args=())
def tripled_on_old_stream(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    if x.is_cuda:
        with torch.cuda.stream(remembered(x.device)):
            torch.mul(x, 3, out=y)
    return y if x.is_cuda else x * 3


@torch.library.custom_op("capture_failures::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.mul(x, 3, out=y)
    return y


@tripled_on_old_stream.register_fake
@tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def program(x: Tensor) -> Tensor:
    return tripled_on_old_stream(x)


def fixed(x: Tensor) -> Tensor:
    return tripled(x)


def inputs(device: torch.device) -> tuple[Tensor]:
    return (torch.randn(64, 64, device=device),)


def plain() -> None:
    x = torch.ones(64, 64, device="cuda")
    program(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = program(x)
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    print(f"replayed on fives, the result is {y[0, 0].item()}, not 15")


ENTRY = Entry(
    symptom='a warning "The CUDA Graph is empty", or nothing at all; replays change nothing',
    cause="a launcher uses the stream that was current when it was made",
    fix="ask for the current stream at each launch",
    shows=r"The CUDA Graph is empty",
    plain=plain,
    program=calls(program, inputs),
    fixed=calls(fixed, inputs),
    on_gpu="not-recorded",
    on_cpu=UNSHOWN,
)

if __name__ == "__main__":
    main(ENTRY)
