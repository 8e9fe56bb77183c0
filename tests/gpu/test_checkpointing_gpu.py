"""Activation checkpointing inside what is compiled, as torchtitan applies it; weights move between calls."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, compile_pgraph, explain, report
from llama import LlamaConfig
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

pytestmark = pytest.mark.gpu

CONFIG = LlamaConfig(vocab=64, dim=256, layers=1, heads=4, kv_heads=2, max_seq=128)
_ATTENTION = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def block(ac: str) -> nn.Module:
    from llama import Block

    torch.manual_seed(0)
    made: nn.Module = Block(CONFIG).to(device=DEVICE, dtype=torch.bfloat16)
    if ac == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
        return checkpoint_wrapper(made, context_fn=contexts, preserve_rng_state=False)
    return checkpoint_wrapper(made, preserve_rng_state=ac == "full-with-rng")


def gradients(call: Any, module: nn.Module, seed: int) -> list[Tensor]:
    """Result and gradients of one call, its weights at new addresses."""
    from llama import rope_table

    torch.manual_seed(seed)
    cos, sin = (t.to(DEVICE) for t in rope_table(CONFIG))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    module.zero_grad()
    x = torch.randn(2, 128, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    out = call(x, cos, sin)
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("codegen", ["inductor", "aten"])
@pytest.mark.parametrize("ac", ["full", "full-with-rng", "selective"])
def test_gradients_are_those_of_the_same_code_without_graphs(ac: str, codegen: str) -> None:
    mine, other = block(ac), block(ac)
    compiled = compile_pgraph(mine, codegen=codegen)
    reference = torch.compile(other, backend="inductor" if codegen == "inductor" else "aot_eager")
    for seed in range(5):
        got, want = gradients(compiled, mine, seed), gradients(reference, other, seed)
        assert len(got) == len(want) > 5
        for g, w in zip(got, want, strict=True):
            near = {"rtol": 2**-6, "atol": 2**-6 * float(w.abs().max())}
            torch.testing.assert_close(g, w, **near, msg=lambda text: text + explain())
    found = report()
    assert found.refused == 0, explain()
    assert found.launches >= 6, explain()
    captures = found.captures
    gradients(compiled, mine, 9)
    assert report().captures == captures, "weights that move ask for no new capture"
