"""Ops with ordered side effects run uncaptured and in order; what surrounds them is launched."""

from __future__ import annotations

import pathlib

import pytest
import torch
from support import BEFORE_2_13, TIGHT, host, launching, same
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import pgraph

LIBRARY = torch.library.Library("pgraph_effects", "DEF")
LIBRARY.define("note(Tensor x, int at) -> Tensor")
_seen: list[int] = []


def _note(x: Tensor, at: int) -> Tensor:
    _seen.append(at)
    return x.clone()


LIBRARY.impl("note", _note, "CPU")
LIBRARY.impl("note", lambda x, at: torch.empty_like(x), "Meta")
note = torch.ops.pgraph_effects.note
_register_effectful_op(note.default, _EffectType.ORDERED)


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
@pytest.mark.parametrize("times", [1, 3])
def test_effects_keep_their_order_and_number(codegen: str, times: int) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2 + 1
        for at in range(times):
            y = note(y, at).sin() * 3
        return y.cos()

    compiled = host(fn, codegen)
    with launching(times + 1):
        for _ in range(5):
            x = torch.randn(4)
            _seen.clear()
            got = compiled(x)
            assert _seen == list(range(times))
            same(got, fn(x), **TIGHT)


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_the_check_of_a_solver_is_the_solvers_own(codegen: str, inductor_cache: pathlib.Path) -> None:
    """One op and one reason; that the check orders effects is none of the user's business."""
    compiled = host(lambda x: torch.linalg.inv(x @ x.mT + torch.eye(3)) * 2 + 1, codegen)
    for _ in range(3):
        compiled(torch.randn(3, 3))
    outside = [p.facts for p in pgraph.report().partitions if not p.facts.safe]
    assert [[reason.code for reason in facts.reasons] for facts in outside] == [["solver"]]
    assert [facts.ops for facts in outside] == [(("aten::linalg_inv_ex", 1),)]
    if BEFORE_2_13:
        return  # PyTorch's own compiled code drops the check: aot_eager gives NaN on 2.11
    with pytest.raises(RuntimeError, match="singular"):
        host(torch.linalg.inv, codegen)(torch.zeros(3, 3))


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_an_effect_beside_a_backward(codegen: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).sin()
        return note(y.detach(), 7).cos() * y.exp()

    compiled = host(fn, codegen)
    for _ in range(4):
        x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
        _seen.clear()
        mine = compiled(x, w)
        (got,) = torch.autograd.grad(mine.sum(), w)
        assert _seen == [7]
        theirs = fn(x, w)
        (want,) = torch.autograd.grad(theirs.sum(), w)
        same(mine.detach(), theirs.detach(), **TIGHT)
        same(got, want, **TIGHT)


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_what_is_saved_beside_an_ordered_effect_keeps_its_strides(codegen: str, dynamic: bool) -> None:
    """A solver's error is ordered: its token is a result of the forward, and no saved tensor."""

    def fn(x: Tensor) -> Tensor:
        return x * torch.linalg.inv(torch.eye(3) + x[:3, :3] @ x[:3, :3].t()).sum()

    compiled = host(fn, codegen, dynamic=dynamic)
    for rows in (8, 8, 8, 9, 9):
        x = torch.randn(rows, 6, requires_grad=True)
        (got,) = torch.autograd.grad(compiled(x).sum(), x)
        (want,) = torch.autograd.grad(fn(x).sum(), x)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
