"""What training loops do: each case equals the same loop without pgraph, by launches and few captures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support import Block, host, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pgraph

Run = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two blocks; `reentrant` None trains without checkpoints."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, 2) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def data(step: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 6, 16, generator=torch.Generator().manual_seed(step))


def both(
    loop: Callable[[nn.Module, Run], list[Any]],
    *,
    net: Callable[[], nn.Module] = Net,
    whole: bool = True,
    captures: int = 2,
    **options: Any,
) -> None:
    """A loop gives the same trace with and without pgraph, from the same weights.

    Args:
        loop: takes the model and what to call, and returns everything that is to be equal.
        whole: compile the model; else each block.
        captures: at most so many recordings.
        options: of `torch.compile` and pgraph.
    """
    torch.manual_seed(0)
    plain = net()
    twin = copy.deepcopy(plain)
    want = loop(plain, plain)
    if whole:
        got = loop(twin, host(twin, **options))
    else:
        for i, block in enumerate(twin.blocks):
            twin.blocks[i] = host(block, **options)
        got = loop(twin, twin)
    same(got, want, rtol=1e-6, atol=1e-7)
    same(list(twin.parameters()), list(plain.parameters()), rtol=1e-6, atol=1e-7)
    report = pgraph.report()
    assert report.refused == 0, str(report)
    assert 0 < report.captures <= captures, str(report)
    assert report.launches > report.captures, str(report)


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("whole", [True, False])
def test_gradient_accumulation(whole: bool) -> None:
    """Four backwards into the same gradients, which are kept and changed by others in between."""

    def loop(model: nn.Module, run: Run) -> list[Any]:
        optimizer, trace = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(4):
            for micro in range(4):
                loss = run(data(4 * step + micro)).square().mean() / 4
                loss.backward()
                trace.append([loss.detach(), grads(model)])
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return trace

    # The first block's input needs no gradient: its backward is another one.
    both(loop, whole=whole, captures=2 if whole else 4)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    def loop(model: nn.Module, run: Run) -> list[Any]:
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), []
        kept = None
        for step in range(5):
            loss = run(data(step)).square().mean()
            loss.backward()
            trace.append([loss.detach(), grads(model)])
            first = next(model.parameters()).grad
            if not set_to_none and kept is not None:
                assert first is kept, "the gradient must stay the same tensor"
            kept = first
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return trace

    both(loop)


def test_optimizer_state_that_comes_late() -> None:
    """Steps without an optimizer first; then one whose state is allocated among live recordings."""

    def loop(model: nn.Module, run: Run) -> list[Any]:
        trace: list[Any] = []
        optimizer: torch.optim.Optimizer | None = None
        for step in range(8):
            if step == 4:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            loss = run(data(step)).square().mean()
            loss.backward()
            trace.append([loss.detach(), grads(model)])
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
        return trace

    both(loop)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_activation_checkpointing(reentrant: bool, whole: bool) -> None:
    """Around compiled blocks (recomputed by launches), and, not reentrant, inside a compiled model."""
    if whole and reentrant:
        pytest.skip("Dynamo does not compile reentrant checkpoints as part of a graph")

    def loop(model: nn.Module, run: Run) -> list[Any]:
        optimizer, trace = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(5):
            x = data(step).requires_grad_()
            loss = run(x).square().mean()
            loss.backward()
            trace.append([loss.detach(), x.grad, grads(model)])
            optimizer.step()
            optimizer.zero_grad()
        return trace

    # Around compiled blocks a reentrant checkpoint's first forward runs without gradients, which is a graph
    # of its own.
    both(loop, net=lambda: Net(reentrant), whole=whole, captures=3 if reentrant else 2)
    assert not pgraph.report().outside, str(pgraph.report())


@pytest.mark.parametrize("dynamic", [False, True])
def test_batches_of_varying_size(dynamic: bool) -> None:
    """Sizes come again; as many recordings as sizes, whether Dynamo compiles once or for each."""

    def loop(model: nn.Module, run: Run) -> list[Any]:
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=1e-2), []
        for step in range(12):
            loss = run(data(step, batch=(2, 3, 5)[step % 3])).square().mean()
            loss.backward()
            trace.append([loss.detach(), grads(model)])
            optimizer.step()
            optimizer.zero_grad()
        return trace

    both(loop, captures=6, dynamic=dynamic)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(context: Callable[[], Any]) -> None:
    """The results of an evaluation are kept over the training steps that follow."""

    def loop(model: nn.Module, run: Run) -> list[Any]:
        optimizer, trace, kept = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
        for step in range(6):
            loss = run(data(step)).square().mean()
            loss.backward()
            trace.append([loss.detach(), grads(model)])
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with context():
                out = run(data(100 + step))
                kept.append((out, out.clone()))
            model.train()
        for out, before in kept:
            assert torch.equal(out, before), "a later step wrote into the result of an evaluation"
        return [trace, [out.clone() for out, _ in kept]]

    both(loop, captures=4)


def test_two_models_share_everything() -> None:
    """In turn, with gradients of both alive; the second is served by the first one's recordings."""
    torch.manual_seed(0)
    plain = [Net(), Net()]
    twins = copy.deepcopy(plain)

    def loop(models: list[Net], runs: list[Run]) -> list[Any]:
        optimizers, trace = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models], []
        for step in range(5):
            outs = [run(data(step)) for run in runs]
            loss = (outs[0] - outs[1]).square().mean()
            loss.backward()
            trace.append([loss.detach(), grads(models[0]), grads(models[1])])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return trace

    want = loop(plain, list(plain))
    got = loop(twins, [host(m) for m in twins])
    same(got, want, rtol=1e-6, atol=1e-7)
    report = pgraph.report()
    assert report.refused == 0, str(report)
    assert report.captures == 2, str(report)
    assert report.launches >= 2 * 2 * 3, str(report)


def test_autocast_and_a_grad_scaler() -> None:
    """bf16 inside, scaled losses, and a step that the scaler skips because of an infinity."""

    def loop(model: nn.Module, run: Run) -> list[Any]:
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=1e-2), []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
        for step in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = run(data(step)).float().square().mean()
            if step == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            trace.append([loss.detach(), grads(model)])
            scaler.step(optimizer)
            scaler.update()
            trace.append(scaler.get_scale())
            optimizer.zero_grad()
        return trace

    both(loop)


def test_forward_mode_runs_plainly() -> None:
    """Plain ATen code carries tangents, a launch would drop them."""
    compiled = host(lambda x: x.sin() * 2)
    for dual in (False, True, False, True, False):
        x = torch.randn(3)
        with forward_ad.dual_level():
            out = compiled(forward_ad.make_dual(x, torch.ones(3)) if dual else x)
            tangent = forward_ad.unpack_dual(out).tangent
        if dual:
            same(tangent, 2 * x.cos())
        same(compiled(x), x.sin() * 2)
    assert pgraph.report().launches == 4


def test_autocast_around_a_backward_only_changes_nothing() -> None:
    """A graph says its casts; what is in force when it is captured must not stay in it."""

    def fn(x: Tensor) -> Tensor:
        return (x @ x).relu() @ x

    compiled = host(fn)
    for call in range(6):
        mine = torch.randn(4, 4, requires_grad=True)
        theirs = mine.detach().clone().requires_grad_()
        out = compiled(mine).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=call in (1, 2, 4)):
            out.backward()
        fn(theirs).sum().backward()
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_sparse_gradients(codegen: str, inductor_cache: object) -> None:
    """Of an embedding: they have no storage, and what they consist of is made outside."""
    embedding = nn.Embedding(20, 6, sparse=True)
    twin = copy.deepcopy(embedding)

    def loss(table: nn.Embedding, tokens: Tensor) -> Tensor:
        return table(tokens).sin().square().sum()

    compiled = host(lambda tokens: loss(embedding, tokens), codegen)
    for _ in range(4):
        tokens = torch.randint(20, (3, 4))
        compiled(tokens).backward()
        loss(twin, tokens).backward()
        ours, theirs = embedding.weight.grad, twin.weight.grad
        assert ours is not None
        assert theirs is not None
        assert ours.is_sparse
        same(ours.to_dense(), theirs.to_dense(), rtol=1e-5, atol=1e-5)
        embedding.zero_grad()
        twin.zero_grad()
    assert pgraph.report().launches
