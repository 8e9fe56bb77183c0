"""`optimizer.step()` in a capture.

Adam counts its steps in a tensor on the CPU unless it is told otherwise: captured, the count would stand
still, so PyTorch refuses. The same goes for a learning rate that is a Python number: a replay keeps the
one it was captured with. With `capturable=True` and a tensor as learning rate everything is on the device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from _harness import CAPTURED, Entry, Trial, main, record
from torch import Tensor


def start(device: torch.device, **settings: Any) -> Trial:
    weights = [torch.randn(n, 32, device=device, requires_grad=True) for n in (8, 16)]
    adam = torch.optim.Adam(weights, **settings)

    def update() -> None:
        adam.step()

    def step(run: Any, number: int) -> list[Tensor]:
        for w in weights:
            w.grad = torch.randn_like(w)
        run()
        return [w.detach().clone() for w in weights]

    return Trial(update, step)


def repaired(device: torch.device) -> Trial:
    if device.type == "cpu":
        return start(device, lr=torch.tensor(0.01))
    return start(device, lr=torch.tensor(0.01, device=device), capturable=True)


def plain() -> None:
    trial = start(torch.device("cuda"), lr=0.01)
    trial.step(trial.fn, 0)
    record(trial.fn)


ENTRY = Entry(
    symptom="an error that `capturable` is False",
    cause="the optimizer keeps its step count on the CPU, and its learning rate in Python",
    fix="`capturable=True`, the learning rate in a tensor on the device",
    shows=r"graph capture of step\(\) .* capturable is False",
    plain=plain,
    program=functools.partial(start, lr=0.01),
    fixed=repaired,
    on_gpu=CAPTURED,
    on_cpu=CAPTURED,
    why_captured="torch.compile takes the capturable path by itself, on a GPU.",
)

if __name__ == "__main__":
    main(ENTRY)
