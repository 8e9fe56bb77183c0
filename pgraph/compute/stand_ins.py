"""Arguments of a partition with sizes that nobody called it with (`pgraph.runtime.lessons`)."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from pgraph import compat
from pgraph.compute.compare import ENOUGH
from pgraph.compute.errors import NotComputableError
from pgraph.compute.first import like, stand_in
from pgraph.drivers.operands import Operand

__all__ = ["ArgumentSizes", "Family", "operands"]

log = logging.getLogger(__name__)

SETS: Final = ENOUGH
"""Of sizes: those of the first call, and others."""


class _Strided(NamedTuple):
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

    layouts: Mapping[int, _Strided]
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

    def like(self, stand_ins: Sequence[Any]) -> list[Any]:
        """Stand-ins with these sizes, else like those given."""
        found = list(stand_ins)
        for i, number in self.numbers.items():
            found[i] = number
        for i, layout in self.layouts.items():
            found[i] = like(stand_ins[i], *layout)
        return found

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
                known = like(value, *layout)
            found.append(known)
        return found


class Family:
    """The sizes that a partition's arguments may have. Of their trace no more is kept than expressions.

    Args:
        traced: the arguments with symbolic sizes.

    Attributes:
        symbols: names of what varies; none if sizes cannot be told: whatever is in the way, a program does
            without.
    """

    def __init__(self, traced: Sequence[Any]) -> None:
        self.symbols: tuple[str, ...] = ()
        try:
            told = {i: _numbers(value) for i, value in enumerate(traced)}
            symbolic = {i: n for i, n in told.items() if any(isinstance(x, torch.SymInt) for x in n)}
            self._dims = {i: t.dim() if isinstance(t := traced[i], torch.Tensor) else None for i in symbolic}
            self._counts = list(map(len, symbolic.values()))
            self._known = compat.SymbolicNumbers([n for numbers in symbolic.values() for n in numbers])
            self.symbols = tuple(self._known.symbols)
        except Exception as e:
            log.debug("sizes cannot be told: %s: %s", type(e).__name__, str(e))

    def made_up(self) -> tuple[ArgumentSizes, ...]:
        """Sizes to learn from: as they were traced, then others that may be as well."""
        try:
            return tuple(map(self._at, self._known.made_up(SETS - 1))) if self.symbols else ()
        except Exception as e:
            log.debug("no sizes are made up: %s: %s", type(e).__name__, str(e))
            return ()

    def at(self, values: Mapping[str, int]) -> ArgumentSizes | None:
        """Those where symbols have these values; None if the trace does not hold there.

        Args:
            values: of all symbols.
        """
        return self._at(values) if self._known.hold(values) else None

    def _at(self, values: Mapping[str, int]) -> ArgumentSizes:
        numbers = iter(self._known.at(values))
        layouts: dict[int, _Strided] = {}
        plain: dict[int, int] = {}
        for (i, dims), count in zip(self._dims.items(), self._counts, strict=True):
            known = tuple(itertools.islice(numbers, count))
            if dims is None:
                (plain[i],) = known
            else:
                layouts[i] = _Strided(known[:dims], known[dims:-1], known[-1])
        return ArgumentSizes(layouts, plain)


def operands(stand_ins: Sequence[Any]) -> list[Any]:
    """Stand-ins as a capture takes them."""
    return [
        Operand(
            0,
            tuple(value.size()),
            tuple(value.stride()),
            value.dtype,
            int(value.storage_offset()),
            compat.lazy_bits(value),
        )
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
