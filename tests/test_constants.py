"""Constants made on the CPU do not cut a graph, have eager's bits, and are nobody's twice."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs_constants import PROGRAMS, SIZED, buckets, logarithms, scaled
from support import same
from support_constants import DEVICE, PARTITIONS, Compiled, compiled
from support_rules import CUDA, Bench
from torch import Tensor

from pgraph.rewrites import constants, operands
from pgraph.rewrites.operands import by_number

aten = torch.ops.aten


def size(name: str) -> tuple[int, int]:
    return (9, 9) if name == "positions" else (7, 7)


def check_whole(found: Compiled) -> None:
    """Each graph is one part, safe, and takes and returns nothing of the CPU's."""
    assert found.reasons() == set()
    assert [len(partitions) for partitions in found.partitions()] == [1] * len(found.graphs)
    for gm in found.graphs:
        for node in gm.graph.nodes:
            assert getattr(node.meta.get("val"), "device", torch.device("meta")).type == "meta"


@pytest.mark.parametrize("name", PROGRAMS)
def test_inference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(size(name))
    found = compiled(PROGRAMS[name], x, patch=monkeypatch)
    assert found.before, "the program has no constant that would cut its graph"
    check_whole(found)
    for _ in range(3):  # a constant is the same at every call
        same(found.run(0, x)[0], PROGRAMS[name](x))


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_training(name: str, partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward saves or computes again is on the device, too."""
    x = torch.randn(size(name), requires_grad=True)
    found = compiled(PROGRAMS[name], x, patch=monkeypatch, partition=partition)
    check_whole(found)
    want = PROGRAMS[name](x)
    grad = torch.randn_like(want)
    wanted = torch.autograd.grad(want, x, grad)
    for _ in range(3):
        got, *saved = found.run(0, x.detach())
        same(got, want.detach())
        torch.testing.assert_close(found.run(1, *saved, grad)[0], wanted[0])


def test_without_the_pass_the_backward_takes_a_tensor_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(9, 9, requires_grad=True)
    found = compiled(PROGRAMS["positions"], x, patch=monkeypatch, partition="min-cut", cured=False)
    with pytest.raises(AssertionError):
        check_whole(found)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", SIZED)
def test_sizes_that_vary(name: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 6, requires_grad=train)
    found = compiled(SIZED[name], x, patch=monkeypatch, dynamic=True)
    assert found.before
    check_whole(found)
    for n in (6, 9):
        x = torch.randn(n, n)
        same(found.run(0, n, x)[0], SIZED[name](x))


def test_arithmetic_of_sizes_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's logarithm is another one."""
    found = compiled(logarithms, torch.randn(6, 6), patch=monkeypatch, dynamic=True)
    assert found.reasons() == {"other-device", "device-copy"}
    same(found.run(0, 9, x := torch.randn(9, 9))[0], logarithms(x))


# -- who may share what ---------------------------------------------------------------------------


def test_a_returned_constant_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Any:
        steps = torch.arange(7).to(x.device)
        ones = torch.ones(7).to(x.device)
        return x * 2, steps, steps.view(7, 1), ones

    found = compiled(fn, torch.randn(7), patch=monkeypatch)
    check_whole(found)
    x = torch.randn(7)
    for _ in range(3):
        results = found.run(0, x)
        same(tuple(results), fn(x))
        for result in results[1:]:
            result.fill_(99)


def test_saved_constants_are_the_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code may overwrite what only it has."""
    x = torch.randn(7, 7, requires_grad=True)
    found = compiled(buckets, x, patch=monkeypatch, partition="aten")
    for _ in range(2):
        got, *saved = found.run(0, x.detach())
        same(got, buckets(x).detach())
        for value in saved:
            value.fill_(99)


def test_each_copy_is_returned_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Any:
        steps = torch.arange(7)
        return x * 2, steps.to(x.device), steps.to(x.device)

    found = compiled(fn, torch.randn(7), patch=monkeypatch)
    check_whole(found)
    _, a, b = found.run(0, torch.randn(7))
    a.fill_(99)
    same(b, torch.arange(7))


def test_moved_copies_are_returned_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Any:
        steps = torch.arange(x.shape[0])
        return x * 2, steps.to(x.device), steps.to(x.device)

    found = compiled(fn, torch.randn(7), patch=monkeypatch, dynamic=True)
    check_whole(found)
    _, a, b = found.run(0, 7, torch.randn(7))
    a.fill_(99)
    same(b, torch.arange(7))


# -- what stays where it is -----------------------------------------------------------------------


def drawn(x: Tensor) -> Tensor:
    return x * torch.rand(7).to(x.device)


def by_mask(x: Tensor) -> Tensor:
    return x[torch.tensor([True, False] * 3 + [True])]


def returned(x: Tensor) -> Any:
    return x * 2, torch.arange(7) * 2


def wider(x: Tensor) -> Tensor:
    """A whole tensor by a scalar of floating point: which type it has is for eager to say."""
    return x.long() * torch.tensor(0.5)


def alone(x: Tensor) -> Tensor:
    """Both without dimensions: the scalar's type counts."""
    return x.sum() * torch.tensor(0.1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (drawn, {"rng", "device-copy"}),
        (returned, {"other-device"}),
        (wider, {"other-device", "cpu-scalar"}),
        (alone, {"other-device", "cpu-scalar"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_constant_of_the_devices(
    fn: Callable[..., Any], left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiled(fn, torch.randn(7), patch=monkeypatch)
    assert found.reasons() == left


def test_an_input_on_the_cpu_is_no_constant() -> None:
    bench = Bench()
    x, scale = bench.tensor(4), bench.tensor(1, device="cpu")
    gm = bench.module(bench.call(aten.mul.Tensor, x, bench.call(aten.add.Tensor, scale, 1), like=x))
    before = gm.code
    constants.on_device(gm)
    assert gm.code == before


def test_a_tensor_of_the_users_is_no_constant() -> None:
    """An attribute that was not made in the traced code may change between calls."""
    bench = Bench()
    attribute = bench.attribute("table", torch.ones(4))
    attribute.meta["val"] = bench.tensor(4, device="cpu").meta["val"]
    copied = bench.call(torch.ops.prims.device_put.default, attribute, CUDA)
    gm = bench.module(bench.call(aten.mul.Tensor, bench.tensor(4), copied))
    before = gm.code
    constants.on_device(gm)
    assert gm.code == before


def test_several_devices_are_left_alone() -> None:
    bench = Bench()
    x = bench.tensor(4)
    bench.tensor(4, device="cuda:1")
    gm = bench.module(bench.call(aten.mul.Tensor, x, scalar(bench, 0.5)))
    before = gm.code
    constants.on_device(gm)
    assert gm.code == before


def test_what_holds_too_much_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers are made on the device then, others stay outside."""
    monkeypatch.setattr(constants, "LARGEST", 64)
    found = compiled(buckets, torch.randn(7, 7), patch=monkeypatch)
    assert found.reasons() == {"other-device", "device-copy"}
    found = compiled(PROGRAMS["mutated"], torch.randn(9, 9), patch=monkeypatch)
    check_whole(found)
    assert not dict(found.graphs[0].named_buffers())
    same(found.run(0, x := torch.randn(9, 9))[0], PROGRAMS["mutated"](x))


def test_a_constant_that_cannot_be_computed_fails_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * (torch.arange(7) // torch.zeros(7, dtype=torch.long)).to(x.device)

    found = compiled(fn, torch.randn(7), patch=monkeypatch)
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        found.run(0, torch.randn(7))


# -- numbers --------------------------------------------------------------------------------------

TYPES = sorted(operands.PLAIN_TYPES, key=str)


def scalar(bench: Bench, value: float, dtype: torch.dtype = torch.float32) -> Any:
    attribute = bench.attribute(f"literal{len(bench.graph.nodes)}", torch.tensor(value, dtype=dtype))
    return bench.call(
        aten.lift_fresh_copy.default, attribute, like=bench.tensor(device="cpu", dtype=dtype).meta["val"]
    )


@pytest.mark.parametrize("op", sorted(operands._NUMBER_OPS, key=str), ids=str)
def test_a_number_is_what_the_scalar_was(op: Any) -> None:
    """Over all pairs of types: same type, same bits, on either side."""
    used = 0
    for mine, its, dims in itertools.product(TYPES, TYPES, (0, 1)):
        bench = Bench()
        x, s = bench.tensor(*[5] * dims, dtype=mine), scalar(bench, 3, its)
        more = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
        real = torch.tensor([-3, 0, 1, 2, 5]).to(mine)[slice(None) if dims else 2]
        for value in (0.1, -3.0, 7.0) if its.is_floating_point else (0, 1, 7):
            small = torch.tensor(value, dtype=its)
            for left in (False, True):
                try:
                    want = op(small, real, **more) if left else op(real, small, **more)
                except RuntimeError:
                    continue  # no such op for these types, or a division by zero
                node = bench.graph.call_function(op, (s, x) if left else (x, s), more)
                if (other := by_number(node, s)) is None:
                    continue
                number = small.item()
                got = other(number, real, **more) if left else other(real, number, **more)
                same(got, want)
                used += 1
    assert used > 20


def test_numbers_change_no_type() -> None:
    for mine, its, dims in itertools.product(TYPES, TYPES, (0, 1, 3)):
        bench = Bench()
        x, s = bench.tensor(*[2] * dims, dtype=mine), scalar(bench, 1, its)
        try:
            node = bench.call(aten.mul.Tensor, x, s)
        except RuntimeError:
            continue
        if by_number(node, s):
            assert node.meta["val"].dtype == mine


def test_numbers_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As constants throughout, and among others: infinite, negative zero, not a number."""
    rows = [[math.inf] * 3, [-0.0] * 3, [0.0, -0.0, 0.0], [math.nan] * 3, [0.1] * 3, [True] * 3]
    types = [torch.float32, torch.bfloat16, torch.float64]

    def fn(x: Tensor) -> list[Tensor]:
        made = [torch.tensor(row).to(t).to(x.device) for row in rows for t in types]
        return [x * 2, *made]

    found = compiled(fn, torch.randn(7), patch=monkeypatch)
    check_whole(found)
    for got, want in zip(found.run(0, torch.randn(7)), fn(torch.randn(7)), strict=True):
        if got.shape == (3,):
            same(got, want)
            same(torch.signbit(got), torch.signbit(want))


def test_strides_are_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Any:
        cube = torch.arange(24.0).view(2, 3, 4)
        return (
            x * 2,
            cube.permute(2, 0, 1).to(x.device),
            torch.ones(3, 4).t().to(x.device),
            cube[:, :, ::2].to(x.device),
            cube[:1].transpose(0, 2).to(x.device),
            torch.empty(0, 3).to(x.device),
        )

    found = compiled(fn, torch.randn(7), patch=monkeypatch)
    check_whole(found)
    results, there = found.run(0, torch.randn(7)), fn(torch.empty(7, device=DEVICE))
    for got, want, copied in zip(results[1:], fn(torch.randn(7))[1:], there[1:], strict=True):
        same(got, want)
        assert got.stride() == copied.stride()


def test_it_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pgraph.rewrites.constants"):
        compiled(scaled, torch.randn(7), patch=monkeypatch)
        compiled(SIZED["causal"], torch.randn(7, 7), patch=monkeypatch, dynamic=True)
    told = "\n".join(caplog.messages)
    assert "constants made on the CPU: 1 folded, of which the code holds 0 bytes on meta" in told
    assert re.search(r"ops on the CPU that depend on sizes only: [1-9]\d* moved to meta", told)
