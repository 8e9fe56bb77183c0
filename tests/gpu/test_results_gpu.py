"""Results on the GPU: those that last are allocated first, and small gradients share memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, assert_launched, compile_pgraph, explain, report
from torch import Tensor, nn

import pgraph
from pgraph.runtime import registry

pytestmark = pytest.mark.gpu

WIDTHS = (96, 700, 256, 1500, 64, 900, 320, 2048, 128)


class Wide(nn.Module):
    """Layers of many widths, so that blocks of many sizes are allocated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(b) for b in WIDTHS[1:])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        sums = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.nn.functional.gelu(norm(layer(x)))
            sums.append(x * 2)
        return sums[3], sums[-1]


def rewritten(run: Any, steps: int) -> float:
    """Nodes set per call."""
    before = report().rewritten_nodes
    for _ in range(steps):
        run()
    return (report().rewritten_nodes - before) / steps


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_the_rest_stays_where_it_was_while_results_are_kept(training: bool) -> None:
    """A loop that holds its last results: only the nodes that write them, or read them, are set anew."""
    model = Wide().to(DEVICE).train(training)
    compiled = compile_pgraph(model)
    x = torch.randn(512, WIDTHS[0], device=DEVICE)
    held: Any = None

    def call() -> None:
        nonlocal held
        with torch.set_grad_enabled(training):
            results = compiled(x)
        if training:
            (results[0].sum() + results[1].sum()).backward()
            model.zero_grad(set_to_none=True)
        held = tuple(r.detach() for r in results)

    for _ in range(12):
        call()
    assert_launched(4)
    templates = [partition.template() for partition in registry.live_capturable()]
    nodes = sum(len(template.nodes) for template in templates if template is not None)
    assert nodes >= 12, explain()
    assert rewritten(call, 8) <= 8, f"of {nodes} nodes"
    if not training:
        for a, b in zip(held, Wide().to(DEVICE).eval()(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_gradients_in_one_piece_train_as_others_do(fused: bool) -> None:
    """Losses and weights are Inductor's over accumulated, clipped and scaled steps."""
    found = []
    for backend in ("inductor", "pgraph"):
        model = Wide().to(DEVICE)
        run = torch.compile(model) if backend == "inductor" else compile_pgraph(model)
        update = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        torch.manual_seed(3)
        losses = []
        for _ in range(8):
            for _ in range(2):
                results = run(torch.randn(64, WIDTHS[0], device=DEVICE))
                loss = results[0].square().mean() + results[1].square().mean()
                scaler.scale(loss).backward()
                losses.append(loss.detach())
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            scaler.unscale_(update)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(update)
            scaler.update()
            storages = len({g.untyped_storage().data_ptr() for g in gradients})
            update.zero_grad(set_to_none=True)
        found.append((losses, [p.detach() for p in model.parameters()], storages, len(gradients)))
    assert_launched(4)
    (losses, weights, apart, count), (mine, mine_weights, together, _) = found
    assert apart == count
    assert together < count / 2, f"{together} storages of {count} gradients"
    for a, b in zip(mine + mine_weights, losses + weights, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def test_a_gradient_on_another_stream_outlives_its_piece() -> None:
    """`record_stream` on one of them keeps the whole piece until that stream is done."""
    model = Wide().to(DEVICE)
    compiled = compile_pgraph(model)
    side = torch.cuda.Stream()
    copies, want = list[Tensor](), list[Tensor]()
    for step in range(10):
        torch.manual_seed(step)
        results = compiled(torch.randn(64, WIDTHS[0], device=DEVICE))
        (results[0].sum() + results[1].sum()).backward()
        bias = model.layers[0].bias.grad
        assert bias is not None
        want.append(bias.clone())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # the copy comes long after the gradient is dropped
            copies.append(bias.clone())
        bias.record_stream(side)
        del bias
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    assert_launched(4)
    for a, b in zip(copies, want, strict=True):
        assert torch.equal(a, b)


def test_all_native_helpers_are_built() -> None:
    """Else results are made from Python, at twice the time, and nothing but the report would tell."""
    compiled = compile_pgraph(Wide().to(DEVICE))
    for _ in range(4):
        compiled(torch.randn(512, WIDTHS[0], device=DEVICE))
    assert_launched(1)
    assert pgraph.report().missing == ()
