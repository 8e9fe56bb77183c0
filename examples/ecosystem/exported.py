"""Modules of `torch.export`, and compiled optimizers.

    python examples/ecosystem/exported.py

What to paste:

    program = torch.export.load("model.pt2")
    model = torch.compile(program.module(), backend="pgraph")

    step = torch.compile(optimizer.step, backend="pgraph")

- An exported program has no Python left, so nothing breaks its graph: `require_full_capture` holds.
- Exported with a dynamic size, each size that is called with is a capture of its own.
- A learning rate that changes belongs in a tensor (`lr=torch.tensor(1e-3)`): a number is part of the code,
  and each change compiles again. On a GPU `capturable=True` keeps Adam's step count on the device.
- Fused optimizers (`fused=True`) are few kernels already, and Dynamo leaves them alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _places import DEVICE, ON_GPU, REFERENCE, captures, difference, fresh, options
from torch import Tensor, nn

import pgraph

STEPS = 6


class Net(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(nn.functional.gelu(self.up(x))))


@torch.no_grad()
def exported() -> dict[str, Any]:
    """A program saved, loaded and compiled: calls with 8 rows, then with others."""
    fresh()
    model = Net().eval().to(DEVICE)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (torch.randn(8, 16, device=DEVICE),), dynamic_shapes=({0: rows},))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
    chosen = options("pgraph")
    chosen["options"] = {**chosen["options"], "require_full_capture": True}
    mine = torch.compile(loaded, **{**chosen, "dynamic": True})
    reference = torch.compile(model, **{**options(REFERENCE), "dynamic": True})
    worst, counts = 0.0, []
    for size in (8, 8, 8, 4, 4, 4, 8, 4):
        x = torch.randn(size, 16, device=DEVICE)
        worst = max(worst, difference([mine(x)], [reference(x)]))
        counts.append(captures())
    return {"difference": worst, "captures": counts, "refused": pgraph.report().refused}


def trained(make: Callable[[Any], torch.optim.Optimizer], backend: str) -> tuple[list[Tensor], Any]:
    """Weights after some steps of a compiled optimizer with a learning rate that falls, and the report."""
    fresh()
    model = Net().to(DEVICE)
    optimizer = make(model.parameters())
    step = torch.compile(optimizer.step, **options(backend))
    for number in range(STEPS):
        random = torch.Generator().manual_seed(number)
        model(torch.randn(8, 16, generator=random).to(DEVICE)).square().mean().backward()
        step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(0.9)
    return [p.detach().clone() for p in model.parameters()], pgraph.report()


def optimizers() -> dict[str, Any]:
    """SGD with momentum and AdamW with the learning rate in a tensor, and Muon."""

    def rate() -> Tensor:
        return torch.tensor(1e-2, device=DEVICE)

    makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=rate(), momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=rate(), capturable=ON_GPU),
        "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
    }
    found = {}
    for name, make in makes.items():
        reference, _ = trained(make, REFERENCE)
        mine, report = trained(make, "pgraph")
        found[name] = {
            "difference": difference(mine, reference),
            "captures": report.captures,
            "refused": report.refused,
        }
    return found


def main() -> dict[str, Any]:
    """Both; returns differences from the reference, and captures."""
    found = {"exported": exported(), **optimizers()}
    for name, one in found.items():
        print(
            f"{name}: largest difference from {REFERENCE} {one['difference']:.3g}, captures {one['captures']}"
        )
    return found


if __name__ == "__main__":
    main()
