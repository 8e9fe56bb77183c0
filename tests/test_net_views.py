"""Results that are views: where they begin, of what type, with which bits, when another part takes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import host, launching, same
from torch import Tensor

import pgraph
from pgraph.compat import lazily
from pgraph.launch.views import based, beside, counted, view
from pgraph.ops.safety import mark_unsafe, unmark_unsafe
from pgraph.template.recording import TensorSpec


@pytest.fixture
def cutting_sin() -> Iterator[None]:
    mark_unsafe("aten::sin", "cuts the graph of a test", "none")
    yield
    unmark_unsafe("aten::sin")


def crosses(fn: Callable[..., Any], inputs: Callable[[], tuple[Tensor, ...]]) -> None:
    """Two launched parts with `sin` between them agree with `fn`; bits of results included."""
    compiled = host(fn)
    compiled(*inputs())
    with launching(4):
        for _ in range(2):
            given = inputs()
            got, want = compiled(*given), fn(*given)
            same(got, want)
            assert [(x.is_conj(), x.is_neg()) for x in got] == [(x.is_conj(), x.is_neg()) for x in want]


def results_of_parts() -> list[Any]:
    """The results of every captured part, as its template has them."""
    templates = [runner.template() for runner in pgraph.runtime.registry.live_capturable()]
    return list(itertools.chain.from_iterable(t.outputs for t in templates if t is not None))


# -- another type ------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 8, 16])
@pytest.mark.parametrize("within", [0, 8])
def test_a_view_of_another_type_counts_from_its_owners_first_byte(start: int, within: int) -> None:
    """Not from where the owner's storage begins; `within` and the layout's own offset are bytes."""
    storage = torch.arange(32, dtype=torch.float32)
    owner = storage[start:]
    got = view(owner, TensorSpec((3, 2), (2, 1), torch.int32, 4), within)
    first = within // 4 + 1
    same(got, owner.view(torch.int32)[first : first + 6].view(3, 2))
    assert got.data_ptr() == owner.data_ptr() + within + 4


@pytest.mark.parametrize("make", [view, counted])
@pytest.mark.parametrize("start", [0, 4])
def test_a_view_of_the_same_type_does_so_too(make: Any, start: int) -> None:
    """With the owner's version counter or another."""
    owner = torch.arange(24, dtype=torch.float32)[start:]
    got = make(owner, TensorSpec((3, 2), (2, 1), torch.float32, 8), 4)
    same(got, owner[3:9].view(3, 2))
    assert got.data_ptr() == owner.data_ptr() + 12
    before = got._version
    owner.add_(1)
    assert got._version - before == (make is counted)


@pytest.mark.usefixtures("cutting_sin")
def test_a_view_of_another_type_of_an_argument_that_begins_late() -> None:
    """A part hands on its argument as integers; the argument is the rest of a larger tensor."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        bits = x.view(torch.int32)
        halves = bits >> 1
        cut = y.sin()
        return bits + 1, halves * 2, cut * 3

    crosses(fn, lambda: (torch.randn(24)[8:], torch.randn(3)))
    retyped = [s for s in results_of_parts() if s.input is not None and s.layout is not None]
    assert [s.layout.dtype for s in retyped] == [torch.int32], "no view of an argument was handed on"


# -- lazy bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=["same type", "another type"])
@pytest.mark.parametrize(("conj", "neg"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_view_has_the_bits_of_its_layout(dtype: torch.dtype, conj: bool, neg: bool) -> None:
    """Of the owner's type or another, over the whole owner or a part of it, whatever bits the owner has."""
    of = torch.complex64 if conj else torch.float32
    for offset in (0, 16):
        owner = torch.randn(8, dtype=dtype)
        n = (owner.untyped_storage().nbytes() - offset) // of.itemsize
        got = view(owner, TensorSpec((n,), (1,), of, 0, conj, neg), offset)
        assert (got.is_conj(), got.is_neg()) == (conj, neg)
        plain = torch.empty(0, dtype=of).set_(owner.untyped_storage(), offset // of.itemsize, (n,), (1,))
        want = plain.conj() if conj else plain
        same(got.resolve_conj().resolve_neg(), -want.resolve_conj() if neg else want.resolve_conj())


@pytest.mark.parametrize("make", [view, counted])
@pytest.mark.parametrize("bits", list(itertools.product([False, True], repeat=4)))
def test_it_has_no_other_bits(make: Any, bits: tuple[bool, ...]) -> None:
    """Whatever its owner has: a conjugate of a conjugate is a plain tensor."""
    owner = lazily(torch.randn(6, dtype=torch.complex64), bits[0], bits[1])
    whole = lazily(plain(owner), bits[2], bits[3])
    for first in (0, 2):
        want = whole[first:]
        got = make(owner, TensorSpec((6 - first,), (1,), owner.dtype, 8 * first, bits[2], bits[3]), 0)
        assert (got.is_conj(), got.is_neg(), got.data_ptr()) == (bits[2], bits[3], want.data_ptr())
        same(got.resolve_conj().resolve_neg(), want.resolve_conj().resolve_neg())


@pytest.mark.parametrize("make", [view, counted])
def test_an_owner_is_returned_as_it_is_only_with_the_same_bits(make: Any) -> None:
    owner = torch.randn(8)
    assert make(owner, TensorSpec((8,), (1,), torch.float32, 0), 0) is owner
    negative = make(owner, TensorSpec((8,), (1,), torch.float32, 0, neg=True), 0)
    same(negative.resolve_neg(), -owner)


def plain(lazy: Tensor) -> Tensor:
    """The tensor in the same memory without bits."""
    return torch.empty(0, dtype=lazy.dtype).set_(lazy.untyped_storage())


def negative_whole(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    turned = torch._neg_view(a.real * 2)
    cut = b.real.sin()
    return turned * 3, cut + 1


def negative_part(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    turned = (a * b).conj().imag
    cut = b.real.sin()
    return turned * 3, cut + 1


def negative_and_plain(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    doubled = a.real * 2
    turned = torch._neg_view(doubled)
    cut = b.real.sin()
    return doubled * 3, turned * 5, cut + 1


@pytest.mark.usefixtures("cutting_sin")
@pytest.mark.parametrize("fn", [negative_whole, negative_part, negative_and_plain])
def test_a_negative_view_crosses_from_part_to_part(fn: Callable[..., Any]) -> None:
    crosses(fn, lambda: (torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)))
    assert any(spec.layout is not None and spec.layout.neg for spec in results_of_parts()), (
        "no part handed a negative view on: the test shows nothing"
    )


def conjugate_and_plain(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    doubled = a * 2
    turned = doubled.conj()
    cut = b.real.sin()
    return doubled * 3, turned * 5, cut + 1


@pytest.mark.usefixtures("cutting_sin")
def test_a_conjugate_crosses_beside_what_it_is_a_view_of() -> None:
    crosses(
        conjugate_and_plain,
        lambda: (torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)),
    )
    views = [spec.layout for spec in results_of_parts() if spec.view_of is not None]
    assert any(layout is not None and layout.conj for layout in views), "no part handed one on"


def retyped_and_plain(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    doubled = a * 2
    retyped = doubled.view(torch.int32)
    cut = b.sin()
    return doubled * 3, retyped // 5, cut + 1


@pytest.mark.usefixtures("cutting_sin")
def test_a_view_of_another_type_crosses_beside_what_it_is_a_view_of() -> None:
    crosses(retyped_and_plain, lambda: (torch.randn(3, 4), torch.randn(3, 4)))
    views = [spec.layout for spec in results_of_parts() if spec.view_of is not None]
    assert any(layout is not None and layout.dtype is torch.int32 for layout in views), "none was handed on"


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_a_conjugate_of_a_conjugate_is_plain(codegen: str, inductor_cache: object) -> None:
    """A backward begins with a part that only takes back the conjugation of what was saved."""
    mark_unsafe("aten::mul", "cuts the graph of a test", "none")

    def fn(x: Tensor) -> Tensor:
        return x.conj() * x

    try:
        compiled = host(fn, codegen)
        for _ in range(4):
            ours = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
            theirs = ours.detach().clone().requires_grad_()
            compiled(ours).abs().square().sum().backward()
            fn(theirs).abs().square().sum().backward()
            same(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    finally:
        unmark_unsafe("aten::mul")
    assert pgraph.report().launches


# -- parts of one result -------------------------------------------------------------------------


def tails(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    doubled = x * 2
    late, later = doubled[4:], doubled[6:]
    cut = y.sin()
    return late + 1, later + 2, cut + 3


@pytest.mark.usefixtures("cutting_sin")
def test_parts_of_one_tensor_that_itself_is_not_handed_on() -> None:
    """The second is a view of the first, and begins later in their storage by both starts together."""
    crosses(tails, lambda: (torch.randn(12), torch.randn(3)))
    assert any(spec.view_of is not None for spec in results_of_parts()), "no view of a result was handed on"


# -- one version counter -------------------------------------------------------------------------


def transposed(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w.t()).tanh()


def conjugated(w: Tensor, x: Tensor) -> Tensor:
    return (torch.complex(x, x) * w.conj()).imag


@pytest.mark.parametrize(("fn", "dtype"), [(transposed, torch.float32), (conjugated, torch.complex64)])
def test_a_view_of_an_argument_that_was_written_into_since_is_refused(fn: Any, dtype: torch.dtype) -> None:
    """Its backward would compute with numbers of another forward; eager says so at each call."""
    compiled = host(fn)
    for call in range(5):
        w = torch.randn(5, 4, dtype=dtype)[1:].detach().requires_grad_()
        x = torch.randn(4, 4, requires_grad=True)
        fine = call % 2 == 0
        for f in (fn, compiled):
            out = f(w, x).sum()
            if fine:
                out.backward()
                continue
            with torch.no_grad():
                w.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward()
    assert pgraph.report().launches
    assert any(spec.counted for spec in results_of_parts()), "no view of an argument was saved"


def slice_first(x: Tensor) -> tuple[Tensor, ...]:
    made = x.sin()
    return made.view(-1)[:4], made.expand(3, *made.shape)


def base_last(x: Tensor) -> tuple[Tensor, ...]:
    made = x.sin()
    return made[1:], made.t(), made


def base_between(x: Tensor) -> tuple[Tensor, ...]:
    made = x.sin()
    return made.t()[1:], made, made.view(-1)[2:]


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("fn", [slice_first, base_last, base_between])
def test_gradients_of_views_whose_base_comes_later_or_not_at_all(
    fn: Callable[[Tensor], tuple[Tensor, ...]], dynamic: bool
) -> None:
    """AOTAutograd takes the gradient of as much as lies in what a view is a view of."""
    compiled = host(fn, dynamic=dynamic)
    for call in range(4):
        x = torch.randn(2 + call % 2 * dynamic, 3, requires_grad=True)
        got, want = ([*out, *torch.autograd.grad(summed(out), x)] for out in (compiled(x), fn(x)))
        same(got, want)
    with launching(2):
        torch.autograd.grad(summed(compiled(x)), x)


def summed(results: tuple[Tensor, ...]) -> Tensor:
    """Each result counts ten times as much as the one before."""
    return torch.stack([10**i * result.sum() for i, result in enumerate(results)]).sum()


def test_a_view_of_a_layout_and_one_beside_it() -> None:
    block = torch.arange(24.0)
    layout, base = (
        TensorSpec(size, stride, torch.float32, offset, False, False)
        for size, stride, offset in (((4,), (1,), 16), ((2, 3), (3, 1), 8))
    )
    made = based(block, layout, 24, base)
    assert made.tolist() == [10, 11, 12, 13]
    assert made._base is not None
    assert made._base.tolist() == [[8, 9, 10], [11, 12, 13]]
    assert beside(made, (2, 3), (3, 1), 8) is made._base
    other = beside(made, (3, 2), (1, 3), 8)
    assert other._base is made._base
    assert other.tolist() == [[8, 11], [9, 12], [10, 13]]
    assert beside(block, (2,), (1,), 3).tolist() == [3, 4]
