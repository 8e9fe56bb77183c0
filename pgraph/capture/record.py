"""Record one run of a partition on ghost memory: nodes, allocations with lifetimes, outputs.

No kernel runs and no physical memory is used: inputs are aliased by ghosts of the same layout and
alignment, and whatever the code allocates gets a ghost address. The allocation timeline counts in
nodes: a range is born at the number of nodes recorded when it was taken, and dead at the number
recorded when it was first seen without an owner; where the recording forks, at the joins around these
(Note [Forks and joins] in `pgraph.template.topology`).

Note [Lifetimes in program order]
A range dies when the program drops its last reference (a weak one to the storage tells), not after the last
node that names it: kernels may read through a table of pointers on the device, and name only the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pgraph.capture.culprit import dispatch_at
from pgraph.capture.failures import failure_of
from pgraph.capture.outputs import output_specs
from pgraph.capture.patches import patched
from pgraph.capture.recorder import GhostRange, Recorder, uncollected
from pgraph.drivers.interface import Arena, Driver, Session
from pgraph.errors import CaptureError
from pgraph.reasons import Dispatch
from pgraph.template.recording import GhostAllocation, Recording

__all__ = ["record"]

log = logging.getLogger(__name__)


def record(
    driver: Driver,
    arena: Arena,
    fn: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[Any],
    alignments: Sequence[int],
    namespaces: Sequence[dict[str, Any]] = (),
    like: Sequence[Dispatch] = (),
    with_kept: bool = True,
    counting: Callable[[Callable[[], int]], None] | None = None,
) -> Recording:
    """Capture one call of `fn` (which takes one list and empties it).

    Args:
        driver: where to capture.
        arena: ghost addresses to use; must outlive the second capture too.
        fn: the partition's code.
        inputs: today's arguments, of which only the layout is read; an `Operand` for a tensor will do.
        alignments: bytes, a power of two per device tensor in `inputs`: its ghost has exactly this
            alignment (up to `ALIGNMENT`), so that no kernel is chosen that needs more.
        namespaces: globals of generated modules that allocate by themselves.
        like: the ops of an earlier capture of the same call, which need not be described again.
        with_kept: see `Session.end`.
        counting: is given a function that tells, while `fn` runs, how many nodes there are.

    Raises:
        CaptureError: the capture was lost, or the code kept a ghost; nothing has run.
        DriverError: the device could not just now (memory, most likely); nothing has run.
    """
    with (
        uncollected(),
        driver.capture(arena) as session,
        contextlib.closing(Recorder(session, like)) as recorder,
    ):
        if counting is not None:
            counting(recorder.boundary)
        try:
            return _undisturbed()(recorder, session, fn, inputs, alignments, namespaces, with_kept)
        except Exception as e:
            # Some op may have started kernels on another stream before it failed.
            arena.touched = True
            failure = failure_of(e)
            log.debug("capture failed", exc_info=True)
            # The frames hold ghosts, which must be gone before their memory is.
            traceback.clear_frames(e.__traceback__)
            if e.__cause__ is not None:
                traceback.clear_frames(e.__cause__.__traceback__)
    raise failure


def _record(
    recorder: Recorder,
    session: Session,
    fn: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[Any],
    alignments: Sequence[int],
    namespaces: Sequence[Any],
    with_kept: bool,
) -> Recording:
    arguments = [recorder.argument(value, alignments) for value in inputs]
    n_inputs = len(recorder.inputs)
    with contextlib.ExitStack() as stack:
        for namespace in namespaces:
            stack.enter_context(patched(namespace, session.patches(namespace, recorder.empty_strided)))
        stack.enter_context(recorder)
        results = fn(arguments)
    arguments.clear()
    recorder.finish()
    try:
        graph, nodes, order = session.end(with_kept, {r.address for r in recorder.ranges})
    except CaptureError as e:
        raise CaptureError(e.reason, e.op, culprit=dispatch_at(recorder.ops, e.node)) from None
    recorder.add_hidden()
    recorder.meet(order)
    ranges, moved = _merge(recorder.ranges, n_inputs)
    specs = output_specs(results, recorder, moved, ranges)
    del results
    recorder.all_gone()
    allocations = tuple(
        GhostAllocation(r.address, r.nbytes, r.birth, r.death, r.margin, r.library) for r in ranges
    )
    ghosts = (session.arena.low, session.arena.position)
    ops = recorder.builtin_nodes(order), recorder.steps(order), tuple(recorder.ops)
    return Recording(nodes, order, allocations, n_inputs, specs, ghosts, graph, *ops)


_undisturbed = functools.cache(lambda: torch.compiler.disable(_record))  # Dynamo is off: see `UnwrappedMode`


def _merge(ranges: list[GhostRange], n_inputs: int) -> tuple[list[GhostRange], list[int]]:
    """Ranges that overlap become one region; returns the regions and, per range, its region.

    Note [Scratch and result in one place]
    A library may free scratch inside an op and take the same address for the result. Nothing tells
    which word means which, so both become one region as large as both and alive as long as either.
    """
    moved = list(range(n_inputs)) + [-1] * (len(ranges) - n_inputs)
    merged: list[tuple[GhostRange, list[int]]] = []
    for i in sorted(range(n_inputs, len(ranges)), key=lambda i: (ranges[i].address, i)):
        r = ranges[i]
        if merged:
            last, members = merged[-1]
            if r.address < last.address + last.nbytes:
                merged[-1] = last, members = dataclasses.replace(last), members  # not the recorder's own
                last.nbytes = max(last.nbytes, r.address + r.nbytes - last.address)
                last.birth = min(last.birth, r.birth)
                ends = (last.death, r.death)
                last.death = None if None in ends else max(e for e in ends if e is not None)
                last.margin = 0
                last.library = last.library and r.library  # a tensor's bytes are meant to last
                members.append(i)
                continue
        merged.append((r, [i]))
    merged.sort(key=lambda m: (m[0].birth, m[0].address))
    for region, (_, members) in enumerate(merged):
        for i in members:
            moved[i] = n_inputs + region
    return ranges[:n_inputs] + [r for r, _ in merged], moved
