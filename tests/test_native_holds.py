"""What a launch in C holds, and for how long: results, frames, guards, recipes."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import threading
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from support_native import CASE, FakeDevice, arguments, in_c, made

from pgraph.launch.guards import TensorGuard
from pgraph.launch.lookup import numbered
from pgraph.launch.native import native_addresses, native_launch, native_program
from pgraph.native import libraries


@pytest.fixture(autouse=True, scope="module")
def _needed() -> None:
    if libraries.load_call() is None:
        pytest.skip("no C compiler or no Python headers, or PGRAPH_NATIVE=0")


def test_nothing_leaks_over_many_calls() -> None:
    device = FakeDevice()
    program = made(device, CASE)
    call = in_c(program)
    tensors = arguments(program)[1:]
    counts = [sys.getrefcount(t) for t in tensors]
    refs = []
    for _ in range(300):
        args: Any = [42, *tensors]
        done = call(args)
        assert done is not None
        refs.append(weakref.ref(done[0][3]))
        wrong = [41, *tensors]
        assert call(wrong) is None
        del done, args, wrong
        device.events.clear()
    assert counts == [sys.getrefcount(t) for t in tensors]
    assert not any(ref() is not None for ref in refs)
    assert not device.living
    alive = weakref.ref(program.built.recipes[0])
    del program, call
    gc.collect()
    assert alive() is None, "the program keeps its recipes alive, and only as long as it lives"


def test_what_c_read_of_guards_is_shared() -> None:
    """Hundreds of inputs of each size are looked at in two ways: to find a size, and to launch it."""
    many = 200
    device = FakeDevice()
    program = made(device, CASE)
    inputs = tuple(TensorGuard(i, (4, 4), (4, 1), 15) for i in range(many))
    larger = dataclasses.replace(program, guards=dataclasses.replace(program.guards, tensors=inputs))

    def taken(addresses: Any) -> int:
        before = tracemalloc.get_traced_memory()[0]
        native = native_program(larger, None, addresses)
        found = tracemalloc.get_traced_memory()[0] - before
        assert native is not None
        return found

    tracemalloc.start()
    try:
        addresses = native_addresses(device)(larger.guards)  # type: ignore[arg-type]
        other = native_addresses(device)(dataclasses.replace(larger.guards))  # type: ignore[arg-type]
        alone, shared = taken(None), taken(addresses)
        assert alone - shared > 32 * many
        assert abs(taken(other) - alone) < many, "an object that may say something else"
        del addresses
    finally:
        tracemalloc.stop()


def test_guards_that_are_shared_live_as_long_as_a_program_needs_them() -> None:
    device = FakeDevice()
    program = made(device, CASE)
    addresses: Any = native_addresses(device)(program.guards)  # type: ignore[arg-type]
    native = native_program(program, None, addresses)
    args = arguments(program)
    assert addresses(args) == program.guards.addresses(args) is not None
    del addresses
    gc.collect()
    call = native_launch([native], numbered([program.guards]))
    assert call is not None
    for _ in range(3):
        assert call([41, *arguments(program)[1:]]) is None
        assert call(arguments(program)) is not None
    del native, call
    gc.collect()


@pytest.mark.parametrize("where", ["in the same thread", "in another one"])
def test_a_launch_within_a_launch_leaves_no_memory_behind(where: str) -> None:
    """Each has a frame of its own, of which one is kept for the next launch."""
    device = FakeDevice()
    program = made(device, CASE)
    real, depth, calls = device.empty_strided, 0, 0

    def work() -> None:
        nonlocal calls
        assert call(arguments(program)) is not None
        calls += 1

    def empty_strided(*layout: Any) -> torch.Tensor:
        nonlocal depth
        depth += 1
        if depth == 1:
            if where == "in the same thread":
                work()
            else:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
        tensor = real(*layout)
        depth -= 1
        return tensor

    device.empty_strided = empty_strided  # type: ignore[method-assign]
    call = in_c(program)

    tracemalloc.start()
    try:
        held = []
        for _ in range(5):
            for _ in range(50):
                work()
                device.events.clear()
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert calls >= 2 * 250, "each with others within"
    frame = 8 * (len(CASE["inputs"]) + 2 * program.n_blocks + program.n_regions)  # type: ignore[arg-type]
    grown = [after - before for before, after in itertools.pairwise(held)]
    assert min(grown) < 50 * frame // 2, f"frames of {frame} bytes are left behind: {grown}"
