"""Reasons that used to be missing, or to point nowhere."""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from typing import Any

import pytest
import torch
from support import host
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pgraph
from pgraph.compiler.graph_breaks import from_text


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


def test_where_nothing_was_compiled_a_break_joins_nothing() -> None:
    found = pgraph.explain(host(looping))(torch.ones(3))
    assert "1. compiles what Python runs there" in str(found)
    assert "joins" not in str(found)


# -- breaks in plain words -----------------------------------------------------------------------------

_ONE = torch.ones(4, 4)
_LOG = logging.getLogger("a.model")


def _steps(x: Tensor) -> Tensor:
    loss = (x * _WEIGHT).sum()
    _OPTIMIZER.zero_grad()
    return loss * 2


_WEIGHT = torch.nn.Parameter(torch.ones(4))
_OPTIMIZER = torch.optim.SGD([_WEIGHT])


@pytest.mark.parametrize(
    ("fn", "sentence", "fix"),
    [
        (lambda x: x[x.argmax() % 4, :2] + 1, "stands for a number, as i does in x[i, :2]", "index_select"),
        (lambda x: x[: x.argmax() % 4] + 1, "a slice up to a tensor", "keep the value in a tensor"),
        (lambda x: x * 2 + sum(x.tolist()[0]), "tolist() reads values", "keep the values in a tensor"),
        (lambda x: [x * 2, _LOG.warning("a")], "the logger a.model is called", "log outside"),
        (lambda x: [x * 2, warnings.warn("a", stacklevel=1)], "warnings.warn()", "warn outside"),
        (lambda x: [x * 2, time.sleep(0)], "does not trace time.sleep()", "call it outside"),
        (lambda x: [x * 2, os.getloadavg()], "does not trace posix.getloadavg()", "call it outside"),
        (lambda x: torch.sparse.mm(_ONE.to_sparse(), x), "sparse tensors", "use dense"),
        (lambda x: x * 2 + x.data_ptr(), "an object that Dynamo cannot put into a graph", "outside"),
        (_steps, "zero_grad() is called inside", "call zero_grad() outside"),
    ],
)
def test_a_break_is_told_in_plain_words(
    fn: Any, sentence: str, fix: str, recwarn: pytest.WarningsRecorder
) -> None:
    reasons = pgraph.explain(host(fn))(torch.rand(4, 4)).breaks
    assert [(sentence in reason.sentence, fix in reason.fix) for reason in reasons[:1]] == [(True, True)]


@pytest.mark.parametrize(
    ("text", "sentence", "fix"),
    [
        (
            "step_unsupported",
            "broke off in a function that is called here",
            "remove the break inside that call",
        ),
        (
            "Missing tp_iternext\n  Explanation: Dynamo does not support next() on dict_itemiterator. "
            "Add tp_iternext_impl to this VariableTracker subclass.\n  Hint: It may be possible to write "
            "Dynamo tracing rules for this code. Please report an issue to PyTorch.\n",
            "cannot step through a dict_itemiterator",
            "loop over a list",
        ),
        (
            "A new kind\n  Explanation: It is not known. Add it to the VariableTracker.\n"
            "  Hint: Please report an issue to PyTorch.\n  Hint: Consider using fullgraph=False.\n"
            "  Hint: Pass a list.\n  Developer debug context: x\n",
            "A new kind: It is not known",
            "Pass a list",
        ),
        (
            "A new kind\n  Hint: Please report an issue to PyTorch.\n",
            "A new kind",
            "keep it outside the compiled region",
        ),
    ],
)
def test_what_dynamo_tells_its_developers_is_left_out(text: str, sentence: str, fix: str) -> None:
    reason = from_text(text, ())
    assert sentence in reason.sentence
    assert reason.fix.startswith(fix)
    assert not re.search("VariableTracker|issue|fullgraph|step_unsupported|tp_iternext", str(reason))


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
