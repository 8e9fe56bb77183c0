"""Reasons that used to be missing, or to point nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import host
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pgraph


def looping(x: Tensor) -> Tensor:
    out = x * 0
    for number in range(2):
        out = out + (x > number).nonzero().sum()
    return out


def test_explain_does_not_compile_what_dynamo_gave_up_on() -> None:
    """A break in a loop leaves nothing compiled; that must not pass for a program yet to be compiled."""
    run = host(looping)
    found = pgraph.explain(lambda: run(torch.randn(8)))()
    assert [r.code for r in found.breaks] == ["graph-break"]
    assert not found.partitions, str(found)
    assert not found.complete


def _stepping(before: bool) -> Any:
    w = torch.randn(8, requires_grad=True)
    w.grad = torch.ones(8)
    sgd = torch.optim.Adam([w])

    def update(x: Tensor) -> Tensor:
        y = x.sin() * 2 if before else x
        sgd.step()
        return y

    return host(update)


def test_an_optimizers_own_breaks_are_no_news() -> None:
    run = _stepping(before=False)
    found = pgraph.explain(lambda: run(torch.ones(8)))()
    assert not found.breaks, str(found)
    assert found.complete


def test_but_what_they_cut_off_is() -> None:
    run = _stepping(before=True)
    found = pgraph.explain(lambda: run(torch.ones(8)))()
    (reason,) = found.breaks
    assert "Optimizer.step()" in reason.sentence
    assert __file__ in str(reason.where)
    assert not found.complete


def test_swapped_generator_states_have_a_line_and_name_the_op() -> None:
    def block(x: Tensor) -> Tensor:
        return functional.dropout(x * 2, 0.5, training=True) * x

    run = host(lambda x: checkpoint(block, x, use_reentrant=False))
    for _ in range(2):
        run(torch.randn(8, requires_grad=True)).sum().backward()
    reasons = [r for p in pgraph.report().partitions for r in p.reasons if r.code == "rng-state"]
    assert len(reasons) == 2
    assert all("to repeat aten::" in r.sentence and __file__ in str(r.where) for r in reasons), reasons


@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize(("p", "codes"), [(0.0, set()), (0.5, {"rng-state"})])
def test_the_fix_for_swapped_states_holds(p: float, codes: set[str], preserve: bool) -> None:
    """Without dropout attention is captured; `preserve_rng_state=False` changes nothing inside a graph."""

    def attend(q: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q * 2, q, q, dropout_p=p)

    run = host(lambda q: checkpoint(attend, q, use_reentrant=False, preserve_rng_state=preserve))
    run(torch.randn(1, 2, 4, 8, requires_grad=True)).sum().backward()
    found = {r.code for partition in pgraph.report().partitions for r in partition.reasons}
    assert found & {"rng", "rng-state"} == codes, str(pgraph.report())
