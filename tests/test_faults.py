"""A driver that fails at any step costs speed, and nothing else."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support import MLP, host, launching, same, train
from torch import Tensor, nn

import pgraph
from pgraph.drivers import faults
from pgraph.drivers.faults import HostFaults, inject
from pgraph.errors import DriverError

CAPTURE_STEPS = ("arena", "begin", "op", "end", "second-end", "instantiate")
LAUNCH_STEPS = ("set_params", "launch")


def mutating(x: Tensor, y: Tensor) -> Tensor:
    y.add_(x)
    return (x * y).cumsum(0)


def call(compiled: Any) -> None:
    """One call on new inputs, compared with eager."""
    x, y = torch.randn(6), torch.randn(6)
    twin = y.clone()
    same(compiled(x, y), mutating(x, twin))
    same(y, twin)


def test_the_matrix_is_complete() -> None:
    """A new step must be added to one of the two lists."""
    assert set(CAPTURE_STEPS + LAUNCH_STEPS) == set(faults.Step.__args__)


@pytest.mark.parametrize("count", [1, 1_000_000], ids=["once", "always"])
@pytest.mark.parametrize("step", CAPTURE_STEPS + LAUNCH_STEPS)
def test_results_stay_right(step: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """During the failure and after it, with one warning and a reason that says what happened."""
    compiled = host(mutating)
    with inject(HostFaults(fail_at=step, fail_count=count)) as injected, caplog.at_level("WARNING", "pgraph"):
        for _ in range(5):
            call(compiled)
    assert injected.fail_count == count - 1, "the step was reached once, and never tried again"
    for _ in range(2):
        call(compiled)
    report = pgraph.report()
    (partition,) = report.partitions
    assert report.fallbacks == 1
    assert partition.plain_runs == 7
    assert f"injected failure at step '{step}'" in str(partition.reason)
    assert partition.reason.fix
    assert str(partition.reason) in str(report)
    warnings = [r for r in caplog.records if r.name.startswith("pgraph") and r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert step in warnings[0].getMessage()
    # A reset gives it another chance.
    pgraph.reset()
    call(compiled)
    with launching(2):
        call(compiled)
        call(compiled)


@pytest.mark.parametrize("step", CAPTURE_STEPS + LAUNCH_STEPS)
def test_training_goes_on(step: Any) -> None:
    """Autograd meets the failure in the forward and in the backward."""
    model = MLP()
    compiled = host(model)
    with inject(HostFaults(fail_at=step)):
        for _ in range(4):
            x = torch.randn(3, 8)
            same(train(model, compiled, x), train(model, model, x))
    assert pgraph.report().fallbacks == 2
    assert torch.is_grad_enabled()
    other = MLP()  # another partition is not affected
    compiled = host(lambda x: other(x) * 2)
    train(other, compiled, torch.randn(3, 8))
    before = pgraph.report().launches
    for _ in range(2):
        x = torch.randn(3, 8)
        same(train(other, compiled, x), train(other, lambda x: other(x) * 2, x))
    assert pgraph.report().launches == before + 4


@pytest.mark.parametrize("step", CAPTURE_STEPS + LAUNCH_STEPS)
def test_random_numbers_go_on_as_without_pgraph(step: Any) -> None:
    """Hazard 8: a failed capture must leave the generator as it found it."""

    def fn(x: Tensor) -> Tensor:
        return nn.functional.dropout(x * 2, 0.5).cumsum(0)

    def draws(f: Any) -> list[Tensor]:
        torch.manual_seed(3)
        return [f(torch.ones(16)) for _ in range(3)] + [torch.rand(3), torch.randperm(9).float()]

    compiled = host(fn)
    with inject(HostFaults(fail_at=step)):
        got = draws(compiled)
    want = draws(fn)
    assert pgraph.report().fallbacks > 0
    same(got, want)
    same(draws(compiled), want)


def test_a_failure_between_chunks_is_an_error() -> None:
    """Part of the partition has run: running it again could mutate twice. The next call is healthy."""
    compiled = host(mutating, memory_slack_mb=0)
    for _ in range(2):
        call(compiled)
    (runner,) = pgraph.stats.live_partitions()
    (variant,) = runner.variants()
    steps = variant.launcher._steps
    variant.launcher._steps = (*steps, *steps)  # a second chunk, so that something runs before
    real = steps[0].exec.launch
    calls = []

    def second_fails(bases: Any, stream: int) -> int:
        calls.append(1)
        if len(calls) == 2:
            raise DriverError("injected failure between chunks")
        return real(bases, stream)

    steps[0].exec.launch = second_fails
    x, y = torch.randn(6), torch.randn(6)
    want_x, want_y = x.clone(), x + y
    with pytest.raises(DriverError, match="between chunks"):
        compiled(x, y)
    assert len(calls) == 2
    same(x, want_x)
    same(y, want_y)
    for _ in range(2):
        call(compiled)
    assert "between chunks" in str(pgraph.report().partitions[0].reason)


def test_a_refused_shape_leaves_the_captured_ones() -> None:
    """What was captured before a capture failed goes on being launched."""
    fn = host(lambda x: (x * 2).cumsum(0), dynamic=True)

    def run(n: int) -> None:
        x = torch.randn(n, 3)
        same(fn(x), (x * 2).cumsum(0))

    for n in (4, 4, 5, 5):
        run(n)
    with inject(HostFaults(fail_at="end")):
        run(6)
        run(6)
    assert pgraph.report().fallbacks == 1
    for n in (4, 5, 6):
        before = pgraph.report().launches
        run(n)
        assert pgraph.report().launches == before + (n != 6)


def test_injection_ends_with_its_block() -> None:
    """Also when the block raises."""

    def block() -> None:
        with inject(HostFaults(garbage=3)):
            assert faults.active().garbage == 3
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert faults.active() == HostFaults()
