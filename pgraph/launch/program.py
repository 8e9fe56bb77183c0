"""The launch program: all that a launch does, laid out once, when a partition has been captured.

A `Program` is the only thing that building hands to launching. Two interpreters run it: `interpreter` in
Python, which is the reference, and `native/launch.c`, which reads the same objects once and then runs
without Python between the steps.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pgraph.capture.build import Built
from pgraph.compat import reinterpret
from pgraph.drivers.execs import Recipe
from pgraph.launch.allocations import (
    Allocation,
    BlockLayouts,
    Places,
    Types,
    allocation_of,
    in_pieces,
    output_blocks,
    piece_of,
    smallest,
    spanned,
)
from pgraph.launch.guards import Guards
from pgraph.launch.views import based, beside, counted, view, with_counter
from pgraph.template.recording import OutputSpec

__all__ = ["ChunkLaunch", "Program", "Result", "Source", "program_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkLaunch:
    """One chunk of the plan: allocate, rebind and launch, free.

    Args:
        allocate: blocks, in order.
        recipe: sets what its exec has otherwise, and launches it; None if the chunk has no node.
        free: blocks that nothing uses any more.
        release: inputs, by number, that the partition is done with.
    """

    allocate: tuple[Allocation, ...]
    recipe: Recipe | None
    free: tuple[int, ...]
    release: tuple[int, ...]


class Source(enum.IntEnum):
    """What a result is made from. The values stand in `native/launch.c`, too, which is checked."""

    CONSTANT = 0
    BLOCK = 1
    INPUT = 2
    RESULT = 3


class Result(NamedTuple):
    """One result: a constant, or an owner (a block's tensor, an input, an earlier result) or a view of it.

    Args:
        source: where the owner is found.
        index: which one.
        constant: the value, for `Source.CONSTANT`.
        make: (owner, *args) -> the result; None if it is the owner itself.
        args: at most three.
    """

    source: Source
    index: int = 0  # type: ignore[assignment]  # hides a method of tuples
    constant: Any = None
    make: Callable[..., torch.Tensor] | None = None
    args: tuple[Any, ...] = ()


# Most results of most sizes are whole blocks, or inputs: equal ones are one object.
_whole = functools.lru_cache(maxsize=4096)(functools.partial(Result, Source.BLOCK))
_given = functools.lru_cache(maxsize=4096)(functools.partial(Result, Source.INPUT))


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """How one specialization of a partition is launched.

    Args:
        guards: what must hold of the arguments.
        chunks: in the order of their launches.
        results: in the order of the partition's results; each may stand on earlier ones.
        shared: positions of those that lie in one piece with others (Note [Results in one piece]).
        n_regions, n_blocks: of the template's plan. The first regions are the inputs.
        workspace: (region, bytes) of the workspace that a library lends to each launch, or None.
        built: the template and the recipes, which the program keeps alive (Note [Freed by reference]).
    """

    guards: Guards
    chunks: tuple[ChunkLaunch, ...]
    results: tuple[Result, ...]
    shared: tuple[int, ...]
    n_regions: int
    n_blocks: int
    workspace: tuple[int, int] | None
    built: Built


def program_of(
    built: Built,
    guards: Guards,
    sharing: Mapping[int, int] = MappingProxyType({}),
    slack_bytes: int = 0,
    lasting: Collection[int] = (),
    gradients: Collection[int] = (),
) -> Program:
    """The program of a partition that was captured for arguments of which `guards` hold.

    Args:
        sharing: positions of results that may share memory, and when each dies (Note [Results in one piece]).
        slack_bytes: see `pgraph.template.plan.make_plan`.
        lasting: positions of results that may outlive the next launch (Note [Results first]).
        gradients: positions of small gradients of parameters, which may share memory with one another.
    """
    template = built.template
    all_blocks = tuple(template.plan.blocks)
    first = {template.plan.location(r)[0] for i in lasting if (r := template.outputs[i].region) is not None}
    direct, dtypes = output_blocks(template)
    results = [_result(built, spec, direct, dtypes) for spec in template.outputs]
    with_tensor = frozenset(r.index for r in results if r.source is Source.BLOCK)
    position_of, gradient_of = (_sharing_blocks(built, results, these) for these in (sharing, gradients))
    sizes, alike = ({b: all_blocks[b].nbytes for b in of} for of in (position_of, gradient_of))
    peak, n_chunks = template.plan.peak, len(template.plan.chunks)
    room = max(slack_bytes, peak // 100)
    chosen, piece = smallest(sizes, room, n_chunks), piece_of(room, n_chunks, peak)
    sizes = {block: sizes[block] for block in sorted(chosen, key=lambda block: sharing[position_of[block]])}
    chunks: list[ChunkLaunch] = []
    places: Places = {}
    for i, chunk in enumerate(template.plan.chunks):
        blocks: Sequence[int] = chunk.allocate
        if not first.isdisjoint(blocks):
            blocks = sorted(blocks, key=lambda block: block not in first)
        each = [allocation_of(all_blocks[b], direct.get(b), dtypes, with_tensor) for b in blocks]
        allocate, joined = in_pieces(each, frozenset(chunk.free), sizes, piece, alike)
        recipe, free = built.recipes[i] if chunk.last > chunk.first else None, chunk.free
        if joined:
            free = tuple(b for b in free if joined.get(b, (b, 0))[0] == b)
            places |= joined
        chunks.append(ChunkLaunch(allocate, recipe, free, chunk.release))
    sharers = position_of | gradient_of
    shared = sorted(position for block, position in sharers.items() if block in places)
    for position in shared:
        piece, offset = places[results[position].index]
        layout = template.outputs[position].layout
        results[position] = Result(Source.BLOCK, piece, make=view, args=(layout, offset))
    # A failed launch gives its arguments back if no exec has run, so nothing may release them before.
    assert len(chunks) < 2 or all(chunk.recipe is not None for chunk in chunks), "a chunk without nodes"
    kinds, nbytes = template.regions.column("kind"), template.regions.column("nbytes")
    workspace = kinds.index("workspace") if "workspace" in kinds else None
    lent = (workspace, nbytes[workspace]) if workspace is not None else None
    n_regions, n_blocks = len(template.regions), len(all_blocks)
    return Program(guards, tuple(chunks), tuple(results), tuple(shared), n_regions, n_blocks, lent, built)


def _sharing_blocks(built: Built, results: Sequence[Result], positions: Collection[int]) -> dict[int, int]:
    """Blocks of these results, at whose start each lies as the only one, and the position of each result."""
    template, found = built.template, dict[int, int]()
    if not positions:
        return found
    regions = Counter([spec.region for spec in template.outputs])
    for position in positions:
        result, spec = results[position], template.outputs[position]
        if result.source is not Source.BLOCK or regions[spec.region] > 1:
            continue
        assert spec.layout is not None
        assert spec.region is not None
        assert template.plan.location(spec.region) == (result.index, 0), "a result begins its block"
        dense = spanned(spec.layout) == math.prod(spec.layout.size) * spec.layout.dtype.itemsize
        if dense and 0 not in spec.layout.size:
            found[result.index] = position
    return found


def _result(built: Built, spec: OutputSpec, direct: BlockLayouts, dtypes: Types) -> Result:
    if spec.region is None and spec.input is None:
        return Result(Source.CONSTANT, constant=spec.constant)
    if spec.input is not None:
        if spec.layout is None:
            return _given(spec.input)
        return Result(Source.INPUT, spec.input, make=counted if spec.counted else view, args=(spec.layout, 0))
    if spec.same is not None:
        return Result(Source.RESULT, spec.same)
    assert spec.layout is not None
    assert spec.region is not None
    block, offset = built.template.plan.location(spec.region)
    if spec.view_of is not None:
        place = _within(built, spec)
        if place is None:  # of another type, or lazy, or detached
            return Result(Source.RESULT, spec.view_of, make=with_counter, args=(spec.layout, offset))
        make = torch.as_strided if built.template.outputs[spec.view_of].base is None else beside
        strided = spec.layout.size, spec.layout.stride, place
        return Result(Source.RESULT, spec.view_of, make=make, args=strided)
    if spec.base is not None:
        return Result(Source.BLOCK, block, make=based, args=(spec.layout, offset, spec.base))
    if (made := direct.get(block)) is spec.layout or made == spec.layout:
        return _whole(block)
    dtype = direct[block].dtype if block in direct else dtypes[block]
    if not (spec.layout.conj or spec.layout.neg) and spec.layout.dtype == dtype:
        # What `view` comes to; a block's tensor begins where its storage does.
        first, rest = divmod(offset + spec.layout.offset, dtype.itemsize)
        if not rest:
            layout = (spec.layout.size, spec.layout.stride, first)
            return Result(Source.BLOCK, block, make=reinterpret, args=layout)
    return Result(Source.BLOCK, block, make=view, args=(spec.layout, offset))


def _within(built: Built, spec: OutputSpec) -> int | None:
    """Elements from its block's start to a result that is a view of another one; None if no plain view."""
    assert spec.region is not None
    assert spec.layout is not None
    assert spec.view_of is not None
    owner = built.template.outputs[spec.view_of].layout
    assert owner is not None
    start = built.template.plan.location(spec.region)[1] + spec.layout.offset
    odd = owner.conj or owner.neg or spec.layout.conj or spec.layout.neg or spec.detached
    if odd or owner.dtype != spec.layout.dtype or start % owner.dtype.itemsize:
        return None
    return start // owner.dtype.itemsize
