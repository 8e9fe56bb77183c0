"""Arguments of kernels without tensors behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = ["HostOperand", "Operand", "distinct"]


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a kernel.

    Args:
        address: of its first element; aligned as it will be, and otherwise without a meaning.
        size, stride: in elements.
        dtype: a `torch.dtype`.
        offset: elements from the start of its storage.
    """

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HostOperand:
    """A tensor argument on the host, which no kernel reads.

    Args:
        tensor: a `torch.Tensor`; another one at each call.
    """

    tensor: Any


def distinct(arguments: Sequence[Any]) -> list[int]:
    """Positions of the operands among some arguments; of equal ones, which are one tensor, the first."""
    places = [i for i, value in enumerate(arguments) if isinstance(value, Operand)]
    if len({arguments[i].address for i in places}) == len(places):
        return places  # as most often, and soon told
    first: dict[Operand, int] = {}
    for i in places:
        first.setdefault(arguments[i], i)
    return list(first.values())
