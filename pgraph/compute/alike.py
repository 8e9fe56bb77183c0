"""Which events of a script are alike, whatever the sizes are.

Layers of a model are alike: of their events, all but the first differ only in which memory they name. What
such an event adds to a recording is told once, for the first of them.

Layouts are not known yet. But each comes from somewhere: with an argument, with an allocation, with a result
of a library call, or from another layout, as a view. Layouts that come from like places have one *origin*, a
number, and are equal for all sizes. So events are alike that say the same of tensors of the same origins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from pgraph.compute.script import (
    CallLibrary,
    CallView,
    Check,
    Drop,
    Event,
    Figure,
    Host,
    LaunchKernel,
    Make,
    Script,
    Sort,
    TensorRef,
)

__all__ = ["Given", "Kind", "Kinds", "kinds_of"]


class Given(NamedTuple):
    """The arguments of an event: what of them differs from size to size.

    Args:
        values: all of them; those that differ are None.
        tensors: which argument each is, and the memory that it lies in.
        figures: which argument each is, and its place on the tape.
        hosts: which argument each is, and which argument of the partition.
        numbers: of each argument that is a tensor, its number among the tensors.
    """

    values: tuple[Any, ...]
    tensors: tuple[tuple[int, int], ...]
    figures: tuple[tuple[int, int], ...]
    hosts: tuple[tuple[int, int], ...]
    numbers: dict[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Events that are alike.

    Args:
        first: position of the first of them among the events.
        tensors: origins of the tensors among its arguments, as `Sort.tensors` has them.
        results: origins of what it makes or returns.
        views: the origins that are views and first come with it: which one, origin of what it is a view of,
            number of the view.
        given: its first event's arguments.
    """

    first: int
    tensors: tuple[int, ...]
    results: tuple[int, ...]
    views: tuple[tuple[int, int, int], ...]
    given: Given


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Of the events of one script.

    Args:
        all: in the order of their first events.
        of_events: number of each event's kind; None for those that give up memory.
        origins: how many there are.
        of_memory: origin of the layout that each memory came with.
        of_look: and of that which each view of a library's has.
    """

    all: tuple[Kind, ...]
    of_events: tuple[int | None, ...]
    origins: int
    of_memory: tuple[int, ...]
    of_look: tuple[int, ...]

    def base(self, place: TensorRef) -> int:
        """Origin of the layout from which a tensor's size, stride and offset are told."""
        return self.of_memory[place.memory] if place.look is None else self.of_look[place.look]


def kinds_of(
    script: Script, inputs: Sequence[int], sample: Callable[[LaunchKernel], Hashable] | None
) -> Kinds:
    """The kinds of a script's events.

    Args:
        inputs: numbers of the layouts of its inputs: equal ones are taken to be equal for all sizes for which
            these numbers are the same.
        sample: see `pgraph.compute.pieces.Tools`. Without it no launch is like another one, and no call.
    """
    sorting = _KindsFound(script, inputs, sample)
    for at, (event, sort) in enumerate(zip(script.events, script.sorts, strict=True)):
        sorting.sort(at, event, sort)
    of_memory = tuple([sorting.of_memory.get(memory, -1) for memory in range(script.memories)])
    kinds = tuple(sorting.kinds)
    return Kinds(kinds, tuple(sorting.of_events), len(sorting.origins), of_memory, tuple(sorting.of_look))


class _KindsFound:
    """Events being sorted."""

    def __init__(
        self, script: Script, inputs: Sequence[int], sample: Callable[[LaunchKernel], Hashable] | None
    ) -> None:
        self._script, self._sample = script, sample
        self.origins: dict[Hashable, int] = {}
        self.of_memory = {m: self._origin((Script, layout)) for m, layout in enumerate(inputs)}
        self.of_look: list[int] = []
        self.kinds: list[Kind] = []
        self.of_events: list[int | None] = []
        self._numbers: dict[Hashable, int] = {}
        self._views: list[tuple[int, int, int]] = []  # of the event being sorted, that no other one had

    def sort(self, at: int, event: Event, sort: Sort) -> None:
        if isinstance(event, Drop):
            self.of_events.append(None)
            return
        tensors = tuple([self._of_tensor(memory, view) for memory, view in sort.tensors])
        said = self._said(event, sort, tensors)
        number = self._numbers.get(said) if said is not None else None
        if number is None:
            number = len(self.kinds)
            made = 1 if isinstance(event, Make | CallView) else len(getattr(event, "results", ()))
            results = tuple([self._origin((Kind, number, i)) for i in range(made)])
            self.kinds.append(Kind(at, tensors, results, tuple(self._views), _given(event)))
            self._views.clear()
            if said is not None:
                self._numbers[said] = number
        self.of_events.append(number)
        if isinstance(event, Make):
            (self.of_memory[event.memory],) = self.kinds[number].results
        elif isinstance(event, CallView):
            self.of_look += self.kinds[number].results
        elif isinstance(event, CallLibrary):
            self.of_memory.update(zip(event.results, self.kinds[number].results, strict=True))

    def _said(self, event: Event, sort: Sort, tensors: tuple[int, ...]) -> Hashable | None:
        """All that an event says; None if it is like no other."""
        if sort.number is None:
            return None
        if isinstance(event, Make | Check | CallView):
            return sort.number, tensors
        if self._sample is None:
            return None
        sample: Any = self._sample(event) if isinstance(event, LaunchKernel) else ()
        return None if sample is None else (sort.number, sample, tensors)

    def _of_tensor(self, memory: int, view: int | None) -> int:
        if view is None:
            return self.of_memory[memory]
        known = self._script.views[view]
        base = self.of_memory[memory] if known.look is None else self.of_look[known.look]
        if known.size is None:
            return base
        origin = self.origins.get((base, view))
        if origin is None:  # so this event is like no earlier one
            origin = self._origin((base, view))
            self._views.append((origin, base, view))
        return origin

    def _origin(self, told: Hashable) -> int:
        return self.origins.setdefault(told, len(self.origins))


def _given(event: Event) -> Given:
    arguments = event.arguments if isinstance(event, LaunchKernel | CallLibrary | CallView) else ()
    told = [(at, value) for at, value in enumerate(arguments)]
    tensors = tuple([(at, value.memory) for at, value in told if isinstance(value, TensorRef)])
    return Given(
        tuple([None if isinstance(value, TensorRef | Figure | Host) else value for value in arguments]),
        tensors,
        tuple([(at, value.place) for at, value in told if isinstance(value, Figure)]),
        tuple([(at, value.position) for at, value in told if isinstance(value, Host)]),
        {at: i for i, (at, _) in enumerate(tensors)},
    )
