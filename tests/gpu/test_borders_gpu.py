"""Strides that Inductor pads on the GPU, from the forward into the parts of a backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, assert_launched, compile_pgraph, explain, outside_codes, randn
from support import train
from torch import Tensor, nn
from torch._inductor import metrics
from torch.library import Library

from pgraph.ops.safety import mark_unsafe, unmark_unsafe

pytestmark = pytest.mark.gpu


class GatedAttention(nn.Module):
    """ConViT's attention: 49 x 49 weights, gated with those of the places, which are saved padded."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.qkv, self.place = nn.Linear(48, 144), nn.Linear(3, 4)
        self.out, self.gate = nn.Linear(48, 48), nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.randn(1, 49, 49, 3))
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        q, k, v = self.qkv(x).view(batch, 49, 3, 4, 12).permute(2, 0, 3, 1, 4)
        place = self.place(self.seen.expand(batch, -1, -1, -1)).permute(0, 3, 1, 2).softmax(-1)
        gate = self.gate.view(1, -1, 1, 1).sigmoid()
        weights = (1 - gate) * (q @ k.transpose(-2, -1) * 0.3).softmax(-1) + gate * place
        weights = weights / weights.sum(-1, keepdim=True)
        y = (weights @ v).transpose(1, 2).reshape(batch, 49, 48)
        if self.cut:
            y = torch.ops.borders_gpu.same(y)
        return self.out(y)


def near(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}{explain()}"
    )


@pytest.fixture
def ops() -> Iterator[None]:
    """`borders_gpu::same` and its backward `borders_gpu::back`."""
    lib = Library("borders_gpu", "FRAGMENT")
    for name in ("same", "back"):
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.impl(name, torch.clone, "CompositeExplicitAutograd")

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    torch.library.register_autograd(
        "borders_gpu::same", lambda ctx, grad: torch.ops.borders_gpu.back(grad), setup_context=setup, lib=lib
    )
    yield
    lib._destroy()


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("where", [("back",), ("same",), ("same", "back")], ids="-".join)
@pytest.mark.parametrize("padding", [{}, {"pad_outputs": True}], ids=["saved", "outputs"])
def test_attention_over_49_tokens_in_parts(where: tuple[str, ...], padding: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GatedAttention(cut=True).to(DEVICE)
    for name in where:
        mark_unsafe(f"borders_gpu::{name}", "cuts the graph", "do not")
    metrics.num_comprehensive_padding = 0
    try:
        # A cache that hits would compile nothing, and tell nothing of padding.
        settings = {"padding_stride_threshold": 0, "fx_graph_cache": False, **padding}
        compiled = compile_pgraph(model, min_ops=1, inductor=settings)
        for call in range(5):
            x = randn(16, 49, 48)
            got, want = train(model, compiled, x), train(model, model, x)
            assert got.keys() == want.keys()
            for name, value in want.items():
                said = f"call {call}, {name}{explain()}"
                torch.testing.assert_close(
                    got[name], value, rtol=1e-3, atol=1e-3, msg=lambda m, s=said: m + s
                )
    finally:
        for name in where:
            unmark_unsafe(f"borders_gpu::{name}")
    assert metrics.num_comprehensive_padding > 0 or where != ("back",), "Inductor padded nothing"
    assert "marked" in outside_codes(), explain()
    assert_launched(2)


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_around_a_number_read_on_the_host(channels_last: bool) -> None:
    """Inductor lays out convolutions as it likes; MaxViT's blocks of 7 x 7 windows follow."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
            self.norm = nn.BatchNorm2d(16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.one(x)).relu()
            scale = y.detach().mean().cpu().to(x.device)
            windows = y.view(x.shape[0], 16, 2, 7, 2, 7).permute(0, 2, 4, 3, 5, 1).reshape(-1, 49, 16)
            weights = (windows @ windows.transpose(1, 2)).softmax(-1) * scale
            mixed = (weights @ windows).view(x.shape[0], 2, 2, 7, 7, 16).permute(0, 5, 1, 3, 2, 4)
            return self.two(mixed.reshape(y.shape) + y)

    torch.manual_seed(0)
    model = Block().to(DEVICE).eval()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    settings = {"padding_stride_threshold": 0}
    compiled = compile_pgraph(model, min_ops=1, inductor=settings)
    for call in range(5):
        x = randn(4, 8, 14, 14)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        got, want = train(model, compiled, x), train(model, model, x)
        for name, value in want.items():
            near(got[name], value, 5e-3, f"call {call}, {name}")
    assert_launched(2)
