"""An op that no rule knows and no graph can hold: pgraph splits the graph around it by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, assert_launched, assert_same, compile_pgraph, explain, randn, report, run_once
from torch import Tensor, nn

import pgraph

pytestmark = pytest.mark.gpu


@torch.library.custom_op("pgraph_gpu_resplit::synchronizing", mutates_args=())
def synchronizing(x: Tensor) -> Tensor:
    """Reads from the device on the host, and no tag says so."""
    return x * (1 + 0 * x.sum().item())


@torch.library.custom_op("pgraph_gpu_resplit::solving", mutates_args=())
def solving(x: Tensor) -> Tensor:
    """A factorization that checks its result on the host."""
    square = x[:, : x.shape[0]]
    return torch.linalg.cholesky(square @ square.T + 50 * torch.eye(x.shape[0], device=x.device)) @ x


@torch.library.custom_op("pgraph_gpu_resplit::copying", mutates_args=())
def copying(x: Tensor) -> Tensor:
    """A node that cannot be rebound: a copy from the host's memory."""
    offset = torch.ones(x.shape[1]).pin_memory().to(x.device, non_blocking=True)
    return x + offset


_buffers: dict[torch.Size, Tensor] = {}


@torch.library.custom_op("pgraph_gpu_resplit::remembering", mutates_args=())
def remembering(x: Tensor) -> Tensor:
    """Works through a buffer of its own, which no argument tells of."""
    if x.shape not in _buffers:
        _buffers[x.shape] = torch.empty_like(x)
    _buffers[x.shape].copy_(x)
    return _buffers[x.shape] * 2


def _alike(x: Tensor) -> Tensor:
    return torch.empty_like(x)


OPS: dict[str, Any] = {
    "synchronizing": synchronizing,
    "solving": solving,
    "copying": copying,
    "remembering": remembering,
}
for op in OPS.values():
    op.register_fake(_alike)
    op.register_autograd(lambda ctx, grad: grad * 2, setup_context=lambda ctx, inputs, output: None)


class Model(nn.Module):
    """The op between two runs of products and pointwise work."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.after = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self._middle = middle

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.before:
            x = layer(x).tanh()
        x = self._middle(x) * 0.1
        for layer in self.after:
            x = layer(x).sigmoid() + x
        return x


def _check(model: nn.Module, codegen: str, grad: bool) -> Any:
    """Six calls on new inputs, each as near to eager as eager to itself; returns the compiled model."""
    compiled = compile_pgraph(model, codegen=codegen)
    for i in range(6):
        x = randn(32, 64, grad=grad)
        reference, twin = run_once(model, (x,), grad), run_once(model, (x,), grad)
        got = run_once(compiled, (x,), grad)
        assert_same(f"call {i}", got, reference, twin, exact=False)
    return compiled


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
@pytest.mark.parametrize("name", list(OPS))
def test_the_rest_is_captured(name: str, codegen: str) -> None:
    model = Model(OPS[name]).to(DEVICE)
    with torch.no_grad():
        _check(model, codegen, grad=False)
    summary = report()
    assert (summary.splits, summary.refused) == (1, 0), explain()
    assert [p.state for p in summary.partitions] == ["captured", "uncaptured", "captured"], explain()
    assert_launched(2)
    ((_, reasons),) = summary.outside
    assert any(
        f"pgraph_gpu_resplit::{name}" in dict(p.facts.ops) for p in summary.partitions if not p.facts.safe
    )
    assert all("by itself" in reason.sentence and reason.where for reason in reasons), explain()


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_training(codegen: str) -> None:
    """The forward is split; the backward, which has another op there, is captured whole."""
    _check(Model(synchronizing).to(DEVICE), codegen, grad=True)
    summary = report()
    assert (summary.splits, summary.refused) == (1, 0), explain()
    kinds = [(p.facts.graph.kind, p.state) for p in summary.partitions]
    assert kinds == [
        ("forward", "captured"),
        ("forward", "uncaptured"),
        ("forward", "captured"),
        ("backward", "captured"),
    ], explain()


def test_hard_mode_still_raises() -> None:
    model = Model(synchronizing).to(DEVICE)
    compiled = compile_pgraph(model, codegen="aten", require_full_capture=True)
    with torch.no_grad():
        compiled(randn(32, 64))
        with pytest.raises(pgraph.FullCaptureError, match="synchronizing"):
            compiled(randn(32, 64))
    assert report().splits == 0
