"""Sizes that are made up, from which a partition learns at its first call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import Block, host, same, train
from support_sizes import W, call, compiled, made, work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pgraph
from pgraph import compat
from pgraph.capture import build
from pgraph.compiler import assemble
from pgraph.compute import computer as computers_module
from pgraph.compute.computer import Computer
from pgraph.compute.errors import NotComputableError
from pgraph.compute.first import stand_in, without_memory
from pgraph.compute.stand_ins import ArgumentSizes, Family, operands
from pgraph.drivers.operands import Operand
from pgraph.reasons import Reason
from pgraph.runtime import admission, lessons, registry
from pgraph.runtime.partition_runner import PartitionRunner

CPU = torch.device("cpu")


def computers() -> list[Computer]:
    found = [partition._cache.shelf.computer for partition in registry.live_capturable()]
    assert all(isinstance(each, Computer) for each in found)
    return [each for each in found if isinstance(each, Computer)]


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The arguments of each lesson."""
    real, found = admission.teach, []

    def teach(driver: Any, fn: Any, stand_ins: Any, *given: Any, **options: Any) -> None:
        found.append(list(stand_ins))
        real(driver, fn, stand_ins, *given, **options)

    monkeypatch.setattr(admission, "teach", teach)
    return found


def test_all_sizes_are_computed_from_the_first_one_on(taught: list[list[Any]]) -> None:
    """Lessons come with the first call; nothing of the program's is ever captured."""
    model = compiled()
    call(model, (6,))
    assert len(taught) == 3
    assert not any(computer.learning or computer.reason for computer in computers())
    assert made() == (0, 0)
    call(model, (6, 17, 2, 30, 17, 2, 30, 64, 3))
    assert len(taught) == 3
    assert made() == (6, 6)
    report = pgraph.report()
    assert (report.launches, report.refused) == (9, 0)
    assert sum(partition.uncaptured_runs for partition in report.partitions) == 1


def test_a_forward_and_its_backward(taught: list[list[Any]]) -> None:
    torch.manual_seed(0)
    block = Block()
    model = compiled(block)
    for n in (6, 3, 4, 9, 6):
        x = torch.randn(2, n, 32)
        want = train(block, block, x)
        for name, grad in train(block, model, x).items():
            same(grad, want[name], rtol=1e-3, atol=1e-4)
    assert len(taught) == 6
    captures, computed = made()
    assert captures == computed > 0


def test_lessons_take_no_memory_of_the_programs(taught: list[list[Any]]) -> None:
    """Tensors are told by their layouts; weights stay as large as they are."""
    model = compiled()
    call(model, (6,))
    for arguments in taught:
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        assert all(tensor.is_meta for tensor in tensors)
        assert sorted(tuple(tensor.size()) for tensor in tensors)[-1] == (8, 8) or len(tensors) == 2
    rows = [next(value for value in arguments if type(value) is int) for arguments in taught]
    assert rows[0] == 6
    assert len(set(rows)) == 3


def test_sizes_are_such_that_the_code_was_compiled_for(taught: list[list[Any]]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        assert x.size(0) % 4 == 0
        return (x.view(-1, 4, 8) @ w).sum(1) if x.size(0) < 100 else x @ w

    model = compiled(fn)
    call(model, (32, 8, 64, 12), fn)
    rows = [value for arguments in taught for value in arguments if type(value) is int]
    assert rows
    assert all(n % 4 == 0 and n < 100 for n in rows)
    assert made() == (4, 4) or made() == (3, 3)


@pytest.mark.parametrize("compute_sizes", ["off", "check"])
def test_no_lessons_where_nothing_is_computed(taught: list[list[Any]], compute_sizes: str) -> None:
    model = compiled(compute_sizes=compute_sizes)
    call(model, (6, 6, 3, 3, 4, 4, 5, 5))
    assert not taught
    assert made()[1] == 0


def test_no_lessons_where_sizes_are_fixed(taught: list[list[Any]]) -> None:
    model = host(work, codegen="inductor")
    call(model, (6, 6, 6))
    assert not taught
    assert made() == (1, 0)


def test_a_lesson_that_fails_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's own sizes teach, as they do without lessons."""

    def teach(*_: Any, **__: Any) -> None:
        raise build.MatchError(Reason("ambiguous-address", "made up"))

    monkeypatch.setattr(admission, "teach", teach)
    model = compiled()
    call(model, (3, 3, 5, 5, 9, 9, 17, 2))
    assert made() == (5, 2)
    assert pgraph.report().refused == 0


def test_lessons_end_when_their_time_is_up(
    monkeypatch: pytest.MonkeyPatch, taught: list[list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """What was learned by then counts."""
    monkeypatch.setattr(lessons, "_LEAST_S", 0.0)
    monkeypatch.setattr(lessons, "_SHARE", 1e-9)
    with caplog.at_level(logging.INFO, logger="pgraph.runtime.lessons"):
        call(compiled(), (3, 3, 5, 5, 9, 9, 17))
    assert len(taught) == 1
    assert "captured at 1 made-up size" in caplog.text
    assert made() == (4, 1)


@torch.library.custom_op("pgraph_lessons::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Nobody knows what it keeps."""
    return x * 2


@twice.register_fake
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_no_lessons_with_a_custom_op(taught: list[list[Any]]) -> None:
    """It may keep what it makes at its first call with a size; in a capture that has no memory."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (twice(torch.relu(x @ w)) @ w).sin()  # type: ignore[no-any-return]

    call(compiled(fn), (6, 6, 3, 3, 4, 4, 9, 9), fn)
    assert not taught
    assert made() == (4, 1)


def test_lessons_end_where_there_is_nothing_to_learn(
    monkeypatch: pytest.MonkeyPatch, taught: list[list[Any]]
) -> None:
    """Such as where the first one shows that nothing can be computed."""
    monkeypatch.setattr(computers_module, "difference", lambda *_: "another one")
    model = compiled()
    call(model, (6, 6, 3, 3))
    assert len(taught) == 1
    assert made() == (2, 0)


class Looking(TorchDispatchMode):
    """Sees ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_sees_no_lessons(taught: list[list[Any]]) -> None:
    """They are given after a call without one, once the sizes that were traced have come."""
    model, w = compiled(), W.clone().requires_grad_()

    def step(n: int, around: Any) -> int:
        loss = model(torch.randn(n, 8, dtype=W.dtype), w).sum()
        before = len(taught)
        with around:
            loss.backward()
        return len(taught) - before

    assert step(6, Looking()) == 0
    assert len(taught) == 3, "the forward's"
    nothing = contextlib.nullcontext()
    assert [step(n, nothing) for n in (9, 6, 6, 17)] == [0, 0, 0, 3]
    assert step(30, nothing) == 0
    (backward,) = [p for p in registry.live_capturable() if p.name.startswith("backward")]
    assert (backward.stats.captures, backward.stats.computed) == (2, 1)


def test_helpers_are_there_before_lessons(monkeypatch: pytest.MonkeyPatch, taught: list[list[Any]]) -> None:
    """To build them may take longer than lessons may, in a process that is the first to need them."""
    before: list[int] = []
    real = assemble.ghosts.calls

    def calls() -> Any:
        before.append(len(taught))
        return real()

    monkeypatch.setattr(assemble.ghosts, "calls", calls)
    call(compiled(), (6,))
    assert before[0] == 0
    assert len(taught) == 3


def test_lessons_are_given_once(taught: list[list[Any]]) -> None:
    model = compiled()
    call(model, (6, 3, 5))
    pgraph.reset()
    call(model, (6, 3, 5))
    assert len(taught) == 3


def test_a_first_call_that_fails(taught: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lessons were prepared by then; they come with the next one."""
    monkeypatch.setattr(PartitionRunner, "_run_uncaptured", fails := Once(PartitionRunner._run_uncaptured))
    model = compiled()
    with pytest.raises(RuntimeError, match="for once"):
        call(model, (6,))
    assert fails.over
    assert not taught
    call(model, (6, 9))
    assert len(taught) == 3
    assert made() == (1, 1)


class Once:
    """Fails at its first call."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real, self.over = real, False

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if not self.over:
                self.over = True
                raise RuntimeError("for once")
            return self._real(instance, *args)

        return run


@pytest.mark.parametrize("wrong", ["number", "size", "no tensor"])
def test_arguments_that_were_not_traced_so_teach_nothing(wrong: str) -> None:
    sizes = ArgumentSizes({1: ((6, 8), (8, 1), 0)}, {0: 6})
    good: list[Any] = [6, torch.ones(6, 8), 1.5]
    assert sizes.are_of(good)
    bad = {"number": (0, 7), "size": (1, torch.ones(8, 6).t()), "no tensor": (1, 3)}
    position, value = bad[wrong]
    good[position] = value
    assert not sizes.are_of(good)


def test_stand_ins() -> None:
    """Layouts as given; small tensors on another device as they are."""
    seed, weight = torch.ones((), device="meta"), torch.ones(3, 4)
    sizes = ArgumentSizes({1: ((9, 8), (16, 1), 5)}, {0: 9})
    number, x, w, text = sizes.stand_ins([6, torch.ones(6, 8), weight.t(), "mean"], CPU)
    assert (number, text) == (9, "mean")
    assert (x.size(), x.stride(), x.storage_offset()) == ((9, 8), (16, 1), 5)
    assert (w.size(), w.stride(), w.is_meta) == ((4, 3), (1, 4), True)
    assert operands([9, x, "mean"]) == [9, Operand(0, (9, 8), (16, 1), torch.float32, 5), "mean"]
    lazy = torch.ones(4, 4, dtype=torch.complex64).t().conj()
    (y,) = ArgumentSizes({0: ((2, 3), (3, 1), 0)}, {}).stand_ins([lazy], CPU)
    assert operands([y, stand_in(lazy, CPU)]) == [
        Operand(0, (2, 3), (3, 1), torch.complex64, 0, (True, False)),
        Operand(0, (4, 4), (1, 4), torch.complex64, 0, (True, False)),
    ]
    with pytest.raises(NotComputableError, match="on no device"):
        sizes.stand_ins([6, torch.ones(6, 8), seed], CPU)


def test_what_has_no_stand_in() -> None:
    """Many values of another device; a number beside a device is kept."""
    elsewhere = torch.device("cuda", 0)
    small, large = torch.arange(3), torch.arange(100)
    assert stand_in(small, elsewhere) is small
    assert stand_in(4, elsewhere) == 4
    with pytest.raises(NotComputableError):
        stand_in(large, elsewhere)
    with pytest.raises(NotComputableError, match="on the host and varies"):
        ArgumentSizes({0: ((4,), (1,), 0)}, {}).stand_ins([small], elsewhere)


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 9))
def test_tensors_without_memory(size: list[int], offset: int) -> None:
    like = torch.empty(size)
    found = without_memory(torch.int32, size, like.stride(), offset)
    assert (list(found.size()), found.stride(), found.storage_offset()) == (size, like.stride(), offset)
    assert (found.dtype, found.is_meta) == (torch.int32, True)


def test_whatever_is_in_the_way_of_lessons_a_program_runs(
    monkeypatch: pytest.MonkeyPatch, taught: list[list[Any]]
) -> None:
    def fails(*_: Any) -> Any:
        raise AttributeError("another release of torch")

    monkeypatch.setattr(compat, "SymbolicNumbers", fails)
    call(compiled(), (3, 3, 5, 5, 9, 9, 17))
    assert not taught
    assert made() == (4, 1)


def test_nothing_is_made_up_of_plain_arguments() -> None:
    family = Family([torch.ones(3), 4, None])
    assert (family.symbols, family.made_up()) == ((), ())
