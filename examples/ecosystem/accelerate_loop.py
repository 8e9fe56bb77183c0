"""A training loop of your own with Accelerate: accumulation, bf16, state saved and loaded.

    python examples/ecosystem/accelerate_loop.py
    accelerate launch examples/ecosystem/accelerate_loop.py

What to paste: compile first, and `accelerator.prepare` takes the model as it is.

    model = torch.compile(model, backend="pgraph")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

- `Accelerator(dynamo_backend="pgraph")` cannot work: Accelerate's list of backends (`DynamoBackend`) refuses
  every other name.
- Under several processes `prepare` wraps the compiled model by DistributedDataParallel: the right order.
- `accelerator.accumulate` leaves gradients out of the exchange between processes; pgraph needs not to know.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from _places import DEVICE, REFERENCE, captures, difference, fresh, options
from accelerate import Accelerator
from torch import Tensor, nn

import pgraph

BATCHES, SAVED = 8, 4


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3))
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def loop(backend: str) -> tuple[list[Tensor], int]:
    """Losses, those after going back to the saved state included; captures after the first two batches."""
    torch.manual_seed(0)
    model: nn.Module = torch.compile(Net(), **options(backend))  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(BATCHES * 4, 64), torch.randint(10, (BATCHES * 4,)))
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=DEVICE.type == "cpu")
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=4)
    )
    losses: list[Tensor] = []

    def epoch(batches: list[Any], folder: str | None = None) -> None:
        for number, (x, y) in enumerate(batches):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if folder is not None and number + 1 == SAVED:
                accelerator.save_state(folder)

    batches = list(loader)
    with tempfile.TemporaryDirectory() as folder:
        epoch(batches[:2])
        before = captures()
        epoch(batches, folder)
        accelerator.load_state(folder)
        epoch(batches[SAVED:])
    return losses, captures() - before


def main() -> dict[str, Any]:
    """Train with the reference and with pgraph; returns what they did."""
    fresh()
    reference, _ = loop(REFERENCE)
    mine, later = loop("pgraph")
    found = {
        "difference": difference(mine, reference),
        "loaded difference": difference(mine[-(BATCHES - SAVED) :], mine[2 + SAVED : 2 + BATCHES]),
        "captures": captures(),
        "later captures": later,
    }
    print(f"largest difference from {REFERENCE}: {found['difference']:.3g}")
    print(f"after load_state, from the first time: {found['loaded difference']:.3g}")
    print(f"{found['captures']} captures, {later} of them after the first two batches")
    print(pgraph.report().summary())
    return found


if __name__ == "__main__":
    main()
