"""The launch path: today's addresses in, ordinary tensors out.

For each chunk of the plan: allocate its blocks, note their addresses, let the exec rewrite the
nodes that changed and launch, drop what has died. Everything that can be known beforehand is laid
out in `__init__`; `__call__` is the hot path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pgraph.capture.build import Built
from pgraph.compat import lazily, reinterpret
from pgraph.errors import DriverError, LaunchError, LaunchMemoryError
from pgraph.template.recording import OutputSpec, TensorSpec

__all__ = [
    "BLOCK",
    "BLOCK_VIEW",
    "CONSTANT",
    "INPUT",
    "RESULT",
    "RESULT_VIEW",
    "Allocation",
    "Launcher",
    "Step",
    "view",
]


# One block: (index, size, stride, dtype, region of its first tenant, other tenants). Plain tuples: this is
# read at every launch.
Allocation = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int, tuple[tuple[int, int], ...]]
# One chunk: (blocks to allocate, launch function or None, blocks to free, inputs to release).
Step = tuple[tuple[Allocation, ...], Callable[[list[int], int], int] | None, tuple[int, ...], tuple[int, ...]]


class Launcher:
    """Launches a built partition. Safe to call from several threads.

    Args:
        built: template and execs.
        positions: where the template's inputs stand among the partition's arguments.
    """

    def __init__(self, built: Built, positions: Sequence[int]) -> None:
        template = built.template
        self.built = built
        self.positions = tuple(positions)
        self._driver = built.driver
        self._empty = built.driver.empty_strided
        self._rest = [0] * (len(template.regions) - template.n_inputs)
        self._no_blocks: list[Any] = [None] * len(template.plan.blocks)
        direct = _direct_outputs(built)
        self.steps: tuple[Step, ...] = tuple(
            (
                tuple(_allocation(built, block, direct) for block in chunk.allocate),
                built.execs[i].launch if chunk.last > chunk.first else None,
                chunk.free,
                chunk.release,
            )
            for i, chunk in enumerate(template.plan.chunks)
        )
        self.results = tuple(_result(built, spec, direct) for spec in template.outputs)

    def __call__(self, inputs: list[Any], addresses: list[int]) -> tuple[list[Any], int]:
        """Launch on the current stream.

        Args:
            inputs: device tensors in the template's order; entries are dropped (set to None) as
                soon as the plan says that the partition is done with them.
            addresses: of the inputs.

        Returns:
            The results, and the number of nodes rewritten.

        Raises:
            LaunchError: the first chunk could not be launched: nothing has run, and `inputs` is whole.
            DriverError: a later one could not.
            torch.OutOfMemoryError: no memory for a later one.
        """
        guard = self._driver.on_device()
        if guard is not None:
            with guard:
                return self._launch(inputs, addresses)
        return self._launch(inputs, addresses)

    def _launch(self, inputs: list[Any], addresses: list[int]) -> tuple[list[Any], int]:
        stream = self._driver.current_stream()
        empty = self._empty
        bases = addresses + self._rest
        blocks = self._no_blocks.copy()
        rewritten = 0
        ran = False
        try:
            for allocate, launch, free, release in self.steps:
                for block, size, stride, dtype, region, others in allocate:
                    blocks[block] = empty(size, stride, dtype)
                    bases[region] = address = blocks[block].data_ptr()
                    for other, offset in others:
                        bases[other] = address + offset
                if launch is not None:
                    rewritten += launch(bases, stream)
                    ran = True
                for block in free:
                    blocks[block] = None
                for i in release:
                    inputs[i] = None
        except (DriverError, torch.OutOfMemoryError) as e:
            if ran:
                raise
            wrong = LaunchError if isinstance(e, DriverError) else LaunchMemoryError
            raise wrong(str(e)) from e
        results = []
        for source, index, layout, offset in self.results:
            if source == BLOCK:
                results.append(blocks[index])
            elif source == INPUT:
                results.append(inputs[index])
            elif source == CONSTANT:
                results.append(index)
            elif source == RESULT:
                results.append(results[index])
            elif source == RESULT_VIEW:
                results.append(results[index].as_strided(*layout, offset))
            else:
                results.append(view((blocks if source == BLOCK_VIEW else inputs)[index], layout, offset))
        return results, rewritten


# Sources of a result; pgraph_call.c has them too.
BLOCK, BLOCK_VIEW, INPUT, INPUT_VIEW, CONSTANT, RESULT, RESULT_VIEW = range(7)


def _direct_outputs(built: Built) -> dict[int, TensorSpec]:
    """Blocks that can be allocated as the very tensor that is returned: block -> its layout."""
    plan = built.template.plan
    direct: dict[int, TensorSpec] = {}
    for spec in built.template.outputs:
        if spec.region is None:
            continue
        block, offset = plan.location(spec.region)
        layout = spec.layout
        assert layout is not None
        alone = len(plan.blocks[block].tenants) == 1 and offset == 0 and layout.offset == 0
        lazy = layout.conj or layout.neg
        if alone and not lazy and _nbytes(layout) == built.template.regions[spec.region].nbytes:
            direct.setdefault(block, layout)
    return direct


def _nbytes(layout: TensorSpec) -> int:
    if 0 in layout.size:
        return 0
    reach = 1 + sum((n - 1) * step for n, step in zip(layout.size, layout.stride, strict=True))
    return reach * layout.dtype.itemsize


def _allocation(built: Built, block: int, direct: dict[int, TensorSpec]) -> Allocation:
    facts = built.template.plan.blocks[block]
    # Tenants come in order of birth; all but one are told by their distance from the block's start.
    first = next(region for region, offset in facts.tenants if offset == 0)
    others = tuple(t for t in facts.tenants if t[0] != first)
    if block in direct:
        layout = direct[block]
        return block, layout.size, layout.stride, layout.dtype, first, others
    dtype = torch.uint8
    for spec in built.template.outputs:
        if spec.region is not None and built.template.plan.location(spec.region)[0] == block:
            assert spec.layout is not None
            dtype = spec.layout.dtype
            break
    return block, (-(-facts.nbytes // dtype.itemsize),), (1,), dtype, first, others


def _result(built: Built, spec: OutputSpec, direct: dict[int, TensorSpec]) -> tuple[int, Any, Any, int]:
    """(source, index or constant, layout, byte offset) of one result."""
    if spec.region is None and spec.input is None:
        return CONSTANT, spec.constant, None, 0
    if spec.layout is None:
        return INPUT, spec.input, None, 0
    if spec.input is not None:
        return INPUT_VIEW, spec.input, spec.layout, 0
    if spec.same is not None:
        return RESULT, spec.same, None, 0
    if spec.view_of is not None and (place := _within(built, spec)) is not None:
        return RESULT_VIEW, spec.view_of, (spec.layout.size, spec.layout.stride), place
    assert spec.region is not None
    block, offset = built.template.plan.location(spec.region)
    if direct.get(block) == spec.layout:
        return BLOCK, block, None, 0
    return BLOCK_VIEW, block, spec.layout, offset


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
