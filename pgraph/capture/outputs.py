"""How each result of a partition is made from the regions of its recording."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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
    and no error.
    """
    specs: list[OutputSpec] = []
    for position, value in enumerate(results):
        spec = _output_spec(value, recorder, moved, regions)
        if spec.region is not None:
            for earlier in range(position):
                if specs[earlier].region != spec.region:
                    continue
                if results[earlier] is value:
                    spec = dataclasses.replace(spec, same=earlier)
                    break
                if same_counter(results[earlier], value):
                    spec = dataclasses.replace(spec, view_of=earlier)
                    break
        specs.append(spec)
    return tuple(specs)


def _output_spec(value: Any, recorder: Recorder, moved: list[int], regions: list[GhostRange]) -> OutputSpec:
    if not isinstance(value, torch.Tensor):
        return OutputSpec(constant=value)
    for i, ghost in enumerate(recorder.inputs):
        if ghost() is value:
            return OutputSpec(input=i)
    arena, n_inputs = recorder.arena, len(recorder.inputs)
    owner = StorageWeakRef(value.untyped_storage())
    for i, r in enumerate(recorder.ranges):
        if r.owner is not None and r.owner.cdata == owner.cdata and r.death is None:
            region = moved[i]
            sizes = tuple(value.size()), tuple(value.stride())
            layout = TensorSpec(*sizes, value.dtype, 0, value.is_conj(), value.is_neg())
            if r.nbytes:
                # Not `data_ptr()`, which is 0 for an empty tensor.
                start = value.untyped_storage().data_ptr() + value.storage_offset() * value.element_size()
                layout = dataclasses.replace(layout, offset=int(start) - regions[region].address)
            if i < n_inputs:
                return OutputSpec(input=region, layout=layout)
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
