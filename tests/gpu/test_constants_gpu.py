"""Constants that programs make on the CPU: graphs stay whole, numbers are eager's, nobody shares them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu_helpers import (
    DEVICE,
    as_bytes,
    assert_launched,
    check,
    compile_pgraph,
    explain,
    outside_codes,
    randn,
    report,
    run_once,
    same_bits,
)
from programs_constants import PROGRAMS, SIZED
from support_rules import Bench
from torch import Tensor

from pgraph.rewrites import operands

pytestmark = pytest.mark.gpu

CODEGENS = ["aten", "inductor"]
# The GPU's logarithms differ from the CPU's in the last bit, and Inductor moves them there. Indices that are
# on the GPU from the start give another sum of gradients than those that Inductor copies there.
COMPUTED = {"logarithms", "indexed"}


def size(name: str) -> tuple[int, int]:
    return (9, 9) if name == "positions" else (64, 64)


def check_whole() -> None:
    """Everything was captured in one piece per graph, and launched."""
    assert report().outside == (), explain()
    assert all(", partition " not in p.name for p in report().capturable), explain()
    assert_launched(2)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_aten_ops_they_are_eagers_bits(name: str, grad: bool) -> None:
    def make() -> Any:
        return (randn(*size(name), grad=grad),)

    check(PROGRAMS[name], make, label=name, grad=grad, codegen="aten", min_ops=1)
    check_whole()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_inductors_code_they_are_inductors_bits(name: str, grad: bool) -> None:
    compiled = compile_pgraph(PROGRAMS[name], min_ops=1)
    inductor = torch.compile(PROGRAMS[name], dynamic=False)
    for _ in range(5):
        args = (randn(*size(name), grad=grad),)
        eager = run_once(PROGRAMS[name], args, grad)
        plain = run_once(inductor, args, grad)
        for got, want, near in zip(run_once(compiled, args, grad), plain, eager, strict=True):
            torch.testing.assert_close(got, near, rtol=1e-5, atol=1e-5)
            assert name in COMPUTED or same_bits(got, want), f"{name} is not Inductor's{explain()}"
    check_whole()


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", SIZED)
def test_sizes_that_vary(name: str, grad: bool, codegen: str) -> None:
    compiled = compile_pgraph(SIZED[name], dynamic=True, codegen=codegen, min_ops=1)
    for i in range(12):
        n = (32, 48, 96)[i % 3]
        args = (randn(n, n, grad=grad),)
        for got, want in zip(run_once(compiled, args, grad), run_once(SIZED[name], args, grad), strict=True):
            # Inductor's code multiplies and adds with one rounding.
            near = codegen == "inductor" and torch.allclose(got, want, rtol=1e-6, atol=1e-6)
            assert near or same_bits(got, want), f"{name}, call {i}{explain()}"
    check_whole()


def test_a_literal_on_the_device() -> None:
    """Tracing keeps its numbers on the CPU."""

    def fn(x: Tensor) -> Tensor:
        mean = torch.tensor([0.485, 0.456, 0.406], device=x.device)
        return (x - mean) / torch.tensor([0.229, 0.224, 0.225], device=x.device)

    check(fn, lambda: (randn(40, 3),), codegen="aten", min_ops=1)
    check_whole()


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_returned_constant_is_the_callers(codegen: str, dynamic: bool) -> None:
    def fn(x: Tensor) -> Any:
        steps = torch.arange(x.shape[0])
        ones = torch.ones(x.shape[0], 2)
        table = torch.tensor([0.5, 0.25, 3.0])
        return (
            x * 2,
            steps.to(x.device),
            steps.to(x.device).view(-1, 1),
            ones.to(x.device),
            table.to(x.device),
        )

    compiled = compile_pgraph(fn, codegen=codegen, dynamic=dynamic, min_ops=1)
    kept = []
    for i in range(6):
        x = randn(96)
        got, want = compiled(x), fn(x)
        for g, w in zip(got, want, strict=True):
            assert same_bits(g, w), f"call {i}{explain()}"
        kept.append((got, [w.clone() for w in want]))
        for g in got[1:]:
            g.fill_(7)  # must not be seen by any other call
    for got, want in kept:
        assert same_bits(got[0], want[0]), explain()
        assert all((g == 7).all() for g in got[1:]), explain()
    check_whole()


@pytest.mark.parametrize("codegen", CODEGENS)
def test_constants_live_as_long_as_the_code(codegen: str) -> None:
    """Also when the allocator hands out all that is free, before and after the capture."""

    def fn(x: Tensor) -> Tensor:
        table = torch.log(torch.arange(1, x.shape[-1] + 1) / 7.0)
        return (x * table.to(x.device)).sum(0) + x

    check(fn, lambda: (randn(300, 1000),), codegen=codegen, exact=codegen == "aten", min_ops=1, calls=10)
    check_whole()


@pytest.mark.parametrize("codegen", CODEGENS)
def test_a_scalar_that_the_caller_brings_stays_outside(codegen: str) -> None:
    """It is no constant: its value is another one at each call."""

    def fn(x: Tensor, s: Tensor) -> Tensor:
        return ((x * 2).sin() + 1) * s

    compiled = compile_pgraph(fn, codegen=codegen, min_ops=1)
    for i in range(5):
        x, s = randn(64, 64), torch.tensor(float(i))
        torch.testing.assert_close(compiled(x, s), fn(x, s))
    assert "cpu-scalar" in outside_codes(), explain()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("codegen", CODEGENS)
def test_floats_that_may_vary_are_copied_once(codegen: str, grad: bool) -> None:
    """As with `dynamic=True`, where each float of a module is an input on the CPU."""

    def fn(x: Tensor, a: float, b: float) -> Tensor:
        y = torch.nn.functional.gelu(x + a)
        return torch.rsqrt(y.square().mean(-1, keepdim=True) + b) * y * a

    compiled = compile_pgraph(fn, codegen=codegen, min_ops=1, dynamic=True)
    for i in range(8):
        x = randn(64, 32, grad=grad)
        got, want = (f(x, 0.5 + i, 0.1 * (i + 1)) for f in (compiled, fn))
        torch.testing.assert_close(got, want)
        if grad:
            torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)))
    assert [p.facts.safe for p in report().partitions].count(False) == 1, explain()
    assert len(report().capturable) == 1 + grad, explain()
    assert_launched(2)


def test_numbers_that_stay_the_same_may_be_written_over() -> None:
    """What is given is a copy, on each stream, and another one where a bit differs."""
    copy = torch.ops.pgraph.numbers_on_device.default
    zero, minus, one = (torch.tensor(x, dtype=torch.float64) for x in (0.0, -0.0, 1.0))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                for numbers in ([zero, one], [minus, one], [one, zero]):
                    got = copy(numbers, DEVICE)
                    assert as_bytes(got.cpu()).tolist() == as_bytes(torch.stack(numbers)).tolist()
                    got.fill_(7)


# -- what `pgraph.rewrites.operands` says of CUDA's kernels ----------------------------------------

TYPES = sorted(operands.PLAIN_TYPES, key=str)


def operand(dtype: torch.dtype, dims: int) -> Tensor:
    x = (
        torch.randint(0, 2, (1000,), device=DEVICE)
        if dtype == torch.bool
        else torch.randn(1000, device=DEVICE) * 20
    )
    x = x.to(dtype) if dtype != torch.uint8 else x.abs().to(dtype)
    return x if dims else x[0]


def results(op: Any, x: Any, s: Any, left: bool, more: dict[str, Any]) -> Tensor | None:
    try:
        return op(s, x, **more) if left else op(x, s, **more)
    except RuntimeError as e:
        if "CUDA error" in str(e):
            raise
        return None  # no such op for these types


@pytest.mark.parametrize("op", sorted(operands._NUMBER_OPS, key=str), ids=str)
def test_a_number_is_what_a_scalar_on_the_cpu_is(op: Any) -> None:
    used = 0
    more = {"rounding_mode": "floor"} if op is torch.ops.aten.div.Tensor_mode else {}
    for mine, its, dims, left in itertools.product(TYPES, TYPES, (0, 1), (False, True)):
        bench = Bench()
        a, b = bench.tensor(*[5] * dims, dtype=mine), bench.tensor(device="cpu", dtype=its)
        other = operands.by_number(bench.graph.call_function(op, (b, a) if left else (a, b), more), b)
        for value in (0.1, -3.3, 13.856406, 1e-8) if its.is_floating_point else (1, 7, 100):
            x, s = operand(mine, dims), torch.tensor(value).to(its)
            if other is None or (want := results(op, x, s, left, more)) is None:
                continue
            got = other(s.item(), x, **more) if left else other(x, s.item(), **more)
            assert same_bits(got, want), f"{op}: {mine} and {its} {value}, left {left}"
            used += 1
    assert used > 50


@pytest.mark.parametrize("name", ["maximum", "minimum", "where"])
def test_a_scalar_on_the_device_is_what_one_on_the_cpu_is(name: str) -> None:
    for mine, its, dims, left in itertools.product(TYPES, TYPES, (0, 1), (False, True)):
        for value in (0.1, -3.3, 13.856406, 1e-8) if its.is_floating_point else (1, 7, 100):
            x, s = operand(mine, dims), torch.tensor(value).to(its)
            more = (x > 0,) if name == "where" else ()

            def op(a: Tensor, b: Tensor, name: str = name, more: Any = more) -> Tensor:
                return getattr(torch, name)(*more, a, b)

            want = results(op, x, s, left, {})
            if want is not None:
                got = results(op, x, s.to(DEVICE), left, {})
                assert got is not None
                assert same_bits(got, want), f"{name}: {mine} and {its} {value}, left {left}"
