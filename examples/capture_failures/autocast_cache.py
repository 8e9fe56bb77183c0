"""Autocast around a capture.

Autocast keeps the low-precision copy of a weight until its block ends. Made before the capture, the copy
is taken from the cache and the cast is in no graph: replays go on with the weights of that day. PyTorch's
`make_graphed_callables` refuses for this reason. In code compiled for pgraph the cast is an op like any
other, run at each launch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from _harness import CAPTURED, Entry, Trial, main
from torch import Tensor, nn


def program(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return (x @ w).sin() @ w


def uncached(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        return (x @ w).sin() @ w


def start(fn: Any, device: torch.device) -> Trial:
    w = torch.randn(64, 64, device=device, requires_grad=True)

    def step(run: Any, number: int) -> list[Tensor]:
        result = run(torch.randn(32, 64, device=device), w)
        with torch.no_grad():
            w.mul_(1.5)  # the next step has to see it
        return [result.detach()]

    return Trial(fn, step)


def plain() -> None:
    layer, x = nn.Linear(64, 64, device="cuda"), torch.randn(32, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        layer(x)
        with torch.no_grad():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            layer.weight.mul_(3)
            layer.bias.mul_(3)
            graph.replay()
            stale = y.clone()
            torch.clear_autocast_cache()
            wrong = (stale - layer(x)).abs().max().item()
        print(f"torch.cuda.graph: after an update of the weights, replays are off by {wrong:.2g}")
        torch.cuda.make_graphed_callables(layer, (x,))


ENTRY = Entry(
    symptom="an error about autocast caching; without it, replays with yesterday's weights",
    cause="the cast was made before the capture and is taken from autocast's cache",
    fix="`torch.autocast(..., cache_enabled=False)`; with pgraph, nothing",
    shows=r"does not support the autocast caching",
    plain=plain,
    program=functools.partial(start, program),
    fixed=functools.partial(start, uncached),
    on_gpu=CAPTURED,
    on_cpu=CAPTURED,
    why_captured="The cast is part of the compiled code, and reads the weights at each launch.",
    tolerance=2e-2,
)

if __name__ == "__main__":
    main(ENTRY)
