"""Complex numbers on the GPU: lazy conjugates inside, into and out of what is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, assert_launched, compile_pgraph, explain, randn, same_bits
from support import check_lazy_gradients
from torch import Tensor

pytestmark = pytest.mark.gpu


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as complex products (torchtitan's); its backward multiplies by the conjugate."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2) + 1


def pair(*size: int) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(size, dtype=torch.complex64, device=DEVICE) for _ in range(2))
    return a, b


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_backward_through_a_conjugate(codegen: str) -> None:
    compiled = compile_pgraph(rope, codegen=codegen, min_ops=1)
    angles = torch.polar(torch.ones(64, 16), torch.randn(64, 16)).to(DEVICE)
    for i in range(5):
        x = randn(8, 64, 32, grad=True)
        twin = x.detach().clone().requires_grad_()
        got, want = compiled(x, angles), rope(twin, angles)
        grad = torch.randn_like(want)
        got.backward(grad)
        want.backward(grad)
        assert x.grad is not None
        assert twin.grad is not None
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x.grad, twin.grad)
        if codegen == "aten":
            assert same_bits(x.grad, twin.grad), f"call {i}{explain()}"
    assert_launched(3)


@pytest.mark.parametrize("given", ["plain", "conjugate", "negative"])
def test_results_and_arguments_that_are_conjugates(given: str) -> None:
    def fn(a: Tensor, b: Tensor) -> Any:
        product = a * b
        return product.conj(), product.conj().imag, product.conj().clone()

    compiled = compile_pgraph(fn, codegen="aten", min_ops=1)
    for i in range(5):
        a, b = pair(64, 64)
        first = {"plain": a, "conjugate": a.conj(), "negative": a.conj().imag}[given]
        for got, want in zip(compiled(first, b), fn(first, b), strict=True):
            assert (got.is_conj(), got.is_neg()) == (want.is_conj(), want.is_neg())
            assert torch.equal(got, want), f"call {i}{explain()}"
    assert_launched(3)


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_gradients_that_are_lazy_at_some_calls_only(codegen: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * x * 2

    check_lazy_gradients(compile_pgraph(fn, codegen=codegen, min_ops=1), fn, lambda: pair(64, 64))
    assert_launched(6)  # the backward has three specializations
