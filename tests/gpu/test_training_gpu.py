"""Training loops on the GPU: losses and gradients are those of eager blocks, by few captures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, assert_launched, compile_pgraph, explain, index, report
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu

CONFIG = LlamaConfig(vocab=64, dim=128, layers=2, heads=4, kv_heads=2)


class Recomputed(nn.Module):
    """A module behind a checkpoint."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *args: Tensor) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=self.reentrant, preserve_rng_state=False)


Loop = Callable[[Llama], list[Tensor]]


def batch(step: int, size: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return index(size, 64, high=64), index(size, 64, high=64)


def both(loop: Loop, compiled: Callable[[nn.Module], Any], captures: int) -> None:
    """The loop's trace with compiled blocks is near that of eager blocks, in fp32 and by launches."""
    torch.manual_seed(0)
    plain = Llama(CONFIG).to(DEVICE)
    twin = copy.deepcopy(plain)
    for i, block in enumerate(twin.blocks):
        twin.blocks[i] = compiled(block)
    got, want = loop(twin), loop(plain)
    assert len(got) == len(want)
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            g, w, rtol=2e-3, atol=2e-4, msg=lambda m, k=k: f"entry {k}: {m}{explain()}"
        )
    assert_launched(2)
    assert report().captures <= captures, explain()


def step_of(model: Llama, step: int, size: int = 2, scale: float = 1.0) -> Tensor:
    loss = model(*batch(step, size)) * scale
    loss.backward()
    return loss.detach()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_and_zero_grad(set_to_none: bool) -> None:
    def loop(model: Llama) -> list[Tensor]:
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=1e-2), []
        for step in range(4):
            trace += [step_of(model, 4 * step + micro, scale=0.25) for micro in range(4)]
            trace += grads(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return trace

    both(loop, compile_pgraph, captures=2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_activation_checkpointing(reentrant: bool, inside: bool) -> None:
    """The checkpoint inside the compiled block, or around it."""
    if inside and reentrant:
        pytest.skip("Dynamo does not compile reentrant checkpoints as part of a graph")

    def wrap(block: nn.Module) -> nn.Module:
        if inside:
            return compile_pgraph(Recomputed(block, reentrant))
        return Recomputed(compile_pgraph(block), reentrant)

    def loop(model: Llama) -> list[Tensor]:
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=1e-2), []
        for step in range(6):
            trace += [step_of(model, step), *grads(model)]
            optimizer.step()
            optimizer.zero_grad()
        return trace

    both(loop, wrap, captures=2 if inside else 3)
    assert not report().outside, explain()


def test_late_optimizer_varying_batches_and_evaluation() -> None:
    def loop(model: Llama) -> list[Tensor]:
        trace: list[Tensor] = []
        kept: list[tuple[Tensor, Tensor]] = []
        optimizer: torch.optim.Optimizer | None = None
        for step in range(12):
            if step == 4:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            trace += [step_of(model, step, size=(2, 3)[step % 2]), *grads(model)]
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
            with torch.no_grad() if step % 4 < 2 else torch.inference_mode():
                out = model(batch(100 + step)[0])
                kept.append((out, out.clone()))
        assert all(torch.equal(out, before) for out, before in kept), "a result of an evaluation changed"
        return trace

    both(loop, compile_pgraph, captures=8)


def test_two_models_share_the_recordings() -> None:
    torch.manual_seed(0)
    models = [Llama(CONFIG).to(DEVICE) for _ in range(2)]
    for model in models:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = compile_pgraph(block)
    for step in range(5):
        for model in models:
            step_of(model, step)
            model.zero_grad()
    assert report().captures == 2, explain()
    assert_launched(10)


def test_autocast_and_a_grad_scaler() -> None:
    """fp16 inside; a step with an infinity is skipped with and without pgraph."""
    torch.manual_seed(0)
    plain = Llama(CONFIG).to(DEVICE)
    twin = copy.deepcopy(plain)
    for i, block in enumerate(twin.blocks):
        twin.blocks[i] = compile_pgraph(block)
    traces = []
    for model in (twin, plain):
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=1e-3), []
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)
        for step in range(8):
            with torch.autocast("cuda", torch.float16):
                loss = model(*batch(step))
            scaler.scale(loss * float("inf") if step == 5 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            trace.append((loss.item(), scaler.get_scale()))
        traces.append(trace)
    for (mine, my_scale), (theirs, their_scale) in zip(*traces, strict=True):
        assert abs(mine - theirs) < 2e-2, explain()
        assert my_scale == their_scale, explain()
    assert_launched(4)
