"""A Python number changes from step to step, and the graph keeps the first.

A capture records kernels with their arguments: a scale, a step count or a probability is the value of
that day, for ever. There is no error. torch.compile guards on numbers, so with pgraph another value is
other code and another recording: right, but each new value costs a compilation. In a tensor the value is
data, and one recording serves them all.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from _harness import CAPTURED, Entry, Trial, main, record
from torch import Tensor


def program(x: Tensor, scale: float | Tensor) -> Tensor:
    return (x * scale).sin() * scale


def start(in_tensor: bool, device: torch.device) -> Trial:
    def step(run: Any, number: int) -> list[Tensor]:
        scale = 1 / (number + 1)
        x = torch.randn(64, 64, device=device)
        return [run(x, torch.tensor(scale, device=device) if in_tensor else scale)]

    return Trial(program, step)


def plain() -> None:
    x = torch.ones(64, 64, device="cuda")
    state = {"scale": 1.0}
    graph, y = record(lambda: program(x, state["scale"]))
    state["scale"] = 0.5
    graph.replay()
    torch.cuda.synchronize()
    off = (y - program(x, 0.5)).abs().max().item()
    print("with another scale, the replay is", "right" if off < 1e-6 else f"wrong by {off:.2g}")


ENTRY = Entry(
    symptom="wrong numbers and no error, when a number changes between steps",
    cause="the number is part of the recorded kernels",
    fix="keep the number in a tensor on the device",
    shows=r"the replay is wrong by",
    plain=plain,
    program=functools.partial(start, False),
    fixed=functools.partial(start, True),
    on_gpu=CAPTURED,
    on_cpu=CAPTURED,
    why_captured="torch.compile guards on the number: another value is compiled and captured anew.",
)

if __name__ == "__main__":
    main(ENTRY)
