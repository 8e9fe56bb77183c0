"""Whole models on the host driver: what they compute, against eager."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
from support import MLP, TIGHT, Block, host, launching, same, train
from torch import nn

import pgraph


@pytest.mark.parametrize("make", [MLP, Block])
def test_forward_and_backward(make: type[nn.Module]) -> None:
    """Exact: the same ops run, on memory that changes at every call."""
    model = make()
    compiled = host(model)
    shape = (3, 8) if make is MLP else (2, 5, 32)
    train(model, compiled, torch.randn(shape))
    with launching(8):
        for _ in range(4):
            x = torch.randn(shape)
            same(train(model, compiled, x), train(model, model, x))


@pytest.mark.parametrize("make", [MLP, Block])
def test_inductor_forward_and_backward(make: type[nn.Module], inductor_cache: pathlib.Path) -> None:
    """Generated kernels fuse, so the last bits may differ."""
    model = make()
    compiled = host(model, "inductor")
    shape = (3, 8) if make is MLP else (2, 5, 32)
    train(model, compiled, torch.randn(shape))
    with launching(8):
        for _ in range(4):
            x = torch.randn(shape)
            same(train(model, compiled, x), train(model, model, x), **TIGHT)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def test_batch_norm_in_training_moves_its_statistics() -> None:
    """Buffers are mutated by the launch, each call once."""
    model = conv_net()
    twin = copy.deepcopy(model)
    compiled = host(model)
    train(model, compiled, torch.ones(2, 3, 4, 4))
    train(twin, twin, torch.ones(2, 3, 4, 4))
    with launching(6):
        for _ in range(3):
            x = torch.randn(2, 3, 4, 4)
            before = model[1].running_mean.clone()
            same(train(model, compiled, x), train(twin, twin, x))
            assert not torch.equal(before, model[1].running_mean)
    assert model[1].num_batches_tracked == 4


def test_batch_norm_in_evaluation_leaves_its_statistics() -> None:
    model = conv_net().eval()
    compiled = host(model)
    before = {k: b.clone() for k, b in model.named_buffers()}
    with torch.no_grad():
        compiled(torch.randn(2, 3, 4, 4))
        with launching(3):
            for _ in range(3):
                x = torch.randn(2, 3, 4, 4)
                same(compiled(x), model(x))
    same(dict(model.named_buffers()), before)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)


def sgd_foreach(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, foreach=False)


def adamw_foreach(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, foreach=True)


@pytest.mark.parametrize("make", [sgd, sgd_foreach, adamw, adamw_foreach])
def test_a_compiled_optimizer_step(make: type) -> None:
    """Parameters and state change in place; the gradients are new tensors at every step.

    Exact against the same traced ops, close to eager (which counts its steps in double precision).
    """
    params = [nn.Parameter(torch.randn(n, 3)) for n in (1, 4, 5)]
    twins = [[nn.Parameter(p.detach().clone()) for p in params] for _ in range(2)]
    optimizer, traced, eager = make(params), make(twins[0]), make(twins[1])
    step, step_traced = host(optimizer.step), torch.compile(traced.step, backend="aot_eager", dynamic=False)

    def once() -> None:
        for p, q, r in zip(params, *twins, strict=True):
            p.grad = torch.randn_like(p)
            q.grad, r.grad = p.grad.clone(), p.grad.clone()
        step()
        step_traced()
        eager.step()
        same(params, twins[0])
        same(params, twins[1], rtol=1e-4, atol=1e-4)

    for _ in range(2):  # the first step makes the state, the second mutates it
        once()
    once()
    with launching(3):
        for _ in range(3):
            once()


def test_an_op_that_may_draw_and_does_not_is_captured() -> None:
    """`rrelu` draws slopes in training, and takes their mean in evaluation."""
    model = nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)).eval()
    compiled, x = host(model, "aten"), torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(2):
            compiled(x)
        with launching(2):
            for _ in range(2):
                x = torch.randn(4, 8)
                same(compiled(x), model(x))
    (partition,) = pgraph.report().partitions
    assert partition.facts.device_ops > 2, "the whole model"


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_dropout(codegen: str, inductor_cache: pathlib.Path) -> None:
    """Differs from call to call, repeats under one seed, and the backward sees the forward's mask."""
    compiled = host(lambda x: nn.functional.dropout(x * 1.0, 0.5), codegen)
    for _ in range(2):
        compiled(torch.ones(4, 64, requires_grad=True)).sum().backward()
    x = torch.ones(4, 64, requires_grad=True)
    with launching(3):
        torch.manual_seed(7)
        first, second = compiled(x), compiled(x)
        torch.manual_seed(7)
        again = compiled(x)
    same(again, first)
    assert not torch.equal(first, second)
    assert 0.3 < float((first == 0).float().mean()) < 0.7
    for out in (second, first):  # not in the order of the forwards
        x.grad = None
        with launching():
            out.sum().backward()
        same(x.grad, out.detach())  # 0 where dropped, 2 where kept


def test_autocast() -> None:
    """The casts are part of the graph."""
    model = MLP()
    compiled = host(model)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, compiled, torch.randn(3, 8))
        with launching(6):
            for _ in range(3):
                x = torch.randn(3, 8)
                got = train(model, compiled, x)
                assert got["out"].dtype == torch.bfloat16
                same(got, train(model, model, x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode: type) -> None:
    model = MLP()
    compiled = host(model)
    with mode():
        compiled(torch.randn(3, 8))
        with launching(3):
            for _ in range(3):
                x = torch.randn(3, 8)
                same(compiled(x), model(x))
                assert compiled(x).is_inference() == model(x).is_inference()


def test_several_forwards_before_any_backward() -> None:
    """One template, several calls in flight: each backward meets its own activations."""
    model = MLP()
    compiled = host(model)
    for _ in range(2):
        train(model, compiled, torch.randn(3, 8))
    xs = [torch.randn(3, 8, requires_grad=True) for _ in range(5)]
    with launching(10):
        outs = [compiled(x) for x in xs]
        got = [
            torch.autograd.grad((o * o).sum(), x)[0] for o, x in reversed(list(zip(outs, xs, strict=True)))
        ]
    want = [torch.autograd.grad((model(x) ** 2).sum(), x)[0] for x in reversed(xs)]
    same(got, want)


def stack() -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(3))


def run(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def test_one_capture_serves_every_layer() -> None:
    """Layers compiled one by one share the code, and with it one forward and one backward template."""
    layers = stack()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return run([shared[i] for i in range(3)], x)

    block = host(Block.forward)
    shared = [lambda x, layer=layer: block(layer, x) for layer in layers]
    for _ in range(2):
        train(layers, forward, torch.randn(2, 5, 32))
    with launching(18):
        for _ in range(3):
            x = torch.randn(2, 5, 32)
            same(train(layers, forward, x), train(layers, lambda x: run(list(layers), x), x))
    names = [p.name.split()[0] for p in pgraph.report().capturable]
    assert sorted(names) == ["backward", "forward"]
    assert [p.captures for p in pgraph.report().capturable] == [1, 1]


def test_the_whole_model_as_one_graph() -> None:
    layers = stack()
    compiled = host(lambda x: run(list(layers), x))
    for _ in range(2):
        train(layers, compiled, torch.randn(2, 5, 32))
    with launching(6):
        for _ in range(3):
            x = torch.randn(2, 5, 32)
            same(train(layers, compiled, x), train(layers, lambda x: run(list(layers), x), x))
    assert pgraph.report().captures == 2


def test_parts_of_a_graph_that_takes_nothing() -> None:
    def fn() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(4).cumsum(0) * 2
        big = torch.nonzero(x > 4)
        return x.sin() + 1, big.float().sin() + big

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = host(fn, min_ops=1)
        for _ in range(2):
            compiled()
        with launching(2):
            same(compiled(), fn())


def test_normalisation_in_two_types() -> None:
    """Its statistics come out in a type that no shape rule foretells: such a part runs uncaptured."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten.native_layer_norm((x + 1).sin(), [16], w, w, 1e-5)

    compiled = host(fn, min_ops=9)  # too small to be split around what is refused
    for dtype, launches in ((torch.bfloat16, 0), (torch.float32, 3)):
        before = pgraph.report().launches
        for _ in range(4):
            x, w = torch.randn(6, 16, dtype=dtype), torch.randn(16)
            same(compiled(x, w), fn(x, w))
        assert pgraph.report().launches - before == launches
    assert "not-permitted" in str(pgraph.report())


def products_of_rows(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.nonzero().float()
    return rows @ w.softmax(0), rows


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_strides_that_depend_on_data(codegen: str) -> None:
    """`nonzero` lays out its result column by column; the part that reads it was compiled for that."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = host(products_of_rows, codegen, min_ops=1)
        for _ in range(4):
            x, w = torch.randn(4, 4).round(), torch.randn(2, 3)
            same(compiled(x, w), products_of_rows(x, w), **TIGHT)
            compiled(torch.zeros(4, 4), w)  # no rows at all
    assert pgraph.report().launches > 0
