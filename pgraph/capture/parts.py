"""Ops that are recorded as several calls of themselves, each of which computes some of the results.

Note [Results in the place of scratch]
Within one op the allocator hands freed scratch out again: a convolution's weight gradient takes the place
of the workspace that its input gradient needed, so that one region holds both (Note [Scratch and result in
one place] in `pgraph.capture.record`), and tens of megabytes live as long as the small result. ATen computes
the gradients of a convolution one after another, each by calls of its own, and takes a mask of those wanted.
So two calls do what one does, and between two calls nothing is handed out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from pgraph.compat import memory_format
from pgraph.ops.fx import op_name

__all__ = ["RECORDED_IN_PARTS", "in_parts", "joined"]

RECORDED_IN_PARTS: Final = frozenset({"aten::convolution_backward"})

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_GRAD_OUTPUT, _INPUT, _WEIGHT, _MASK = 0, 1, 2, 10  # arguments of convolution_backward


def in_parts(op: Any, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments of each call; `args` alone for all other ops."""
    if op_name(op) not in RECORDED_IN_PARTS or len(args) <= _MASK:
        return [args]
    of_input, of_weight, of_bias = args[_MASK]
    if not of_input or not (of_weight or of_bias) or _would_copy(*args[: _WEIGHT + 1]):
        return [args]
    # The bias's with the weight's: a CPU computes these two together.
    masks = [True, False, False], [False, of_weight, of_bias]
    return [(*args[:_MASK], mask, *args[_MASK + 1 :]) for mask in masks]


def _would_copy(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the gradient comes in another memory format than is computed in: each call would copy it.

    In an image of one pixel that is so if the strides of its single elements are others than the input's.
    """
    if memory_format(grad_output) != memory_format(input):
        return True
    last = _CHANNELS_LAST.get(grad_output.dim())
    if last is not None and any(
        t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (input, weight)
    ):
        return not grad_output.is_contiguous(memory_format=last)
    return not grad_output.is_contiguous()


def joined(results: Sequence[Any]) -> Any:
    """What the whole call would have returned."""
    if len(results) == 1:
        return results[0]
    return tuple(next((r for r in same if r is not None), None) for same in zip(*results, strict=True))
