"""Library calls, each recorded once for all that its kernels may depend on.

Note [Early kernels]
A kernel of cuBLAS may be launched such that it begins before the kernel before it has ended (programmatic
dependent launch; products with few rows on an H100 or H200). A capture tells that by the edge between the
two, whoever launched the first. So each call is recorded after a kernel, and what is told of the edge that
leads into the call is part of it, as an edge from node -1. Such edges are there between kernels only (CUDA's
reference, `CUgraphDependencyType`).

What comes after a call tells what its own nodes wait for, and what waits for them, where they fork
(`Topology.links`). So there is a kernel of our own before the first call and after the last one. Between two
there is one only where it is needed: where a call does not end with a kernel, or both begin or end with a
fork. That is seen when all are recorded.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch

from pgraph.capture.record import record
from pgraph.compute.compare import kind_of, launches, loose_words
from pgraph.compute.errors import NotComputableError, RunTogetherError
from pgraph.compute.library_call import LibraryCall, alignment
from pgraph.compute.pieces import Proved
from pgraph.drivers.interface import Arena, Driver
from pgraph.errors import CaptureError, MatchError, RecountError
from pgraph.template.match import match
from pgraph.template.proofs import Proofs
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import GhostAllocation, Recording
from pgraph.template.template import Slot, slots_of

__all__ = ["Sites"]

_MOST: Final = 1024
"""Calls that are remembered, of a few nodes each."""


@dataclasses.dataclass(slots=True)
class _Known:
    """A recording of a call.

    Args:
        proved: this.
        turn: in which it was asked for; None if it was not.
        shared: it was asked for in another one, too.
    """

    proved: Proved
    turn: int | None = None
    shared: bool = False


class Sites:
    """Of one partition. Called with the driver's capture lock held.

    Attributes:
        padding: words of kernels' parameters that nobody initialises.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._turn = self._waiting = 0
        self._proofs: dict[int, Proofs] = {}
        self._spaced = False  # a kernel of our own between any two calls
        self._before: dict[Hashable, Proved] = {}
        self.padding: dict[Hashable, set[int]] = {}

    def begin(self) -> None:
        """Calls that are asked for from now on are those of some other sizes."""
        self._turn += 1

    def get(self, call: LibraryCall) -> Proved | None:
        """The recording of a call; None if there is none yet."""
        key = call.key
        known = self._known.get(key)
        if known is None:
            return None
        self._known.move_to_end(key)
        known.shared |= known.turn not in (None, self._turn)
        known.turn = self._turn
        return known.proved

    def expect(self, sizes: int) -> None:
        """The latest calls are those of so many sets of sizes."""
        self._waiting = sizes

    def evaluated(self) -> None:
        """All that some sizes record is known. Calls that no others have asked for go, once that holds for
        all sizes that were expected: most calls are those of one set of sizes. Python's collector looks at
        all objects when there are a fourth more, and recordings of calls were two fifths of what a size adds.
        """
        self._waiting -= 1
        if self._waiting <= 0:
            gone = [key for key, known in self._known.items() if known.turn is not None and not known.shared]
            for key in gone:
                del self._known[key]

    def again(self) -> None:
        """Have each call recorded anew, in two captures, when it is asked for. What differs from one time to
        the next, and is no address, is padding.
        """
        self._before = {key: known.proved for key, known in self._known.items()}
        self._known.clear()
        self._proofs.clear()

    def record(self, calls: Sequence[LibraryCall], whole: bool = False) -> None:
        """Record calls, all in one capture, or in two where the first is not proof enough
        (Note [Proved by another size] in `pgraph.template.proofs`).

        Args:
            whole: all are captured twice if one has to be. What is compared with captures needs it: where
                padding lies is only seen in two captures, and not in any two.

        Raises:
            NotComputableError: one of them cannot be recorded by itself.
        """
        wanted = {call.key: call for call in calls}
        found: list[Proved] | None = None
        recounts = 0
        while found is None:
            try:
                found = self._recorded(list(wanted.values()), whole)
            except RunTogetherError as e:
                if self._spaced:
                    raise NotComputableError(str(e)) from None
                self._spaced = True
            except RecountError:
                recounts += 1
                if recounts > 1:
                    raise
            except (CaptureError, MatchError) as e:
                raise NotComputableError(f"a library call cannot be recorded by itself: {e.reason}") from None
        for key, proved in zip(wanted, found, strict=True):
            self._known[key] = _Known(proved)
            old = self._before.pop(key, None)
            if old is not None and launches(old[0]) == launches(proved[0]):
                self._note_padding(old[0], proved[0], [*old[1], *proved[1]])
        while len(self._known) > _MOST:
            self._known.popitem(last=False)

    def _recorded(self, calls: Sequence[LibraryCall], whole: bool) -> list[Proved]:
        driver = self._driver
        with contextlib.ExitStack() as arenas:
            first = _capture(driver, arenas.enter_context(driver.arena(0)), calls, self._spaced)
            parts = _slices(first)
            outside = _Outside(driver.framework_ranges(), driver.workspaces(), _constants(calls))
            known = [self._proofs.setdefault(call.event.kind, Proofs()) for call in calls]
            slots = [
                proofs.slots(part.recording, outside.framework, outside.constants)
                for proofs, part in zip(known, parts, strict=True)
            ]
            left = [i for i, certain in enumerate(slots) if certain is None]
            if left and whole:
                left = list(range(len(parts)))
            if left:
                again = functools.partial(self._again, arenas)
                for i, found in zip(left, self._twice(again, first, parts, left, outside), strict=True):
                    known[i].add(parts[i].recording, found)
                    slots[i] = found
        found_for = zip(parts, slots, strict=True)
        return [(part.recording, certain) for part, certain in found_for if certain is not None]

    def _again(self, arenas: contextlib.ExitStack, calls: Sequence[LibraryCall]) -> _Together:
        arena = arenas.enter_context(self._driver.arena(1))
        return _capture(self._driver, arena, calls, self._spaced, with_kept=False)

    def _twice(
        self,
        again: Callable[[Sequence[LibraryCall]], _Together],
        first: _Together,
        parts: Sequence[_Slice],
        left: Sequence[int],
        outside: _Outside,
    ) -> list[tuple[Slot, ...]]:
        """The slots of the parts that are left, by a second capture: of these calls only, and each matched by
        itself, unless that tells too little.
        """
        if len(left) < len(parts):
            with contextlib.suppress(MatchError, NotComputableError, RunTogetherError):
                others = _slices(again([first.calls[i] for i in left]))
                pairs = zip(left, others, strict=True)
                return [self._matched(parts[i].recording, other.recording, outside) for i, other in pairs]
        whole = self._matched(first.recording, again(first.calls).recording, outside)
        return [parts[i].own(whole) for i in left]

    def _matched(self, first: Recording, second: Recording, outside: _Outside) -> tuple[Slot, ...]:
        slots = match(first, second, **outside._asdict())
        self._note_padding(first, second, slots)
        return slots

    def _note_padding(self, first: Recording, second: Recording, slots: Sequence[Slot]) -> None:
        addresses: dict[int, set[int]] = {}
        for slot in slots:
            addresses.setdefault(slot.node, set()).add(slot.offset)
        for i, (a, b) in enumerate(zip(first.nodes, second.nodes, strict=True)):
            if found := loose_words(a, b, addresses.get(i, set())):
                self.padding.setdefault(kind_of(a), set()).update(found)


class _CallRange(NamedTuple):
    """Where a call is in a recording of several.

    Args:
        first, end: its nodes.
        low, high: where the memory lies that it took.
    """

    first: int
    end: int
    low: int
    high: int


class _Together(NamedTuple):
    """Calls recorded together.

    Args:
        recording: of all of them.
        calls: in order.
        places: where each one is.
        counts: of each one's results.
    """

    recording: Recording
    calls: Sequence[LibraryCall]
    places: Sequence[_CallRange]
    counts: Sequence[int]


class _Outside(NamedTuple):
    """What lies outside of ghost memory, as `pgraph.template.match.match` takes it."""

    framework: RangeMap | None
    workspaces: frozenset[int]
    constants: RangeMap


def _capture(
    driver: Driver, arena: Arena, calls: Sequence[LibraryCall], spaced: bool, with_kept: bool = True
) -> _Together:
    """Record calls, with a kernel of our own between any two if `spaced`."""
    operands = [operand for call in calls for operand in call.operands]
    aligned = [alignment(operand.address) for operand in operands]
    ends: list[_CallRange] = []
    counts: list[int] = []
    counters: list[Callable[[], int]] = []

    def run(tensors: list[Any]) -> list[Any]:
        ends.clear()
        counts.clear()
        results: list[Any] = []
        between = torch.empty(1, device=driver.device)
        for call in calls:
            mine = [tensors.pop(0) for _ in call.operands]
            if spaced or not ends:
                between.fill_(1.0)  # a kernel: Note [Early kernels]
            first, low = counters[0](), arena.position
            made = call.run(mine)
            ends.append(_CallRange(first, counters[0](), low, arena.position))
            counts.append(len(made))
            results += made
        between.fill_(1.0)  # it waits for all nodes of the last call
        return results

    found = record(driver, arena, run, operands, aligned, with_kept=with_kept, counting=counters.append)
    return _Together(found, calls, ends, counts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Slice:
    """One call of a recording of several.

    Args:
        recording: of this call alone.
        regions: number in the whole of each of its regions.
        first, end: its nodes in the whole.
    """

    recording: Recording
    regions: dict[int, int]
    first: int
    end: int

    def own(self, slots: Sequence[Slot]) -> tuple[Slot, ...]:
        """Its slots, of those of the whole.

        Raises:
            NotComputableError: it takes something of another call.
        """
        try:
            return tuple(
                Slot(slot.node - self.first, slot.offset, self.regions[slot.region], slot.delta)
                for slot in slots_of(slots, self.first, self.end)
            )
        except KeyError:
            raise NotComputableError("a library call uses memory of another one") from None


def _slices(together: _Together) -> list[_Slice]:
    whole, calls, ends, counts = together
    if any(whole.nodes[first - 1].kind != "kernel" for first, *_ in ends):
        raise RunTogetherError("a library call comes after no kernel")
    libraries = [i for i, a in enumerate(whole.allocations) if a.library]
    taken = list(accumulate((len(call.operands) for call in calls), initial=0))
    returned = list(accumulate(counts, initial=0))
    made = range(whole.n_inputs, len(whole.allocations))
    found = []
    for at, (first, end, low, high) in enumerate(ends):
        if end == first:
            raise NotComputableError(f"{calls[at].event.function} records nothing")
        born = [i for i in made if low <= whole.allocations[i].address < high and i not in libraries]
        if any(whole.allocations[i].birth >= end for i in born):
            raise NotComputableError(f"{calls[at].event.function} takes memory after its last node")
        # A library's workspace came with the first call that used the library.
        mine = [*range(taken[at], taken[at + 1]), *born, *libraries]
        regions = {region: i for i, region in enumerate(mine)}
        n_inputs = taken[at + 1] - taken[at]
        allocations = tuple(
            GhostAllocation(
                (a := whole.allocations[region]).address,
                a.nbytes,
                max(a.birth - first, 0),
                min(a.death, end) - first if a.death is not None and i >= n_inputs else None,
                a.margin,
                a.library,
            )
            for i, region in enumerate(mine)
        )
        outputs = []
        for output in whole.outputs[returned[at] : returned[at + 1]]:
            if output.region is not None:
                output = output._replace(region=regions[output.region])
            elif output.input is not None:
                raise NotComputableError(f"{calls[at].event.function} returns an argument")
            outputs.append(output)
        steps = whole.steps[bisect.bisect_left(whole.steps, first) : bisect.bisect_right(whole.steps, end)]
        order = whole.order.piece(first, end)
        if order is None:
            raise RunTogetherError(f"{calls[at].event.function} is not over when the next call begins")
        recording = Recording(
            whole.nodes[first:end],
            order,
            allocations,
            n_inputs,
            tuple(outputs),
            whole.ghost_range,
            None,
            frozenset(node - first for node in whole.builtin if first <= node < end),
            tuple(step - first for step in steps),
        )
        found.append(_Slice(recording, regions, first, end))
    return found


def _constants(calls: Sequence[LibraryCall]) -> RangeMap:
    """Memory of tensors that the code holds."""
    held = [a.untyped_storage() for call in calls for a in call.arguments if isinstance(a, torch.Tensor)]
    return RangeMap(sorted({(storage.data_ptr(), storage.nbytes(), 0) for storage in held}))
