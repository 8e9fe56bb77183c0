"""Arguments of kernels without tensors behind them."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Operand"]


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
