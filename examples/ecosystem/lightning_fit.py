"""Lightning's `Trainer.fit`: a compiled submodule, a module compiled in place, and `torch.compile(module)`.

    python examples/ecosystem/lightning_fit.py

What to paste is one of these:

    module.net = torch.compile(module.net, backend="pgraph")     # in __init__, or before fit
    module.compile(backend="pgraph")                             # forward; training_step stays Python
    trainer.fit(torch.compile(module, backend="pgraph"), ...)    # all of training_step

- The third way lets Dynamo trace `training_step`. `self.log` stops it, in torch 2.13 with an error: keep it
  out with `log = torch.compiler.disable(LightningModule.log)`, as here. It is then a graph break, and what
  follows it is a graph of its own.
- A module of torch.nn itself, such as `nn.Sequential`, cannot be compiled in place: Dynamo skips it without a
  word. Use `torch.compile` as in the first way. `pgraph.report()` says so if nothing else was compiled.
- Do not append to a list in `training_step` of the third way: its length is a guard, and each step compiles
  again until `recompile_limit`.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from _places import REFERENCE, captures, difference, fresh, options
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import pgraph


class Net(LightningModule):
    """Three blocks, a head, AdamW."""

    # Logging is Python's own business: Dynamo is not to trace it.
    log = torch.compiler.disable(LightningModule.log)

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3))
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Losses(Callback):
    """Keeps the loss of each batch, and the captures that there were before and after it."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.captures: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].detach().cpu())
        self.captures.append(captures())


def fit(way: str, backend: str) -> Losses:
    """Two epochs of six batches; gradients of two batches make a step, in bf16 on a GPU."""
    fresh()
    module = Net()
    fitted: Any = module
    if way == "submodule":
        module.net = torch.compile(module.net, **options(backend))
    elif way == "in place":
        module.compile(**options(backend))
    else:
        fitted = torch.compile(module, **options(backend))
    data = torch.utils.data.TensorDataset(torch.randn(48, 64), torch.randint(10, (48,)))
    kept = Losses()
    trainer = Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        accelerator="auto",
        precision="bf16-mixed",
        callbacks=[kept],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(fitted, torch.utils.data.DataLoader(data, batch_size=8))
    return kept


def main() -> dict[str, Any]:
    """Fit in each way with the reference and with pgraph; returns what they did."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    found: dict[str, Any] = {}
    for way in ("submodule", "in place", "module"):
        reference = fit(way, REFERENCE)
        mine = fit(way, "pgraph")
        report = pgraph.report()
        found[way] = {
            "difference": difference(mine.losses, reference.losses),
            "captures": mine.captures,
            "launches": report.launches,
            "refused": report.refused,
            "trains": len({loss.item() for loss in mine.losses}) == len(mine.losses),
        }
        print(
            f"{way}: largest difference from {REFERENCE} {found[way]['difference']:.3g}; {report.summary()}"
        )
    return found


if __name__ == "__main__":
    main()
