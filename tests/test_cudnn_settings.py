"""Captures hold for cuDNN's settings of their making."""

from __future__ import annotations

import pytest
import torch
from support import host, launching, same
from torch import nn

import pgraph


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    first: nn.Module = nn.Conv1d(4, 4, 3, padding=1) if kind == "convolution" else nn.Linear(8, 8)
    return nn.Sequential(first, nn.ReLU(), nn.LayerNorm(8))


def captures() -> int:
    return sum(p.captures for p in pgraph.report().partitions)


@pytest.mark.parametrize("kind", ["convolution", "product"])
@pytest.mark.parametrize("name", ["deterministic", "benchmark", "allow_tf32", "enabled"])
def test_a_change_of_settings_has_convolutions_captured_anew(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch would go on with the kernels that were chosen before."""
    plain = model(kind)
    compiled = host(plain)

    def step() -> None:
        x = torch.randn(2, 4, 8)
        same(compiled(x), plain(x))

    with torch.no_grad():
        for _ in range(3):
            step()
        with launching(1):
            step()
        monkeypatch.setattr(torch.backends.cudnn, name, not getattr(torch.backends.cudnn, name))
        with launching(1 if kind == "product" else 0):
            step()  # as in a program that has just begun
        step()
        with launching(1):
            step()
    assert captures() == 1, "and what was captured before is gone"


def test_backwards_look_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model("convolution")
    compiled = host(plain)

    def step() -> None:
        x = torch.randn(2, 4, 8)
        wanted = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
        same(torch.autograd.grad(compiled(x).sum(), list(plain.parameters())), wanted)

    for _ in range(3):
        step()
    with launching(2):
        step()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with launching(0):
        step()
    step()
    with launching(2):
        step()
