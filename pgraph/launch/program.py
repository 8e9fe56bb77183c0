"""The launch program: all that a launch does, laid out once, when a partition has been captured.

A `Program` is the only thing that building hands to launching. Two interpreters run it: `interpreter` in
Python, which is the reference, and `native/launch.c`, which reads the same objects once and then runs
without Python between the steps.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch

from pgraph.capture.build import Built
from pgraph.compat import lazily, reinterpret
from pgraph.drivers.interface import Exec
from pgraph.launch.guards import Guards
from pgraph.template.plan import GRANULE, Chunk
from pgraph.template.recording import OutputSpec, TensorSpec

__all__ = ["Allocation", "ChunkLaunch", "Program", "Result", "Source", "program_of", "view"]


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """One block of memory, allocated before a chunk is launched, or several in one piece.

    Args:
        block: its number; of the first, if there are several.
        size, stride, dtype: of the tensor that is allocated.
        raw: bytes, if no result lies in the block, so that it needs no tensor; else 0.
        tenants: (region, bytes from the block's start) of each region that lives in it.
    """

    block: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    raw: int
    tenants: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkLaunch:
    """One chunk of the plan: allocate, rebind and launch, free.

    Args:
        allocate: blocks, in order.
        exec: rewrites the nodes whose addresses changed, and launches; None if the chunk has no node.
        free: blocks that nothing uses any more.
        release: inputs, by number, that the partition is done with.
    """

    allocate: tuple[Allocation, ...]
    exec: Exec | None
    free: tuple[int, ...]
    release: tuple[int, ...]


class Source(enum.IntEnum):
    """What a result is made from. The values stand in `native/launch.c`, too, which is checked."""

    CONSTANT = 0
    BLOCK = 1
    INPUT = 2
    RESULT = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One result: a constant, or an owner (a block's tensor, an input, an earlier result) or a view of it.

    Args:
        source: where the owner is found.
        index: which one.
        constant: the value, for `Source.CONSTANT`.
        make: (owner, *args) -> the result; None if it is the owner itself.
        args: at most three.
    """

    source: Source
    index: int = 0
    constant: Any = None
    make: Callable[..., torch.Tensor] | None = None
    args: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """How one specialization of a partition is launched.

    Args:
        guards: what must hold of the arguments.
        chunks: in the order of their launches.
        results: in the order of the partition's results; each may stand on earlier ones.
        n_regions, n_blocks: of the template's plan. The first regions are the inputs.
        workspace: (region, bytes) of the workspace that a library lends to each launch, or None.
        built: the template and the execs, which the program keeps alive (Note [Freed by reference]).
    """

    guards: Guards
    chunks: tuple[ChunkLaunch, ...]
    results: tuple[Result, ...]
    n_regions: int
    n_blocks: int
    workspace: tuple[int, int] | None
    built: Built


_Layouts = dict[int, TensorSpec]  # by block
_Types = dict[int, torch.dtype]

_SMALL = 512 << 10
_PIECE = 1 << 20  # more than that comes from another pool of the allocator, whose pieces are larger


def program_of(built: Built, guards: Guards) -> Program:
    """The program of a partition that was captured for arguments of which `guards` hold."""
    template = built.template
    direct, dtypes = _output_blocks(built)
    results = tuple(_result(built, spec, direct, dtypes) for spec in template.outputs)
    with_tensor = frozenset(r.index for r in results if r.source is Source.BLOCK)
    chunks = tuple(
        _chunk(
            [_allocation(built, block, direct, dtypes, with_tensor) for block in chunk.allocate],
            built.execs[i] if chunk.last > chunk.first else None,
            chunk,
        )
        for i, chunk in enumerate(template.plan.chunks)
    )
    # A failed launch gives its arguments back if no exec has run, so nothing may release them before.
    assert len(chunks) < 2 or all(chunk.exec is not None for chunk in chunks), "a chunk without nodes"
    lent = next(((r.index, r.nbytes) for r in template.regions if r.kind == "workspace"), None)
    n_regions, n_blocks = len(template.regions), len(template.plan.blocks)
    return Program(guards, chunks, results, n_regions, n_blocks, lent, built)


def _chunk(allocations: list[Allocation], exec: Exec | None, chunk: Chunk) -> ChunkLaunch:
    """One launch, whose small blocks that die with it are allocated in few pieces.

    A call of the allocator takes as long for a small block as for a large one. Results stay apart, however
    small: `as_strided` in a later graph counts from the start of a result's storage.
    """
    pieces: list[Allocation] = []
    joined: set[int] = set()
    dying = frozenset(chunk.free)
    last = -1  # the piece that may still grow
    for one in allocations:
        if not 0 < one.raw <= _SMALL or one.block not in dying:
            pieces.append(one)
        elif last >= 0 and pieces[last].raw + one.raw <= _PIECE:
            pieces[last] = _join(pieces[last], one)
            joined.add(one.block)
        else:
            last = len(pieces)
            pieces.append(one)
    return ChunkLaunch(tuple(pieces), exec, tuple(b for b in chunk.free if b not in joined), chunk.release)


def _join(piece: Allocation, one: Allocation) -> Allocation:
    """`one` behind `piece`; both are bytes, in multiples of what the allocator aligns to."""
    assert piece.raw % GRANULE == 0, piece
    tenants = tuple((region, piece.raw + offset) for region, offset in one.tenants)
    nbytes = piece.raw + one.raw
    return Allocation(piece.block, (nbytes,), (1,), torch.uint8, nbytes, piece.tenants + tenants)


def _output_blocks(built: Built) -> tuple[_Layouts, _Types]:
    """Blocks with results in them.

    Returns:
        The layouts of those that can be allocated as the very tensor that is returned; and the type of each
        one's elements: that of the first result in it, so that this one is a plain view.
    """
    plan = built.template.plan
    direct: _Layouts = {}
    dtypes: _Types = {}
    for spec in built.template.outputs:
        if spec.region is None:
            continue
        block, offset = plan.location(spec.region)
        layout = spec.layout
        assert layout is not None
        dtypes.setdefault(block, layout.dtype)
        alone = len(plan.blocks[block].tenants) == 1 and offset == 0 and layout.offset == 0
        lazy = layout.conj or layout.neg
        if alone and not lazy and _nbytes(layout) == built.template.regions[spec.region].nbytes:
            direct.setdefault(block, layout)
    return direct, dtypes


def _nbytes(layout: TensorSpec) -> int:
    if 0 in layout.size:
        return 0
    reach = 1 + sum((n - 1) * step for n, step in zip(layout.size, layout.stride, strict=True))
    return reach * layout.dtype.itemsize


def _allocation(
    built: Built, block: int, direct: _Layouts, dtypes: _Types, with_tensor: frozenset[int]
) -> Allocation:
    facts = built.template.plan.blocks[block]
    if block in direct:
        layout = direct[block]
        return Allocation(block, layout.size, layout.stride, layout.dtype, 0, facts.tenants)
    dtype = dtypes.get(block, torch.uint8)
    length = -(-facts.nbytes // dtype.itemsize)
    raw = 0 if block in with_tensor else length * dtype.itemsize
    return Allocation(block, (length,), (1,), dtype, raw, facts.tenants)


def _result(built: Built, spec: OutputSpec, direct: _Layouts, dtypes: _Types) -> Result:
    if spec.region is None and spec.input is None:
        return Result(Source.CONSTANT, constant=spec.constant)
    if spec.input is not None:
        if spec.layout is None:
            return Result(Source.INPUT, spec.input)
        return Result(Source.INPUT, spec.input, make=view, args=(spec.layout, 0))
    if spec.same is not None:
        return Result(Source.RESULT, spec.same)
    assert spec.layout is not None
    assert spec.region is not None
    if spec.view_of is not None and (place := _within(built, spec)) is not None:
        layout = (spec.layout.size, spec.layout.stride, place)
        return Result(Source.RESULT, spec.view_of, make=torch.as_strided, args=layout)
    block, offset = built.template.plan.location(spec.region)
    if direct.get(block) == spec.layout:
        return Result(Source.BLOCK, block)
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
    lazy = owner.conj or owner.neg or spec.layout.conj or spec.layout.neg
    if lazy or owner.dtype != spec.layout.dtype or start % owner.dtype.itemsize:
        return None
    return start // owner.dtype.itemsize


def view(owner: torch.Tensor, layout: TensorSpec, offset: int) -> torch.Tensor:
    """The tensor of this layout, `offset` bytes plus its own offset after the owner's first byte."""
    start = offset + layout.offset
    if owner.dtype == layout.dtype and start % layout.dtype.itemsize == 0:
        same = start == 0 and owner.size() == layout.size and owner.stride() == layout.stride
        if same and (owner.is_conj(), owner.is_neg()) == (layout.conj, layout.neg):
            return owner
        plain = reinterpret(owner, layout.size, layout.stride, start // layout.dtype.itemsize)
        return lazily(plain, layout.conj, layout.neg)
    first = owner.storage_offset() * owner.element_size() + start
    storage = owner.untyped_storage()
    view = torch.empty(0, dtype=layout.dtype, device=owner.device)
    view.set_(storage, first // layout.dtype.itemsize, layout.size, layout.stride)
    return lazily(view, layout.conj, layout.neg)
