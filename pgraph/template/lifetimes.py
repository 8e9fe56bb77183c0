"""When the regions of a recording must exist: what a plan is made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pgraph.errors import PlanError

__all__ = ["GRANULE", "Lifetime", "check", "survives"]

GRANULE = 512
"""Bytes to which the caching allocator rounds every size; offsets are multiples of it."""


def survives(n_nodes: int) -> int:
    """The `Lifetime.death` of a region that outlives the launch."""
    return n_nodes + 1


class Lifetime(NamedTuple):
    """When a region must exist, in node order. A tuple: there are hundreds for each plan.

    Args:
        region: unique id.
        nbytes: size in bytes; 0 is allowed.
        birth: it must exist before node `birth` runs; 0 for inputs.
        death: it may be freed once all nodes < `death` have run; ``survives(n_nodes)`` for outputs
            and for inputs that the caller keeps.
        kind: who owns it.
    """

    region: int
    nbytes: int
    birth: int
    death: int
    kind: Literal["input", "output", "temp"]


def check(n_nodes: int, lifetimes: Sequence[Lifetime]) -> None:
    """See to it that these can be planned.

    Raises:
        PlanError: they contradict each other.
    """
    seen: set[int] = set()
    end = survives(n_nodes)
    for life in lifetimes:
        region, nbytes, birth, death, kind = life
        right = nbytes >= 0 <= birth <= death <= end and region not in seen
        if right and (
            (kind == "temp" and death < end)
            or (kind == "output" and death == end and birth <= n_nodes)
            or (kind == "input" and birth == 0)
        ):
            seen.add(region)
            continue
        if life.region in seen:
            wrong = "appears twice; give each region an id of its own"
        elif life.nbytes < 0:
            wrong = f"has nbytes {life.nbytes}; pass a size >= 0"
        elif life.birth < 0:
            wrong = f"has birth {life.birth}; pass a node >= 0"
        elif life.death > end:
            wrong = f"has death {life.death} in a chain of {n_nodes} nodes; pass at most {end} (survives)"
        elif life.birth > life.death:
            wrong = f"has birth {life.birth} after death {life.death}; pass birth <= death"
        elif life.kind == "input" and life.birth != 0:
            wrong = f"is an input with birth {life.birth}; inputs exist before the launch, pass 0"
        elif life.kind == "output" and (life.death != end or life.birth > n_nodes):
            wrong = (
                f"is an output with birth {life.birth} and death {life.death}; outputs survive, pass a "
                f"birth <= {n_nodes} and death {end}, or make it a temp"
            )
        elif life.kind == "temp" and life.death == end:
            wrong = f"is a temp with death {end} (survives); pass at most {n_nodes}, or make it an output"
        else:
            wrong = f"has kind {life.kind!r}; pass 'input', 'output' or 'temp'"
        raise PlanError(f"region {life.region} {wrong}")
