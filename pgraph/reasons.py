"""Why something stays outside a graph: a code, a sentence, a fix, and the user's own line."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from pgraph.reason_codes import CATALOGUE, ReasonCode

__all__ = ["Dispatch", "Reason"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why an op, or a whole partition, runs uncaptured.

    Args:
        code: one of `pgraph.reason_codes`, e.g. ``"dynamic-shape"``.
        sentence: what is wrong, naming the op and the value.
        fix: what the user can change; where none is given, what the catalogue says of the code.
        where: ``file:line`` of the user's own source, when known.

    Raises:
        ValueError: the catalogue has no such code.
    """

    code: str
    sentence: str
    fix: str = ""
    where: str | None = None

    def __post_init__(self) -> None:
        if self.code not in CATALOGUE:
            raise ValueError(f"no reason has the code {self.code!r}. Fix: add it to pgraph.reason_codes")
        if not self.fix:
            object.__setattr__(self, "fix", self.info.fix)

    @property
    def info(self) -> ReasonCode:
        """What is true of every reason with this code: decisions read this, never the texts."""
        return CATALOGUE[self.code]

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"[{self.code}] {self.sentence}{place}. Fix: {self.fix}"


class Dispatch(NamedTuple):
    """One op that was dispatched while a partition was captured.

    Args:
        op: ``ns::name``.
        first, end: the nodes that it recorded; the same count twice if it failed.
        tensors: (dtype, size, stride) of the tensors among its arguments, in order.
        literals: numbers, texts and the like among its arguments, in order.
        nth: how many calls of the op with such arguments came before, where an op is to blame; else 0.
    """

    op: str
    first: int
    end: int
    tensors: tuple[tuple[Any, tuple[int, ...], tuple[int, ...]], ...] = ()
    literals: tuple[Any, ...] = ()
    nth: int = 0
