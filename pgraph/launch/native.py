"""The launch path in C, for drivers that have one: `native/pgraph_call.c` runs what a `Launcher` laid out.

It saves the interpreter between the steps, most of all the check of some twenty tensors one by one. What
that comes to on a machine, `bench/launch.py` shows: its column of native microseconds against the same run
with ``PGRAPH_NATIVE=0``. `Launcher` stays the reference, and serves whatever the C path declines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pgraph import compat
from pgraph.drivers.interface import Exec
from pgraph.launch.interpreter import (
    BLOCK,
    BLOCK_VIEW,
    CONSTANT,
    INPUT_VIEW,
    RESULT_VIEW,
    Allocation,
    Launcher,
    Step,
    view,
)
from pgraph.native import libraries

__all__ = ["native_call"]


def native_call(
    launcher: Launcher,
    tensors: Sequence[tuple[int, tuple[int, ...], tuple[int, ...], int]],
    others: Sequence[tuple[int, Any]],
    traits: Sequence[tuple[int, Callable[[torch.Tensor], Any], Any]] = (),
) -> Callable[[list[Any]], tuple[list[Any], int] | None] | None:
    """A function of the partition's arguments that launches, or None where there is no native path.

    It returns None, and has touched nothing, for arguments that are not right for this capture, on
    another device, and inside somebody's capture. Otherwise the results and the number of rewritten
    nodes; the arguments are then taken out of the list. It raises as `Launcher` does, and where nothing
    has run the list is whole again.

    Args:
        launcher: laid out for the same capture.
        tensors, others, traits: see `pgraph.runtime.specialization.Specialization`.
    """
    built = launcher.built
    module, calls, shims = libraries.load_call(), built.driver.native_calls(), compat.tensor_shims()
    library = libraries.load()
    if module is None or library is None or calls is None or shims is None:
        return None
    steps = list(zip(launcher.steps, built.execs, strict=True))
    if any(launch is not None and e.entry is None for (_, launch, _, _), e in steps):
        return None
    handles_of, functions = shims
    with_tensor = {index for source, index, _, _ in launcher.results if source in (BLOCK, BLOCK_VIEW)}
    dtypes = {block: dtype for allocate, *_ in launcher.steps for block, _, _, dtype, *_ in allocate}
    program = module.program(
        tuple((position, (*size, *stride), mask) for position, size, stride, mask in tensors),
        tuple(others),
        tuple(traits),
        tuple(_step(step, e, with_tensor) for step, e in steps),
        tuple(_result(*result, dtypes) for result in launcher.results),
        (len(built.template.regions), len(built.template.plan.blocks)),
        (handles_of, calls.empty, calls.failed, calls.current_stream, calls.current_device),
        (
            *(libraries.address_of(function) for function in functions),
            calls.raw_alloc,
            calls.raw_free,
            libraries.address_of(library.pg_launch),
            calls.capturing or 0,
        ),
        (torch.Tensor, *compat.tensor_layout()),
        calls.index,
        built,  # kept alive: the steps hold addresses of its execs
    )
    return functools.partial(module.call, program)


def _step(step: Step, e: Exec, with_tensor: set[int]) -> tuple[Any, ...]:
    allocate, launch, free, release = step
    return (
        tuple(_allocation(allocation, allocation[0] not in with_tensor) for allocation in allocate),
        e.entry if launch is not None else 0,
        tuple(free),
        tuple(release),
    )


def _allocation(allocation: Allocation, raw: bool) -> tuple[Any, ...]:
    block, size, stride, dtype, region, others = allocation
    # What is raw was laid out as one dimension of bytes, or of some result's type: see `Launcher`.
    nbytes = size[0] * dtype.itemsize if raw else 0
    return block, (size, stride, dtype), nbytes, raw and nbytes > 0, ((region, 0), *others)


def _result(
    source: int, index: Any, layout: Any, offset: int, dtypes: dict[int, torch.dtype]
) -> tuple[int, int, Any, tuple[Any, ...]]:
    """(source, index, value or function that makes a view, the function's arguments after the owner)."""
    if source == CONSTANT:
        return source, 0, index, ()
    if source == RESULT_VIEW:
        return source, index, torch.as_strided, (*layout, offset)
    if source not in (BLOCK_VIEW, INPUT_VIEW):
        return source, index, None, ()
    if source == BLOCK_VIEW and not (layout.conj or layout.neg) and layout.dtype == dtypes[index]:
        # What `view` comes to; a block's tensor begins where its storage does.
        steps, rest = divmod(offset + layout.offset, layout.dtype.itemsize)
        if not rest:
            return source, index, compat.reinterpret, (layout.size, layout.stride, steps)
    return source, index, view, (layout, offset)
