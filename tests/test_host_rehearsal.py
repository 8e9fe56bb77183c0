"""The host driver asks an op's kernel what it makes before it records the op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import agree, host
from torch import Tensor

import pgraph
from pgraph.drivers.host import rehearsal
from pgraph.drivers.host.nodes import OpCall
from pgraph.errors import DriverError

Library = torch.library.Library


@pytest.fixture
def library() -> Iterator[Library]:
    lib = Library("rehearsed", "FRAGMENT")
    yield lib
    lib._destroy()


def define(lib: Library, returns: str, rule: Callable[..., Any], kernel: Callable[..., Any]) -> Any:
    """An op of one tensor whose rule for fake tensors and whose kernel are these."""
    lib.define(f"op(Tensor x) -> {returns}")
    lib.impl("op", kernel, "CPU")
    lib._register_fake("op", rule)
    return torch.ops.rehearsed.op.default


def reasons() -> str:
    return str(pgraph.report())


@torch._dynamo.config.patch(allow_rnn=True)
def test_an_lstm_in_inference() -> None:
    """Its kernel makes no workspace outside of training; the rule for fake tensors knows of one."""
    model = torch.nn.LSTM(8, 6).eval()
    with torch.no_grad():
        agree(model, host(model), lambda: [torch.randn(5, 3, 8)])


def test_a_result_that_is_left_out_stays_out(library: Library) -> None:
    """Whoever asks whether there is one gets the answer that the kernel gives."""
    op = define(library, "(Tensor, Tensor)", lambda x: (x + 1, x + 2), lambda x: (x + 1, None))

    def fn(x: Tensor) -> Tensor:
        return op(x.sin())[0] * 2

    agree(fn, host(fn), lambda: [torch.randn(4, 3)])


def test_strides_are_the_kernels(library: Library) -> None:
    op = define(library, "Tensor", torch.empty_like, lambda x: (x + 1).t().contiguous().t())

    def fn(x: Tensor) -> Tensor:
        return op(x.sin())

    compiled = host(fn)
    agree(fn, compiled, lambda: [torch.randn(4, 3)])
    assert compiled(torch.randn(4, 3)).stride() == (1, 4)


@pytest.mark.parametrize(
    ("returns", "rule", "kernel", "said"),
    [
        ("Tensor", lambda x: x + 1, lambda x: (x + 1).double(), "makes float64[4, 3]"),
        ("Tensor", lambda x: x + 1, lambda x: (x + 1)[:1], "makes float32[1, 3]"),
        ("Tensor[]", lambda x: [x + 1, x + 2], lambda x: [x + 1], "makes 1 results"),
    ],
    ids=["type", "size", "number"],
)
def test_a_kernel_that_breaks_its_rule_is_not_captured(
    library: Library, returns: str, rule: Any, kernel: Any, said: str
) -> None:
    """It runs uncaptured, as without pgraph, with a reason: a launch would have filled what the rule says."""
    op = define(library, returns, rule, kernel)

    def fn(x: Tensor) -> Any:
        made = op(x.sin())
        return made[0] if returns == "Tensor[]" else made

    compiled = host(fn, min_ops=9)  # too small to be split around what is refused
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(compiled(x), fn(x))
    assert said in reasons()
    assert pgraph.report().launches == 0


def test_a_launch_checks_what_could_not_be_rehearsed(library: Library) -> None:
    """Its kernel takes no zeros: then the rule is believed until the first launch, which writes nothing."""

    def kernel(x: Tensor) -> Tensor:
        if not x.any():
            raise ValueError("zeros")
        return (x + 1)[:1]

    op = define(library, "Tensor", lambda x: x + 1, kernel)

    def fn(x: Tensor) -> Any:
        return op(x.sin())

    compiled = host(fn)
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(compiled(x), fn(x))
    assert "made torch.float32[1, 3] of what was to be torch.float32[4, 3]" in reasons()


@pytest.mark.parametrize("made", [None, torch.zeros(2), torch.zeros(1), torch.zeros(3, dtype=torch.int64)])
def test_a_call_writes_nothing_that_does_not_fit(made: Any) -> None:
    """A result of size 1 would be spread over what it was to be, and one of ints be converted."""
    target = torch.full((3,), 7.0)
    args, spec = torch.utils._pytree.tree_flatten(((), {}))
    call = OpCall(lambda: (torch.ones(3), made), spec, (0, 1))
    first = torch.full((3,), 7.0)
    with pytest.raises(DriverError, match="of what was to be"):
        call([*args, first, target])
    assert first.tolist() == target.tolist() == [7.0] * 3
    call = OpCall(lambda: (), spec, (0,))
    with pytest.raises(DriverError, match="made NoneType"):
        call([*args, target])


def test_a_rehearsal_leaves_the_generator_alone() -> None:
    """Dropout of nothing may be captured, and draws; the call that captures draws no more than any other."""

    def fn(x: Tensor) -> Tensor:
        return torch.ops.aten.native_dropout.default(x, 0.0, True)[0] + 1

    compiled = host(fn)
    compiled(torch.randn(4))
    states = []
    for call in (fn, compiled):
        torch.manual_seed(1)
        call(torch.ones(4))
        states.append(torch.get_rng_state())
    assert pgraph.report().launches == 1, reasons()
    assert torch.equal(*states)


def test_ops_called_alike_are_asked_once(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in ones: nobody knows on what the results of another one depend."""
    mine = define(library, "Tensor", torch.empty_like, lambda x: x + 1)
    asked: list[str] = []
    real = rehearsal.expected

    def expected(op: Any, *args: Any) -> list[Any]:
        asked.append(str(op))
        return real(op, *args)

    monkeypatch.setattr(rehearsal, "expected", expected)
    aten, x, y = torch.ops.aten, torch.randn(4, 3), torch.randn(4, 3)
    calls = [
        (aten.sum.dim_IntList, (x, [0])),
        (aten.sum.dim_IntList, (x, [1])),
        (aten.sum.dim_IntList, (x.t(), [1])),
        (aten.sum.dim_IntList, (x.double(), [1])),
        (aten.sum.dim_IntList, (x, [True])),
        (aten.add_.Tensor, (x, y)),
        (aten.max.dim, (x, 1)),
        (aten.split_with_sizes_copy.default, (x, [1, 3])),
        (aten.mul.Scalar, (x, 2)),
        (aten.mul.Scalar, (x, 2.0)),
    ]
    asks = rehearsal.Rehearsal()
    first = [asks.outline(op, args, {}) for op, args in calls]
    assert len(asked) == len(calls)
    for (op, args), outline in zip(calls, first, strict=True):
        assert asks.outline(op, args, {}) is outline
        made = torch.utils._pytree.tree_leaves(op(*args))
        told = [outline.fresh.get(i) for i in range(len(made))]
        for i, (want, got) in enumerate(zip(made, told, strict=True)):
            if got is None:
                assert args[outline.given[i]] is want
            else:
                assert (got.size(), got.stride(), got.dtype) == (want.size(), want.stride(), want.dtype)
    assert len(asked) == len(calls)
    asks.outline(mine, (x,), {})
    asks.outline(mine, (x,), {})
    assert len(asked) == len(calls) + 2
