"""Arguments of a partition with sizes that nobody called it with, for lessons (`pgraph.runtime.lessons`)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from pgraph import compat
from pgraph.compute.compare import ENOUGH
from pgraph.compute.errors import NotComputableError
from pgraph.compute.first import stand_in, without_memory
from pgraph.drivers.operands import Operand

__all__ = ["ArgumentSizes", "made_up", "operands"]

log = logging.getLogger(__name__)

SETS: Final = ENOUGH
"""Of sizes: those of the first call, and others."""


class _Layout(NamedTuple):
    """Of a tensor, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentSizes:
    """What differs from call to call, by position.

    Args:
        layouts: of tensors.
        numbers: among the arguments.
    """

    layouts: Mapping[int, _Layout]
    numbers: Mapping[int, int]

    def are_of(self, arguments: Sequence[Any]) -> bool:
        """Whether these arguments have them."""
        if any(arguments[i] != number for i, number in self.numbers.items()):
            return False
        return all(
            isinstance(t := arguments[i], torch.Tensor)
            and layout == (tuple(t.size()), tuple(t.stride()), t.storage_offset())
            for i, layout in self.layouts.items()
        )

    def stand_ins(self, arguments: Sequence[Any], device: torch.device) -> list[Any]:
        """Arguments with these sizes, else like those given; tensors of the device without memory.

        Raises:
            NotComputableError: there are none.
        """
        found: list[Any] = []
        for i, value in enumerate(arguments):
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise NotComputableError(f"argument {i} is on no device")
            known = self.numbers[i] if i in self.numbers else stand_in(value, device)
            if (layout := self.layouts.get(i)) is not None:
                if known is value:
                    raise NotComputableError(f"argument {i} is on the host and varies")
                known = without_memory(value.dtype, *layout)
            found.append(known)
        return found


def made_up(traced: Sequence[Any]) -> tuple[ArgumentSizes, ...]:
    """Sizes to learn from: as they were traced, then others that may be as well; none if they cannot be told:
    whatever is in the way, a program does without lessons.

    Args:
        traced: a partition's arguments with symbolic sizes.
    """
    try:
        told = {i: _numbers(value) for i, value in enumerate(traced)}
        symbolic = {i: n for i, n in told.items() if any(isinstance(x, torch.SymInt) for x in n)}
        every = [number for numbers in symbolic.values() for number in numbers]
        return tuple(_sizes(traced, symbolic, values) for values in compat.other_numbers(every, SETS - 1))
    except Exception as e:
        log.debug("no sizes are made up: %s: %s", type(e).__name__, str(e))
        return ()


def _sizes(
    traced: Sequence[Any], symbolic: Mapping[int, Sequence[Any]], values: Mapping[str, int]
) -> ArgumentSizes:
    """Of the arguments, where symbols have these values."""
    layouts: dict[int, _Layout] = {}
    numbers: dict[int, int] = {}
    for i, symbols in symbolic.items():
        known = [_number(n, values) for n in symbols]
        if isinstance(traced[i], torch.Tensor):
            dims = traced[i].dim()
            layouts[i] = _Layout(tuple(known[:dims]), tuple(known[dims:-1]), known[-1])
        else:
            (numbers[i],) = known
    return ArgumentSizes(layouts, numbers)


def operands(stand_ins: Sequence[Any]) -> list[Any]:
    """Stand-ins as a capture takes them."""
    return [
        Operand(0, tuple(value.size()), tuple(value.stride()), value.dtype, int(value.storage_offset()))
        if isinstance(value, torch.Tensor) and value.is_meta
        else value
        for value in stand_ins
    ]


def _numbers(value: Any) -> list[Any]:
    """The numbers of a traced value that may be symbolic."""
    if isinstance(value, torch.SymInt):
        return [value]
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return [*value.size(), *value.stride(), value.storage_offset()]
    return []


def _number(value: Any, values: Mapping[str, int]) -> int:
    if not isinstance(value, torch.SymInt):
        return int(value)
    found = compat.evaluate(value, values)
    assert found is not None, "each symbol has a number"
    return found
