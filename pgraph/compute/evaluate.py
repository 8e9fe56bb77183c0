"""A script at certain sizes: the recording that a capture would make (Note [Computed recordings])."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import torch

from pgraph import compat
from pgraph.compute.alike import Kind
from pgraph.compute.errors import NotComputableError
from pgraph.compute.library_call import view_of
from pgraph.compute.pieces import Form, Part, Proved, Tools
from pgraph.compute.script import (
    CallLibrary,
    CallView,
    Check,
    Figure,
    Host,
    LaunchKernel,
    Make,
    Script,
    TensorRef,
)
from pgraph.compute.skeleton import Latest
from pgraph.drivers.interface import ALIGNMENT, extent
from pgraph.drivers.operands import HostOperand, Layouts, Operand
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
        # Of inputs: bytes from an aligned address, bytes of each.
        self.phases = [alignment % ALIGNMENT for _, alignment in zip(script.inputs, alignments, strict=False)]
        self.inputs: list[int] = []
        layouts = self.given()
        self.kinds = latest.kinds(script, layouts, tools.sample)
        self.layout_of: list[int | None] = [None] * self.kinds.origins
        for memory, layout in enumerate(layouts):
            self.layout_of[self.kinds.of_memory[memory]] = layout
        self.viewed: dict[tuple[int, int], int] = {}  # layouts of views, by that of the base
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # numbers, by their places
        self.constants: dict[int, OutputSpec] = {}  # by origin: they have no layout
        self.made: list[int] = []  # bytes, by kind of event
        self.parts: list[Part] = []  # by kind of event
        self.known: dict[Hashable, Part | None] = {}  # None if it was asked for in vain
        self.missing: list[Hashable] = []  # calls that were asked for in vain: kinds and layouts
        self.fresh: dict[Hashable, Proved | None] = {}  # these, once they are recorded
        self.nodes = self.rounds = 0  # how many so far; how often library calls were recorded

    def given(self) -> tuple[int, ...]:
        """The layouts of all inputs."""
        found, number = [], self.layouts.number
        extents: dict[int, int] = {}  # bytes, by layout: weights of all layers are alike
        for position, phase in zip(self.script.inputs, self.phases, strict=True):
            tensor = self.arguments[position]
            size, stride, dtype, lazy = tensor.size(), tensor.stride(), tensor.dtype, compat.lazy_bits(tensor)
            layout = number(size, stride, dtype, tensor.storage_offset(), 0, phase, lazy)
            nbytes = extents.get(layout)
            if nbytes is None:
                nbytes = extents[layout] = extent(size, stride) * dtype.itemsize
            found.append(layout)
            self.inputs.append(nbytes)
        return tuple(found)

    # -- parts --------------------------------------------------------------------------------

    def follow(self) -> None:
        """Tell the part of each kind of event."""
        steps: dict[type, Callable[[Any, Kind], Part]] = {
            Make: self.make,
            LaunchKernel: self.run,
            CallLibrary: self.call,
            CallView: self.look,
            Check: self.check,
        }
        for kind in self.kinds.all:
            event = self.script.events[kind.first]
            self.made.append(0)
            if kind.views:
                self.lay(kind)
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

    def run(self, event: LaunchKernel, kind: Kind) -> Part:
        layouts = self.told(kind)
        sample = self.tools.sample(event) if self.tools.sample is not None else None
        number = self.script.sorts[kind.first].number
        if sample is None or number is None:
            return self.launched(event, kind, layouts)
        key = number, sample, *layouts
        part = self.known.get(key)
        if part is None:
            part = self.known[key] = self.launched(event, kind, layouts)
        return part

    def launched(self, event: LaunchKernel, kind: Kind, layouts: Sequence[int]) -> Part:
        node, addresses = self.tools.node(self.nodes, event, self.given_to(kind, layouts))
        # All but constants, which stay where they are.
        tensors = kind.given.numbers
        found = [(byte, tensors[at]) for byte, at in addresses if at in tensors]
        form = Form((node.kind,), tuple([(0, byte, i) for byte, i in found]))
        return Part((node,), form, tuple([self.layouts.known[layouts[i]].into for _, i in found]))

    def call(self, event: CallLibrary, kind: Kind) -> Part:
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

    def look(self, event: CallView, kind: Kind) -> Part:
        (base,) = layouts = self.told(kind)
        found = view_of(event, self.given_to(kind, layouts))
        layout = found.size(), found.stride(), found.dtype, int(found.storage_offset())
        self.layout_of[kind.results[0]] = self.layouts.look(base, *layout, compat.lazy_bits(found))
        return _NOTHING

    def alike(self, kind: Kind) -> bool:
        """Whether a call may be the same as another one."""
        return self.script.sorts[kind.first].number is not None and self.tools.sample is not None

    def recorded(self, event: CallLibrary, kind: Kind, layouts: Sequence[int]) -> Part:
        """The part of a library call. If it is not known it is recorded, together with those to come."""
        part = self.called(event, kind, layouts)
        if part is None and self.tools.record is not None and self.rounds < _ROUNDS:
            self.rounds += 1
            self.look_ahead(kind)
            self.fresh.update(zip(self.missing, self.tools.record(), strict=True))
            self.missing.clear()
            part = self.called(event, kind, layouts)
        if part is None:
            raise NotComputableError("library calls depend on one another in ways that cannot be told")
        return part

    def called(self, event: CallLibrary, kind: Kind, layouts: Sequence[int]) -> Part | None:
        key = kind.first, *layouts
        known = self.fresh.get(key)
        if known is None:
            known = self.tools.site(event, self.given_to(kind, layouts))
        if known is None:
            self.missing.append(key)
            return None
        site, slots = known
        if len(site.outputs) != len(event.results):
            raise NotComputableError(f"{event.function} has {len(site.outputs)} new results")
        # Equal operands are one tensor, which is the first of them: they have one memory and one layout.
        each: dict[Any, int] = {}
        for i, ((_, memory), layout) in enumerate(zip(kind.given.tensors, layouts, strict=True)):
            each.setdefault((memory, layout), i)
        regions = [(i, self.layouts.known[layouts[i]].into) for i in each.values()]
        regions += [(len(layouts) + i, 0) for i in range(len(site.allocations) - site.n_inputs)]
        results = [self.result(spec, site.n_inputs) for spec in site.outputs]
        allocations = site.allocations[site.n_inputs :]
        form = Form(
            tuple([node.kind for node in site.nodes]),
            tuple([(node, byte, regions[region][0]) for node, byte, region, _ in slots]),
            tuple([(a.birth, a.death, a.nbytes if a.library else None) for a in allocations]),
            tuple([None if isinstance(result, OutputSpec) else result[0] for result in results]),
            site.order if site.order.links or site.order.odd else None,
            site.steps,
        )
        distances = [regions[region][1] + delta for _, _, region, delta in slots]
        sizes = [a.nbytes for a in allocations]
        return Part(site.nodes, form, tuple(distances), tuple(sizes), tuple(results))

    def look_ahead(self, kind: Kind) -> None:
        """Ask for the library calls after this one, as far as their arguments' layouts are told before."""
        with contextlib.suppress(NotComputableError):
            self.foretell(kind, None)
            for later in self.kinds.all[len(self.parts) + 1 :]:
                event = self.script.events[later.first]
                if later.views:
                    self.lay(later)
                if isinstance(event, Make):
                    found = self.whole(event.size, event.stride, event.dtype)
                    self.layout_of[later.results[0]] = found[1]
                elif isinstance(event, CallLibrary):
                    self.foretell(later, self.asked(event, later))
                elif isinstance(event, CallView) and self.layout_of[later.tensors[0]] is not None:
                    self.look(event, later)

    def asked(self, event: CallLibrary, kind: Kind) -> Part | None:
        """The part of a call to come; None if that, or the layout of an argument, is not known."""
        told = [layout for origin in kind.tensors if (layout := self.layout_of[origin]) is not None]
        if len(told) < len(kind.tensors):
            return None
        key = self.script.sorts[kind.first].number, *told
        if key not in self.known or not self.alike(kind):
            self.known[key] = self.called(event, kind, told)
        return self.known[key]

    def foretell(self, kind: Kind, part: Part | None) -> None:
        """The layouts of a call's results: as it is known, or as the generated code tells them."""
        event = self.script.events[kind.first]
        assert isinstance(event, CallLibrary)
        types: Sequence[Any] | None = None
        for i, (memory, origin) in enumerate(zip(event.results, kind.results, strict=True)):
            found = part.results[i] if part is not None else None
            layout, dtype = self.script.layouts.get(memory), self.tools.types.get(memory)
            if found is not None and not isinstance(found, OutputSpec):
                self.layout_of[origin] = found[1]
            elif found is None and layout is not None:
                if dtype is None:
                    types = self.foretold(event, kind) if types is None else types
                    dtype = types[i] if types else None
                if dtype is not None:
                    self.layout_of[origin] = self.whole(*layout, dtype)[1]

    def foretold(self, event: CallLibrary, kind: Kind) -> Sequence[Any]:
        """Types of a call's results, where none was ever seen."""
        told = [layout for origin in kind.tensors if (layout := self.layout_of[origin]) is not None]
        known = len(told) == len(kind.tensors)
        return self.tools.foretell(event, self.given_to(kind, told)) if known else ()

    def result(self, spec: OutputSpec, n_inputs: int) -> tuple[int, int] | OutputSpec:
        if spec.region is None and spec.input is None:
            return spec
        if spec.region is None or spec.layout is None or spec.same is not None or spec.view_of is not None:
            raise NotComputableError("a library returns one of its arguments, or one result twice")
        size, stride, dtype, into, conj, neg = spec.layout
        number = self.layouts.number(size, stride, dtype, into // dtype.itemsize, into, lazy=(conj, neg))
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
        if of_size != size or (of_stride != stride and not all(a == b for n, a, b in strides if n > 1)):
            raise NotComputableError("a tensor is laid out otherwise than the generated code expects")
        return _NOTHING

    # -- values -------------------------------------------------------------------------------

    def numbers(self, places: tuple[int, ...]) -> tuple[int, ...]:
        found = self.shapes.get(places)
        if found is None:
            found = self.shapes[places] = tuple([self.values[place] for place in places])
        return found

    def lay(self, kind: Kind) -> None:
        """Note the layouts of the views that first come with a kind of event."""
        for origin, base, view in kind.views:
            layout = self.layout_of[base]
            self.layout_of[origin] = self.view(layout, view) if layout is not None else None

    def told(self, kind: Kind) -> list[int]:
        """Layouts of the tensors among an event's arguments."""
        found = [layout for origin in kind.tensors if (layout := self.layout_of[origin]) is not None]
        if len(found) < len(kind.tensors):
            raise NotComputableError("a result that a library did not give is used")
        return found

    def view(self, base: int, view: int) -> int:
        found = self.viewed.get((base, view))
        if found is None:
            of_size, of_stride, offset, _ = self.script.views[view]
            if of_size is None or of_stride is None or offset is None:
                return base  # what a library gave as a view, as it is
            size, stride = self.numbers(of_size), self.numbers(of_stride)
            found = self.viewed[base, view] = self.layouts.view(base, size, stride, self.values[offset])
        return found

    def given_to(self, kind: Kind, layouts: Sequence[int]) -> list[Any]:
        """The arguments of an event."""
        given, known, n_inputs = kind.given, self.layouts.known, len(self.phases)
        found = list(given.values)
        for (at, memory), layout in zip(given.tensors, layouts, strict=True):
            size, stride, dtype, offset, into, lazy = known[layout]
            phase = self.phases[memory] if memory < n_inputs else 0
            found[at] = Operand(_BASE + memory * _APART + phase + into, size, stride, dtype, offset, lazy)
        for at, place in given.figures:
            found[at] = self.values[place]
        for at, position in given.hosts:
            found[at] = HostOperand(self.arguments[position])
        return found

    # -- the end ------------------------------------------------------------------------------

    def note_types(self) -> None:
        """Note the types of the results of library calls."""
        for memory in self.script.returned if len(self.tools.types) < len(self.script.returned) else ():
            layout = self.layout_of[self.kinds.of_memory[memory]]
            if memory not in self.tools.types and layout is not None:
                self.tools.types[memory] = self.layouts.known[layout].dtype

    def recording(self) -> Proved:
        skeleton = self.latest.skeleton(self.script, self.kinds, self.parts)
        allocations = skeleton.allocations(self.parts, self.inputs, self.made)
        constants = [self.constant(self.script.results[position]) for position in skeleton.constants]
        layouts = [self.layouts.known[self.laid(origin, view)] for origin, view in skeleton.layouts]
        recording = Recording(
            skeleton.nodes(self.parts),
            skeleton.order,
            allocations,
            len(self.inputs),
            skeleton.outputs(constants, layouts, allocations),
            (0, 0),
            None,
            steps=skeleton.steps,
            skeleton=skeleton,
        )
        return recording, skeleton.slots(self.parts)

    def constant(self, leaf: Any) -> OutputSpec:
        if isinstance(leaf, TensorRef):
            return self.constants[self.kinds.of_memory[leaf.memory]]
        if isinstance(leaf, Host):
            return OutputSpec(constant=self.arguments[leaf.position], unread=True)
        return OutputSpec(constant=self.values[leaf.place] if isinstance(leaf, Figure) else leaf)

    def laid(self, origin: int, view: int | None) -> int:
        layout = self.layout_of[origin]
        assert layout is not None
        return layout if view is None else self.view(layout, view)


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
