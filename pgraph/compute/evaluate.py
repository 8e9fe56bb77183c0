"""A script at certain sizes: the recording that a capture would make (Note [Computed recordings])."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import torch

from pgraph.compute.alike import Kind
from pgraph.compute.errors import NotComputableError
from pgraph.compute.pieces import Part, Proved, Tools
from pgraph.compute.script import Call, Check, Figure, Host, Make, Place, Run, Script, View
from pgraph.compute.skeleton import Latest, Skeleton
from pgraph.drivers.interface import ALIGNMENT, extent
from pgraph.drivers.operands import HostOperand, Layouts, Operand, distinct
from pgraph.template.recording import OutputSpec, Recording

__all__ = ["evaluate"]

_BASE: Final = 1 << 60  # addresses only tell which operands are one, and how they are aligned
_APART: Final = 1 << 40
_ROUNDS: Final = 16
"""In one go all library calls are recorded, unless the layout of a result is not known before."""

_NOTHING: Final = Part()


class _Evaluation:
    """One evaluation: each kind of event adds a part, and a skeleton tells what becomes of them.

    Layouts have numbers. What an event makes of tensors of some layouts is kept for other kinds that come
    to the same.
    """

    def __init__(
        self,
        script: Script,
        arguments: Sequence[Any],
        alignments: Sequence[int],
        tools: Tools,
        latest: Latest,
    ):
        script.require(arguments)
        values = script.tape.replay(arguments)
        if values is None:
            raise NotComputableError("the generated code goes another way for these sizes")
        self.script, self.arguments, self.values = script, arguments, values
        self.tools, self.latest = tools, latest
        self.layouts = Layouts(tools.offsets)
        self.phases: list[int] = []  # of inputs: bytes from an aligned address
        self.inputs: list[int] = []  # bytes of each
        self.extents: dict[int, int] = {}  # bytes, by layout: weights of all layers are alike
        layouts = tuple(map(self.given, script.inputs, alignments))
        self.kinds = latest.kinds(script, layouts, tools.sample)
        self.layout_of: list[int | None] = [None] * self.kinds.origins
        for memory, layout in enumerate(layouts):
            self.layout_of[self.kinds.of_memory[memory]] = layout
        self.viewed: dict[tuple[int, int], int] = {}  # layouts of views, by that of the base
        self.constants: dict[int, OutputSpec] = {}  # by origin: they have no layout
        self.made: list[int] = []  # bytes, by kind of event
        self.parts: list[Part] = []  # by kind of event
        self.known: dict[Hashable, Part | None] = {}  # None if it was asked for in vain
        self.nodes = self.rounds = 0  # how many so far; how often library calls were recorded

    def given(self, position: int, alignment: int) -> int:
        """The layout of an input."""
        tensor = self.arguments[position]
        if tensor.is_conj() or tensor.is_neg():  # a library would make it plain first
            raise NotComputableError(f"argument {position} is a lazy view")
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        phase = alignment % ALIGNMENT
        layout = self.layouts.number(size, stride, dtype, int(tensor.storage_offset()), 0, phase)
        nbytes = self.extents.get(layout)
        if nbytes is None:
            nbytes = self.extents[layout] = extent(size, stride) * dtype.itemsize
        self.phases.append(phase)
        self.inputs.append(nbytes)
        return layout

    # -- parts --------------------------------------------------------------------------------

    def follow(self) -> None:
        """Tell the part of each kind of event."""
        steps: dict[type, Callable[[Any, Kind], Part]] = {
            Make: self.make,
            Run: self.run,
            Call: self.call,
            Check: self.check,
        }
        for kind in self.kinds.all:
            event = self.script.events[kind.first]
            self.made.append(0)
            part = steps[type(event)](event, kind)
            self.parts.append(part)
            self.nodes += len(part.nodes)

    def make(self, event: Make, kind: Kind) -> Part:
        self.made[-1], self.layout_of[kind.results[0]] = self.whole(event.size, event.stride, event.dtype)
        return _NOTHING

    def whole(self, of_size: tuple[int, ...], of_stride: tuple[int, ...], dtype: Any) -> tuple[int, int]:
        """Bytes and layout of a tensor that has memory for itself."""
        size, stride = self.numbers(of_size), self.numbers(of_stride)
        return extent(size, stride) * dtype.itemsize, self.layouts.number(size, stride, dtype)

    def run(self, event: Run, kind: Kind) -> Part:
        layouts = self.told(kind)
        sample = self.tools.sample(event) if self.tools.sample is not None else None
        number = self.script.sorts[kind.first].number
        if sample is None or number is None:
            return self.launched(event, layouts)
        key = number, sample, *layouts
        part = self.known.get(key)
        if part is None:
            part = self.known[key] = self.launched(event, layouts)
        return part

    def launched(self, event: Run, layouts: Sequence[int]) -> Part:
        arguments, tensors = self.given_to(event, layouts)
        node, addresses = self.tools.node(self.nodes, event, arguments)
        # All but constants, which stay where they are.
        found = [(byte, tensors[at]) for byte, at in addresses if at in tensors]
        return Part((node,), tuple([(0, byte, i, self.layouts.known[layouts[i]].into) for byte, i in found]))

    def call(self, event: Call, kind: Kind) -> Part:
        layouts = self.told(kind)
        key = self.script.sorts[kind.first].number, *layouts
        part = self.known.get(key) if self.alike(kind) else None
        if part is None:
            part = self.known[key] = self.recorded(event, kind, layouts)
        for origin, result in zip(kind.results, part.results, strict=True):
            if isinstance(result, OutputSpec):
                self.constants[origin], self.layout_of[origin] = result, None
            else:
                _, self.layout_of[origin] = result
        return part

    def alike(self, kind: Kind) -> bool:
        """Whether a call may be the same as another one."""
        return self.script.sorts[kind.first].number is not None and self.tools.sample is not None

    def recorded(self, event: Call, kind: Kind, layouts: Sequence[int]) -> Part:
        """The part of a library call. If it is not known it is recorded, together with those to come."""
        part = self.called(event, layouts)
        if part is None and self.tools.record is not None and self.rounds < _ROUNDS:
            self.rounds += 1
            self.look_ahead(kind)
            self.tools.record()
            part = self.called(event, layouts)
        if part is None:
            raise NotComputableError("library calls depend on one another in ways that cannot be told")
        return part

    def called(self, event: Call, layouts: Sequence[int]) -> Part | None:
        arguments, tensors = self.given_to(event, layouts)
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

    def look_ahead(self, kind: Kind) -> None:
        """Ask for the library calls after this one, as far as their arguments' layouts are told before."""
        with contextlib.suppress(NotComputableError):
            self.foretell(kind, None)
            for later in self.kinds.all[len(self.parts) + 1 :]:
                event = self.script.events[later.first]
                if isinstance(event, Make):
                    found = self.whole(event.size, event.stride, event.dtype)
                    self.layout_of[later.results[0]] = found[1]
                elif isinstance(event, Call):
                    self.foretell(later, self.asked(event, later))

    def asked(self, event: Call, kind: Kind) -> Part | None:
        """The part of a call to come; None if that, or the layout of an argument, is not known."""
        layouts = [self.layout(origin) for origin in kind.tensors]
        told = [layout for layout in layouts if layout is not None]
        if len(told) < len(layouts):
            return None
        key = self.script.sorts[kind.first].number, *told
        if key not in self.known or not self.alike(kind):
            self.known[key] = self.called(event, told)
        return self.known[key]

    def foretell(self, kind: Kind, part: Part | None) -> None:
        """The layouts of a call's results: as it is known, or as the generated code tells them."""
        event = self.script.events[kind.first]
        assert isinstance(event, Call)
        for i, (memory, origin) in enumerate(zip(event.results, kind.results, strict=True)):
            found = part.results[i] if part is not None else None
            layout, dtype = self.script.layouts.get(memory), self.tools.types.get(memory)
            if isinstance(found, tuple):
                self.layout_of[origin] = found[1]
            elif found is None and layout is not None and dtype is not None:
                self.layout_of[origin] = self.whole(*layout, dtype)[1]

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

    def check(self, event: Check, kind: Kind) -> Part:
        (origin,) = kind.tensors
        spec = self.constants.get(origin)
        if spec is not None and isinstance(spec.constant, torch.Tensor):
            # Seeds, too: see Note [Seeds of attention].
            of_size, of_stride = tuple(spec.constant.size()), tuple(spec.constant.stride())
        else:
            found = self.layouts.known[self.told(kind)[0]]
            of_size, of_stride = found.size, found.stride
        size, stride = self.numbers(event.size), self.numbers(event.stride)
        strides = zip(size, of_stride, stride, strict=False)
        if of_size != size or not all(a == b for n, a, b in strides if n > 1):
            raise NotComputableError("a tensor is laid out otherwise than the generated code expects")
        return _NOTHING

    # -- values -------------------------------------------------------------------------------

    def numbers(self, places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([self.values[place] for place in places])

    def layout(self, origin: int) -> int | None:
        """The number of a layout; None for a constant, and for what is not known."""
        view = self.kinds.views.get(origin)
        if view is None:
            return self.layout_of[origin]
        base = self.layout(view[0])
        if base is None:
            return None
        key = base, view[1]
        found = self.viewed.get(key)
        if found is None:
            found = self.viewed[key] = self.view(base, self.script.views[view[1]])
        return found

    def told(self, kind: Kind) -> list[int]:
        """Layouts of the tensors among an event's arguments."""
        found = [layout for layout in map(self.layout, kind.tensors) if layout is not None]
        if len(found) < len(kind.tensors):
            raise NotComputableError("a result that a library did not give is used")
        return found

    def view(self, base: int, view: View) -> int:
        size, stride, offset = view
        return self.layouts.view(base, self.numbers(size), self.numbers(stride), self.values[offset])

    def given_to(self, event: Run | Call, layouts: Sequence[int]) -> tuple[list[Any], dict[int, int]]:
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
        phase = self.phases[memory] if memory < len(self.phases) else 0
        return self.layouts.known[layout].at(_BASE + memory * _APART + phase)

    def argument(self, value: Any) -> Any:
        if isinstance(value, Figure):
            return self.values[value.place]
        return HostOperand(self.arguments[value.position]) if isinstance(value, Host) else value

    # -- the end ------------------------------------------------------------------------------

    def note_types(self) -> None:
        """Note the types of the results of library calls."""
        for event in self.script.events:
            for memory in event.results if isinstance(event, Call) else ():
                layout = self.layout_of[self.kinds.of_memory[memory]]
                if memory not in self.tools.types and layout is not None:
                    self.tools.types[memory] = self.layouts.known[layout].dtype

    def recording(self) -> Proved:
        skeleton = self.latest.skeleton(self.script, self.kinds, self.parts)
        allocations = skeleton.allocations(self.parts, self.inputs, self.made)
        nbytes = [a.nbytes for a in allocations]
        rows = [self.output(i, leaf, skeleton, nbytes) for i, leaf in enumerate(self.script.results)]
        recording = Recording(
            skeleton.nodes(self.parts),
            skeleton.order,
            allocations,
            len(self.inputs),
            self.latest.outputs(rows),
            (0, 0),
            None,
            steps=skeleton.steps,
            skeleton=skeleton,
        )
        return recording, skeleton.slots(self.parts)

    def output(
        self, position: int, leaf: Any, skeleton: Skeleton, nbytes: Sequence[int]
    ) -> OutputSpec | tuple[Any, ...]:
        """A constant; or the number among the allocations, the one among the inputs, the layout, and which
        result it is once more.
        """
        if isinstance(leaf, Host):
            return OutputSpec(constant=self.arguments[leaf.position], unread=True)
        if not isinstance(leaf, Place):
            return OutputSpec(constant=self.argument(leaf))
        origin = self.kinds.of_memory[leaf.memory]
        if origin in self.constants:
            return self.constants[origin]
        region = skeleton.region[leaf.memory]
        assert region is not None
        is_input = region < len(self.inputs)
        if is_input and leaf.size is None:
            return None, region, None, None
        number = self.layout_of[origin]
        assert number is not None
        if leaf.size is not None and leaf.stride is not None and leaf.offset is not None:
            number = self.view(number, (leaf.size, leaf.stride, leaf.offset))
        found = self.layouts.known[number]
        layout = found.size, found.stride, found.dtype, found.into if nbytes[region] else 0
        if is_input:
            return None, region, layout, None
        first = self.script.identities[position]
        return region, None, layout, first if first < position else None


def evaluate(
    script: Script,
    arguments: Sequence[Any],
    alignments: Sequence[int],
    tools: Tools,
    latest: Latest | None = None,
) -> Proved:
    """The recording of a partition at certain sizes, without a graph, and its slots.

    Args:
        arguments: of a call; of tensors only the layout is read.
        alignments: bytes, a power of two for each input.
        latest: what other evaluations of this script left.

    Raises:
        NotComputableError: these sizes have to be captured.
    """
    evaluation = _Evaluation(script, arguments, alignments, tools, latest or Latest())
    evaluation.follow()
    evaluation.note_types()
    return evaluation.recording()
