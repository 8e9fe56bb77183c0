"""Memory of launches in both interpreters: workspaces that are lent, small blocks; and where time goes."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from support_native import BOTH, CASE, FakeDevice, arguments, made

from pgraph.launch.native import PHASES, native_launch, native_program, time_calls
from pgraph.native import libraries


@pytest.fixture(autouse=True, scope="module")
def _needed() -> None:
    if libraries.load_call() is None:
        pytest.skip("no C compiler or no Python headers, or PGRAPH_NATIVE=0")


SMALL = {
    "nodes": 6,
    "inputs": [(True, 0)],
    "memory": [("temp", i % 4, 2, 5 + i) for i in range(12)] + [("output", 5, 0, 4), ("temp", 1, 1, 1 << 15)],
    "slack": 1 << 30,
}


@BOTH
def test_small_blocks_of_a_chunk_come_in_one_piece(path: Any) -> None:
    device = FakeDevice()
    program = made(device, SMALL)
    call = path(program)
    assert call(arguments(program)) is not None
    blocks = program.built.template.plan.blocks
    small = [b for b in blocks if b.nbytes <= 512 << 10]
    assert len(small) > 3, "one chunk, and more than one block"
    sizes = [event[1] for event in device.events if event[0] == "alloc"]
    assert len(sizes) == 3, f"the result, the large temporary, and all others: {sizes}"
    assert not device.living
    (bases,) = (event[1] for event in device.events if event[0] == "launch")
    regions = [r for r in program.built.template.regions if r.kind == "temp"]
    for a in regions:
        for b in regions:
            if a.index < b.index and a.birth < b.death and b.birth < a.death:
                apart = (
                    bases[a.index] + a.nbytes <= bases[b.index] or bases[b.index] + b.nbytes <= bases[a.index]
                )
                assert apart, f"regions {a} and {b} share bytes"


LENT = {**CASE, "workspace": 1 << 20}


@BOTH
def test_a_lent_workspace_is_asked_for_at_each_launch(path: Any) -> None:
    device = FakeDevice()
    program = made(device, LENT)
    assert program.workspace is not None
    region, nbytes = program.workspace
    call = path(program)
    assert call(arguments(program)) is not None
    launches = [event[1] for event in device.events if event[0] == "launch"]
    asked = [event for event in device.events if event[0] == "workspace"]
    assert asked == [("workspace", nbytes)] * len(launches)
    found = [bases[region] for bases in launches if region in bases]
    assert found == [0x7000_0000 + 4096 * (i + 1) for i in range(len(launches))]


@BOTH
@pytest.mark.parametrize("ran", [False, True])
def test_no_workspace(path: Any, ran: bool) -> None:
    """Before the first launch the caller has its arguments back; later the error says that a part has run."""
    device = FakeDevice()
    program = made(device, LENT)
    call = path(program)
    if ran:
        device.at_launch = lambda: setattr(device, "lent", 0)
    else:
        device.lent = 0
    args = arguments(program)
    before = list(args)
    with pytest.raises(torch.OutOfMemoryError, match="no workspace of 1048576 bytes") as caught:
        call(args)
    assert caught.value.pgraph_launch == (0, ran)  # type: ignore[attr-defined]
    assert device.launches == ran
    if not ran:
        assert all(a is b for a, b in zip(args, before, strict=True))
    del caught
    gc.collect()
    assert not device.living


def test_a_device_that_lends_none_is_left_to_python() -> None:
    device = FakeDevice()
    program = made(device, LENT)
    calls = device.native_calls()
    device.native_calls = lambda: dataclasses.replace(calls, workspace=None)  # type: ignore[method-assign]
    assert native_program(program) is None


def test_calls_are_timed_while_it_is_switched_on() -> None:
    device = FakeDevice()
    program = native_program(made(device, CASE))
    call = native_launch([program])
    assert call is not None
    args = arguments(made(FakeDevice(), CASE))
    assert call(list(args)) is not None
    assert set(time_calls(program, True).values()) == {0}, "timed before it was switched on"
    assert call(list(args)) is not None
    spent = time_calls(program, False)
    assert list(spent) == list(PHASES)
    assert all(ns > 0 for ns in spent.values()), spent
    assert call(list(args)) is not None
    assert set(time_calls(program, False).values()) == {0}, "timed after it was switched off"
