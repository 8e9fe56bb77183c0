"""What a capture must not leave behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pgraph.capture.record import record
from pgraph.drivers.host.driver import HostDriver
from pgraph.drivers.host.nodes import run
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


def test_a_size_is_in_the_parameters_as_on_a_device() -> None:
    """Two sizes of one function: the same kernels, copies and fills, on other bytes."""

    def fn(args: list[Any]) -> Any:
        x = args.pop()
        y = torch.zeros_like(x).add_(x, alpha=2).mul_(1 / x.shape[0])
        return (y.clone(), y.view(-1, 2).sum(1))

    (small, _), (large, _) = (_capture(fn, torch.ones(n, 4)) for n in (3, 5))
    assert [n.kind for n in small.nodes] == ["memset", "kernel", "kernel", "memcpy", "kernel"]
    for a, b in zip(small.nodes, large.nodes, strict=True):
        assert (a.kind, a.name, a.header, len(a.params)) == (b.kind, b.name, b.header, len(b.params))
        assert a.params != b.params


@pytest.mark.parametrize("number", [-0.0, 0.1, float("nan"), float("-inf"), -3, 1 << 40])
def test_a_number_comes_back_as_it_was(number: float) -> None:
    x, target = torch.ones(2), -torch.zeros(2)

    def fn(args: list[Any]) -> Any:
        y, z = args
        args.clear()
        torch.ops.aten.add_.Tensor(z, y, alpha=number)
        return ()

    recording, _ = _capture(fn, x, target)
    (node,) = recording.nodes
    params = bytearray(node.params)
    ghosts = {a.address: t.data_ptr() for a, t in zip(recording.allocations, (x, target), strict=True)}
    for offset in range(0, len(params), 8):
        word = int.from_bytes(params[offset : offset + 8], "little")
        params[offset : offset + 8] = ghosts.get(word, word).to_bytes(8, "little")
    run(node, params)
    torch.testing.assert_close(target, x * number, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(target), torch.signbit(x * number)) or number != number
