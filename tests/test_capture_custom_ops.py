"""What is said of custom ops that misbehave while they are captured: the op, and the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import host, same
from torch import Tensor

import pgraph
from pgraph.capture.record import record
from pgraph.drivers.host.driver import HostDriver, HostSession
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.errors import CaptureError
from pgraph.reasons import Reason

LIBRARY = torch.library.Library("pgraph_elsewhere", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.define("fill_(Tensor(a!) x) -> ()")


def _fill(x: Tensor) -> None:
    x.fill_(3)


for _key in ("CPU", "Meta"):
    LIBRARY.impl("twice", lambda x: x * 2, _key)
    LIBRARY.impl("fill_", _fill, _key)
OPS = torch.ops.pgraph_elsewhere


def returning(x: Tensor) -> Tensor:
    return OPS.twice(x + 1).sin()


def test_an_op_that_launches_on_another_stream_is_refused() -> None:
    compiled = host(returning, min_ops=9)  # too few to split
    with inject(HostFaults(elsewhere=frozenset({"twice"}))):
        for _ in range(4):
            x = torch.randn(8)
            same(compiled(x), returning(x))
    (partition,) = pgraph.report().capturable
    assert partition.launches == 0
    assert partition.reason is not None
    assert partition.reason.code == "not-recorded"
    assert "pgraph_elsewhere::twice" in partition.reason.sentence
    assert __file__ in str(partition.reason.where)


def _record_fill(elsewhere: frozenset[str], x: Tensor) -> list[str]:
    def code(args: list[Any]) -> list[Tensor]:
        OPS.fill_(args[0])
        return [args.pop().sin()]

    driver = HostDriver()
    with inject(HostFaults(elsewhere=elsewhere)), driver.capture_lock(), driver.arena(0) as arena:
        return [n.name for n in record(driver, arena, code, [x], [16]).nodes]


def test_so_is_one_that_writes_into_its_argument() -> None:
    with pytest.raises(CaptureError) as caught:
        _record_fill(frozenset({"fill_"}), torch.ones(4))
    assert caught.value.reason.code == "not-recorded"
    assert caught.value.op == "pgraph_elsewhere::fill_"
    assert _record_fill(frozenset(), torch.ones(4)) == ["fill_", "sin"]
    assert _record_fill(frozenset({"fill_"}), torch.ones(0)) == ["sin"]


def test_one_that_records_is_captured() -> None:
    compiled = host(returning)
    for _ in range(4):
        x = torch.randn(8)
        same(compiled(x), returning(x))
    assert [p.launches for p in pgraph.report().capturable] == [3]


def test_no_elements_need_no_node() -> None:
    compiled = host(returning)
    with inject(HostFaults(elsewhere=frozenset({"twice"}))):
        for _ in range(3):
            same(compiled(torch.randn(0)), torch.randn(0))
    assert pgraph.report().refused == 0


def test_an_op_that_fails_while_captured_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run = HostSession.run_op

    def failing(self: HostSession, op: object, *rest: object) -> object:
        if "twice" in str(op):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return run(self, op, *rest)

    monkeypatch.setattr(HostSession, "run_op", failing)
    compiled = host(returning, min_ops=9)  # too few to split
    for _ in range(3):
        x = torch.randn(8)
        same(compiled(x), returning(x))
    reason = pgraph.report().capturable[0].reason
    assert reason is not None
    assert reason.sentence == (
        "the capture stopped in pgraph_elsewhere::twice: "
        "RuntimeError: operation not permitted when stream is capturing"
    )
    assert __file__ in str(reason.where)


def test_what_the_driver_says_of_the_whole_recording_names_the_custom_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(self: HostSession, with_kept: bool, *tracked: Any) -> None:
        raise CaptureError(Reason("capture-lost", "the driver ended the capture", "mark it"))

    monkeypatch.setattr(HostSession, "end", end)
    compiled = host(returning)
    for _ in range(3):
        compiled(torch.randn(8))
    reason = pgraph.report().capturable[0].reason
    assert reason is not None
    assert reason.sentence == "the driver ended the capture (custom ops here: pgraph_elsewhere::twice)"
    assert __file__ in str(reason.where)


def test_one_that_writes_into_its_argument_is_captured_as_aten_code() -> None:
    """Tracing wraps it into a higher-order op, which is taken apart before the graph is judged."""

    @torch.library.custom_op("pgraph_tests::add_into", mutates_args=("y",))
    def add_into(x: Tensor, y: Tensor) -> None:
        y.add_(x)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x = (x * 2).sin()
        torch.ops.pgraph_tests.add_into(x, y)
        return y * 2 + x

    compiled = host(fn)
    for _ in range(4):
        x, y = torch.randn(3), torch.randn(3)
        mine, theirs = y.clone(), y.clone()
        same(compiled(x, mine), fn(x, theirs))
        same(mine, theirs)
    report = pgraph.report()
    assert (report.captures, report.launches, report.refused) == (1, 3, 0), str(report)


@torch.library.custom_op("pgraph_tests::scaled_into", mutates_args=("x",))
def _scaled_into(x: Tensor, y: Tensor) -> None:
    x.mul_(y)


_WRITERS = {
    "whole": lambda x, y: _scaled_into(x, y),
    "a row": lambda x, y: _scaled_into(x[1], y[0]),
    "transposed": lambda x, y: _scaled_into(x.t(), y),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", [lambda z: z, lambda z: z.t(), lambda z: z.permute(1, 0) * 1])
@pytest.mark.parametrize("writer", list(_WRITERS))
def test_a_result_that_was_written_into_is_no_view(
    writer: str, layout: Callable[[Tensor], Tensor], dynamic: bool
) -> None:
    """Whether it comes from a run or from a launch: a view cannot be detached in place."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = layout(x * 2)
        _WRITERS[writer](z, y)
        return z + 0 if layout(x)._is_view() else z, (z + 1).sin()

    compiled = host(fn, dynamic=dynamic)
    for _ in range(4):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        z, sine = compiled(x, y)
        same(z, fn(x, y)[0])
        same(sine, fn(x, y)[1])
        assert not z._is_view()
        z.detach_()


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_where_an_argument_begins_that_is_written_into_is_no_other_specialization(
    transposed: bool, first: int
) -> None:
    """Its elements are cloned, wherever in a storage they are. (Multiples of 16 bytes: alignments count.)"""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        _scaled_into(x, y)
        return x.sin() * 2

    compiled = host(fn, dynamic=False)
    for call in range(6):
        offset, y = (first if call == 0 else 4 * call), torch.randn(4, 4)
        (mine, theirs) = (torch.arange(60.0) for _ in range(2))
        x, z = (whole[offset : offset + 16].view(4, 4) for whole in (mine, theirs))
        x, z = (x.t(), z.t()) if transposed else (x, z)
        same(compiled(x, y), fn(z, y))
        same(mine, theirs)
    report = pgraph.report()
    assert report.captures >= 1, str(report)
    assert report.launches >= 3, str(report)
