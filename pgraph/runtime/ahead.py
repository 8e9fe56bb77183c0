"""Sizes that are to be expected, whose recordings are computed before they come.

Note [Computed ahead]
Of some hundred sizes (lengths in training) each comes once in some hundred calls. What its recording costs
is what several launches save, and a program may lose no more than a hundredth of its time
(`pgraph.runtime.economy`): with that alone, thousands of calls pass before all sizes are launched. A few
dozen that are launched from the first call on earn what the others cost much sooner. So a small part
of the time that a partition took to be compiled is spent on sizes that have not come: between the smallest
and the largest that have, as far as the compiled code serves them. That is done in a partition's first calls,
and not where there are so many sizes that few of those computed would ever come.

Which sizes a function gets is told by all graphs that Dynamo made of it: of lengths that are multiples of
eight it may make one of their own.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from pgraph.compute.computer import Computer
from pgraph.compute.stand_ins import Family
from pgraph.launch.guards import Guards, ValueGuard
from pgraph.runtime.cache import SpecializationCache
from pgraph.runtime.sizes import Sizes
from pgraph.runtime.specialization import Specialization

__all__ = ["OF_THE_PROCESS", "Ahead", "Allowance"]

log = logging.getLogger(__name__)

SHARE: Final = 0.16
"""Of the time that Inductor took for a partition: a twentieth of what the program waited for it (training of
a model of six blocks, H200: 79 s, of which Inductor took 25 for four partitions)."""

_LEAST_S: Final = 1.5
"""Seconds, however soon it was compiled: code may come from a cache."""

_MOST_S: Final = 3.0

_ALL_S: Final = 6.0
"""Seconds for all partitions of a process together, beside `SHARE` of what each took to be compiled: a
program may have dozens."""

_FEW: Final = 3
"""Values of a size that have to come first. Two may be all: one in training, and one for what follows."""

_FIRST: Final = 16
"""Calls of a partition after which none is computed ahead any more."""

_MOST: Final = 4096
"""Sets of sizes that may be looked at."""

_SPREAD: Final = 12
"""Times as many sizes as can be computed: beyond that, too few of them would come."""

_TOGETHER: Final = 8
"""Sizes whose library calls are recorded in one capture. They tell how long others take: the first ones take
longer."""

_VAIN: Final = 3
"""Sizes in a row that could not be computed, after which no further one is tried."""


class Allowance:
    """What all partitions of a process may spend. Used by any thread: it need not be exact."""

    def __init__(self) -> None:
        self._granted_s = self._spent_s = 0.0

    @property
    def left_s(self) -> float:
        return _ALL_S + self._granted_s - self._spent_s

    def compiled(self, seconds: float) -> None:
        """A partition was, for so long."""
        self._granted_s += SHARE * seconds

    def spent(self, seconds: float) -> None:
        """So much is gone."""
        self._spent_s += seconds

    def reset(self) -> None:
        """Begin anew."""
        self._granted_s = self._spent_s = 0.0


OF_THE_PROCESS: Final = Allowance()


class _Effort:
    """Time that is spent within, but for Python's full collections. They are due with or without this, and
    took up to a second of the 1.5 that a partition has (H200).

    Attributes:
        seconds: so far.
    """

    def __enter__(self) -> _Effort:
        self._collecting = self._collected = 0.0
        self._start = time.perf_counter()
        gc.callbacks.append(self._told)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._told)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start - self._collected

    def _told(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._collecting = time.perf_counter()
        elif self._collecting:
            self._collected += time.perf_counter() - self._collecting
            self._collecting = 0.0


class Ahead:
    """Of one partition. Called with its lock held, but for `due`.

    Args:
        family: of its arguments' sizes.
        came: values that each symbol has had, by name, of the whole function.
        listed: option `capture_sizes`.
        compile_s: seconds that it took to compile the partition.
    """

    def __init__(
        self, family: Family, came: Mapping[str, set[int]], listed: Collection[int], compile_s: float
    ) -> None:
        self._family, self._listed = family, sorted(listed)
        self._came = [came[name] for name in family.symbols if name in came]
        OF_THE_PROCESS.compiled(compile_s)
        self._left_s = min(max(_LEAST_S, SHARE * compile_s), _MOST_S)
        self._limit_s = self._left_s
        self._told = 0  # values that there were when it was looked at last
        self._stand_ins: Sequence[Any] = ()
        self._guards: Guards | None = None
        self._every = 0  # sets of sizes
        if not self._came or len(self._came) < len(family.symbols):
            self.end()

    def begin(self, stand_ins: Sequence[Any], guards: Guards) -> None:
        """Sizes can be computed from now on.

        Args:
            stand_ins: for arguments of some call.
            guards: of this call.
        """
        self._stand_ins, self._guards = stand_ins, guards

    def end(self) -> None:
        """No further size is computed ahead."""
        self._left_s = 0.0

    @property
    def over(self) -> bool:
        """Whether none will be any more."""
        return self._left_s <= 0.0

    def due(self, calls: int) -> bool:
        """Whether there are sizes to expect that there were not before.

        Args:
            calls: of the partition so far.
        """
        if self.over or self._guards is None:
            return False
        if calls > _FIRST:
            self.end()
        told = sum(map(len, self._came))
        return (
            not self.over and told > self._told and (bool(self._listed) or max(map(len, self._came)) >= _FEW)
        )

    def compute(
        self,
        computer: Computer,
        cache: SpecializationCache,
        sizes: Sizes,
        compute: Callable[[Specialization, list[Any], float], bool],
    ) -> None:
        """Compute recordings of sizes to expect, as long as there is time and room for them.

        Args:
            computer, cache, sizes: of the partition.
            compute: makes a specialization launchable, for such arguments, if it can; from which second on.
        """
        self._left_s = min(self._left_s, OF_THE_PROCESS.left_s)
        if self.over:
            return
        with _Effort() as effort:
            try:
                self._compute(effort, computer, cache, sizes, compute)
            finally:
                spent = effort.seconds
                self._left_s -= spent
                OF_THE_PROCESS.spent(spent)

    def _compute(
        self,
        effort: _Effort,
        computer: Computer,
        cache: SpecializationCache,
        sizes: Sizes,
        compute: Callable[[Specialization, list[Any], float], bool],
    ) -> None:
        vain = 0
        for looked_at, together in self._expected():
            further = [(guards, args) for guards, args in together if not cache.knows(guards)]
            cases = [(args, guards.alignments) for guards, args in further]
            if not all(computer.covers(*case) for case in cases):
                return self.end()
            computer.look_ahead(cases)
            for guards, args in further:
                if effort.seconds >= self._left_s or not cache.room.fits():
                    return self.end()
                specialization = cache.expected(guards, sizes.of(args))
                vain = 0 if compute(specialization, args, time.perf_counter()) else vain + 1
                if vain >= _VAIN:
                    return self.end()
            if effort.seconds * (1.0 - looked_at) / looked_at > _SPREAD * self._limit_s:
                log.debug("%d sizes are too many to compute some of them ahead", self._every)
                return self.end()
        return None

    def _expected(self) -> Iterator[tuple[float, list[tuple[Guards, list[Any]]]]]:
        """Of sizes to expect the guards, and stand-ins for arguments, some at a time; and which part of all
        sets of sizes was looked at by then.
        """
        assert self._guards is not None
        self._told = sum(map(len, self._came))
        ranges = [self._range(sorted(came)) for came in self._came]
        self._every = math.prod(map(len, ranges))
        if not 1 < self._every <= _MOST:
            return
        sets = list(itertools.product(*ranges))
        random.Random(0).shuffle(sets)
        together: list[tuple[Guards, list[Any]]] = []
        for looked_at, values in enumerate(sets, 1):
            sizes = self._family.at(dict(zip(self._family.symbols, values, strict=True)))
            if sizes is not None:
                arguments = sizes.like(self._stand_ins)
                together.append((_guards_like(self._guards, arguments), arguments))
            if together and (len(together) == _TOGETHER or looked_at == self._every):
                yield looked_at / self._every, together
                together = []

    def _range(self, came: Sequence[int]) -> Sequence[int]:
        if self._listed:
            return self._listed
        return range(came[0], came[-1] + 1) if came else ()


def _guards_like(guards: Guards, arguments: Sequence[Any]) -> Guards:
    """The guards of arguments with other sizes, aligned as they were."""
    tensors = tuple(
        dataclasses.replace(
            guard,
            size=tuple(arguments[guard.position].size()),
            stride=tuple(arguments[guard.position].stride()),
        )
        for guard in guards.tensors
    )
    values = tuple(ValueGuard(guard.position, arguments[guard.position]) for guard in guards.values)
    return dataclasses.replace(guards, tensors=tensors, values=values)
