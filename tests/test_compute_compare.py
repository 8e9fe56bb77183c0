"""Whatever differs between a computed recording and the captured one is found; addresses do not differ."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pgraph.compute import host_memory
from pgraph.compute.compare import difference, kind_of, loose_words
from pgraph.compute.host_memory import HostMemory, mapped
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording, TensorSpec
from pgraph.template.template import Slot
from pgraph.template.topology import chain, topology

LAYOUT = TensorSpec((4,), (1,), torch.float32, 0)


def node(address: int, *numbers: int, name: str = "add", kept: Any = (1,)) -> NodeRecord:
    return NodeRecord(
        "kernel", name, (7, (1, 1, 1)), struct.pack(f"={1 + len(numbers)}Q", address, *numbers), kept=kept
    )


def fill(address: int, nbytes: int) -> NodeRecord:
    params = struct.pack("=2Q", address, nbytes)
    return NodeRecord("memset", "memset", (), params, kept=params)


def recording(base: int = 1 << 20) -> tuple[Recording, tuple[Slot, ...]]:
    """An input, a temporary, a library's workspace, a result."""
    starts = [base + i * 4096 for i in range(4)]
    allocations = (
        GhostAllocation(starts[0], 16, 0, 2),
        GhostAllocation(starts[1], 16, 0, 2),
        GhostAllocation(starts[2], 64, 1, None, library=True),
        GhostAllocation(starts[3], 16, 2, None),
    )
    nodes = (node(starts[1], 5), node(starts[2], 9, 9), fill(starts[3] + 8, 8))
    slots = (Slot(0, 0, 1, 0), Slot(1, 0, 2, 0), Slot(2, 0, 3, 8))
    outputs = (
        OutputSpec(region=3, layout=LAYOUT),
        OutputSpec(input=0),
        OutputSpec(constant=3),
        OutputSpec(constant=torch.ones(2), unread=True),
    )
    made = Recording(nodes, chain(3), allocations, 1, outputs, (base, base + 1), None, steps=(0, 1, 3))
    return made, slots


def test_it_is_told_which_node_waits_otherwise() -> None:
    made, slots = recording()
    odd = dataclasses.replace(made, order=dataclasses.replace(made.order, odd=((1, 2, b"\1"),)))
    told = difference(odd, slots, made, slots)
    assert told == "node 2 does not wait for node 1 as it was captured"
    forked = dataclasses.replace(made, order=topology(3, [(0, 1), (0, 2)]))
    assert difference(made, slots, forked, slots) == "node 2 does not wait for node 0 as it was captured"


def changed(change: Callable[[Recording], Any]) -> Recording:
    made, _ = recording()
    return dataclasses.replace(made, **change(made))


HOST = HostMemory(((0x7FCD_0000_0000, 0x7FCD_0000_1000), (0x7FFE_1000_0000, 0x7FFE_1010_0000)))


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        # A number of four bytes, and padding beside it.
        (0x7FCD_0000_2100, 0x2100, True),
        (0x2100, 0x7FFE_0000_2100, True),
        (0x7FCD_0000_2100, 0x7FFE_0000_2100, True),
        (0x7FCD_0000_2100, 0x2101, False),
        (0x7FCE_0000_2100, 0x2100, False),
        (0x0001_0000_2100, 0x2100, False),
        # A word that nobody set.
        (0x78, 0x7FFE_1000_2100, True),
        (0x7FCD_0000_0FFF, 0x78, True),
        (0x7FCD_0000_1000, 0x78, False),
        (0x7FFE_0FFF_FFFF, 0x78, False),
    ],
)
def test_left_over_host_addresses_are_no_difference(mine: int, theirs: int, same: bool) -> None:
    """In structs of built-in ops."""

    def made(number: int, *, builtin: bool = True, structs: Any = ((0, 16),)) -> Any:
        plain, slots = recording()
        nodes = put(plain.nodes, 0, params=node(0, number).params, structs=structs)
        return dataclasses.replace(plain, nodes=nodes, builtin=frozenset({0} if builtin else ())), slots

    assert (difference(*made(mine), *made(theirs), host=HOST) is None) == same
    assert difference(*made(mine), *made(theirs)) is not None
    assert difference(*made(mine), *made(theirs, builtin=False), host=HOST) is not None
    others = [made(number, structs=((0, 8),)) for number in (mine, theirs)]
    assert difference(*others[0], *others[1], host=HOST) is not None


@pytest.mark.parametrize(("name", "same"), [("reduce_kernel", True), ("reduce_scatter", False)])
def test_kernels_that_leave_tables_unfilled_are_told_by_name(name: str, same: bool) -> None:
    """What lies there need not be an address: half of a set of dispatch keys was seen."""
    mangled = f"_ZN2at6native{len(name)}{name}ILi512EEEv"

    def made(number: int, pointer: int = 1, structs: Any = ((0, 16),)) -> Any:
        plain, slots = recording()
        params = node(pointer, number).params
        nodes = put(plain.nodes, 0, params=params, name=mangled, structs=structs)
        slots = slots if pointer == 1 else slots[1:]
        return dataclasses.replace(plain, nodes=nodes, builtin=frozenset({0})), slots

    mine, theirs = 0xCFFF_8300_0000_0000, 0xCFFF_8000_0000_0000
    assert (difference(*made(mine), *made(theirs), host=HOST) is None) == same
    assert (difference(*made(mine), *made(theirs)) is None) == same
    assert difference(*made(mine, structs=()), *made(theirs, structs=()), host=HOST) is not None
    custom = [(dataclasses.replace(r, builtin=frozenset()), slots) for r, slots in map(made, (mine, theirs))]
    assert difference(*custom[0], *custom[1], host=HOST) is not None
    assert difference(*made(mine), *made(theirs, pointer=2), host=HOST) is not None


def test_where_the_hosts_memory_lies() -> None:
    held = ctypes.create_string_buffer(1 << 20)
    address, host = ctypes.addressof(held), mapped()
    assert address in host
    assert host.has_upper(address >> 32)
    assert host.ranges[0][0] - 1 not in host
    assert not host.has_upper((host.ranges[0][0] >> 32) - 1)
    assert not host.has_upper(0)
    assert 0 not in host


def test_what_cannot_be_read_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "_MAPS", tmp_path / "none")
    assert mapped() == HostMemory()


def test_addresses_are_no_difference() -> None:
    assert difference(*recording(), *recording(1 << 30)) is None


def put(items: tuple[Any, ...], at: int, **fields: Any) -> tuple[Any, ...]:
    return (*items[:at], items[at]._replace(**fields), *items[at + 1 :])


CHANGES: dict[str, Callable[[Recording], dict[str, Any]]] = {
    "a number": lambda r: {"nodes": put(r.nodes, 0, params=node(0, 6).params)},
    "a word more": lambda r: {"nodes": put(r.nodes, 0, params=node(0, 5, 0).params)},
    "a grid": lambda r: {"nodes": put(r.nodes, 0, header=(7, (2, 1, 1)))},
    "a kernel": lambda r: {"nodes": put(r.nodes, 0, name="mul")},
    "a launch attribute": lambda r: {"nodes": put(r.nodes, 0, kept=(2,))},
    "an unknown attribute": lambda r: {"nodes": put(r.nodes, 0, kept=None)},
    "a parameter's layout": lambda r: {"nodes": put(r.nodes, 0, layout="other")},
    "a struct": lambda r: {"nodes": put(r.nodes, 0, structs=((0, 16),))},
    "the bytes of a fill": lambda r: {
        "nodes": put(r.nodes, 2, kept=fill(0, 9).params, params=fill(0, 9).params)
    },
    "what a fill keeps": lambda r: {"nodes": put(r.nodes, 2, kept=fill(0, 9).params)},
    "a node less": lambda r: {"nodes": r.nodes[:2]},
    "the order": lambda r: {"order": topology(3, [(0, 1), (0, 2)])},
    "the size of a region": lambda r: {"allocations": put(r.allocations, 1, nbytes=32)},
    "a birth": lambda r: {"allocations": put(r.allocations, 1, birth=1)},
    "a death": lambda r: {"allocations": put(r.allocations, 1, death=3)},
    "the death of an input": lambda r: {"allocations": put(r.allocations, 0, death=None)},
    "the size of a workspace": lambda r: {"allocations": put(r.allocations, 2, nbytes=128)},
    "whose memory it is": lambda r: {"allocations": put(r.allocations, 1, library=True)},
    "a region more": lambda r: {"allocations": (*r.allocations, r.allocations[1])},
    "the inputs": lambda r: {"n_inputs": 2},
    "a result's layout": lambda r: {"outputs": put(r.outputs, 0, layout=LAYOUT._replace(stride=(2,)))},
    "a result's region": lambda r: {"outputs": put(r.outputs, 0, region=1)},
    "an input returned": lambda r: {"outputs": put(r.outputs, 1, layout=LAYOUT)},
    "a constant": lambda r: {"outputs": put(r.outputs, 2, constant=4)},
    "a constant's type": lambda r: {"outputs": put(r.outputs, 2, constant=3.0)},
    "a constant tensor": lambda r: {"outputs": put(r.outputs, 2, constant=torch.ones(2))},
    "a result less": lambda r: {"outputs": r.outputs[:3]},
    "the steps": lambda r: {"steps": (0, 3)},
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_differs_is_found(what: str) -> None:
    made, slots = recording()
    other = changed(CHANGES[what])
    assert difference(other, slots, made, slots)
    assert difference(made, slots, other, slots)


@pytest.mark.parametrize("slot", [Slot(0, 0, 0, 0), Slot(0, 8, 1, 0), Slot(0, 0, 1, 4), Slot(1, 0, 1, 0)])
def test_slots_that_differ(slot: Slot) -> None:
    made, slots = recording()
    assert difference(made, (slot, *slots[1:]), made, slots)
    assert difference(made, slots, made, slots[1:])


def test_a_constant_that_nobody_reads_may_be_another() -> None:
    made, slots = recording()
    other = changed(lambda r: {"outputs": put(r.outputs, 3, constant=torch.zeros(3))})
    assert difference(other, slots, made, slots) is None


def test_workspaces_may_come_at_any_time() -> None:
    """A library has one for all its calls: when it came says nothing, and one that no node names is none."""
    made, slots = recording()
    first = made.allocations
    later = first[2]._replace(birth=3)
    idle = first[2]._replace(nbytes=8, birth=0)
    moved = dataclasses.replace(
        made,
        allocations=(first[0], idle, first[1], first[3], later),
        outputs=put(made.outputs, 0, region=3),
    )
    renumbered = (Slot(0, 0, 2, 0), Slot(1, 0, 4, 0), Slot(2, 0, 3, 8))
    assert difference(moved, renumbered, made, slots) is None
    assert difference(made, slots, moved, renumbered) is None


def test_padding_is_what_two_captures_of_one_call_show() -> None:
    first, second = node(100, 5, 1, 8), node(200, 5, 2, 9)
    assert loose_words(first, second, {0}) == {16, 24}
    made, slots = recording()
    other = changed(lambda r: {"nodes": put(r.nodes, 1, params=node(0, 9, 8).params)})
    assert (
        difference(other, slots, made, slots) == "node 1: add: byte 16 of the parameters is 0x8, captured 0x9"
    )
    assert difference(other, slots, made, slots, {kind_of(made.nodes[1]): {16}}) is None
    assert difference(other, slots, made, slots, {kind_of(made.nodes[0]): {16}}) is not None
