"""Results in one memory share a version counter, whatever their types, and are views only where they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import host, launching, same
from torch import Tensor

from pgraph.compat import same_counter
from pgraph.launch.views import counted, with_counter
from pgraph.template.recording import TensorSpec

Results = tuple[Tensor, ...]


def integers(x: Tensor) -> Results:
    y = (x * 2).exp()
    return y.sum(), y.detach().view(torch.int32)


def pairs(x: Tensor) -> Results:
    y = (torch.complex(x.sin(), x.cos()) * 2).exp()
    return y.abs().sum(), torch.view_as_real(y.detach())


def conjugate(x: Tensor) -> Results:
    y = (torch.complex(x.sin(), x.cos()) * 2).exp()
    return y.abs().sum(), y.detach().conj()


def of_argument(x: Tensor) -> Results:
    return (x.exp() * x).sum(), x.detach().view(torch.int32)


@pytest.mark.parametrize("fn", [integers, pairs, conjugate, of_argument])
def test_a_write_to_a_result_is_seen_by_the_backward_that_saved_it(fn: Callable[[Tensor], Results]) -> None:
    """As eager sees it at each call; the gradient would be computed from other numbers, without a word."""
    compiled = host(fn)
    for call in range(4):
        for f in (fn, compiled):
            x = torch.randn(4, 8, requires_grad=True)
            loss, result = f(x)
            if call % 2:
                with torch.no_grad():
                    result.zero_()
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
    with launching(2):
        compiled(torch.randn(4, 8, requires_grad=True))[0].backward()


def saves_floats(x: Tensor, w: Tensor) -> Tensor:
    return (x.view(torch.float32) * w).sin().sum()


def saves_pairs(x: Tensor, w: Tensor) -> Tensor:
    return (torch.view_as_real(x) * w).sin().sum()


@pytest.mark.parametrize(("fn", "dtype"), [(saves_floats, torch.int64), (saves_pairs, torch.complex64)])
def test_a_write_to_an_argument_is_seen_where_another_type_of_it_is_saved(
    fn: Any, dtype: torch.dtype
) -> None:
    compiled = host(fn)
    shape = (4, 8) if dtype is torch.complex64 else (4, 8, 1)
    for call in range(4):
        for f in (fn, compiled):
            x, w = torch.randn(shape).to(dtype), torch.randn(4, 8, 2, requires_grad=True)
            loss = f(x, w)
            if call % 2:
                x.zero_()
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()


def rows(x: Tensor) -> Results:
    y = x.sin() * 2
    return y, y.detach()[1:]


def rows_first(x: Tensor) -> Results:
    y = x.sin() * 2
    return y.detach()[1:], y


def beside_a_view(x: Tensor) -> Results:
    y = x.sin() * 2
    return y, y[2:], y.detach().view(-1)


def the_same_layout(x: Tensor) -> Results:
    y = x.sin() * 2
    return y, y.detach()


@pytest.mark.parametrize("fn", [rows, rows_first, beside_a_view, the_same_layout])
def test_what_was_detached_requires_no_gradient(fn: Callable[[Tensor], Results]) -> None:
    """It is no view of what it was detached from, though both lie in one memory."""
    compiled = host(fn)
    for call in range(6):
        x = torch.randn(4, 8, requires_grad=True)
        found, wanted = compiled(x), fn(x)
        same(found, wanted)
        assert [t.requires_grad for t in found] == [t.requires_grad for t in wanted]
        for results in (found, wanted):
            (detached,) = (t for t in results if not t.requires_grad)
            detached.numpy()
            if call % 2:
                detached.mul_(3)  # which changes the others, too
        same(found, wanted)
        got, want = (torch.autograd.grad(sum(t.sum() for t in f(x) if t.grad_fn), x) for f in (compiled, fn))
        same(got, want)
    with launching(1):
        compiled(x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32])
@pytest.mark.parametrize("inference", [False, True])
def test_one_counter_for_tensors_of_all_types(dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        owner = torch.arange(12.0)
        size = owner[4:].view(dtype).size()
        layout = TensorSpec(tuple(size), (1,), dtype, 8, False, False)
        for made in (with_counter(owner, layout, 8), counted(owner, layout, 8)):
            same(made, owner[4:].view(dtype))
            assert made.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
            assert same_counter(owner, made) != inference
        assert with_counter(owner, layout, 8)._base is None
