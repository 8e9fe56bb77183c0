"""Why something stays outside a graph: a code, a sentence, a fix, and the user's own line."""

from __future__ import annotations

import dataclasses

__all__ = ["Reason"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why an op, or a whole partition, runs plainly.

    Args:
        code: short stable name, for tables and tests, e.g. ``"dynamic-shape"``.
        sentence: what is wrong, naming the op and the value.
        fix: what the user can change; never empty.
        where: ``file:line`` of the user's own source, when known.
    """

    code: str
    sentence: str
    fix: str
    where: str | None = None

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"[{self.code}] {self.sentence}{place}. Fix: {self.fix}"
