"""Values that go from part to part, and from the forward to the backward, in other strides than traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support import TIGHT, agree, host, launching, same, shows, train, with_and_without
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.library import Library

from pgraph.compiler import assemble, borders, compile_graph
from pgraph.compiler.borders import Borders
from pgraph.compiler.strides import dense, keep_strides
from pgraph.ops.safety import mark_unsafe, unmark_unsafe

# Inductor pads on GPUs only, and large strides only, unless it is told otherwise.
PADDING = {"disable_padding_cpu": False, "padding_stride_threshold": 0}
PADDING_ALL = PADDING | {"pad_outputs": True}

pytestmark = pytest.mark.usefixtures("inductor_cache")


class Attention(nn.Module):
    """Attention with a learned bias over an odd number of tokens: what it saves is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.place = nn.Linear(12, 36), nn.Linear(3, 4)
        self.gate = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.randn(1, 7, 7, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 7, 3, 4, 3).permute(2, 0, 3, 1, 4)
        place = self.place(self.seen.expand(2, -1, -1, -1)).permute(0, 3, 1, 2).softmax(-1)
        gate = self.gate.view(1, -1, 1, 1).sigmoid()
        weights = (1 - gate) * (q @ k.transpose(-2, -1)).softmax(-1) + gate * place
        y = (weights / weights.sum(-1, keepdim=True)) @ v
        return torch.ops.borders.same(y.transpose(1, 2).reshape(2, 7, 12))


@pytest.fixture(autouse=True)
def ops() -> Iterator[None]:
    """`borders::same` may be captured; its backward is `borders::back`."""
    lib = Library("borders", "FRAGMENT")
    for name in ("same", "back"):
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.impl(name, torch.clone, "CompositeExplicitAutograd")

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    torch.library.register_autograd(
        "borders::same", lambda ctx, grad: torch.ops.borders.back(grad), setup_context=setup, lib=lib
    )
    yield
    lib._destroy()


@pytest.fixture
def cutting() -> Iterator[Callable[..., None]]:
    """Marks ops of `borders` as unsafe, for this test only."""
    marked: list[str] = []

    def cut(*names: str) -> None:
        for name in names:
            marked.append(f"borders::{name}")
            mark_unsafe(marked[-1], "cuts the graph", "do not")

    yield cut
    for name in marked:
        unmark_unsafe(name)


class Traced(Borders):
    """Takes the strides of the graph's inputs from the trace."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], split: Any, *, by_inductor: bool) -> None:
        traced = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
        super().__init__(gm, traced, split, by_inductor=by_inductor)


def check_training(settings: dict[str, Any]) -> None:
    model = Attention()
    compiled = host(model, "inductor", inductor=settings)
    train(model, compiled, torch.randn(2, 7, 12))
    with launching(4):
        for _ in range(2):
            x = torch.randn(2, 7, 12)
            same(train(model, compiled, x), train(model, model, x), **TIGHT)


@with_and_without
def test_a_part_of_a_backward_takes_what_the_forward_padded(
    cutting: Callable[..., None], monkeypatch: pytest.MonkeyPatch, cured: bool
) -> None:
    """The forward is one graph of Inductor's, which pads what it saves; the backward is in parts."""
    cutting("back")
    if not cured:
        monkeypatch.setattr(compile_graph, "bring_up_to_date", lambda gm, inputs: None)
        monkeypatch.setattr(assemble, "Borders", Traced)
    shows(functools.partial(check_training, PADDING), cured)


@with_and_without
@pytest.mark.parametrize("hole", ["next-part", "backward"])
def test_what_a_part_returns_is_padded(
    cutting: Callable[..., None], monkeypatch: pytest.MonkeyPatch, hole: str, cured: bool
) -> None:
    """Inductor may be told to pad even what it promised: later parts and the backward stand on its report."""
    cutting("same", "back")
    if not cured and hole == "next-part":
        monkeypatch.setattr(borders.compat, "restrided", lambda value, strides: value)
    if not cured and hole == "backward":
        monkeypatch.setattr(Borders, "_output_strides", lambda self: [None] * len(self._split.output_slots))
    shows(functools.partial(check_training, PADDING_ALL), cured)


def seen_by_the_user(x: Tensor) -> tuple[Tensor, Tensor]:
    a = (x + 1).softmax(-1)
    return torch.ops.borders.same(a.sum(0)), a * 2


def test_what_the_user_sees_has_the_strides_of_the_trace(cutting: Callable[..., None]) -> None:
    cutting("same")
    compiled = host(seen_by_the_user, "inductor", inductor=PADDING_ALL)
    x = torch.randn(4, 7, 7)
    for _ in range(3):
        got = compiled(x)
        same(got, seen_by_the_user(x), **TIGHT)
        assert [t.stride() for t in got] == [(7, 1), (49, 7, 1)]


def counted_from_the_storage(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = (x + 1)[1:]
    cut = torch.ops.borders.same(x).sum()
    return rows.as_strided((3, 5), (5, 1), 2) * cut, torch.as_strided(rows.t(), (2, 3), (1, 2)) * cut


def check_storage(codegen: str) -> None:
    compiled = host(counted_from_the_storage, codegen)
    compiled(torch.randn(4, 6))
    with launching(2):
        for _ in range(2):
            x = torch.randn(4, 6)
            same(compiled(x), counted_from_the_storage(x), **TIGHT)


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_a_storage_is_read_in_the_next_part(cutting: Callable[..., None], codegen: str) -> None:
    """What crosses the border is its owner, not the view from which the program counts."""
    cutting("same")
    check_storage(codegen)


@with_and_without
def test_a_storage_is_read_in_the_same_part(monkeypatch: pytest.MonkeyPatch, cured: bool) -> None:
    """Inductor reads another place, given a view of what it makes itself."""
    if not cured:
        monkeypatch.setattr(compile_graph, "count_from_owners", lambda *args: None)
    shows(lambda: check_storage("inductor"), cured)


def rows_of_true(x: Tensor) -> tuple[Tensor, Tensor]:
    found = x.gt(0).nonzero() + 1  # column by column
    captured = x.sin() + 1
    return found.float() * torch.ops.borders.same(captured).sum(), found * 2


@with_and_without
def test_strides_that_depend_on_data(
    cutting: Callable[..., None], monkeypatch: pytest.MonkeyPatch, cured: bool
) -> None:
    """Inductor reports none: what the user sees gets those of the trace."""
    cutting("same")
    if not cured:
        monkeypatch.setattr(borders, "keep_strides", lambda code, *told: code)

    @torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    def check() -> None:
        compiled = host(rows_of_true, "inductor")
        for _ in range(3):
            x = torch.randn(3, 4)
            got, want = compiled(x), rows_of_true(x)
            same(got, want, **TIGHT)
            assert [t.stride() for t in got] == [t.stride() for t in want]

    shows(check, cured)


def test_sizes_that_vary_are_padded_all_the_same(cutting: Callable[..., None]) -> None:
    """The strides that Inductor reports are formulas then."""
    cutting("same")

    def fn(x: Tensor, w: Tensor) -> Tensor:
        a = (x @ w).softmax(-1).transpose(0, 1)
        return a.cos() * torch.ops.borders.same(x).sum()

    settings = PADDING_ALL | {"pad_dynamic_shapes": True}
    compiled = host(fn, "inductor", dynamic=True, inductor=settings)
    for length in (5, 6, 5, 6, 9):
        x, w = torch.randn(3, length, requires_grad=True), torch.randn(length, 7, requires_grad=True)
        got, want = compiled(x, w), fn(x, w)
        same(got, want, **TIGHT)
        given = torch.autograd.grad(got.sum(), (x, w)), torch.autograd.grad(want.sum(), (x, w))
        same(*given, rtol=1e-4, atol=1e-4)


def test_a_conjugate_crosses(cutting: Callable[..., None]) -> None:
    cutting("same")

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.complex(x, x + 1).conj()
        negative = a.imag
        cut = torch.ops.borders.same(x).sum()
        return (a * 2).abs() + cut, negative * cut

    agree(fn, host(fn), lambda: [torch.randn(4, 3)])


# --- the helpers


@pytest.mark.parametrize("size", [(), (3,), (2, 3), (2, 0, 4), (4, 1, 2)])
def test_dense_strides(size: tuple[int, ...]) -> None:
    """A product of the sizes after it, also where one of them is 0."""
    assert dense(size) == tuple(
        functools.reduce(lambda a, b: a * b, size[at + 1 :], 1) for at in range(len(size))
    )


def test_results_are_copied_where_they_have_other_strides() -> None:
    """And stay what they are where not; what the code says about itself stays, too."""
    results = torch.randn(2, 3), torch.randn(3, 2).t(), torch.randn(3, 2).t()

    def code(args: list[Any]) -> Any:
        return results

    code.constants = {"c": 1}  # type: ignore[attr-defined]
    run = keep_strides(code, [], list(results), {0: (3, 1), 1: (3, 1), 2: None})
    found = run([])
    assert found[0] is results[0]
    assert [t.stride() for t in found] == [(3, 1)] * 3
    same(list(found), list(results))
    assert run.constants == {"c": 1}  # type: ignore[attr-defined]
