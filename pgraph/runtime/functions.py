"""The functions that Dynamo was asked to compile for pgraph, and what has become of them.

A record is text and numbers. It lives until `torch._dynamo.reset()`, which lets Dynamo begin anew.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pgraph.reasons import Reason

__all__ = ["FunctionStats", "forget", "found", "graph_arrived", "graphs_arrived", "live", "values"]


@dataclasses.dataclass(slots=True)
class FunctionStats:
    """What Dynamo made of one function.

    Args:
        name: e.g. ``"Block.forward"``.
        where: ``file:line`` of its definition, if it is the user's own.
        compilations: how often Dynamo has compiled it.
        graphs: that it made of it for pgraph.
        guards: that failed, so that it was compiled again; each once.
        change: what would end that, if it is known.
        stopped: why it is compiled no more.
        skipped: why nothing of it was compiled when Dynamo tried last.
        below: whether that is a break in what it calls, which tells it by itself, or is `Optimizer.step`:
            that breaks graphs before it begins its own.
    """

    name: str
    where: str | None
    compilations: int = 0
    graphs: int = 0
    guards: list[str] = dataclasses.field(default_factory=list)
    change: str = ""
    stopped: Reason | None = None
    skipped: Reason | None = None
    below: bool = False

    @property
    def reason(self) -> Reason | None:
        """Why some or all of its calls run eagerly."""
        return self.stopped or self.skipped

    @property
    def often(self) -> bool:
        """Whether it is compiled again and again. Another gradient mode and varying sizes are one each."""
        return len(self.guards) > 2

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        if self.reason is None:
            told = f"{self.name}: compiled x {self.compilations}"
            if self.often:
                told += f"; the last guard that failed: {self.guards[-1]}"
                told += f". Fix: {self.change}" if self.change else ""
            return told
        what = "compiled no more" if self.stopped is not None else "skipped by Dynamo"
        return f"{self.name}: {what}; {self.reason}"


_functions: dict[tuple[str, str | None], FunctionStats] = {}
_values: dict[tuple[str, str], set[int]] = {}
_arrived = 0


def found(name: str, where: str | None) -> FunctionStats:
    """The record of a function."""
    return _functions.setdefault((name, where), FunctionStats(name, where))


def live() -> tuple[FunctionStats, ...]:
    """Those that made a graph or have a reason why not; what works on no tensors is not worth a word."""
    return tuple(
        dataclasses.replace(one, guards=list(one.guards))
        for one in list(_functions.values())
        if one.graphs or one.reason is not None
    )


def values(compilation: str | None, source: str | None) -> set[int]:
    """Values that one of a function's sizes has had, to be added to, whatever graph it came to: of some sizes
    Dynamo makes one of their own.

    Args:
        compilation: under way, ``"3/0"``: of the function that Dynamo calls 3.
        source: of the size, as Dynamo calls it. If either is not known, only one graph has the set.
    """
    if compilation is None or source is None:
        return set()
    return _values.setdefault((compilation.rpartition("/")[0], source), set())


def graph_arrived() -> None:
    """Dynamo has handed a graph over. It compiles one function at a time."""
    global _arrived
    _arrived += 1


def graphs_arrived() -> int:
    """How many since this was asked last."""
    global _arrived
    number, _arrived = _arrived, 0
    return number


def forget() -> None:
    """Dynamo begins anew."""
    _functions.clear()
    _values.clear()
    graphs_arrived()
