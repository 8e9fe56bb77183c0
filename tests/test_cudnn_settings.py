"""Captures hold for cuDNN's settings of their making."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import host, same
from torch import nn

import pgraph


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    first: nn.Module = nn.Conv1d(4, 4, 3, padding=1) if kind == "convolution" else nn.Linear(8, 8)
    return nn.Sequential(first, nn.ReLU(), nn.LayerNorm(8))


def launches(step: Callable[[], None]) -> int:
    """How many one step has."""
    before = pgraph.report().launches
    step()
    return pgraph.report().launches - before


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
        assert [launches(step) for _ in range(3)] == [0, 1, 1]
        monkeypatch.setattr(torch.backends.cudnn, name, not getattr(torch.backends.cudnn, name))
        # As in a program that has just begun.
        assert [launches(step) for _ in range(3)] == ([0, 1, 1] if kind == "convolution" else [1, 1, 1])
    (told,) = pgraph.report().partitions
    assert told.captures == 1, "what was captured before is gone"


def test_backwards_look_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model("convolution")
    compiled = host(plain)

    def step() -> None:
        x = torch.randn(2, 4, 8)
        wanted = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
        same(torch.autograd.grad(compiled(x).sum(), list(plain.parameters())), wanted)

    assert [launches(step) for _ in range(3)] == [0, 2, 2]
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert [launches(step) for _ in range(3)] == [0, 2, 2]
