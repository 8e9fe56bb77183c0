"""A library call, and what tells whether another one records the same nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from pgraph.compute.script import CallLibrary
from pgraph.drivers.interface import ALIGNMENT
from pgraph.drivers.operands import HostOperand, Operand, distinct

__all__ = ["LibraryCall", "alignment"]


@dataclasses.dataclass(frozen=True, slots=True)
class LibraryCall:
    """A call of a library.

    Args:
        event: of the script.
        arguments: an `Operand` for each tensor of the device, or a value.
        settings: a number for those of libraries (`pgraph.compat.library_settings`).

    Attributes:
        operands: the tensors among its arguments, each once.
        key: equal for calls of one script that record the same nodes, but for addresses.
    """

    event: CallLibrary
    arguments: tuple[Any, ...]
    settings: int
    operands: list[Operand] = dataclasses.field(init=False, repr=False, compare=False)
    key: Hashable = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        operands = [self.arguments[i] for i in distinct(self.arguments)]
        object.__setattr__(self, "operands", operands)
        given = sum([isinstance(a, Operand) for a in self.arguments])
        same = tuple(self._numbers) if len(operands) < given else None
        likeness = tuple(map(_likeness, self.arguments))
        object.__setattr__(self, "key", (self.event.kind, likeness, same, self.settings))

    @property
    def _numbers(self) -> list[int]:
        """For each argument that is a tensor, which one."""
        return [self.operands.index(a) for a in self.arguments if isinstance(a, Operand)]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Call with these operands; the results that are none of the arguments."""
        at = iter(self._numbers)
        given = [tensors[next(at)] if isinstance(a, Operand) else _value(a) for a in self.arguments]
        args, options = tree_unflatten(given, self.event.spec)
        known = {id(value) for value in given if isinstance(value, torch.Tensor)}
        made = self.event.function(*args, **options)
        if made is None and not self.event.results:  # all that it does is to write; None counts as a leaf
            return []
        return [result for result in tree_flatten(made)[0] if id(result) not in known]


def alignment(address: int) -> int:
    return min(address & -address, ALIGNMENT)


def _value(argument: Any) -> Any:
    return argument.tensor if isinstance(argument, HostOperand) else argument


def _likeness(value: Any) -> Hashable:
    """All of an argument that kernels may depend on."""
    if isinstance(value, Operand):
        address, *layout = value
        return *layout, alignment(address)
    if isinstance(value, HostOperand):
        return "host", tuple(value.tensor.size()), value.tensor.dtype
    if isinstance(value, torch.Tensor):  # a constant of the code
        return id(value), value.data_ptr(), tuple(value.size()), tuple(value.stride()), value.dtype
    return type(value), str(value) if isinstance(value, float | complex) else value  # -0.0 == 0.0
