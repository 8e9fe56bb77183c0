"""How each result of a partition is made from the regions of its recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pgraph.capture.recorder import GhostRange, Recorder
from pgraph.compat import base_of, same_counter
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

    Where the first of them is a view, and what it is a view of comes later or is no result, AOTAutograd still
    looks at the latter's layout (``_base``), and takes as much of a gradient as fits in there. So the first
    is a view of a tensor of that layout, and the others are views of that tensor, or the tensor itself.

    A tensor and what was detached from it share the counter, too, and are no views of one another: a view of
    what requires a gradient would require one. The second of such results is `detached`.
    """
    origins = _Origins(recorder, moved, regions)
    specs: list[OutputSpec] = []
    earlier: dict[int, list[list[int]]] = {}  # results by region, together those that share a counter
    for position, value in enumerate(results):
        spec = _output_spec(value, origins)
        if spec.region is not None:
            sharing = _sharing(results, earlier.setdefault(spec.region, []), value)
            same = next((other for other in sharing if results[other] is value), None)
            beside = next((other for other in sharing if _whole(results[other]) is _whole(value)), None)
            if same is not None:
                spec = spec._replace(same=same)
            elif beside is not None:
                spec = spec._replace(view_of=beside)
                specs[beside] = specs[beside]._replace(base=_base(results[beside], origins))
            elif sharing:
                spec = spec._replace(view_of=sharing[0], detached=True)
            sharing.append(position)
        specs.append(spec)
    return tuple(specs)


def _sharing(results: Sequence[Any], groups: list[list[int]], value: torch.Tensor) -> list[int]:
    """The group of results that share their version counter with this one; a new one, if none does."""
    for group in groups:
        if results[group[0]] is value or same_counter(results[group[0]], value):
            return group
    groups.append([])
    return groups[-1]


def _whole(value: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, or itself if it is none."""
    base = base_of(value)
    return value if base is None else base


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


def _layout(value: torch.Tensor, range_: int, origins: _Origins) -> TensorSpec:
    """Of a tensor within a range."""
    offset = 0
    if origins.recorder.ranges[range_].nbytes:
        # Not `data_ptr()`, which is 0 for an empty tensor.
        start = value.untyped_storage().data_ptr() + value.storage_offset() * value.element_size()
        offset = int(start) - origins.regions[origins.moved[range_]].address
    sizes = tuple(value.size()), tuple(value.stride())
    return TensorSpec(*sizes, value.dtype, offset, value.is_conj(), value.is_neg())


def _base(value: torch.Tensor, origins: _Origins) -> TensorSpec | None:
    """The layout of what a result is a view of; None if it is none, or has other elements or bits."""
    base, i = base_of(value), origins.range(value)
    if base is None or i is None:
        return None
    mine, its = _layout(value, i, origins), _layout(base, i, origins)
    alike = (mine.dtype, mine.conj, mine.neg) == (its.dtype, its.conj, its.neg) == (its.dtype, False, False)
    return its if alike else None


def _output_spec(value: Any, origins: _Origins) -> OutputSpec:
    if not isinstance(value, torch.Tensor):
        return OutputSpec(constant=value)
    if (i := origins.input(value)) is not None:
        return OutputSpec(input=i)
    arena = origins.recorder.arena
    if (i := origins.range(value)) is not None:
        region, layout = origins.moved[i], _layout(value, i, origins)
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
