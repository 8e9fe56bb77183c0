"""A script at certain sizes: the recording that a capture would make (Note [Computed recordings])."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pgraph.compute.errors import NotComputableError
from pgraph.compute.script import Call, Check, Drop, Figure, Host, Make, Place, Run, Script
from pgraph.drivers.interface import ALIGNMENT, extent
from pgraph.drivers.operands import HostOperand, Operand, distinct
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording, TensorSpec
from pgraph.template.template import Slot
from pgraph.template.topology import chain

__all__ = ["Proved", "Tools", "evaluate"]

Proved = tuple[Recording, tuple[Slot, ...]]
"""A recording and its slots."""

_BASE = 1 << 40  # addresses only tell how far apart things lie within one allocation
_GAP = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """What it takes besides a script.

    Args:
        node: the node of a generated kernel (its position among the nodes, which one, its arguments), and
            (byte of the parameters, number of the argument) of each address in it.
        site: a library call of these arguments, recorded by itself; None if that is not known.
        types: of results of library calls, by memory; those that become known are added.
    """

    node: Callable[[int, Run, Sequence[Any]], tuple[NodeRecord, Sequence[tuple[int, int]]]]
    site: Callable[[Call, Sequence[Any]], Proved | None]
    types: dict[int, Any]


@dataclasses.dataclass(slots=True)
class _Range:
    """An allocation."""

    address: int
    nbytes: int
    birth: int
    death: int | None = None
    library: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Memory:
    """What the program holds: the whole of a range, or a constant."""

    range: int | None
    operand: Operand | None
    constant: OutputSpec | None = None


def _same_kind(script: Script, arguments: Sequence[Any]) -> None:
    """Make sure that these are arguments like those that the code was followed with.

    Raises:
        NotComputableError: they are not.
    """
    kept = ((i, value, arguments[i]) for i, value in script.constants)
    # By their texts: 0.0 and -0.0 are equal, and nan is not.
    others = [i for i, was, now in kept if type(now) is not type(was) or repr(now) != repr(was)]
    others += [s.position for s in script.tape.arguments if type(s.of(arguments)) is not int]
    if others:
        raise NotComputableError(f"argument {min(others)} is not what the generated code was followed with")


class _Evaluation:
    """One evaluation."""

    def __init__(self, script: Script, arguments: Sequence[Any], alignments: Sequence[int], tools: Tools):
        _same_kind(script, arguments)
        values = script.tape.replay(arguments)
        if values is None:
            raise NotComputableError("the generated code goes another way for these sizes")
        self.script, self.arguments, self.values, self.tools = script, arguments, values, tools
        self.told: dict[tuple[int, ...], tuple[int, ...]] = {}  # numbers by places: most come many times
        self.operands: dict[int, Operand] = {}  # by the objects that the script names them by: so do these
        self.position = _BASE
        self.ranges: list[_Range] = []
        self.nodes: list[NodeRecord] = []
        self.slots: list[tuple[int, int, int, int]] = []  # node, byte, range, how far into it
        self.memories: list[_Memory | None] = [None] * script.memories
        self.workspaces: dict[int, int] = {}  # ranges of libraries, by bytes
        self.dropped: list[int] = []
        self.steps: set[int] = set()
        self.outlined = False  # a library call is not known: only layouts are told from there on
        for memory, (position, alignment) in enumerate(zip(script.inputs, alignments, strict=True)):
            tensor = arguments[position]
            if tensor.is_conj() or tensor.is_neg():  # a library would make it plain first
                raise NotComputableError(f"argument {position} is a lazy view")
            size, stride = tuple(tensor.size()), tuple(tensor.stride())
            nbytes = extent(size, stride) * tensor.element_size()
            r = self.range(nbytes, 0, alignment % ALIGNMENT)
            offset = int(tensor.storage_offset())
            operand = Operand(self.ranges[r].address, size, stride, tensor.dtype, offset)
            self.memories[memory] = _Memory(r, operand)

    def range(self, nbytes: int, birth: int, phase: int = 0) -> int:
        address = self.position + phase
        self.position += -(-(nbytes + phase) // _GAP) * _GAP + _GAP
        self.ranges.append(_Range(address, nbytes, birth))
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

    def make(self, event: Make) -> None:
        size, stride = self.numbers(event.size), self.numbers(event.stride)
        r = self.range(extent(size, stride) * event.dtype.itemsize, self.boundary())
        operand = Operand(self.ranges[r].address, size, stride, event.dtype, 0)
        self.memories[event.memory] = _Memory(r, operand)

    def run(self, event: Run) -> None:
        if self.outlined:
            return
        arguments = [self.argument(a) for a in event.arguments]
        node, words = self.tools.node(len(self.nodes), event, arguments)
        for offset, at in words:
            place = event.arguments[at]
            if isinstance(place, Place):  # else a constant, which stays where it is
                self.slots.append((len(self.nodes), offset, *self.within(place, arguments[at].address)))
        self.nodes.append(node)

    def call(self, event: Call) -> None:
        arguments = [self.argument(a) for a in event.arguments]
        first = self.boundary()
        known = self.tools.site(event, arguments)
        if known is None:
            self.outline(event)
            return
        site, slots = known
        if len(site.outputs) != len(event.results):
            raise NotComputableError(f"{event.function} has {len(site.outputs)} new results")
        given = distinct(arguments)
        ranges = [self.adopted(a, first) for a in site.allocations[site.n_inputs :]]
        for slot in slots:
            if slot.region < site.n_inputs:
                at = given[slot.region]
                r, delta = self.within(event.arguments[at], arguments[at].address)
                self.slots.append((first + slot.node, slot.offset, r, delta + slot.delta))
            else:
                r = ranges[slot.region - site.n_inputs]
                self.slots.append((first + slot.node, slot.offset, r, slot.delta))
        self.nodes += site.nodes
        self.steps.update(first + step for step in site.steps)
        for memory, spec in zip(event.results, site.outputs, strict=True):
            self.memories[memory] = found = self.result(spec, ranges, site.n_inputs)
            if found.operand is not None:
                self.tools.types[memory] = found.operand.dtype
        self.boundary()

    def outline(self, event: Call) -> None:
        """Tell the results of a call that is not known, as far as the generated code tells their layouts."""
        self.outlined = True
        for memory in event.results:
            layout, dtype = self.script.layouts.get(memory), self.tools.types.get(memory)
            if layout is None or dtype is None:
                continue
            size, stride = map(self.numbers, layout)
            r = self.range(extent(size, stride) * dtype.itemsize, 0)
            self.memories[memory] = _Memory(r, Operand(self.ranges[r].address, size, stride, dtype, 0))

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

    def result(self, spec: OutputSpec, ranges: Sequence[int], n_inputs: int) -> _Memory:
        if spec.region is None and spec.input is None:
            return _Memory(None, None, spec)
        if spec.region is None or spec.layout is None or spec.same is not None or spec.view_of is not None:
            raise NotComputableError("a library returns one of its arguments, or one result twice")
        r, layout = ranges[spec.region - n_inputs], spec.layout
        if layout.conj or layout.neg:
            raise NotComputableError("a library returns a lazy view")
        address, offset = self.ranges[r].address + layout.offset, layout.offset // layout.dtype.itemsize
        return _Memory(r, Operand(address, layout.size, layout.stride, layout.dtype, offset))

    def check(self, event: Check) -> None:
        of_size, of_stride = self.layout(event.tensor)
        size, stride = self.numbers(event.size), self.numbers(event.stride)
        strides = zip(size, of_stride, stride, strict=False)
        if of_size != size or not all(a == b for n, a, b in strides if n > 1):
            raise NotComputableError("a tensor is laid out otherwise than the generated code expects")

    def layout(self, place: Place) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size and stride of a tensor: of a constant, too (Note [Seeds of attention])."""
        memory = self.memories[place.memory]
        constant = memory.constant.constant if memory is not None and memory.constant is not None else None
        if isinstance(constant, torch.Tensor) and place.size is None:
            return tuple(constant.size()), tuple(constant.stride())
        operand = self.operand(place)
        return operand.size, operand.stride

    def drop(self, event: Drop) -> None:
        memory = self.memories[event.memory]
        if memory is not None and memory.range is not None:
            self.dropped.append(memory.range)

    # -- values -------------------------------------------------------------------------------

    def numbers(self, places: tuple[int, ...]) -> tuple[int, ...]:
        found = self.told.get(places)
        if found is None:
            values = self.values
            found = self.told[places] = tuple([values[place] for place in places])
        return found

    def argument(self, value: Any) -> Any:
        kind = type(value)
        if kind is Place:
            return self.operand(value)
        if kind is Figure:
            return self.values[value.place]
        if kind is Host:
            return HostOperand(self.arguments[value.position])
        return value

    def operand(self, place: Place) -> Operand:
        found = self.operands.get(id(place))
        if found is None:
            found = self.operands[id(place)] = self._operand(place)
        return found

    def _operand(self, place: Place) -> Operand:
        memory = self.memories[place.memory]
        if memory is None or memory.operand is None:
            raise NotComputableError("a result that a library did not give is used")
        base = memory.operand
        if place.size is None or place.stride is None or place.offset is None:
            return base
        further = self.values[place.offset]
        address = base.address + further * base.dtype.itemsize
        return Operand(
            address, self.numbers(place.size), self.numbers(place.stride), base.dtype, base.offset + further
        )

    def within(self, place: Place, address: int) -> tuple[int, int]:
        """The range of a tensor, and how far into it the tensor begins, in bytes."""
        memory = self.memories[place.memory]
        assert memory is not None
        assert memory.range is not None
        return memory.range, address - self.ranges[memory.range].address

    # -- the end ------------------------------------------------------------------------------

    def recording(self) -> Proved:
        self.boundary()
        n_inputs = len(self.script.inputs)
        later = sorted(range(n_inputs, len(self.ranges)), key=lambda r: self.ranges[r].birth)
        order = [*range(n_inputs), *later]
        region = {r: i for i, r in enumerate(order)}
        made = [self.ranges[r] for r in order]
        allocations = tuple(
            GhostAllocation(r.address, r.nbytes, r.birth, r.death, 0, r.library) for r in made
        )
        slots = tuple(Slot(node, offset, region[r], delta) for node, offset, r, delta in sorted(self.slots))
        outputs = tuple(self.output(i, leaf, region) for i, leaf in enumerate(self.script.results))
        steps, nodes = tuple(sorted(self.steps)), tuple(self.nodes)
        recording = Recording(
            nodes, chain(len(nodes)), allocations, n_inputs, outputs, (0, 0), None, steps=steps
        )
        return recording, slots

    def output(self, position: int, leaf: Any, region: dict[int, int]) -> OutputSpec:
        if isinstance(leaf, Host):
            return OutputSpec(constant=self.arguments[leaf.position], unread=True)
        if not isinstance(leaf, Place):
            return OutputSpec(constant=self.argument(leaf))
        memory = self.memories[leaf.memory]
        assert memory is not None
        if memory.constant is not None:
            return memory.constant
        assert memory.range is not None
        is_input = memory.range < len(self.script.inputs)
        if is_input and leaf.size is None:
            return OutputSpec(input=memory.range)
        operand = self.operand(leaf)
        offset = (
            operand.address - self.ranges[memory.range].address if self.ranges[memory.range].nbytes else 0
        )
        layout = TensorSpec(operand.size, operand.stride, operand.dtype, offset)
        if is_input:
            return OutputSpec(input=memory.range, layout=layout)
        first = self.script.identities[position]
        return OutputSpec(
            region=region[memory.range], layout=layout, same=first if first < position else None
        )


def evaluate(
    script: Script, arguments: Sequence[Any], alignments: Sequence[int], tools: Tools
) -> Proved | None:
    """The recording of a partition at certain sizes, without a graph, and its slots; None if recordings of
    library calls are missing, which `tools.site` was asked for: all of them, or the first ones.

    Args:
        arguments: of a call; of tensors only the layout is read.
        alignments: bytes, a power of two for each input.

    Raises:
        NotComputableError: these sizes have to be captured.
    """
    evaluation = _Evaluation(script, arguments, alignments, tools)
    steps: dict[type, Callable[[Any], None]] = {
        Make: evaluation.make,
        Run: evaluation.run,
        Call: evaluation.call,
        Check: evaluation.check,
        Drop: evaluation.drop,
    }
    try:
        for event in script.events:
            steps[type(event)](event)
    except NotComputableError:
        if not evaluation.outlined:
            raise
    return None if evaluation.outlined else evaluation.recording()
