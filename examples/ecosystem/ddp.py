"""DistributedDataParallel around compiled blocks, around a compiled model, and compiled itself.

    python examples/ecosystem/ddp.py                              # one process
    torchrun --nproc-per-node 2 examples/ecosystem/ddp.py

What to paste is one of these:

    for block in model.blocks: block.compile(backend="pgraph")
    model = DistributedDataParallel(model)                                            # one recording
    model = DistributedDataParallel(torch.compile(model, backend="pgraph"))
    model = torch.compile(DistributedDataParallel(model), backend="pgraph")

- All three work, with equal results. Dynamo cuts a model inside DDP into a graph for each bucket, so that
  gradients travel while the rest of the backward runs: a recording of each. Blocks that are compiled one by
  one share one for forward and one for backward, if all their inputs need gradients, or none.
- Dynamo does not trace DDP itself. The last order leaves a line about it in `pgraph.report()`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from _places import DEVICE, ON_GPU, REFERENCE, difference, fresh, options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pgraph

ORDERS = ("blocks", "model", "ddp")
STEPS, WIDTH, DEPTH = 5, 384, 4


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks one after the other; two fill a bucket of 1 MB. All their inputs need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def parallel(model: Net, order: str, backend: str) -> Any:
    """The model as it is trained."""
    chosen = options(backend)
    if order == "ddp":
        return torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), **chosen)
    if order == "model":
        return DistributedDataParallel(torch.compile(model, **chosen), bucket_cap_mb=1)
    for block in model.blocks:
        block.compile(**chosen)
    return DistributedDataParallel(model, bucket_cap_mb=1)


def train(order: str, backend: str) -> tuple[list[Tensor], Any]:
    """Losses and weights after some steps on data of each rank's own, and pgraph's report."""
    fresh()
    model = Net().to(DEVICE)
    trained = parallel(model, order, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(STEPS):
        random = torch.Generator().manual_seed(100 * dist.get_rank() + number)
        loss = trained(torch.randn(8, WIDTH, generator=random).to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(p.detach().clone() for p in model.parameters())], pgraph.report()


def main() -> dict[str, Any]:
    """Train in each order with the reference and with pgraph; returns what rank 0 did."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    found: dict[str, Any] = {}
    try:
        for order in ORDERS:
            reference, _ = train(order, REFERENCE)
            mine, report = train(order, "pgraph")
            found[order] = {
                "difference": difference(mine, reference),
                "captures": report.captures,
                "refused": report.refused,
            }
            if dist.get_rank() == 0:
                print(f"{order}: largest difference from {REFERENCE} {found[order]['difference']:.3g};")
                print(f"  {report.summary()}")
    finally:
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
