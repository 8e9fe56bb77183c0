"""What callers hand in and get back: views, aliases, mutation, offsets, empty tensors, other shapes."""

from __future__ import annotations

import ctypes

import pytest
import torch
from gpu_helpers import (
    DEVICE,
    Shaker,
    assert_launched,
    check,
    compile_pgraph,
    explain,
    randn,
    report,
    same_bits,
    templates,
    whole,
)
from torch import Tensor

from pgraph import compat
from pgraph.ops.safety import mark_unsafe, unmark_unsafe

pytestmark = pytest.mark.gpu


def test_launches_in_c_read_tensors_in_place() -> None:
    """Note [Handles in place]: the layout is known, and it is that of tensors on the GPU too."""
    offset, table = compat.tensor_layout()
    assert offset
    for x in (randn(3), randn(3, 4).t(), torch.nn.Parameter(randn(2)), randn(2, grad=True) * 2):
        implementation = ctypes.c_uint64.from_address(id(x) + offset).value
        assert ctypes.c_uint64.from_address(implementation).value == table


def test_inputs_are_mutated_in_place() -> None:
    """`check` compares the arguments after the call as well."""

    def fn(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
        x.mul_(2).add_(y)
        n += 1
        y[3:7].zero_()
        return x.sum(0) * n

    check(fn, lambda: (randn(50, 30), randn(50, 30), torch.zeros(1, device=DEVICE)), label="mutation")


def test_buffers_are_mutated_in_place() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(64, device=DEVICE))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=DEVICE))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.lerp_(x.mean(0), 0.1)
            self.calls += 1
            return (x - self.mean) * 2

    eager, mine = Counter(), Counter()
    compiled = compile_pgraph(mine, codegen="aten")
    for i in range(8):
        x = randn(32, 64)
        assert same_bits(compiled(x), eager(x)), f"call {i}{explain()}"
        assert same_bits(mine.mean, eager.mean), f"call {i}{explain()}"
        assert mine.calls.item() == eager.calls.item() == i + 1, explain()
    assert_launched(6)


def test_results_that_are_views_of_inputs_and_of_each_other() -> None:
    """Aliasing of results is eager's: writing through one shows in the other."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return x, x[2:5], y, y.t(), y[1], y.view(-1)[7:19]

    check(fn, lambda: (randn(12, 20),), label="views")
    compiled = compile_pgraph(fn, codegen="aten")
    for _ in range(4):
        x = randn(12, 20)
        same, partition, y, turned, row, piece = compiled(x)
        assert same.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), explain()
        partition.fill_(5.0)
        assert (x[2:5] == 5.0).all(), f"a view of the input is a copy{explain()}"
        y.fill_(3.0)
        for view in (turned, row, piece):
            assert (view == 3.0).all(), f"two results in one storage came apart{explain()}"


def test_same_tensor_twice_then_two() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2 + y).sin()

    def pair() -> tuple[Tensor, Tensor]:
        x = randn(40, 40)
        return x, x

    compiled = compile_pgraph(fn, codegen="aten")
    for i in range(12):
        x, y = pair() if i // 3 % 2 == 0 else (randn(40, 40), randn(40, 40))
        assert same_bits(compiled(x, y), fn(x, y)), f"call {i}{explain()}"
    assert_launched(2)


@pytest.mark.parametrize("first", ["one", "two"])
def test_inputs_in_one_storage_then_in_two_and_back(first: str) -> None:
    """Captured on either, launched on both: the pointers of the two are moved independently."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x @ y, x + y)).cos()

    def one(gap: int) -> tuple[Tensor, Tensor]:
        base = randn(2 * 1024 + gap)
        return base[:1024].view(32, 32), base[1024 + gap :].view(32, 32)

    compiled = compile_pgraph(fn, codegen="aten")
    for i in range(16):
        shared = (i // 4 % 2 == 0) == (first == "one")
        x, y = one(64 * i) if shared else (randn(32, 32), randn(32, 32))
        assert same_bits(compiled(x, y), fn(x, y)), f"call {i}{explain()}"
    assert_launched(4)


@pytest.mark.parametrize("shift", [0, 4, 256, 512])
def test_overlapping_inputs_that_are_mutated(shift: int) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return (y * 2).sin() + x

    compiled = compile_pgraph(fn, codegen="aten")
    for i in range(6):
        base = randn(2048)
        mine = base.clone()
        expected = fn(base[:1024], base[shift : shift + 1024])
        got = compiled(mine[:1024], mine[shift : shift + 1024])
        assert same_bits(got, expected), f"call {i}{explain()}"
        assert same_bits(mine, base), f"call {i}: the storage differs{explain()}"
    assert_launched(4)


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
@pytest.mark.parametrize("offset", [2, 8, 16])
def test_misaligned_inputs_get_a_capture_of_their_own(codegen: str, offset: int) -> None:
    """Captured aligned, then called with slices that begin `offset` bytes later, and mixed (hazard 10).

    Whole numbers: another product kernel, chosen for another alignment, gives the same sums.
    """

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x * 2 + 1) @ w + x.sum()

    compiled = compile_pgraph(fn, codegen=codegen)
    reference = torch.compile(fn, dynamic=False) if codegen == "inductor" else fn
    w, shaker = whole(64, 64, dtype=torch.bfloat16), Shaker()
    captures = []
    for shift in (0, offset, 0, offset):
        for i in range(4):
            skip = shift // 2
            base = whole(64 * 64 + skip, dtype=torch.bfloat16)
            x = base[skip:].view(64, 64)
            assert x.data_ptr() % 32 == shift % 32
            got, expected = compiled(x, w), reference(x, w)
            assert same_bits(got, expected), f"offset {shift}, call {i}{explain()}"
            shaker.shake()
        captures.append(report().captures)
    assert_launched(8)
    assert captures[1] == captures[0] + 1, f"no capture for the other alignment: {captures}{explain()}"
    assert captures[3] == captures[1], f"captured again: {captures}{explain()}"


def test_wandering_slices_share_one_capture() -> None:
    """Slices at many offsets of 16 bytes and more must not ask for a capture each."""
    compiled = compile_pgraph(lambda x: (x * 2).sin() + 1, codegen="aten")
    base = randn(1 << 16)
    for i in range(40):
        x = base[4 * i : 4 * i + 4096]
        assert same_bits(compiled(x), (x * 2).sin() + 1), f"slice {i}{explain()}"
    assert report().captures <= 2, explain()
    assert_launched(30)


def test_strides_are_part_of_the_contract() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * 2).cos() + x.sum(1, keepdim=True)

    compiled = compile_pgraph(fn, codegen="aten")
    for i in range(9):
        x = randn(30, 40) if i % 2 else randn(40, 30).t()
        got, expected = compiled(x), fn(x)
        assert same_bits(got, expected), f"call {i}{explain()}"
        assert got.stride() == expected.stride(), f"call {i}{explain()}"


def test_empty_tensors() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x * 2, torch.cat((x, y)).sin(), x.sum() + y.sum()

    check(fn, lambda: (randn(0, 16), randn(8, 16)), label="empty")


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_dynamic_shapes(codegen: str) -> None:
    """One symbolic graph; each size seen often enough gets its own capture, at most `max_captures`."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w + x.shape[0]).sum(0)

    compiled = compile_pgraph(fn, dynamic=True, codegen=codegen, max_captures=3)
    reference = torch.compile(fn, dynamic=True) if codegen == "inductor" else fn
    w = randn(32, 48)
    for i in range(30):
        x = randn((16, 24, 40, 56, 72)[i // 2 % 5 if i < 20 else i % 2], 32)
        got, expected = compiled(x, w), reference(x, w)
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5), f"call {i}{explain()}"
    assert_launched(6)
    assert 1 <= len(templates()) <= 3, explain()


def test_outputs_stay_valid_for_ever() -> None:
    compiled = compile_pgraph(lambda x: ((x * 3).sin(), x.sum(1)), codegen="aten")
    kept = []
    for i in range(50):
        x = torch.full((64, 64), float(i), device=DEVICE)
        kept.append(compiled(x))
        del x
    for i, (a, b) in enumerate(kept):
        assert torch.equal(a, (torch.full((64, 64), float(i), device=DEVICE) * 3).sin()), f"{i}{explain()}"
        assert torch.equal(b, torch.full((64,), 64.0 * i, device=DEVICE)), f"{i}{explain()}"
    assert len({a.data_ptr() for a, _ in kept}) == len(kept), "two live results share an address"
    assert_launched(40)


def test_parts_of_a_backward_write_into_nobodys_tensors() -> None:
    """What is donated to the whole backward stands at positions where its parts have the user's tensors."""

    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        total = a.sin() + b.sin() + c.sin() + d.sin() + e.sin()
        return total.cumsum(0).tanh().cumsum(0).sin()

    mark_unsafe("aten::cumsum", "cuts the graph of a test", "none")
    try:
        compiled = compile_pgraph(fn, min_ops=1)
        for call in range(5):
            inputs = [randn(64, 64, grad=True) for _ in range(5)]
            before = [x.detach().clone() for x in inputs]
            tangent = randn(64, 64)
            kept = tangent.clone()
            torch.autograd.grad(compiled(*inputs), inputs, tangent)
            for x, value in zip([*inputs, tangent], [*before, kept], strict=True):
                assert same_bits(x, value), f"call {call} wrote into an input{explain()}"
    finally:
        unmark_unsafe("aten::cumsum")
    assert_launched(2)
