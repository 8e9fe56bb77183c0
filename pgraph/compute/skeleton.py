"""What a script's recordings have in common for all sizes at which each of its events adds as much to them.

From size to size hardly more than numbers change: how large allocations are, and what stands in nodes. Which
node comes when, who waits for it, which words are addresses of what, when memory is born and dies is told
once, and kept as long as each kind of event (`pgraph.compute.alike`) adds a part of the same form.

Pure logic: parts in, facts of a recording out; no torch, no CUDA.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain as joined
from typing import Any, Final, NamedTuple, TypeVar

from pgraph.compute.alike import Kinds, kinds_of
from pgraph.compute.errors import NotComputableError
from pgraph.compute.pieces import Part
from pgraph.compute.script import CallLibrary, CallView, Check, Drop, LaunchKernel, Make, Script, TensorRef
from pgraph.drivers.operands import Layout
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, TensorSpec
from pgraph.template.template import Slot
from pgraph.template.topology import Topology, chain, forked

T = TypeVar("T")

__all__ = ["Latest", "Skeleton"]

_APART: Final = 1 << 40
"""Bytes between two allocations. Addresses only tell how far into one of them something lies."""

_MOST: Final = 16
"""Skeletons that are kept, and kinds of events. Few forms come again and again: libraries choose among some
kernels, and of one with more nodes there is another skeleton."""


@dataclasses.dataclass(slots=True)
class _Range:
    """An allocation.

    Args:
        kind: number of the kind of event that it came with; -1 for an input.
        index: among the allocations of that kind's part; of an input, which one; -1 for one that is made.
    """

    kind: int
    index: int
    birth: int
    death: int | None = None
    library: bool = False


class _LaidResult(NamedTuple):
    """A result that is a tensor with a layout of its own.

    Args:
        position: among the results.
        region, given: number of the allocation; of the input, if it is a view of one.
        laid: which of the layouts of results.
        same: see `OutputSpec`.
    """

    position: int
    region: int
    given: int | None
    laid: int
    same: int | None


class Skeleton:
    """Of a script's recordings whose parts have the same forms. What was made for the latest of them is given
    again where it is equal.

    Attributes:
        order, steps: as a `Recording` has them.
        constants: positions of the results that are constants, which are told each time.
        layouts: origin, and number of the view or None, of each layout that other results have.
    """

    def __init__(self, script: Script, kinds: Kinds, drafting: _Drafting) -> None:
        n_inputs, ranges = drafting.n_inputs, drafting.ranges
        later = sorted(range(n_inputs, len(ranges)), key=lambda r: ranges[r].birth)
        self._ranges = [ranges[r] for r in (*range(n_inputs), *later)]
        region = {r: i for i, r in enumerate((*range(n_inputs), *later))}
        self._words = [
            (node, byte, region[r], kind, word) for node, byte, r, kind, word in sorted(drafting.words)
        ]
        self._adding = drafting.adding
        n_nodes = len(drafting.kinds)
        order = forked(n_nodes, drafting.forks) if drafting.forks else chain(n_nodes)
        self.order = dataclasses.replace(order, odd=tuple(drafting.odd))
        self.steps = tuple(sorted(drafting.steps))
        self._distances: list[tuple[int, ...]] = []
        self._slots: tuple[Slot, ...] = ()
        self._allocations: tuple[GhostAllocation, ...] = ()
        self._outputs: list[Any] = [None] * len(script.results)
        self._laid: list[tuple[Layout, TensorSpec] | None] = []
        self._lay(script, kinds, [None if r is None else region[r] for r in drafting.range_of])

    def _lay(self, script: Script, kinds: Kinds, region: Sequence[int | None]) -> None:
        """Tell what results are.

        Args:
            region: number of the allocation in which each memory lies; None for a constant.
        """
        constants, layouts = [], dict[tuple[int, int | None], int]()
        self._results: list[_LaidResult] = []
        for position, (leaf, view) in enumerate(zip(script.results, script.shown, strict=True)):
            if not isinstance(leaf, TensorRef) or (r := region[leaf.memory]) is None:
                constants.append(position)
                continue
            is_input = r < len(script.inputs)
            if is_input and view is None:
                self._outputs[position] = OutputSpec(input=r)
                continue
            laid = layouts.setdefault((kinds.base(leaf), view), len(layouts))
            first = script.identities[position]
            same = first if first < position and not is_input else None
            self._results.append(_LaidResult(position, r, r if is_input else None, laid, same))
        self.constants, self.layouts = tuple(constants), tuple(layouts)
        self._laid = [None] * len(layouts)

    def nodes(self, parts: Sequence[Part]) -> tuple[NodeRecord, ...]:
        """All nodes, in order."""
        return tuple(joined.from_iterable([parts[kind].nodes for kind in self._adding]))

    def slots(self, parts: Sequence[Part]) -> tuple[Slot, ...]:
        """All slots, in the order of their nodes."""
        distances = [part.distances for part in parts]
        if distances != self._distances:
            rows = [(n, byte, r, distances[kind][word]) for n, byte, r, kind, word in self._words]
            old = self._slots or (None,) * len(rows)
            self._slots = tuple([a if a == b else Slot(*b) for a, b in zip(old, rows, strict=True)])
            self._distances = distances
        return self._slots

    def allocations(
        self, parts: Sequence[Part], inputs: Sequence[int], made: Sequence[int]
    ) -> tuple[GhostAllocation, ...]:
        """All allocations.

        Args:
            inputs: bytes of each.
            made: bytes of what is made, by kind.
        """
        sizes = [
            inputs[r.index] if r.kind < 0 else made[r.kind] if r.index < 0 else parts[r.kind].sizes[r.index]
            for r in self._ranges
        ]
        old = self._allocations or (None,) * len(sizes)
        self._allocations = tuple(
            [
                a
                if a is not None and a.nbytes == nbytes
                else GhostAllocation((i + 1) * _APART, nbytes, r.birth, r.death, 0, r.library)
                for i, (a, nbytes, r) in enumerate(zip(old, sizes, self._ranges, strict=True))
            ]
        )
        return self._allocations

    def outputs(
        self,
        constants: Sequence[OutputSpec],
        layouts: Sequence[Layout],
        allocations: Sequence[GhostAllocation],
    ) -> tuple[OutputSpec, ...]:
        """All results.

        Args:
            constants, layouts: as the attributes name them.
        """
        laid = [
            old if old is not None and old[0] == layout else (layout, _spec(layout, layout.into))
            for old, layout in zip(self._laid, layouts, strict=True)
        ]
        found = self._outputs.copy()
        for position, region, given, which, same in self._results:
            layout, spec = laid[which]
            if layout.into and not allocations[region].nbytes:
                spec = _spec(layout, 0)
            if found[position] is None or found[position].layout is not spec:
                of = region if given is None else None
                found[position] = OutputSpec(region=of, input=given, layout=spec, same=same)
        self._laid, self._outputs = [*laid], found.copy()
        for position, constant in zip(self.constants, constants, strict=True):
            found[position] = constant
        return tuple(found)


def _spec(layout: Layout, offset: int) -> TensorSpec:
    conj, neg = layout.lazy
    return TensorSpec(layout.size, layout.stride, layout.dtype, offset, conj, neg)


class Latest:
    """What evaluations of one script have in common, kept from one to the next."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, Kinds] = OrderedDict()
        self._skeletons: OrderedDict[Hashable, Skeleton] = OrderedDict()

    def kinds(
        self, script: Script, inputs: tuple[int, ...], sample: Callable[[LaunchKernel], Hashable] | None
    ) -> Kinds:
        """As `kinds_of` gives them."""
        if sample is None:  # nothing is like anything else, which is asked for but a few times
            return kinds_of(script, inputs, None)
        samples = tuple(map(sample, script.runs))
        return _kept(self._kinds, (inputs, samples), lambda: kinds_of(script, inputs, sample))

    def skeleton(self, script: Script, kinds: Kinds, parts: Sequence[Part]) -> Skeleton:
        """The skeleton of recordings to which each event adds a part like that of its kind.

        Args:
            parts: of each kind.

        Raises:
            NotComputableError: how a library call waits for what comes before it cannot be told.
        """
        forms = tuple([part.form for part in parts])
        return _kept(self._skeletons, (kinds, forms), lambda: _skeleton_of(script, kinds, parts))


def _kept(known: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    if known and next(reversed(known)) == key:  # as most often, and sooner told
        return known[next(reversed(known))]
    if key not in known:
        made = make()
        while len(known) >= _MOST:
            known.popitem(last=False)
        known[key] = made
    known.move_to_end(key)
    return known[key]


def _skeleton_of(script: Script, kinds: Kinds, parts: Sequence[Part]) -> Skeleton:
    drafting = _Drafting(script, parts)
    steps: dict[type, Callable[[Any, Any, int], None]] = {
        Make: drafting.make,
        LaunchKernel: drafting.run,
        CallLibrary: drafting.call,
        CallView: drafting.look,
        Drop: drafting.drop,
    }
    for event, sort, kind in zip(script.events, script.sorts, kinds.of_events, strict=True):
        if not isinstance(event, Check):
            steps[type(event)](event, sort, -1 if kind is None else kind)
    drafting.boundary()
    return Skeleton(script, kinds, drafting)


class _Drafting:
    """A skeleton being made: memory, nodes and deaths as the recorder of a capture would note them."""

    def __init__(self, script: Script, parts: Sequence[Part]) -> None:
        self._parts = parts
        self.n_inputs = len(script.inputs)
        self.ranges = [_Range(-1, i, 0) for i in range(self.n_inputs)]
        self.range_of: list[int | None] = [None] * script.memories
        self.range_of[: self.n_inputs] = range(self.n_inputs)
        self.kinds: list[str] = []  # of nodes
        self.words: list[tuple[int, int, int, int, int]] = []  # node, byte, range, kind of event, which word
        self.adding: list[int] = []  # kinds of the events that add nodes, in order
        self.odd: list[tuple[int, int, bytes]] = []  # edges
        self.forks: list[tuple[int, Topology]] = []  # first nodes of pieces that fork
        self.steps: set[int] = set()
        self._workspaces: dict[int, int] = {}  # ranges of libraries, by bytes
        self._dropped: list[int] = []

    def boundary(self) -> int:
        """Note deaths up to now, as the recorder of a capture does."""
        count = len(self.kinds)
        self.steps.add(count)
        for r in self._dropped:
            self.ranges[r].death = count
        self._dropped.clear()
        return count

    def make(self, event: Make, _: Any, kind: int) -> None:
        self.range_of[event.memory] = self._range(_Range(kind, -1, self.boundary()))

    def run(self, _: LaunchKernel, sort: Any, kind: int) -> None:
        self._add(sort, kind)

    def call(self, event: CallLibrary, sort: Any, kind: int) -> None:
        first, part = self.boundary(), self._parts[kind]
        made = self._add(sort, kind)
        self.steps.update([first + step for step in part.form.steps])
        for memory, result in zip(event.results, part.form.results, strict=True):
            if result is not None:
                self.range_of[memory] = made[result]
        self.boundary()

    def look(self, *_: Any) -> None:
        self.boundary()

    def drop(self, event: Drop, *_: Any) -> None:
        r = self.range_of[event.memory]
        if r is not None:
            self._dropped.append(r)

    def _range(self, made: _Range) -> int:
        self.ranges.append(made)
        return len(self.ranges) - 1

    def _add(self, sort: Any, kind: int) -> list[int]:
        """The ranges of the allocations of a part."""
        first, form = len(self.kinds), self._parts[kind].form
        made = [self._adopted(*a, first, kind, i) for i, a in enumerate(form.allocations)]
        ranges: list[Any] = [self.range_of[memory] for memory, _ in sort.tensors] + made
        self.words += [
            (first + node, byte, ranges[which], kind, i) for i, (node, byte, which) in enumerate(form.words)
        ]
        if form.order is not None:
            self._wait(form.order, first)
        self.kinds += form.kinds
        self.adding.append(kind)
        return made

    def _wait(self, order: Topology, first: int) -> None:
        """Note how the nodes of a part wait that begins here: Note [Early kernels] in `sites.py`."""
        begin, fork = self.forks[-1] if self.forks else (-1, chain(0))
        alone = begin + fork.n_nodes < first  # the node before this part
        for before, after, how in order.odd:
            if before >= 0 or (first and alone and self.kinds[-1] == "kernel"):
                self.odd.append((first + before, first + after, how))
            elif first:
                raise NotComputableError("a library call that begins early follows a copy, a fill or a fork")
        if order.links:
            self.forks.append((first, order))

    def _adopted(
        self, birth: int, death: int | None, library: int | None, first: int, kind: int, index: int
    ) -> int:
        """The range of an allocation of a library call. A library keeps one workspace for all calls."""
        if library is not None and library in self._workspaces:
            return self._workspaces[library]
        death = first + death if death is not None else None
        r = self._range(_Range(kind, index, first + birth, death, library is not None))
        if library is not None:
            self._workspaces[library] = r
        return r
