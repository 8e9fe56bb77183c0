"""How each result of a partition is made from the regions of its recording."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from pgraph.capture.recorder import GhostRange, Recorder
from pgraph.compat import same_counter
from pgraph.errors import CaptureError
from pgraph.reasons import Reason
from pgraph.template.recording import OutputSpec, TensorSpec

__all__ = []


def output_specs(
    results: Sequence[Any], recorder: Recorder, moved: list[int], regions: list[GhostRange]
) -> tuple[OutputSpec, ...]:
    """Note [One tensor, several results]
    What a forward returns and saves is one tensor or a view of it, and their version counter tells autograd
    when it was written into. Two tensors on the same memory, each with a counter, would give wrong gradients
    and no error. The same holds of an argument and a view of it that is saved.
    """
    origins = _Origins(recorder, moved, regions)
    specs: list[OutputSpec] = []
    earlier: dict[int, list[int]] = {}  # results by region
    for position, value in enumerate(results):
        spec = _output_spec(value, origins)
        if spec.region is not None:
            others = earlier.setdefault(spec.region, [])
            for other in others:
                if results[other] is value:
                    spec = dataclasses.replace(spec, same=other)
                    break
                if same_counter(results[other], value):
                    spec = dataclasses.replace(spec, view_of=other)
                    break
            others.append(position)
        specs.append(spec)
    return tuple(specs)


class _Origins:
    """Finds the input that a value is, and the range that it lies in.

    Args:
        moved: region of each range.
    """

    def __init__(self, recorder: Recorder, moved: list[int], regions: list[GhostRange]) -> None:
        self.recorder, self.moved, self.regions = recorder, moved, regions
        self._inputs: dict[int, int] = {}  # by object
        for i, ghost in enumerate(recorder.inputs):
            self._inputs.setdefault(id(ghost()), i)
        self._ranges: dict[int, int] = {}  # by storage, those that live
        for i, r in enumerate(recorder.ranges):
            if r.owner is not None and r.death is None:
                self._ranges.setdefault(r.owner, i)

    def input(self, value: torch.Tensor) -> int | None:
        i = self._inputs.get(id(value))
        return i if i is not None and self.recorder.inputs[i]() is value else None

    def range(self, value: torch.Tensor) -> int | None:
        return self._ranges.get(value.untyped_storage()._cdata)


def _output_spec(value: Any, origins: _Origins) -> OutputSpec:
    if not isinstance(value, torch.Tensor):
        return OutputSpec(constant=value)
    if (i := origins.input(value)) is not None:
        return OutputSpec(input=i)
    arena = origins.recorder.arena
    if (i := origins.range(value)) is not None:
        r, region = origins.recorder.ranges[i], origins.moved[i]
        offset = 0
        if r.nbytes:
            # Not `data_ptr()`, which is 0 for an empty tensor.
            start = value.untyped_storage().data_ptr() + value.storage_offset() * value.element_size()
            offset = int(start) - origins.regions[region].address
        sizes = tuple(value.size()), tuple(value.stride())
        layout = TensorSpec(*sizes, value.dtype, offset, value.is_conj(), value.is_neg())
        if i < len(origins.recorder.inputs):
            counted = same_counter(origins.recorder.counters[i], value)
            return OutputSpec(input=region, layout=layout, counted=counted)
        return OutputSpec(region=region, layout=layout)
    if value.device != arena.device and value.device.type == "cpu":
        # Attention without dropout hands out host seeds that its backward takes and never reads; the
        # safety rules let no other host tensor into a captured partition.
        return OutputSpec(constant=value, unread=True)
    if arena.holds(value.data_ptr()):
        raise CaptureError(
            Reason(
                "untracked-output",
                f"a result of shape {tuple(value.size())} lies in memory that no tensor was seen to own",
            )
        )
    return OutputSpec(constant=value)
