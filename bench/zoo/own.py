"""Small models that need torch alone: with them the benchmark itself is tested on a CPU."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn

from zoo.entry import Draw, Entry, Inputs

CLASSES = 10


class Classifier(nn.Module):
    """Any model that gives logits (batch, classes), with its cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor | tuple[Tensor]:
        logits = self.model(x)
        return (logits,) if target is None else F.cross_entropy(logits.float(), target)


def mlp() -> nn.Module:
    """Three layers and a norm."""
    return Classifier(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU())
        .append(nn.Dropout(0.1))
        .append(nn.Linear(64, CLASSES))
    )


def convnet() -> nn.Module:
    """Convolutions with batch norm: its buffers change in training."""

    def block(before: int, after: int, groups: int) -> list[nn.Module]:
        convolution = nn.Conv2d(before, after, 3, padding=1, groups=groups, bias=False)
        return [convolution, nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, 8, 1), *block(8, 8, 8), *block(8, 16, 4)]
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)))


def _vectors(draw: Draw, batch: int, train: bool) -> Inputs:
    return (draw.normal(batch, 32), *([draw.integers(0, CLASSES, batch)] if train else []))


def _images(draw: Draw, batch: int, train: bool) -> Inputs:
    return (draw.normal(batch, 3, 16, 16), *([draw.integers(0, CLASSES, batch)] if train else []))


ENTRIES = (
    Entry("own/mlp", mlp, _vectors, timed=True, cost=0.1, precision="fp32"),
    Entry("own/convnet", convnet, _images, conv=True, timed=True, cost=0.1, precision="fp32"),
)
