"""Checkpointed attention in a compiled graph: captured whole without dropout, right and outside with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_helpers import (
    DEVICE,
    Shaker,
    assert_launched,
    assert_same,
    compile_pgraph,
    explain,
    outside_codes,
    randn,
    report,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu

Call = Callable[[Tensor], Tensor]


class Attending(nn.Module):
    """A residual block of causal attention and a feed-forward net, recomputed in its backward."""

    def __init__(self, dim: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(dim), heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def inner(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def step(model: nn.Module, run: Call, values: Tensor) -> list[Tensor]:
    """Result and gradients, with the input and the parameters at fresh addresses."""
    for p in model.parameters():
        p.data, p.grad = p.data.clone(), None
    x = values.clone().requires_grad_()
    out = run(x)
    out.backward(torch.linspace(-1, 1, out.numel(), device=DEVICE).to(out.dtype).view(out.shape))
    found = [x.grad, *(p.grad for p in model.parameters())]
    assert all(grad is not None for grad in found)
    return [out.detach(), *(grad for grad in found if grad is not None)]


@pytest.mark.parametrize("codegen", ["inductor", "aten"])
@pytest.mark.parametrize(
    "kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
)
def test_attention_without_dropout_is_captured_whole(kernel: SDPBackend, codegen: str) -> None:
    """Bit for bit what Inductor computes (eager, for plain ATen code), wherever that repeats itself."""
    model = Attending().to(DEVICE, torch.bfloat16)
    whole = {"require_full_capture": True} if codegen == "inductor" else {}
    compiled = compile_pgraph(lambda x: model(x), codegen=codegen, **whole)
    reference: Call = torch.compile(lambda x: model(x), dynamic=False) if codegen == "inductor" else model
    shaker = Shaker()
    with sdpa_kernel(kernel):
        for call in range(8):
            values = randn(4, 128, 256, dtype=torch.bfloat16)
            want, again = (step(model, reference, values) for _ in range(2))
            got = step(model, compiled, values)
            assert_same(f"call {call}", got, want, again)
            del want, again, got
            shaker.shake()
    assert not report().outside, explain()
    assert len(report().capturable) == 2, explain()
    assert report().captures == 2, explain()
    assert_launched(6)


@pytest.mark.parametrize("graphsafe", [True, False])
def test_two_forwards_before_their_backwards(graphsafe: bool) -> None:
    """With generators of its own AOTAutograd then saves their states, which nobody uses, and sets them again.

    Without (what it does for ops on several devices) each forward returns a state, which nobody uses either.
    """
    with torch._functorch.config.patch(graphsafe_rng_functionalization=graphsafe):
        two_forwards()


def two_forwards() -> None:
    model = Attending().to(DEVICE, torch.bfloat16)
    compiled = compile_pgraph(lambda x: model(x), require_full_capture=True)
    reference = torch.compile(lambda x: model(x), dynamic=False)

    def both(run: Call, values: list[Tensor]) -> list[Tensor]:
        inputs = [v.clone().requires_grad_() for v in values]
        outs = [run(x) for x in inputs]
        model.zero_grad()
        for out in reversed(outs):
            out.float().square().mean().backward()
        return [*(out.detach() for out in outs), *(x.grad for x in inputs if x.grad is not None)]

    for call in range(5):
        values = [randn(4, 128, 256, dtype=torch.bfloat16) for _ in range(2)]
        want, again = both(reference, values), both(reference, values)
        assert_same(f"call {call}", both(compiled, values), want, again)
    assert not report().outside, explain()
    assert_launched(6)


@pytest.mark.parametrize("codegen", ["inductor", "aten"])
@pytest.mark.parametrize("dropouts", [(0.1,), (0.1, 0.0), (0.0, 0.1)])
def test_attention_with_dropout_stays_outside_and_repeats_its_mask(
    dropouts: tuple[float, ...], codegen: str
) -> None:
    """Attention is linear in its values: `(A v, g) = (v, A' g)` holds only if both A have the same mask.

    With a second attention that draws nothing, of two generators one is handed on.
    """
    q, k = randn(2, 4, 64, 64), randn(2, 4, 64, 64)

    def attend(v: Tensor) -> Tensor:
        for p in dropouts:
            v = functional.scaled_dot_product_attention(q, k, v * 2, dropout_p=p)
        return v

    def program(v: Tensor) -> Tensor:
        return (checkpoint(attend, v * 3, use_reentrant=False) * 0.5 + v) - v

    compiled = compile_pgraph(program, codegen=codegen, min_ops=1)
    outs: list[Tensor] = []
    for _ in range(6):
        v, g = randn(2, 4, 64, 64, grad=True), randn(2, 4, 64, 64)
        out = compiled(v)
        (grad,) = torch.autograd.grad(out, v, g)
        left, right = (out * g).double().sum(), (v * grad).double().sum()
        scale = out.double().norm() * g.double().norm()
        assert (left - right).abs() < 1e-4 * scale, explain()
        with torch.no_grad():
            v.fill_(1)
        outs.append(compiled(v).detach())
    assert not torch.equal(outs[-1], outs[-2]), "two calls drew the same mask"
    assert "rng-state" in outside_codes(), explain()
