"""The launch path: today's addresses in, ordinary tensors out.

For each chunk of the plan: allocate its blocks, note their addresses, let the exec rewrite the
nodes that changed and launch, drop what has died. Everything that can be known beforehand is laid
out in `__init__`; `__call__` is the hot path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from pgraph.build import Built
from pgraph.compat import reinterpret
from pgraph.errors import DriverError, LaunchError
from pgraph.template import OutputSpec, TensorSpec

__all__ = ["Launcher"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Allocate:
    """One block: how to make it, and the regions that live in it with their byte offsets."""

    block: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    tenants: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One chunk."""

    allocate: tuple[_Allocate, ...]
    exec: Any
    free: tuple[int, ...]
    release: tuple[int, ...]


class Launcher:
    """Launches a built partition. Safe to call from several threads.

    Args:
        built: template and execs; stays the owner of the execs.
    """

    def __init__(self, built: Built) -> None:
        template = built.template
        self._driver = built.driver
        self._n_regions = len(template.regions)
        self._n_blocks = len(template.plan.blocks)
        self._n_inputs = template.n_inputs
        direct = _direct_outputs(built)
        self._steps = tuple(
            _Step(
                tuple(_allocation(built, block, direct) for block in chunk.allocate),
                built.execs[i] if chunk.last > chunk.first else None,
                chunk.free,
                chunk.release,
            )
            for i, chunk in enumerate(template.plan.chunks)
        )
        self._results = tuple(_result_maker(built, spec, direct) for spec in template.outputs)

    def __call__(self, inputs: list[Any]) -> tuple[list[Any], int]:
        """Launch on the current stream.

        Args:
            inputs: device tensors in the template's order; entries are dropped (set to None) as
                soon as the plan says that the partition is done with them.

        Returns:
            The results, and the number of nodes rewritten.

        Raises:
            LaunchError: the driver failed before anything ran; `inputs` is as it was.
            DriverError: the driver failed after a part had been launched.
        """
        driver = self._driver
        stream = driver.current_stream()
        bases = driver.bases(self._n_regions)
        blocks: list[Any] = [None] * self._n_blocks
        for i in range(self._n_inputs):
            bases[i] = inputs[i].data_ptr()
        empty = driver.empty_strided
        rewritten = 0
        launched = False
        try:
            for step in self._steps:
                for a in step.allocate:
                    tensor = empty(a.size, a.stride, a.dtype)
                    blocks[a.block] = tensor
                    address = tensor.data_ptr()
                    for region, offset in a.tenants:
                        bases[region] = address + offset
                if step.exec is not None:
                    rewritten += step.exec.launch(bases, stream)
                    launched = True
                for b in step.free:
                    blocks[b] = None
                for i in step.release:
                    inputs[i] = None
        except DriverError as e:
            if launched:
                raise
            raise LaunchError(str(e)) from e
        results = [make(blocks, inputs) for make in self._results]
        return results, rewritten


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
        if alone and _nbytes(layout) == built.template.regions[spec.region].nbytes:
            direct.setdefault(block, layout)
    return direct


def _nbytes(layout: TensorSpec) -> int:
    if 0 in layout.size:
        return 0
    reach = 1 + sum((n - 1) * step for n, step in zip(layout.size, layout.stride, strict=True))
    return reach * layout.dtype.itemsize


def _allocation(built: Built, block: int, direct: dict[int, TensorSpec]) -> _Allocate:
    facts = built.template.plan.blocks[block]
    if block in direct:
        layout = direct[block]
        return _Allocate(block, layout.size, layout.stride, layout.dtype, facts.tenants)
    dtype = torch.uint8
    for spec in built.template.outputs:
        if spec.region is not None and built.template.plan.location(spec.region)[0] == block:
            assert spec.layout is not None
            dtype = spec.layout.dtype
            break
    return _Allocate(block, (-(-facts.nbytes // dtype.itemsize),), (1,), dtype, facts.tenants)


def _result_maker(
    built: Built, spec: OutputSpec, direct: dict[int, TensorSpec]
) -> Callable[[list[Any], list[Any]], Any]:
    if spec.region is None and spec.input is None:
        constant = spec.constant
        return lambda blocks, inputs: constant
    layout = spec.layout
    assert layout is not None
    if spec.input is not None:
        position = spec.input
        return lambda blocks, inputs: _view(inputs[position], layout, 0)
    assert spec.region is not None
    block, offset = built.template.plan.location(spec.region)
    if direct.get(block) == layout:
        return lambda blocks, inputs: blocks[block]
    return lambda blocks, inputs: _view(blocks[block], layout, offset)


def _view(owner: torch.Tensor, layout: TensorSpec, offset: int) -> torch.Tensor:
    """The tensor of this layout, `offset` bytes plus its own offset after the owner's first byte."""
    start = offset + layout.offset
    if owner.dtype == layout.dtype and start % layout.dtype.itemsize == 0:
        if start == 0 and owner.size() == layout.size and owner.stride() == layout.stride:
            return owner
        return reinterpret(owner, layout.size, layout.stride, start // layout.dtype.itemsize)
    first = owner.storage_offset() * owner.element_size() + start
    storage = owner.untyped_storage()
    view = torch.empty(0, dtype=layout.dtype, device=owner.device)
    return view.set_(storage, first // layout.dtype.itemsize, layout.size, layout.stride)
