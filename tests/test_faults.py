"""A driver that fails at any step costs speed, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import MLP, RecipeOf, change_program, host, launching, same, train
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import pgraph
from pgraph.capture import build
from pgraph.drivers.host import faults
from pgraph.drivers.host.driver import HostDriver, HostSession
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.errors import DriverError, PlanError
from pgraph.launch.interpreter import note_failure
from pgraph.launch.program import ChunkLaunch, Program
from pgraph.runtime import admission

FIRST, SECOND = ("begin", "op", "end"), ("second-begin", "second-op", "second-end")
CAPTURE_STEPS = ("arena", *FIRST, *SECOND, "match", "instantiate")
LAUNCH_STEPS = ("set_params", "launch")
# What becomes of a failure:
# * retried: a failure of the device, or no memory, which may pass: warmed up again, three tries in all;
# * final: the capture was lost, which an op did, or a graph could not be launched;
# * once: no memory for a launch: this call runs uncaptured, the next is launched.
CASES = [
    *((step, kind, "retried") for step in CAPTURE_STEPS for kind in ("device", "memory")),
    *((step, "lost", "final") for step in (*FIRST, *SECOND)),
    *((step, "device", "final") for step in LAUNCH_STEPS),
    ("allocate", "memory", "once"),
]
FEWER = [case for case in CASES if case[1] != "device" or case[2] == "final"]


def over(cases: list[tuple[str, str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("step", "kind", "then"), cases, ids=["-".join(case) for case in cases])


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
    """A new step or kind must be added to the cases."""
    assert {step for step, _, _ in CASES} == set(faults.FaultPoint.__args__)
    assert {kind for _, kind, _ in CASES} == set(faults.Kind.__args__)


def code_of(step: str, kind: str) -> str:
    if step in LAUNCH_STEPS:
        return "launch-failed"
    return "capture-lost" if kind == "lost" else "device-failed"


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.name.startswith("pgraph") and r.levelno >= logging.WARNING]
    return [r.getMessage() for r in records]


@over([*CASES, *((step, kind, "passes") for step, kind, then in FEWER if then == "retried")])
def test_results_stay_right(step: Any, kind: Any, then: str, caplog: pytest.LogCaptureFixture) -> None:
    """During the failure and after it; one warning and a reason that says what happened, or a capture."""
    passes = then in ("once", "passes")
    count = 1 if then == "passes" else 1_000_000
    compiled = host(mutating, min_ops=9)  # too few ops to split
    faulty = HostFaults(fail_at=step, fail_as=kind, fail_count=count)
    with inject(faulty) as injected, caplog.at_level("WARNING", "pgraph"):
        for _ in range(5):
            call(compiled)
    tries = min(count, {"once": 4, "retried": 3, "final": 1, "passes": 1}[then])
    assert injected.fail_count == count - tries, "the step was not reached as often as it should be"
    for _ in range(2):
        call(compiled)
    report = pgraph.report()
    (partition,) = report.capturable
    told = warnings_in(caplog)
    if passes:
        assert partition.reason is None
        plain = 1 + tries
        assert (report.refused, partition.uncaptured_runs, partition.launches) == (0, plain, 7 - plain)
        assert [("no memory for a launch" in text, step in text) for text in told] == (
            [(True, True)] if then == "once" else []
        )
    else:
        assert (report.refused, partition.uncaptured_runs, partition.launches) == (1, 7, 0)
        assert partition.reason.code == code_of(step, kind)
        assert f"injected failure at step '{step}'" in str(partition.reason)
        assert partition.reason.fix
        assert str(partition.reason) in str(report)
        (warning,) = told
        assert step in warning
    # A reset gives it another chance.
    pgraph.reset()
    call(compiled)
    with launching(2):
        call(compiled)
        call(compiled)


@over(FEWER)
def test_training_goes_on(step: Any, kind: Any, then: str) -> None:
    """Autograd meets the failure in the forward and in the backward."""
    model = MLP()
    compiled = host(model)
    with inject(HostFaults(fail_at=step, fail_as=kind)):
        for _ in range(4):
            x = torch.randn(3, 8)
            same(train(model, compiled, x), train(model, model, x))
    assert pgraph.report().refused == (0 if then == "once" else 2)
    assert torch.is_grad_enabled()
    other = MLP()  # another partition is not affected
    compiled = host(lambda x: other(x) * 2)
    train(other, compiled, torch.randn(3, 8))
    before = pgraph.report().launches
    for _ in range(2):
        x = torch.randn(3, 8)
        same(train(other, compiled, x), train(other, lambda x: other(x) * 2, x))
    assert pgraph.report().launches == before + 4


@over(FEWER)
def test_random_numbers_go_on_as_without_pgraph(step: Any, kind: Any, then: str) -> None:
    """Hazard 8: a failed capture must leave the generator as it found it."""

    def fn(x: Tensor) -> Tensor:
        return nn.functional.dropout(x * 2, 0.5).cumsum(0)

    def draws(f: Any) -> list[Tensor]:
        torch.manual_seed(3)
        return [f(torch.ones(16)) for _ in range(5)] + [torch.rand(3) for _ in range(99)] + [torch.randn(9)]

    compiled = host(fn)
    faulty = HostFaults(fail_at=step, fail_as=kind)
    with inject(faulty):
        got = draws(compiled)
    want = draws(fn)
    assert faulty.fail_count < HostFaults().fail_count, "the step was not reached"
    same(got, want)
    same(draws(compiled), want)


@pytest.mark.parametrize("step", ["match", "plan_of"])
@pytest.mark.parametrize("error", [MemoryError, PlanError, KeyError])
def test_failures_off_the_driver(step: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching and planning call no driver: no memory may pass, a contradiction does not."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error("injected")

    compiled = host(mutating)
    with monkeypatch.context() as patch:
        patch.setattr(build, step, fails)
        for _ in range(5):
            call(compiled)
    call(compiled)
    (partition,) = pgraph.report().capturable
    assert (partition.captures, partition.uncaptured_runs) == (0, 6)
    assert partition.reason.code == ("device-failed" if error is MemoryError else "internal-error")
    assert "injected" in partition.reason.sentence
    pgraph.reset()
    call(compiled)
    with launching(1):
        call(compiled)


def test_a_failing_warm_up_is_the_users_own() -> None:
    """As without pgraph: the error comes out, and the next call is a warm-up run again."""
    compiled = host(mutating)
    x = torch.randn(6)
    call(compiled)
    pgraph.reset()
    (partition_runner,) = pgraph.runtime.registry.live_capturable()
    plain = partition_runner._plain

    def fails(args: list[Any]) -> Any:
        args.clear()
        raise torch.OutOfMemoryError("injected in the plain code")

    partition_runner._plain = fails
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError, match="plain code"):
            compiled(x, torch.randn(6))
    partition_runner._plain = plain
    assert pgraph.report().captures == 0
    call(compiled)
    with launching(1):
        call(compiled)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "device-failed"),
        (RuntimeError("CUDA driver error: out of memory"), "device-failed"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "device-failed"),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), "capture-failed"),
        (ValueError("out of memory is what this op says of everything"), "capture-failed"),
    ],
    ids=["torch", "launcher", "library", "not permitted", "own"],
)
def test_what_an_op_raises_decides(error: Exception, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops and libraries report a want of memory in several types; nothing else is tried again."""
    real, tries = HostSession.run_op, []

    def run_op(self: Any, op: Any, *rest: Any) -> Any:
        if op._schema.name == "aten::cumsum":
            tries.append(1)
            raise error
        return real(self, op, *rest)

    monkeypatch.setattr(HostSession, "run_op", run_op)
    compiled = host(mutating, min_ops=9)  # too few ops to split
    for _ in range(6):
        call(compiled)
    (partition,) = pgraph.report().capturable
    assert partition.reason.code == code
    assert len(tries) == (3 if code == "device-failed" else 1)
    assert str(error) in str(partition.reason)


def test_failures_of_many_shapes_end_too() -> None:
    """Sizes that come and go, so that none of them fails three times: the partition counts as well."""
    compiled = host(lambda x: (x * 2).cumsum(0), dynamic=True, max_captures=1)
    faulty = HostFaults(fail_at="second-op", fail_as="memory")
    with inject(faulty):
        for n in range(2, 60):
            for _ in range(2):
                x = torch.randn(n, 3)
                same(compiled(x), (x * 2).cumsum(0))
    assert HostFaults().fail_count - faulty.fail_count <= 2 * 9 + 9
    assert {p.reason.code for p in pgraph.report().capturable} == {"device-failed"}


def test_a_launch_without_memory_leaves_it_to_the_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the failed launch had allocated is free again when the plain code starts."""
    compiled = host(lambda x: ((x * 2).cumsum(0), x + 1))
    for _ in range(2):
        compiled(torch.randn(6))
    (partition_runner,) = pgraph.runtime.registry.live_capturable()
    (specialization,) = partition_runner.specializations()
    assert specialization.program is not None
    plain, made, alive = partition_runner._plain, [], []
    empty = HostDriver.empty_strided

    def allocate(self: HostDriver, *layout: Any) -> Tensor:
        if made:
            raise torch.OutOfMemoryError("injected")
        tensor = empty(self, *layout)
        made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def run(args: list[Any]) -> Any:
        alive.append([not storage.expired() for storage in made])
        return plain(args)

    monkeypatch.setattr(HostDriver, "empty_strided", allocate)
    partition_runner._plain = run
    x = torch.randn(6)
    same(compiled(x), ((x * 2).cumsum(0), x + 1))
    assert alive == [[False]]
    monkeypatch.setattr(HostDriver, "empty_strided", empty)
    with launching(1):
        same(compiled(x), ((x * 2).cumsum(0), x + 1))


@pytest.mark.parametrize("ran", [False, True])
def test_no_memory_in_a_launch_in_c(ran: bool) -> None:
    """It gives the arguments back if nothing has run; if something has, the error is the user's own."""
    compiled = host(mutating)
    for _ in range(2):
        call(compiled)
    (partition_runner,) = pgraph.runtime.registry.live_capturable()

    def fails(args: list[Any]) -> Any:
        if ran:
            args[:] = [None] * len(args)
        error = torch.OutOfMemoryError("injected in C")
        note_failure(error, 0, ran)
        raise error

    captured = partition_runner._cache.captured
    real, captured.launch = captured.launch, fails
    plain = pgraph.report().capturable[0].uncaptured_runs
    if ran:
        with pytest.raises(torch.OutOfMemoryError, match="in C"):
            compiled(torch.randn(6), torch.randn(6))
    else:
        call(compiled)
    assert pgraph.report().capturable[0].uncaptured_runs == plain + (not ran)
    assert pgraph.report().refused == 0
    captured.launch = real
    with launching(1):
        call(compiled)


def test_a_late_failure_of_a_capture_that_is_gone_refuses_nothing() -> None:
    """Another thread has freed it meanwhile: what is captured next is as good as any."""
    compiled = host(mutating)
    for _ in range(2):
        call(compiled)
    (partition_runner,) = pgraph.runtime.registry.live_capturable()

    def fails(args: list[Any]) -> Any:
        pgraph.reset()
        error = DriverError("too late")
        note_failure(error, 0, False)
        raise error

    partition_runner._cache.captured.launch = fails
    call(compiled)
    assert pgraph.report().refused == 0
    call(compiled)
    call(compiled)
    with launching(1):
        call(compiled)


def one_chunk_more(partition: Any, launch: Any) -> Program:
    """Have the partition launch this at the end; returns the program that it had."""
    (specialization,) = partition.specializations()
    chunk = ChunkLaunch((), RecipeOf(launch), (), ())
    return change_program(partition, chunks=(*specialization.program.chunks, chunk))


def test_no_memory_between_chunks_is_the_users_own() -> None:
    """Part of the partition has run: the error comes out, as it would without pgraph."""
    compiled = host(mutating, memory_slack_mb=0)
    for _ in range(2):
        call(compiled)
    (partition_runner,) = pgraph.runtime.registry.live_capturable()

    def fails(bases: list[int], stream: int) -> int:
        raise torch.OutOfMemoryError("injected between chunks")

    before = one_chunk_more(partition_runner, fails)
    x, y = torch.randn(6), torch.randn(6)
    want = x + y
    with pytest.raises(torch.OutOfMemoryError, match="between chunks"):
        compiled(x, y)
    same(y, want)
    change_program(partition_runner, chunks=before.chunks)
    with launching(1):
        call(compiled)


def test_a_failure_between_chunks_is_an_error() -> None:
    """Part of the partition has run: running it again could mutate twice. The next call is healthy."""
    compiled = host(mutating, memory_slack_mb=0)
    for _ in range(2):
        call(compiled)
    (partition_runner,) = pgraph.runtime.registry.live_capturable()
    (specialization,) = partition_runner.specializations()
    calls = []

    def fails(bases: list[int], stream: int) -> int:
        calls.append(1)
        raise DriverError("injected failure between chunks")

    one_chunk_more(partition_runner, fails)
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
    (partition,) = pgraph.report().capturable
    assert partition.reason.code == "launch-failed"
    assert "between chunks" in str(partition.reason)
    assert specialization.program is None
    assert specialization.built is None


def captured_at_four_and_five() -> Callable[[int], None]:
    """Runs a program at so many rows, and compares; two sizes are captured."""
    fn = host(lambda x: (x * 2).cumsum(0), dynamic=True)

    def run(n: int) -> None:
        x = torch.randn(n, 3)
        same(fn(x), (x * 2).cumsum(0))

    for n in (4, 4, 5, 5):
        run(n)
    return run


def test_a_refused_shape_leaves_the_captured_ones() -> None:
    """What was captured before a capture failed goes on being launched."""
    run = captured_at_four_and_five()
    with inject(HostFaults(fail_at="end", fail_as="lost")):
        run(6)
        run(6)
    assert pgraph.report().refused == 1
    for n in (4, 5, 6):
        before = pgraph.report().launches
        run(n)
        assert pgraph.report().launches == before + (n != 6)


@pytest.mark.parametrize("failing", [4, 5])
def test_a_failed_launch_refuses_no_other_shape(failing: int) -> None:
    """Whichever of the captures it was, and before anything had run."""
    run = captured_at_four_and_five()
    with inject(HostFaults(fail_at="launch")):
        run(failing)
    assert pgraph.report().refused == 1
    for n in (4, 5):
        before = pgraph.report().launches
        run(n)
        assert pgraph.report().launches == before + (n != failing)


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
            with inject(HostFaults(fail_at="end", fail_as="lost")):
                assert launches(n) == [0, 0, 0]
            assert launches(n) == [0, 0, 0]
        assert launches(20) == [0, 0, 0], "three shapes were refused"
        for n in (14, 15, 16):
            assert launches(n) == [1, 1, 1]
    assert sum("runs uncaptured" in told for told in warnings_in(caplog)) == 1
    pgraph.reset()
    assert launches(20) == [0, 1, 1]


def test_out_of_memory_while_capturing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another program's memory, soon given back."""
    real, raised = admission.build, []

    def build(*args: Any, **kwargs: Any) -> Any:
        if len(raised) < 2:
            raised.append(1)
            raise torch.OutOfMemoryError("injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(admission, "build", build)
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
