"""What a launch allocates: a block of memory, or several small ones in one piece.

A call of the allocator takes as long for a small block as for a large one, and of the small ones it has, it
hands out another one each time. So the fewer it is asked for, the less a launch takes, and the more addresses
are the ones of last time.

Note [Results in one piece]
What dies within a launch may share a piece with whatever dies with it. Results have owners, who may do what
they like to their memory: free it, resize it, hand it to another stream. So they stay apart, but for two
kinds of small ones. They then lie within a storage instead of at its start, which must not make a difference.

Gradients of parameters have PyTorch for an owner, which hands out parts of a larger storage by itself: of
parameters that a program concatenates, the gradients are views of one tensor, in eager mode too. Most die
together, when the program sets them to None, and freeing them one by one takes as long as allocating them.
But a program may keep one of them at each step (a layer's bias, for a log), and its piece with it. So those
of about one size share, and a piece is at most `ALIKE` times as large as any of its gradients.

What a forward saves for its backward and for nobody else:

* ``as_strided`` counts from the start of the storage. Inductor's code does not, but somebody else may run the
  backward (compiled autograd). So its graph has no such op, which is known once it has been compiled.
* Hooks on saved tensors get them. Those of PyTorch itself leave the storage alone. With others about, each
  result is copied out of the piece (`apart`).
* A backward may overwrite what was saved for it, with a gradient for one, or hand it on. Code for small
  tensors is not allowed the first (`may_share`), and where a graph does the second nothing is shared.
* The piece lives until the last of them dies. So they are small (`RESULT_MOST`), and those of a chunk share
  one that die one after the other: at any time one piece of each chunk at most is kept for some of its
  tenants alone. Pieces are so large that even those are no more than a launch may exceed the peak by, or than
  one percent of the peak (`piece_of`). Were they too small, the smallest share that are no more than that
  together.

Note [Results first]
A program that keeps a result until it has the next one (``out = model(x)`` in a loop) has two of them, which
take turns in two places. Were anything allocated before the result, it would find the one place free or the
other, and so would all that follows: in every other launch most addresses would be new, and the nodes that
have them would be set. Results that the program gets are therefore allocated before all else in their chunk.
Both places are taken then, and the rest has the addresses of last time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pgraph.template.lifetimes import Pairs
from pgraph.template.plan import GRANULE, Block
from pgraph.template.recording import TensorSpec
from pgraph.template.template import Template

__all__ = [
    "ALIKE",
    "FEW_MOST",
    "LARGE_PEAK",
    "PIECE_MOST",
    "RESULTS_MOST",
    "RESULT_MOST",
    "TEMPORARY_MOST",
    "Allocation",
    "BlockLayouts",
    "Places",
    "Types",
    "allocation_of",
    "apart",
    "in_pieces",
    "may_share",
    "output_blocks",
    "piece_of",
    "small_of",
    "smallest",
    "spanned",
]

RESULT_MOST = 1 << 20
"""Bytes of a result that may share a piece."""

FEW_MOST = 256 << 10
"""The same where little memory is needed: what shares a piece is not overwritten, so that the peak grows."""

TEMPORARY_MOST = 512 << 10
"""Bytes of a temporary that may."""

PIECE_MOST = 1 << 20
"""Bytes of a piece: more comes from another pool of PyTorch's allocator, whose segments are larger."""

RESULTS_MOST = 8 << 20
"""Bytes of a piece of results, if there is room for it."""

ALIKE = 8
"""Times the bytes of the smallest gradient in a piece that the piece may have."""

LARGE_PEAK = 128 << 20
"""Bytes at the peak of a program that may have such pieces: the other pool's segments take 20 MB at least."""

BlockLayouts = dict[int, TensorSpec]
"""By block."""

Types = dict[int, torch.dtype]
"""By block."""

Places = dict[int, tuple[int, int]]
"""block -> (first block of its piece, bytes from the piece's start)"""


class Allocation(NamedTuple):
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
    tenants: Pairs


def output_blocks(template: Template) -> tuple[BlockLayouts, Types]:
    """Blocks with results in them.

    Returns:
        The layouts of those that can be allocated as the very tensor that is returned; and the type of each
        one's elements: that of the first result in it, so that this one is a plain view.
    """
    plan, nbytes, tenants = (
        template.plan,
        template.regions.column("nbytes"),
        template.plan.blocks.column("tenants"),
    )
    direct: BlockLayouts = {}
    dtypes: Types = {}
    for spec in template.outputs:
        region, layout = spec.region, spec.layout
        if region is None:
            continue
        block, offset = plan.location(region)
        assert layout is not None
        if block not in dtypes:
            dtypes[block] = layout.dtype
        alone = offset == 0 and layout.offset == 0 and len(tenants[block]) == 1
        if not alone or layout.conj or layout.neg or block in direct:
            continue
        if _reached(layout.size, layout.stride) * layout.dtype.itemsize == nbytes[region]:
            direct[block] = layout
    return direct, dtypes


def spanned(layout: TensorSpec) -> int:
    """Bytes that a tensor spans."""
    itemsize: int = layout.dtype.itemsize
    return _reached(layout.size, layout.stride) * itemsize


@functools.lru_cache(maxsize=4096)  # a model has many layers
def _reached(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements that a tensor spans."""
    if 0 in size:
        return 0
    return 1 + sum(map(operator.mul, size, stride)) - sum(stride)  # what is one further is not reached


def allocation_of(
    facts: Block, layout: TensorSpec | None, dtypes: Types, with_tensor: frozenset[int]
) -> Allocation:
    """What is allocated for a block.

    Args:
        layout: of the tensor that is allocated; None for a block as it is.
        dtypes: see `output_blocks`.
        with_tensor: blocks that need a tensor.
    """
    block, nbytes, tenants = facts
    if layout is not None:
        return Allocation(block, layout.size, layout.stride, layout.dtype, 0, tenants)
    dtype = dtypes.get(block, torch.uint8)
    length = -(-nbytes // dtype.itemsize)
    raw = 0 if block in with_tensor else length * dtype.itemsize
    return Allocation(block, (length,), (1,), dtype, raw, tenants)


def in_pieces(
    allocations: Sequence[Allocation],
    dying: Collection[int],
    results: Mapping[int, int],
    most: int = PIECE_MOST,
    gradients: Mapping[int, int] = MappingProxyType({}),
) -> tuple[tuple[Allocation, ...], Places]:
    """The allocations of one chunk, small ones joined.

    Args:
        allocations: one for each block, in order.
        dying: blocks that are freed after the launch.
        results: bytes of the blocks of results that may share a piece, in the order in which they die.
        most: bytes of a piece of results.
        gradients: bytes of the blocks of parameters' gradients that may share a piece.

    Returns:
        Fewer allocations, in order; and where the blocks lie that share a piece.
    """
    small = {a.block: a.raw for a in allocations if 0 < a.raw <= TEMPORARY_MOST and a.block in dying}
    groups = [(small, group) for group in _grouped(small.items(), PIECE_MOST)]
    if results or gradients:
        here = {a.block for a in allocations}
        mine, alike = (
            {block: nbytes for block, nbytes in sizes.items() if block in here}
            for sizes in (results, gradients)
        )
        groups += [(mine, group) for group in _grouped(mine.items(), most)]
        groups += [(alike, group) for group in _alike(alike)]
    places: Places = {}
    if not groups:
        return tuple(allocations), places
    by_block = {a.block: a for a in allocations}
    joined = {}
    for sizes, group in groups:
        joined[group[0]] = _joined([by_block[block] for block in group], sizes, places)
    kept = [a for a in allocations if a.block not in places or a.block in joined]
    return tuple([joined.get(a.block, a) for a in kept]), places


def small_of(examples: Iterable[Any]) -> int:
    """Bytes of a result that may lie in a piece.

    Args:
        examples: of what a forward saves, from tracing.
    """
    total = sum(nbytes for example in examples if (nbytes := _static_nbytes(example)) is not None)
    return RESULT_MOST if total >= LARGE_PEAK else FEW_MOST


def may_share(example: Any, small: int) -> bool:
    """Whether a result, of which there is an example from tracing, is small enough to lie in a piece.

    Args:
        small: see `small_of`.
    """
    nbytes = _static_nbytes(example)
    return nbytes is not None and nbytes <= small


def _static_nbytes(example: Any) -> int | None:
    """None if it is no tensor, or differs from call to call."""
    if not isinstance(example, torch.Tensor) or any(type(n) is not int for n in example.size()):
        return None
    return example.numel() * example.element_size()


def piece_of(room: int, chunks: int, peak: int) -> int:
    """Bytes of a piece of results, of which one for each chunk may be kept longer than needed.

    Args:
        room: bytes that may be kept.
        peak: of the program.
    """
    piece = min(RESULTS_MOST, room // max(1, chunks)) if peak >= LARGE_PEAK else PIECE_MOST
    return max(PIECE_MOST, piece - piece % GRANULE)


def smallest(blocks: Mapping[int, int], room: int, chunks: int) -> frozenset[int]:
    """The results' blocks that share pieces: all small ones, or as many as there is room for.

    Args:
        blocks: bytes of each one that may.
        room: bytes that may be kept for longer than they are needed.
        chunks: of the program.
    """
    if room >= chunks * PIECE_MOST:
        return frozenset(block for block, nbytes in blocks.items() if nbytes <= RESULT_MOST)
    chosen = list[int]()
    for block in sorted(blocks, key=lambda block: (blocks[block], block)):
        room -= blocks[block]
        if room < 0 or blocks[block] > RESULT_MOST:
            break
        chosen.append(block)
    return frozenset(chosen)


def _grouped(members: Iterable[tuple[int, int]], most: int) -> list[list[int]]:
    """Blocks that share a piece of at most so many bytes, in order; a piece of one is none."""
    groups: list[list[int]] = []
    filled = most
    for block, nbytes in members:
        if filled + nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(block)
        filled += nbytes
    return [group for group in groups if len(group) > 1]


def _alike(gradients: Mapping[int, int]) -> list[list[int]]:
    """Blocks that share a piece, each about as large as the others; a piece of one is none."""
    groups: list[list[int]] = []
    filled = most = 0
    for block in sorted(gradients, key=lambda block: (gradients[block], block)):
        nbytes = gradients[block]
        if filled + nbytes > most:
            groups.append([])
            filled, most = 0, min(PIECE_MOST, ALIKE * nbytes)
        groups[-1].append(block)
        filled += nbytes
    return [sorted(group) for group in groups if len(group) > 1]


def _joined(blocks: Sequence[Allocation], sizes: Mapping[int, int], places: Places) -> Allocation:
    """Blocks one behind the other, as bytes; `places` is told where."""
    first, end, tenants = blocks[0], 0, list[tuple[int, int]]()
    for one in blocks:
        places[one.block] = first.block, end
        tenants += [(region, end + offset) for region, offset in one.tenants]
        end += sizes[one.block]
        assert end % GRANULE == 0, blocks  # what the allocator aligns to
    return Allocation(first.block, (end,), (1,), torch.uint8, end if first.raw else 0, Pairs(tenants))


def apart(results: list[torch.Tensor], shared: Sequence[int]) -> None:
    """Give results that lie in pieces memory of their own; changes `results`.

    Args:
        shared: their positions.
    """
    for position in shared:
        results[position] = results[position].clone()
