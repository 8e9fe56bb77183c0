"""Which library calls share a recording."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from pgraph.compute.library_call import LibraryCall
from pgraph.compute.sites import Sites
from pgraph.drivers.host.driver import HostDriver
from pgraph.drivers.operands import Operand, distinct
from pgraph.template.recording import NodeRecord, Recording
from pgraph.template.template import Slot
from pgraph.template.topology import chain

A = Operand(1 << 20, (4, 8), (8, 1), torch.float32, 0)
B = Operand(1 << 21, (8, 4), (4, 1), torch.float32, 0)


def call(*arguments: Any, kind: int = 0, settings: int = 0) -> LibraryCall:
    event: Any = SimpleNamespace(kind=kind, function=None, spec=tree_flatten((arguments, {}))[1])
    return LibraryCall(event, arguments, settings)


USUAL = call(A, B, 1.0, True)


@pytest.mark.parametrize(
    "other",
    [
        call(A, B._replace(size=(8, 5)), 1.0, True),
        call(A, B._replace(stride=(1, 8)), 1.0, True),
        call(A, B._replace(dtype=torch.int32), 1.0, True),
        call(A, B._replace(offset=4), 1.0, True),
        call(A, B._replace(address=B.address + 16), 1.0, True),
        call(A, A, 1.0, True),
        call(A, B, 2.0, True),
        call(A, B, 1.0, 1),
        call(A, B, -1.0, True),
        call(A, B, 1.0, None),
        call(A, torch.ones(8, 4), 1.0, True),
        call(A, B, 1.0, True, kind=1),
        call(A, B, 1.0, True, settings=1),
    ],
)
def test_whatever_a_library_may_look_at_tells_calls_apart(other: LibraryCall) -> None:
    assert other.key != USUAL.key


@pytest.mark.parametrize("grid", [1, 2])
def test_what_a_library_launches_otherwise_the_next_time_shows_no_padding(
    grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word that differs goes with the grid; with the same grid, nobody initialises it."""
    made = [
        Recording(
            (NodeRecord("kernel", "k", header, struct.pack("=2Q", 1 << 20, word)),),
            *(chain(1), (), 0, (), (0, 0), None),
        )
        for header, word in (((1,), 5), ((grid,), 6))
    ]
    monkeypatch.setattr(Sites, "_recorded", lambda *_: [(made.pop(0), (Slot(0, 0, 0, 0),))])
    sites = Sites(HostDriver())
    sites.record([USUAL])
    sites.again()
    assert sites.get(USUAL) is None
    sites.record([USUAL])
    assert list(sites.padding.values()) == ([{8}] if grid == 1 else [])


def test_addresses_alone_do_not() -> None:
    """But for how they are aligned, and whether two arguments are one tensor."""
    moved = [operand._replace(address=operand.address + 512) for operand in (A, B)]
    assert call(*moved, 1.0, True).key == USUAL.key
    assert call(A, 0.0).key != call(A, -0.0).key
    twin = A._replace(address=A.address + 4096)
    assert call(A, twin).key != call(A, A).key
    assert call(A, A).key == call(twin, twin).key
    assert call(A, twin, A).key != call(A, A, twin).key


def test_constants_of_the_code_are_themselves() -> None:
    weight = torch.ones(4)
    assert call(weight).key == call(weight).key
    assert call(weight).key != call(torch.ones(4)).key


def test_one_tensor_is_one_operand() -> None:
    twin = A._replace()
    view = A._replace(stride=(1, 4))
    assert distinct([None, A, B, twin, 3, view]) == [1, 2, 5]
    assert distinct([A, B]) == [0, 1]
    assert call(A, B, twin, view).operands == [A, B, view]


def test_a_call_is_given_one_tensor_for_one_operand() -> None:
    seen: list[Any] = []

    def function(*given: Any, scale: float) -> list[Any]:
        seen.extend(given)
        return [given[0], torch.zeros(2), None]

    arguments = (A, 2, A, B, 0.5)
    spec = tree_flatten(((0, 0, 0, 0), {"scale": 0}))[1]
    event: Any = SimpleNamespace(kind=0, function=function, spec=spec)
    tensors = [torch.ones(1), torch.ones(2)]
    results = LibraryCall(event, arguments, 0).run(tensors)
    assert [seen[0] is tensors[0], seen[1], seen[2] is tensors[0], seen[3] is tensors[1]] == [
        True,
        2,
        True,
        True,
    ]
    assert [type(r) for r in results] == [torch.Tensor, type(None)], "what is an argument is no new result"
