"""Runs a launch program in Python: the reference, and the way where there is no launch in C.

For each chunk: allocate its blocks, note their addresses, let the recipe set the nodes that changed and
launch, drop what has died.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from pgraph.drivers.interface import Driver
from pgraph.errors import DriverError
from pgraph.launch.lookup import Lookup
from pgraph.launch.program import Program, Result, Source

__all__ = ["Launched", "launch_first", "note_failure"]


Launched = tuple[list[Any], int, int]
"""(results of the partition, nodes that were rewritten, which of the programs it was)"""


def launch_first(programs: Sequence[Program], lookup: Lookup[int], args: list[Any]) -> Launched | None:
    """Launch the first program whose guards hold for `args`, on the current stream.

    Args:
        programs: of one partition.
        lookup: the number of each of them.
        args: of the partition. Device tensors are taken out (None stands in their places). If nothing has
            run when the launch fails, the list is whole again.

    Returns:
        None if no program's guards hold, or within somebody's capture; `args` is untouched.

    Raises:
        DriverError: the driver refused a launch. What failed: see `note_failure`.
        torch.OutOfMemoryError: no memory for a block.
    """
    for guards, index in lookup.candidates(args):
        if (addresses := guards.addresses(args)) is not None:
            program, driver = programs[index], programs[index].built.driver
            if driver.is_capturing():
                return None
            with driver.on_device() or contextlib.nullcontext():
                results, rewritten = _launch(program, driver, args, addresses, index)
            return results, rewritten, index
    return None


def _launch(
    program: Program, driver: Driver, args: list[Any], addresses: list[int], index: int
) -> tuple[list[Any], int]:
    inputs = []
    for guard in program.guards.tensors:
        inputs.append(args[guard.position])
        args[guard.position] = None
    bases = addresses + [0] * (program.n_regions - len(addresses))
    blocks: list[Any] = [None] * program.n_blocks
    stream = driver.current_stream()
    rewritten, ran = 0, False
    try:
        for chunk in program.chunks:
            for block in chunk.allocate:
                # In no variable: it would hold the last block for longer than the plan says.
                blocks[block.block] = driver.empty_strided(block.size, block.stride, block.dtype)
                address = blocks[block.block].data_ptr()
                for region, offset in block.tenants:
                    bases[region] = address + offset
            if chunk.recipe is not None:
                if program.workspace is not None:  # at each launch: others may drop it in between
                    region, nbytes = program.workspace
                    bases[region] = driver.workspace(stream, nbytes)
                rewritten += chunk.recipe.launch(bases, stream)
                ran = True
            for number in chunk.free:
                blocks[number] = None
            for number in chunk.release:
                inputs[number] = None
    except (DriverError, torch.OutOfMemoryError) as e:
        if not ran:
            for guard, value in zip(program.guards.tensors, inputs, strict=True):
                args[guard.position] = value
        note_failure(e, index, ran)
        raise
    return _results(program.results, blocks, inputs), rewritten


def _results(wanted: Sequence[Result], blocks: list[Any], inputs: list[Any]) -> list[Any]:
    results: list[Any] = []
    owners = {Source.BLOCK: blocks, Source.INPUT: inputs, Source.RESULT: results}
    for result in wanted:
        if result.source is Source.CONSTANT:
            results.append(result.constant)
            continue
        owner = owners[result.source][result.index]
        results.append(owner if result.make is None else result.make(owner, *result.args))
    return results


def note_failure(error: BaseException, index: int, ran: bool) -> None:
    """Have an error say which program failed, and whether a part of it had run. C does the same."""
    error.pgraph_launch = index, ran  # type: ignore[attr-defined]
