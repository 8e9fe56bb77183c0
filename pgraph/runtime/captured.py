"""The captured specializations of one partition, launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pgraph.launch.interpreter import launch_first
from pgraph.launch.lookup import Lookup, numbered
from pgraph.launch.native import native_launch
from pgraph.runtime.specialization import Specialization

__all__ = ["Captured"]


class Captured:
    """The captured specializations, ready to be launched. Immutable: whoever launches holds on to it.

    Args:
        specializations: each with its program.
        before: what was there before one of them came, or went.

    Attributes:
        lookup: which of them is for which sizes.
        shared: whether one of them makes results that share memory (Note [Results in one piece]).
        native: launches in C, where that is possible; else None.
        in_python: launches by the interpreter in Python.
        launch: the usual way: in C, where that is possible. See `launch_first`. Most calls of many programs
            come before anything is captured, and should not take longer for it.
    """

    __slots__ = ("in_python", "launch", "lookup", "native", "programs", "shared", "specializations")

    def __init__(
        self, specializations: Sequence[Specialization] = (), before: Captured | None = None
    ) -> None:
        self.specializations = tuple(specializations)
        self.programs = tuple(s.program for s in self.specializations if s.program is not None)
        self.shared = any(program.shared for program in self.programs)
        known = before.lookup if before is not None else None
        self.lookup: Lookup[int] = numbered((s.guards for s in self.specializations), known)
        self.in_python = functools.partial(launch_first, self.programs, self.lookup)
        self.native = native_launch([s.native for s in self.specializations], self.lookup)
        self.launch = self.native or self.in_python if self.programs else _nothing

    def growth(self) -> int:
        """Bytes that a launch of one of them needs at most, beyond its inputs."""
        plans = [program.built.template.plan for program in self.programs]
        return max((plan.peak - plan.inputs for plan in plans), default=0)

    def find(self, args: list[Any]) -> Specialization | None:
        """The first one whose guards hold for these arguments."""
        for _, number in self.lookup.candidates(args):
            if self.specializations[number].addresses(args) is not None:
                return self.specializations[number]
        return None


def _nothing(args: list[Any]) -> None:
    """There is nothing to launch."""
