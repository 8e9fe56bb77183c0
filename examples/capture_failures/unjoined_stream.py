"""Work is sent to a side stream, and nobody waits for it before the capture ends.

A stream that waits for a captured one is captured too. All of them have to come back to the stream on
which the capture began: error 904 at the end of it otherwise. Here a layer notes a statistic on the
side, to be read at the end of the epoch.

Joining is the fix, for pgraph as for plain CUDA graphs; here the statistic stays on the current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _harness import UNSHOWN, Entry, Trial, calls, main, record
from torch import Tensor


@functools.cache
def side() -> tuple[torch.cuda.Stream, Tensor, Tensor]:
    """The stream, a copy of the activations for it to read, and where the statistic goes."""
    return torch.cuda.Stream(), torch.empty(64, 64, device="cuda"), torch.zeros((), device="cuda")


@torch.library.custom_op("capture_failures::doubled_and_noted", mutates_args=())
def doubled_and_noted(x: Tensor) -> Tensor:
    if x.is_cuda:
        stream, seen, largest = side()
        seen.copy_(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            largest.copy_(seen.abs().max())
    return x * 2


@doubled_and_noted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def program(x: Tensor) -> Tensor:
    return doubled_and_noted(x.sin()).cos()


def fixed(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.sin()
    return (h * 2).cos(), h.abs().max()


def inputs(device: torch.device) -> tuple[Tensor]:
    return (torch.randn(64, 64, device=device),)


def start(device: torch.device) -> Trial:
    def step(run: Callable[..., Any], number: int) -> list[Tensor]:
        y = run(*inputs(device))
        torch.cuda.synchronize()
        return [y, side()[2].clone()]

    return Trial(program, step)


def plain() -> None:
    record(program, *inputs(torch.device("cuda")))


ENTRY = Entry(
    symptom="error 904, capturing stream has unjoined work",
    cause="a side stream was forked and does not come back before the capture ends",
    fix="join it by an event (plain graphs), or do the work on the current stream",
    shows=r"capturing stream has unjoined work",
    plain=plain,
    program=start,
    fixed=calls(fixed, inputs),
    on_gpu="capture-lost",
    on_cpu=UNSHOWN,
)

if __name__ == "__main__":
    main(ENTRY)
