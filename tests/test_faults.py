"""A driver that fails at any step costs speed, and nothing else."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support import MLP, host, launching, same, train
from torch import Tensor, nn

import pgraph
from pgraph import runner
from pgraph.drivers import faults
from pgraph.drivers.faults import HostFaults, inject
from pgraph.errors import DriverError

CAPTURE_STEPS = ("arena", "begin", "op", "end", "second-end", "instantiate")
LAUNCH_STEPS = ("set_params", "launch")
RETRIED = ("arena", "begin", "instantiate")
"""The device could not, which may pass: tried again after another warm-up, three times in all."""


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


def code_of(step: str) -> str:
    if step in RETRIED:
        return "device-failed"
    return "launch-failed" if step in LAUNCH_STEPS else "capture-failed"


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.name.startswith("pgraph") and r.levelno >= logging.WARNING]
    return [r.getMessage() for r in records]


@pytest.mark.parametrize("count", [1, 1_000_000], ids=["once", "always"])
@pytest.mark.parametrize("step", CAPTURE_STEPS + LAUNCH_STEPS)
def test_results_stay_right(step: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """During the failure and after it; one warning and a reason that says what happened, or a capture."""
    passes = step in RETRIED and count == 1
    compiled = host(mutating)
    with inject(HostFaults(fail_at=step, fail_count=count)) as injected, caplog.at_level("WARNING", "pgraph"):
        for _ in range(5):
            call(compiled)
    tries = 3 if step in RETRIED and not passes else 1
    assert injected.fail_count == count - tries, "the step was not reached as often as it should be"
    for _ in range(2):
        call(compiled)
    report = pgraph.report()
    (partition,) = report.partitions
    if passes:
        assert partition.reason is None
        assert (report.fallbacks, partition.plain_runs, partition.launches) == (0, 2, 5)
        assert warnings_in(caplog) == []
    else:
        assert (report.fallbacks, partition.plain_runs, partition.launches) == (1, 7, 0)
        assert partition.reason.code == code_of(step)
        assert f"injected failure at step '{step}'" in str(partition.reason)
        assert partition.reason.fix
        assert str(partition.reason) in str(report)
        (warning,) = warnings_in(caplog)
        assert step in warning
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
        return [f(torch.ones(16)) for _ in range(5)] + [torch.rand(3), torch.randperm(9).float()]

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
    (partition_runner,) = pgraph.stats.live_partitions()
    (variant,) = partition_runner.variants()
    calls = []

    def fails(bases: list[int], stream: int) -> int:
        calls.append(1)
        raise DriverError("injected failure between chunks")

    variant.launcher.steps = (*variant.launcher.steps, ((), fails, (), ()))  # one more chunk
    x, y = torch.randn(6), torch.randn(6)
    want_x, want_y = x.clone(), x + y
    with pytest.raises(DriverError, match="between chunks"):
        compiled(x, y)
    assert len(calls) == 1
    same(x, want_x)
    same(y, want_y)
    for _ in range(2):
        call(compiled)
    assert len(calls) == 1, "what failed once is not launched again"
    (partition,) = pgraph.report().partitions
    assert partition.reason.code == "launch-failed"
    assert "between chunks" in str(partition.reason)
    assert variant.launcher is None
    assert variant.built is None


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


def test_three_refused_shapes_end_the_captures(caplog: pytest.LogCaptureFixture) -> None:
    """One refusal is one shape's; after the third, only what there is still launches."""
    fn = host(lambda x: (x * 2).cumsum(0), dynamic=True)

    def launches(n: int) -> list[int]:
        found = []
        for _ in range(3):
            before = pgraph.report().launches
            x = torch.randn(n, 3)
            same(fn(x), (x * 2).cumsum(0))
            found.append(pgraph.report().launches - before)
        return found

    launches(3)  # a size that Dynamo may have specialized
    with caplog.at_level("WARNING", "pgraph"):
        for n in (4, 5, 6):
            assert launches(n + 10) == [0, 1, 1], "a new shape is captured after a refusal"
            with inject(HostFaults(fail_at="end")):
                assert launches(n) == [0, 0, 0]
            assert launches(n) == [0, 0, 0]
        assert launches(20) == [0, 0, 0], "three shapes were refused"
        for n in (14, 15, 16):
            assert launches(n) == [1, 1, 1]
    assert sum("runs plainly" in told for told in warnings_in(caplog)) == 1
    pgraph.reset()
    assert launches(20) == [0, 1, 1]


def test_out_of_memory_while_capturing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another program's memory, soon given back."""
    real, raised = runner.build, []

    def build(*args: Any, **kwargs: Any) -> Any:
        if len(raised) < 2:
            raised.append(1)
            raise torch.OutOfMemoryError("injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(runner, "build", build)
    compiled = host(mutating, warmup=2)
    for _ in range(2 + 2 + 2):
        call(compiled)
    assert pgraph.report().launches == 0, "each failure asks for a warm-up"
    with launching(2):
        call(compiled)
        call(compiled)


def test_injection_ends_with_its_block() -> None:
    """Also when the block raises."""

    def block() -> None:
        with inject(HostFaults(garbage=3)):
            assert faults.active().garbage == 3
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert faults.active() == HostFaults()
