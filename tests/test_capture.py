"""What a capture must not leave behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pgraph.capture.record import record
from pgraph.drivers.host.driver import HostDriver
from pgraph.errors import CaptureError


def _capture(fn: Callable[[list[Any]], Any], *inputs: torch.Tensor) -> Any:
    driver = HostDriver()
    with driver.capture_lock(), driver.arena(0) as arena:
        recording = record(driver, arena, fn, inputs, [16] * len(inputs))
        return recording, arena.leaked


def test_code_that_keeps_a_ghost_is_refused_and_its_addresses_stay_reserved() -> None:
    kept: list[torch.Tensor] = []

    def fn(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        kept.append(x * 2)
        return (x + 1,)

    driver = HostDriver()
    with driver.capture_lock(), driver.arena(0) as arena:
        with pytest.raises(CaptureError) as caught:
            record(driver, arena, fn, [torch.ones(4)], [16])
        assert caught.value.reason.code == "ghost-kept"
        assert arena.leaked


def test_nothing_runs_while_capturing() -> None:
    x = torch.ones(4)

    def fn(args: list[Any]) -> Any:
        (y,) = args
        args.clear()
        return (y.add_(1),)

    recording, leaked = _capture(fn, x)
    assert not leaked
    assert [n.name for n in recording.nodes] == ["add_"]
    assert torch.equal(x, torch.ones(4))


def test_a_failing_capture_says_what_stopped_it() -> None:
    def fn(args: list[Any]) -> Any:
        return (args.pop().nonzero(),)

    with pytest.raises(CaptureError) as caught:
        _capture(fn, torch.ones(4))
    assert caught.value.reason.code == "not-permitted"
    assert "nonzero" in caught.value.reason.sentence


def test_a_ghost_in_a_cycle_of_references_is_not_kept() -> None:
    """An exception's traceback holds frames that hold ghosts; the collector is off during a capture."""

    def fn(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        try:
            raise ValueError("caught at once")
        except ValueError as e:
            held = e  # frame -> held -> traceback -> frame
        assert held is not None
        return (x + 1,)

    recording, leaked = _capture(fn, torch.ones(4))
    assert not leaked
    assert [n.name for n in recording.nodes] == ["add"]


@pytest.mark.parametrize("fails", [True, False])
def test_after_a_failure_the_ghosts_wait_for_the_device(fails: bool) -> None:
    """An op may have started kernels on another stream before it failed; they still use the ghosts."""

    def fn(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        return ((x + 1).nonzero() if fails else x + 1,)

    driver = HostDriver()
    with driver.capture_lock(), driver.arena(0) as arena:
        with pytest.raises(CaptureError) if fails else contextlib.nullcontext():
            record(driver, arena, fn, [torch.ones(4)], [16])
        assert arena.touched is fails
