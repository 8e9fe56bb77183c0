"""Small models end to end: what pgraph computes is what Inductor computes, step after step.

The reference runs twice (the twin): where it does not repeat itself bit for bit (atomic additions in
the backward of attention and convolutions), near is enough.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from gpu_helpers import (
    DEVICE,
    Shaker,
    assert_launched,
    assert_same,
    compile_pgraph,
    explain,
    index,
    randn,
    report,
    same_bits,
)
from llama import Block, LlamaConfig, rope_table
from torch import Tensor, nn

from pgraph.backend import backend

pytestmark = pytest.mark.gpu


def step(run: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Result, gradients (the input's too) and buffers of one training step."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = run(x)
    y.float().square().mean().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    assert all(g is not None for g in grads)
    return [y.detach(), *grads, *(b.clone() for b in model.buffers())]


def compare_training(
    model: nn.Module, make: Callable[[], Tensor], steps: int = 6, exact: bool = True
) -> None:
    """Three copies, compiled by Inductor, Inductor again and pgraph, on moving addresses."""
    models = [model, copy.deepcopy(model), copy.deepcopy(model)]
    inductor = [torch.compile(m, dynamic=False) for m in models[:2]]
    runs = [*inductor, compile_pgraph(models[2])]
    shaker = Shaker()
    for i in range(steps):
        x = make()
        reference, twin, got = (step(run, m, x) for run, m in zip(runs, models, strict=True))
        assert_same(f"step {i}", got, reference, twin, exact)
        shaker.shake()
    assert_launched(steps - 2)


def test_mlp_trains_as_with_inductor() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).to(DEVICE)
    compare_training(model, lambda: randn(128, 64))


def test_one_capture_serves_four_llama_layers() -> None:
    """Forward and backward equal Inductor's; all layers share one capture of each."""
    config = LlamaConfig(dim=256, layers=4, heads=4, kv_heads=2)
    cos, sin = (t[:128].to(DEVICE) for t in rope_table(config))

    def stack() -> nn.ModuleList:
        torch.manual_seed(1)
        return nn.ModuleList(Block(config) for _ in range(4)).to(DEVICE, torch.bfloat16)

    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, cos, sin)
        return x

    stacks = [stack() for _ in range(3)]
    for block in [*stacks[0], *stacks[1]]:
        block.compile(dynamic=False)
    for block in stacks[2]:
        block.compile(backend=backend, dynamic=False)
    shaker = Shaker()
    for i in range(8):
        x = randn(2, 128, 256, dtype=torch.bfloat16)
        reference, twin, got = (step(lambda t, s=s: run(s, t), s, x) for s in stacks)
        # Attention's backward adds atomically; the layers below the last one inherit it.
        assert same_bits(got[0], reference[0]), f"forward of step {i}{explain()}"
        assert_same(f"step {i}", got, reference, twin, exact=False)
        shaker.shake()
    assert_launched(20)
    summary = report()
    assert len(summary.capturable) == 2, f"forward and backward of one block{explain()}"
    assert summary.captures == 2, f"one capture each for all layers and steps{explain()}"


class TinyResNet(nn.Module):
    """Two residual blocks with batch norm, a pool and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x).relu(), 2)
        for block in self.blocks:
            x = (x + block(x)).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_resnet_trains_as_with_inductor(layout: torch.memory_format) -> None:
    """Buffers of batch norm are compared too."""
    model = TinyResNet().to(DEVICE, memory_format=layout)
    compare_training(model, lambda: randn(8, 3, 32, 32).contiguous(memory_format=layout), exact=False)


def test_resnet_evaluates_as_with_inductor() -> None:
    model = TinyResNet().to(DEVICE).eval()
    reference, compiled = torch.compile(model, dynamic=False), compile_pgraph(model)
    shaker = Shaker()
    with torch.no_grad():
        for i in range(6):
            x = randn(8, 3, 32, 32)
            assert same_bits(compiled(x), reference(x)), f"call {i}{explain()}"
            shaker.shake()
    assert_launched(4)


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_compiled_adamw_steps(codegen: str) -> None:
    """Parameters and state are rewritten in place, at addresses that the graph never saw before."""

    def trainer() -> tuple[list[Tensor], torch.optim.Optimizer]:
        torch.manual_seed(2)
        parameters = [nn.Parameter(randn(40 + i, 30)) for i in range(12)]
        return parameters, torch.optim.AdamW(parameters, lr=1e-2, foreach=True, capturable=True)

    def stepper(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def update() -> None:
            optimizer.step()

        return update

    mine, my_optimizer = trainer()
    theirs, their_optimizer = trainer()
    update = compile_pgraph(stepper(my_optimizer), codegen=codegen)
    reference = stepper(their_optimizer)
    if codegen == "inductor":
        reference = torch.compile(reference, dynamic=False)
    for i in range(8):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = randn(*a.shape)
            b.grad = a.grad.clone()
        update()
        reference()
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            what = f"step {i}, parameter {k}{explain()}"
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), what
            assert codegen == "aten" or same_bits(a.data, b.data), what
    assert any(p.launches >= 4 for p in report().capturable), explain()
    assert not report().refused, explain()


def test_dropout_differs_from_call_to_call_and_repeats_under_a_seed() -> None:
    """Seeds are an input of the graph (hazard 14): Inductor's numbers, and one mask both ways."""

    def fn(x: Tensor) -> Tensor:
        return F.dropout((x * 2).cos().sin() * 0 + x, 0.5, training=True) * 3

    compiled, reference = compile_pgraph(fn), torch.compile(fn, dynamic=False)

    def sequence(run: Callable[[Tensor], Tensor], seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        results = []
        for _ in range(5):
            x = torch.ones(200, 100, device=DEVICE, requires_grad=True)
            y = run(x)
            y.sum().backward()
            assert x.grad is not None
            assert same_bits(x.grad, y.detach()), f"the backward used another mask{explain()}"
            results.append(y.detach())
        return results

    sequence(compiled, 0)
    first, again, other = sequence(compiled, 1), sequence(compiled, 1), sequence(compiled, 2)
    expected = sequence(reference, 1)
    for i in range(5):
        assert same_bits(first[i], again[i]), f"one seed, two results, call {i}{explain()}"
        assert same_bits(first[i], expected[i]), f"not Inductor's numbers, call {i}{explain()}"
        assert not same_bits(first[i], other[i]), f"two seeds, one result{explain()}"
        assert 0.4 < (first[i] == 0).float().mean().item() < 0.6, explain()
    assert not same_bits(first[3], first[4]), f"two calls drew the same numbers{explain()}"
    assert report().launches >= 4, explain()
    assert not report().refused, explain()


def test_several_forwards_before_their_backwards() -> None:
    """Saved activations of each forward are its own."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(DEVICE)
    compiled = compile_pgraph(model, codegen="aten")

    def losses(run: Any, inputs: list[Tensor]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        outputs = [run(x) for x in inputs]
        for y in reversed(outputs):
            y.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for i in range(5):
        inputs = [randn(16, 32) for _ in range(4)]
        got, expected = losses(compiled, inputs), losses(model, inputs)
        assert_same(f"round {i}", got, expected, losses(model, inputs))
    assert_launched(12)


def test_inputs_chosen_by_index_keep_their_embedding_gradient() -> None:
    """Sparse-looking backward (embedding, cross-entropy) of a byte model, through Inductor."""
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)).to(DEVICE)
    twins = [copy.deepcopy(model) for _ in range(2)]
    runs = [torch.compile(m, dynamic=False) for m in (model, twins[0])] + [compile_pgraph(twins[1])]
    for i in range(6):
        tokens, targets = index(4, 64, high=256), index(256, high=256)
        results = []
        for run, m in zip(runs, (model, *twins), strict=True):
            m.zero_grad(set_to_none=True)
            F.cross_entropy(run(tokens).flatten(0, 1), targets).backward()
            results.append([p.grad for p in m.parameters() if p.grad is not None])
        assert_same(f"step {i}", results[2], results[0], results[1], exact=False)
    assert_launched(4)
