"""Complex numbers: a conjugate (and the imaginary part of one) is a bit on a view, not numbers in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import check_lazy_gradients, host, launching, same
from torch import Tensor

import pgraph
from pgraph.ops.safety import mark_unsafe, unmark_unsafe


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as complex products; its backward multiplies by the conjugate."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2)


def angles(length: int, width: int) -> Tensor:
    return torch.polar(torch.ones(length, width), torch.randn(length, width))


def complex_pair() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)


def test_backward_through_a_conjugate() -> None:
    compiled = host(rope)
    turn = angles(5, 4)

    def run(fn: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().clone().requires_grad_()
        out = fn(leaf, turn)
        out.backward(torch.arange(40.0).view(5, 8))
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    run(compiled, torch.randn(5, 8))
    with launching(4):
        for _ in range(2):
            x = torch.randn(5, 8)
            same(run(compiled, x), run(rope, x))


def results_conjugate(a: Tensor, b: Tensor) -> Any:
    product = a * b
    return product.conj(), product.conj().imag, product.conj().clone()


@pytest.mark.parametrize("given", ["plain", "conjugate", "negative"])
def test_results_and_arguments_that_are_conjugates(given: str) -> None:
    compiled = host(results_conjugate)

    def arguments() -> tuple[Tensor, Tensor]:
        a, b = complex_pair()
        if given == "negative":
            return a.conj().imag, b
        return (a.conj() if given == "conjugate" else a), b

    assert arguments()[0].is_conj() == (given == "conjugate")
    assert arguments()[0].is_neg() == (given == "negative")
    compiled(*arguments())
    with launching(2):
        for _ in range(2):
            a, b = arguments()
            got, want = compiled(a, b), results_conjugate(a, b)
            same(got, want)
            assert [x.is_conj() for x in got] == [x.is_conj() for x in want]
            assert [x.is_neg() for x in got] == [x.is_neg() for x in want]


def test_code_is_chosen_by_the_bit() -> None:
    """The same layout with and without the bit is not the same call."""
    compiled = host(lambda a, b: (a * b) + 1)
    a, b = complex_pair()
    for _ in range(3):
        same(compiled(a, b), a * b + 1)
        same(compiled(a.conj(), b), a.conj() * b + 1)
    assert pgraph.report().refused == 0


@pytest.fixture
def marked() -> Any:
    pgraph.mark_unsafe("aten::sin", reason="a cut for this test", fix="none")
    yield
    from pgraph.ops.safety import unmark_unsafe

    unmark_unsafe("aten::sin")


@pytest.mark.usefixtures("marked")
def test_a_conjugate_crosses_from_part_to_part() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        turned = (a * b).conj()
        cut = b.real.sin()
        return turned * 3 + cut

    compiled = host(fn)
    compiled(*complex_pair())
    with launching(4):
        for _ in range(2):
            a, b = complex_pair()
            same(compiled(a, b), fn(a, b))


def test_the_conjugate_of_a_number_lies_in_the_recording() -> None:
    """The backward of `x * 1j` takes a conjugate of the number itself: a tensor that no argument is."""

    def fn(x: Tensor) -> Tensor:
        return (x * 1j).cos()

    compiled = host(fn)
    check_lazy_gradients(compiled, fn, complex_pair)
    report = pgraph.report()
    assert report.refused == 0, str(report)
    assert report.launches >= 8, str(report)


def doubled_square(x: Tensor) -> Tensor:
    return x * x * 2


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_gradients_that_are_lazy_at_some_calls_only(codegen: str) -> None:
    """Nobody guards what comes into a backward: its bits are looked at in every call."""
    check_lazy_gradients(host(doubled_square, codegen), doubled_square, complex_pair)
    report = pgraph.report()
    assert report.captures == 3, str(report)  # a backward for each kind of gradient
    assert report.launches >= 8, str(report)


def test_lazy_gradients_reach_every_part_of_a_backward() -> None:
    """Also one that an uncaptured part of it has only viewed."""

    def fn(x: Tensor) -> Tensor:
        return (x * 3).sin().reshape(-1)

    mark_unsafe("aten::cos", "is kept out", "none")
    try:
        compiled = host(fn)
        check_lazy_gradients(compiled, fn, lambda: (complex_pair()[0], complex_pair()[1].reshape(-1)))
    finally:
        unmark_unsafe("aten::cos")
    report = pgraph.report()
    assert len(report.outside) == 1, str(report)
    assert any(partition.captures == 2 for partition in report.capturable), str(report)
