"""Arguments of kernels without tensors behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

__all__ = ["HostOperand", "Layout", "Layouts", "Operand", "distinct"]


class Operand(NamedTuple):
    """A tensor argument of a kernel.

    Args:
        address: of its first element; aligned as it will be, and otherwise without a meaning.
        size, stride: in elements.
        dtype: a `torch.dtype`.
        offset: elements from the start of its storage.
        lazy: whether it is a lazy conjugate, and a lazy negative (Note [Lazy conjugates] in `pgraph.compat`).
    """

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    offset: int
    lazy: tuple[bool, bool] = (False, False)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HostOperand:
    """A tensor argument on the host, which no kernel reads.

    Args:
        tensor: a `torch.Tensor`; another one at each call.
    """

    tensor: Any


class Layout(NamedTuple):
    """All that operands have in common that kernels cannot tell apart but by their addresses.

    Args:
        size, stride, dtype, offset, lazy: as an `Operand` has them.
        into: bytes from the beginning of the allocation that it lies in.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    offset: int
    into: int
    lazy: tuple[bool, bool] = (False, False)


class Layouts:
    """Layouts by numbers, which are soon compared.

    Args:
        offsets: whether anybody asks where in its storage a tensor begins; else all offsets are 0.

    Attributes:
        known: by number.
    """

    def __init__(self, offsets: bool = True) -> None:
        self._offsets = offsets
        self.known: list[Layout] = []
        self._numbers: dict[Hashable, int] = {}
        self._phases: list[int] = []

    def number(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: Any,
        offset: int = 0,
        into: int = 0,
        phase: int = 0,
        lazy: tuple[bool, bool] = (False, False),
    ) -> int:
        """Equal for equal layouts in allocations that are aligned alike.

        Args:
            phase: bytes from an aligned address to the beginning of the allocation.
        """
        offset = offset if self._offsets else 0
        key = size, stride, dtype, offset, into, phase, lazy
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.known)
            self.known.append(Layout(tuple(size), tuple(stride), dtype, offset, into, lazy))
            self._phases.append(phase)
        return number

    def view(self, number: int, size: Sequence[int], stride: Sequence[int], further: int) -> int:
        """The number of a view that begins so many elements further on."""
        base = self.known[number]
        into = base.into + further * base.dtype.itemsize
        phase = self._phases[number]
        return self.number(size, stride, base.dtype, base.offset + further, into, phase, base.lazy)

    def look(
        self,
        number: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: Any,
        offset: int,
        lazy: tuple[bool, bool],
    ) -> int:
        """The number of a view whose elements may be of another type, and which begins so many of them from
        the start of the storage.
        """
        base = self.known[number]
        into = base.into + offset * dtype.itemsize - base.offset * base.dtype.itemsize
        return self.number(size, stride, dtype, offset, into, self._phases[number], lazy)


def distinct(arguments: Sequence[Any]) -> list[int]:
    """Positions of the operands among some arguments; of equal ones, which are one tensor, the first."""
    places = [i for i, value in enumerate(arguments) if isinstance(value, Operand)]
    if len({arguments[i].address for i in places}) == len(places):
        return places  # as most often, and soon told
    first: dict[Operand, int] = {}
    for i in places:
        first.setdefault(arguments[i], i)
    return list(first.values())
