"""A script at certain sizes: the recording that a capture would make (Note [Computed recordings])."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from pgraph.compute.errors import NotComputableError
from pgraph.compute.pieces import Part, Proved, Range, Tools
from pgraph.compute.script import Call, Check, Drop, Figure, Host, Make, Place, Run, Script, Sort, View
from pgraph.drivers.interface import ALIGNMENT, extent
from pgraph.drivers.operands import HostOperand, Layouts, Operand, distinct
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording
from pgraph.template.topology import Topology, chain, forked

__all__ = ["evaluate"]

_BASE = 1 << 40  # addresses only tell how far apart things lie within one allocation
_AHEAD = 1 << 60  # of memory that is not there yet
_GAP = 1 << 20

_ROUNDS = 16
"""In one go all library calls are recorded, unless the layout of a result is not known before."""


class _Evaluation:
    """One evaluation.

    Layers of a model are alike: of their events, all but the first differ only in which memory they name. So
    layouts have numbers, and what an event makes of tensors of some layouts is kept for all that are like it.
    """

    def __init__(self, script: Script, arguments: Sequence[Any], alignments: Sequence[int], tools: Tools):
        script.require(arguments)
        values = script.tape.replay(arguments)
        if values is None:
            raise NotComputableError("the generated code goes another way for these sizes")
        self.script, self.arguments, self.values, self.tools = script, arguments, values, tools
        self.position = _BASE
        self.ranges: list[Range] = []
        self.nodes: list[NodeRecord] = []
        self.slots: list[tuple[int, int, int, int]] = []  # node, byte, range, how far into it
        self.odd: list[tuple[int, int, bytes]] = []  # edges
        self.forks: list[tuple[int, Topology]] = []  # first nodes of pieces that fork
        self.layouts = Layouts(tools.offsets)
        self.viewed: dict[tuple[int | None, int], int | None] = {}  # layouts of views
        self.range_of: list[int | None] = [None] * script.memories  # of what the program holds
        self.layout_of: list[int | None] = [None] * script.memories
        self.constants: dict[int, OutputSpec] = {}  # by memory: they have neither
        self.made: dict[int | None, tuple[int, int]] = {}  # bytes and layout, by sort
        self.parts: dict[Hashable, Part | None] = {}  # None if it was asked for in vain
        self.checked: set[Hashable] = set()
        self.workspaces: dict[int, int] = {}  # ranges of libraries, by bytes
        self.dropped: list[int] = []
        self.steps: set[int] = set()
        self.at = self.rounds = 0  # the event; how often library calls were recorded
        given: dict[Hashable, tuple[int, int]] = {}  # bytes and layout: weights of all layers are alike
        for memory, (position, alignment) in enumerate(zip(script.inputs, alignments, strict=True)):
            tensor = arguments[position]
            if tensor.is_conj() or tensor.is_neg():  # a library would make it plain first
                raise NotComputableError(f"argument {position} is a lazy view")
            told = tensor.size(), tensor.stride(), tensor.dtype, int(tensor.storage_offset())
            phase = alignment % ALIGNMENT
            found = given.get((told, phase))
            if found is None:
                size, stride, dtype, _ = told
                nbytes = extent(size, stride) * dtype.itemsize
                found = given[told, phase] = nbytes, self.layouts.number(*told, 0, phase)
            nbytes, self.layout_of[memory] = found
            self.range_of[memory] = self.range(nbytes, 0, phase)

    def range(self, nbytes: int, birth: int, phase: int = 0) -> int:
        address = self.position + phase
        self.position += -(-(nbytes + phase) // _GAP) * _GAP + _GAP
        self.ranges.append(Range(address, nbytes, birth))
        return len(self.ranges) - 1

    def boundary(self) -> int:
        """Note deaths up to now, as the recorder of a capture does."""
        count = len(self.nodes)
        self.steps.add(count)
        for r in self.dropped:
            self.ranges[r].death = count
        self.dropped.clear()
        return count

    # -- events -------------------------------------------------------------------------------

    def follow(self) -> None:
        steps: dict[type, Callable[[Any, Sort], None]] = {
            Make: self.make,
            Run: self.run,
            Call: self.call,
            Check: self.check,
            Drop: self.drop,
        }
        events = zip(self.script.events, self.script.sorts, strict=True)
        for self.at, (event, sort) in enumerate(events):
            steps[type(event)](event, sort)

    def make(self, event: Make, sort: Sort) -> None:
        nbytes, self.layout_of[event.memory] = self.sized(event, sort)
        self.range_of[event.memory] = self.range(nbytes, self.boundary())

    def sized(self, event: Make, sort: Sort) -> tuple[int, int]:
        """Bytes and layout."""
        made = self.made.get(sort.number)
        if made is None:
            made = self.made[sort.number] = self.whole(event.size, event.stride, event.dtype)
        return made

    def whole(self, of_size: tuple[int, ...], of_stride: tuple[int, ...], dtype: Any) -> tuple[int, int]:
        """Bytes and layout of a tensor that has memory for itself."""
        size, stride = self.numbers(of_size), self.numbers(of_stride)
        return extent(size, stride) * dtype.itemsize, self.layouts.number(size, stride, dtype)

    def run(self, event: Run, sort: Sort) -> None:
        layouts = self.told(sort)
        like = self.tools.sample
        sample = like(event) if like is not None else None
        key = (sort.number, sample, *layouts)
        part = self.parts.get(key)
        if part is None or sample is None or sort.number is None:
            part = self.parts[key] = self.launched(event, sort, layouts)
        self.add(part, sort)

    def launched(self, event: Run, sort: Sort, layouts: Sequence[int]) -> Part:
        arguments, tensors = self.given(event, sort, layouts)
        node, addresses = self.tools.node(len(self.nodes), event, arguments)
        # All but constants, which stay where they are.
        found = [(byte, tensors[at]) for byte, at in addresses if at in tensors]
        return Part((node,), tuple([(0, byte, i, self.layouts.known[layouts[i]].into) for byte, i in found]))

    def call(self, event: Call, sort: Sort) -> None:
        layouts = self.told(sort)
        part = self.parts.get((sort.number, *layouts)) if self.alike(sort) else None
        if part is None:
            part = self.parts[(sort.number, *layouts)] = self.known(event, sort, layouts)
        first = self.boundary()
        made = self.add(part, sort)
        self.steps.update([first + step for step in part.steps])
        for memory, result in zip(event.results, part.results, strict=True):
            if isinstance(result, OutputSpec):
                self.constants[memory], self.layout_of[memory] = result, None
                continue
            at, layout = result
            self.range_of[memory], self.layout_of[memory] = made[at], layout
            self.tools.types[memory] = self.layouts.known[layout].dtype
        self.boundary()

    def alike(self, sort: Sort) -> bool:
        """Whether a call may be the same as another one."""
        return sort.number is not None and self.tools.sample is not None

    def known(self, event: Call, sort: Sort, layouts: Sequence[int]) -> Part:
        """The part of a library call. If it is not known it is recorded, together with those to come."""
        part = self.called(event, sort, layouts)
        if part is None and self.tools.record is not None and self.rounds < _ROUNDS:
            self.rounds += 1
            self.look_ahead(event)
            self.tools.record()
            part = self.called(event, sort, layouts)
        if part is None:
            raise NotComputableError("library calls depend on one another in ways that cannot be told")
        return part

    def called(self, event: Call, sort: Sort, layouts: Sequence[int]) -> Part | None:
        arguments, tensors = self.given(event, sort, layouts)
        known = self.tools.site(event, arguments)
        if known is None:
            return None
        site, slots = known
        if len(site.outputs) != len(event.results):
            raise NotComputableError(f"{event.function} has {len(site.outputs)} new results")
        regions = [
            (i, self.layouts.known[layouts[i]].into) for i in (tensors[at] for at in distinct(arguments))
        ]
        regions += [(len(layouts) + i, 0) for i in range(len(site.allocations) - site.n_inputs)]
        words = [(s.node, s.offset, regions[s.region][0], regions[s.region][1] + s.delta) for s in slots]
        results = [self.result(spec, site.n_inputs) for spec in site.outputs]
        allocations = site.allocations[site.n_inputs :]
        order = site.order if site.order.links or site.order.odd else None
        return Part(site.nodes, tuple(words), allocations, site.steps, tuple(results), order)

    def look_ahead(self, call: Call) -> None:
        """Ask for the library calls after this one, as far as their arguments' layouts are told before."""
        later = slice(self.at + 1, None)
        with contextlib.suppress(NotComputableError):
            self.foretell(call.results, None)
            for event, sort in zip(self.script.events[later], self.script.sorts[later], strict=True):
                if isinstance(event, Make):
                    self.layout_of[event.memory] = self.sized(event, sort)[1]
                elif isinstance(event, Call):
                    self.foretell(event.results, self.asked(event, sort))

    def asked(self, event: Call, sort: Sort) -> Part | None:
        """The part of a call to come; None if that, or the layout of an argument, is not known."""
        layouts = self.layouts_of(sort)
        if None in layouts:
            return None
        key = (sort.number, *layouts)
        if key not in self.parts or not self.alike(sort):
            self.parts[key] = self.called(event, sort, layouts)
        return self.parts[key]

    def foretell(self, results: Sequence[int], part: Part | None) -> None:
        """The layouts of a call's results: as it is known, or as the generated code tells them."""
        for i, memory in enumerate(results):
            found = part.results[i] if part is not None else None
            layout, dtype = self.script.layouts.get(memory), self.tools.types.get(memory)
            if isinstance(found, tuple):
                self.layout_of[memory] = found[1]
            elif found is None and layout is not None and dtype is not None:
                self.layout_of[memory] = self.whole(*layout, dtype)[1]

    def add(self, part: Part, sort: Sort) -> list[int]:
        """The ranges of its allocations."""
        first = len(self.nodes)
        made = [self.adopted(a, first) for a in part.allocations] if part.allocations else []
        ranges: list[Any] = [self.range_of[memory] for memory, _ in sort.tensors] + made
        self.slots += [(first + node, byte, ranges[which], into) for node, byte, which, into in part.words]
        if part.order is not None:
            self.wait(part.order, first)
        self.nodes += part.nodes
        return made

    def wait(self, order: Topology, first: int) -> None:
        """Note how the nodes of a part wait that begins here: Note [Early kernels] in `sites.py`."""
        begin, fork = self.forks[-1] if self.forks else (-1, chain(0))
        alone = begin + fork.n_nodes < first  # the node before this part
        for before, after, how in order.odd:
            if before >= 0 or (first and alone and self.nodes[-1].kind == "kernel"):
                self.odd.append((first + before, first + after, how))
            elif first:
                raise NotComputableError("a library call that begins early follows a copy, a fill or a fork")
        if order.links:
            self.forks.append((first, order))

    def adopted(self, allocation: GhostAllocation, first: int) -> int:
        """The range of an allocation of a library call. A library keeps one workspace for all calls."""
        if allocation.library and allocation.nbytes in self.workspaces:
            return self.workspaces[allocation.nbytes]
        r = self.range(allocation.nbytes, first + allocation.birth)
        self.ranges[r].death = first + allocation.death if allocation.death is not None else None
        if allocation.library:
            self.ranges[r].library = True
            self.workspaces[allocation.nbytes] = r
        return r

    def result(self, spec: OutputSpec, n_inputs: int) -> tuple[int, int] | OutputSpec:
        if spec.region is None and spec.input is None:
            return spec
        if spec.region is None or spec.layout is None or spec.same is not None or spec.view_of is not None:
            raise NotComputableError("a library returns one of its arguments, or one result twice")
        layout = spec.layout
        if layout.conj or layout.neg:
            raise NotComputableError("a library returns a lazy view")
        offset = layout.offset // layout.dtype.itemsize
        number = self.layouts.number(layout.size, layout.stride, layout.dtype, offset, layout.offset)
        return spec.region - n_inputs, number

    def check(self, event: Check, sort: Sort) -> None:
        (layout,) = self.layouts_of(sort)
        key = sort.number, layout
        if key in self.checked:
            return
        spec = self.constants.get(event.tensor.memory)
        if spec is not None and isinstance(spec.constant, torch.Tensor) and event.tensor.size is None:
            # Seeds, too: see Note [Seeds of attention].
            of_size, of_stride = tuple(spec.constant.size()), tuple(spec.constant.stride())
        else:
            found = self.layouts.known[self.told(sort)[0]]
            of_size, of_stride = found.size, found.stride
        size, stride = self.numbers(event.size), self.numbers(event.stride)
        strides = zip(size, of_stride, stride, strict=False)
        if of_size != size or not all(a == b for n, a, b in strides if n > 1):
            raise NotComputableError("a tensor is laid out otherwise than the generated code expects")
        if layout is not None:
            self.checked.add(key)

    def drop(self, event: Drop, _: Sort) -> None:
        r = self.range_of[event.memory]
        if r is not None:
            self.dropped.append(r)

    # -- values -------------------------------------------------------------------------------

    def numbers(self, places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([self.values[place] for place in places])

    def layouts_of(self, sort: Sort) -> list[Any]:
        """Of the tensors among an event's arguments; None for a constant, and for what is not known."""
        of, viewed = self.layout_of, self.viewed
        found = [of[m] if v is None else viewed.get((of[m], v), -1) for m, v in sort.tensors]
        if -1 in found:
            for i, (memory, view) in enumerate(sort.tensors):
                base = of[memory]
                if found[i] == -1 and view is not None:
                    found[i] = None if base is None else self.view(base, self.script.views[view])
                    viewed[base, view] = found[i]
        return found

    def told(self, sort: Sort) -> list[int]:
        found = self.layouts_of(sort)
        if None in found:
            raise NotComputableError("a result that a library did not give is used")
        return found

    def view(self, base: int, view: View) -> int:
        size, stride, offset = view
        return self.layouts.view(base, self.numbers(size), self.numbers(stride), self.values[offset])

    def given(
        self, event: Run | Call, sort: Sort, layouts: Sequence[int]
    ) -> tuple[list[Any], dict[int, int]]:
        """The arguments of an event, and for each that is a tensor its number among the tensors."""
        found: list[Any] = []
        tensors: dict[int, int] = {}
        for at, value in enumerate(event.arguments):
            if isinstance(value, Place):
                tensors[at] = i = len(tensors)
                found.append(self.operand(value.memory, layouts[i]))
            else:
                found.append(self.argument(value))
        return found, tensors

    def operand(self, memory: int, layout: int) -> Operand:
        r = self.range_of[memory]
        address = self.ranges[r].address if r is not None else _AHEAD + memory * _GAP
        return self.layouts.known[layout].at(address)

    def argument(self, value: Any) -> Any:
        if isinstance(value, Figure):
            return self.values[value.place]
        return HostOperand(self.arguments[value.position]) if isinstance(value, Host) else value

    # -- the end ------------------------------------------------------------------------------

    def recording(self) -> Proved:
        self.boundary()
        n_inputs = len(self.script.inputs)
        later = sorted(range(n_inputs, len(self.ranges)), key=lambda r: self.ranges[r].birth)
        order = [*range(n_inputs), *later]
        region = {r: i for i, r in enumerate(order)}
        allocations = self.tools.latest.allocations([self.ranges[r] for r in order])
        words = [(node, offset, region[r], into) for node, offset, r, into in sorted(self.slots)]
        slots = self.tools.latest.slots(words)
        results = [self.output(i, leaf, region) for i, leaf in enumerate(self.script.results)]
        outputs = self.tools.latest.outputs(results)
        steps, nodes = tuple(sorted(self.steps)), tuple(self.nodes)
        waits = forked(len(nodes), self.forks) if self.forks else chain(len(nodes))
        waits = dataclasses.replace(waits, odd=tuple(self.odd))
        recording = Recording(nodes, waits, allocations, n_inputs, outputs, (0, 0), None, steps=steps)
        return recording, slots

    def output(self, position: int, leaf: Any, region: dict[int, int]) -> OutputSpec | tuple[Any, ...]:
        """A constant; or the number among the allocations, the one among the inputs, the layout, and which
        result it is once more.
        """
        if isinstance(leaf, Host):
            return OutputSpec(constant=self.arguments[leaf.position], unread=True)
        if not isinstance(leaf, Place):
            return OutputSpec(constant=self.argument(leaf))
        if leaf.memory in self.constants:
            return self.constants[leaf.memory]
        r = self.range_of[leaf.memory]
        assert r is not None
        is_input = r < len(self.script.inputs)
        if is_input and leaf.size is None:
            return None, r, None, None
        number = self.layout_of[leaf.memory]
        assert number is not None
        if leaf.size is not None and leaf.stride is not None and leaf.offset is not None:
            number = self.view(number, (leaf.size, leaf.stride, leaf.offset))
        found = self.layouts.known[number]
        layout = found.size, found.stride, found.dtype, found.into if self.ranges[r].nbytes else 0
        if is_input:
            return None, r, layout, None
        first = self.script.identities[position]
        return region[r], None, layout, first if first < position else None


def evaluate(script: Script, arguments: Sequence[Any], alignments: Sequence[int], tools: Tools) -> Proved:
    """The recording of a partition at certain sizes, without a graph, and its slots.

    Args:
        arguments: of a call; of tensors only the layout is read.
        alignments: bytes, a power of two for each input.

    Raises:
        NotComputableError: these sizes have to be captured.
    """
    evaluation = _Evaluation(script, arguments, alignments, tools)
    evaluation.follow()
    return evaluation.recording()
