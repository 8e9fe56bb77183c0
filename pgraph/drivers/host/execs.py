"""The host's execs: nodes with parameters of their own, which recipes set and run by a device's rules."""

from __future__ import annotations

import array
import copy
import itertools
import operator
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from pgraph.drivers.execs import Exec, Recipe
from pgraph.drivers.host import faults as fault
from pgraph.drivers.host.nodes import run, spoil
from pgraph.errors import DriverError
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot
from pgraph.template.topology import Topology, in_order

__all__ = ["HostExec", "HostRecipe"]

_numbers = itertools.count(1)


class HostExec(Exec):
    """Nodes, run at each launch in an order that their edges allow.

    Whatever is set later, a node keeps its kind and what the driver would keep: a kernel its launch
    attribute, a fill its length. Where another length is asked for it refuses, as a device may; what it does
    with another launch attribute it does in silence.

    Attributes:
        held: number of the recipe that all nodes were set to last; 0 if that is not known.
        lock: one thread at a time sets and runs.
    """

    def __init__(self, nodes: Sequence[NodeRecord], order: Topology, first: int) -> None:
        fault.active().reach("instantiate")
        self._made_from = tuple(nodes)
        self._nodes = list(nodes)
        self._params = [n.params for n in nodes]
        self._sequence = _late_first(order, first, first + len(nodes))
        self.held = 0
        self.lock = threading.Lock()
        self.nbytes = sum(len(n.params) for n in nodes)

    def replica(self) -> HostExec:
        """Another one, made from the same nodes."""
        fault.active().reach("instantiate")
        made = copy.copy(self)
        made._nodes, made._params = list(self._made_from), [n.params for n in self._made_from]
        made.held, made.lock = 0, threading.Lock()
        return made

    def alike(self, nodes: Sequence[NodeRecord]) -> Sequence[NodeRecord]:
        """These nodes but for their parameters; the exec's own ones where that is no difference."""
        pairs = zip(nodes, self._made_from, strict=True)
        found = tuple([own if _function(n) == _function(own) else n for n, own in pairs])
        return self._made_from if found == self._made_from else found

    def set(self, position: int, node: NodeRecord, params: bytes) -> None:
        """Have a node do what another one does, with these parameters.

        Raises:
            DriverError: an exec does not take that.
        """
        fault.active().reach("set_params")
        made_from = self._made_from[position]
        if node.kind != made_from.kind:
            raise DriverError(f"node {position} is a {made_from.kind} and cannot become a {node.kind}")
        if node.kind == "memset" and params[16:] != made_from.params[16:]:
            raise DriverError(f"node {position} fills another number of bytes than when it was instantiated")
        self._nodes[position], self._params[position] = node, params

    def run(self) -> None:
        """Do what the nodes say now."""
        fault.active().reach("launch")
        # No mode of the caller's applies to a device's kernels, so none does here.
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            for i in self._sequence:
                run(self._nodes[i], self._params[i])
                if self._nodes[i].kind == "kernel" and self._nodes[i].kept != self._made_from[i].kept:
                    spoil(self._nodes[i], self._params[i])


class HostRecipe(Recipe):
    """Nodes with parameters, of which those in slots are today's.

    Args:
        slots: of these nodes, in the order of the nodes.
        first: number of the first node.
    """

    def __init__(
        self, exec: HostExec, nodes: Sequence[NodeRecord], slots: Sequence[Slot], first: int
    ) -> None:
        self.exec: HostExec = exec
        self._number = next(_numbers)
        self._nodes = exec.alike(nodes)
        self._params = bytearray().join(n.params for n in nodes)
        self._ends = array.array("q", itertools.accumulate(len(n.params) for n in nodes))
        self._slots, self._first = slots, first
        self.nbytes = len(self._params) + 8 * len(nodes)

    def launch(self, bases: list[int], stream: int) -> int:
        with self.exec.lock:
            turn = self._turn(bases)
            return self._launch(bases) if turn is self else turn.launch(bases, stream)

    def replica(self) -> HostRecipe:
        """See `Driver.replica`."""
        made = copy.copy(self)
        made.exec, made._number, made._params = self.exec.replica(), next(_numbers), bytearray(self._params)
        made._turns, made._others, made._itself = None, (), True
        return made

    def today(self, bases: Sequence[int]) -> list[int]:
        return [(bases[slot.region] + slot.delta) & 0xFFFFFFFFFFFFFFFF for slot in self._slots]

    def misses(self, today: Sequence[int]) -> int | None:
        if self.exec.held != self._number:
            return None
        starts = [0, *self._ends]
        places = [starts[slot.node - self._first] + slot.offset for slot in self._slots]
        words = [struct.unpack_from("=Q", self._params, place)[0] for place in places]
        return sum(map(operator.ne, words, today))

    def _launch(self, bases: list[int]) -> int:
        anew, count, at, start = self.exec.held != self._number, 0, 0, 0
        self.exec.held = 0
        for i, end in enumerate(self._ends):
            changed = anew
            while at < len(self._slots) and self._slots[at].node == self._first + i:
                changed |= self._bind(self._slots[at], start, bases)
                at += 1
            if changed:
                self.exec.set(i, self._nodes[i], bytes(self._params[start:end]))
                count += 1
            start = end
        self.exec.held = self._number
        self.exec.run()
        return count

    def _bind(self, slot: Slot, start: int, bases: list[int]) -> bool:
        """Write today's address; whether it is another one."""
        value = (bases[slot.region] + slot.delta) & 0xFFFFFFFFFFFFFFFF
        before = struct.unpack_from("=Q", self._params, start + slot.offset)[0]
        struct.pack_into("=Q", self._params, start + slot.offset, value)
        return bool(before != value)

    def fits(self) -> bool:
        with self.exec.lock:
            self.exec.held = start = 0
            try:
                for i, end in enumerate(self._ends):
                    if self._nodes[i].kind == "kernel":
                        self.exec.set(i, self._nodes[i], bytes(self._params[start:end]))
                    start = end
            except DriverError:
                return False
            return True


def _function(node: NodeRecord) -> tuple[Any, ...]:
    """What runs, whatever its parameters."""
    return node.kind, node.name, node.header, node.kept if node.kind == "kernel" else None


def _late_first(order: Topology, first: int, last: int) -> Sequence[int]:
    """The nodes [first, last) counted from the first: the latest of those that may run goes first."""
    n = last - first
    if order.is_chain:
        return range(n)
    mirrored = ((last - 1 - a, last - 1 - b) for a, b in order.edges if first <= a and b < last)
    found = in_order(n, mirrored)
    assert found is not None
    return [n - 1 - i for i in found]
