"""Pointers beyond their region: each hazard with its cure and, to prove that the check can fail, without."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import host, launching, same, shows
from torch import Tensor

import pgraph
from pgraph.drivers.host import arena, nodes
from pgraph.drivers.host import driver as host_driver
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.drivers.interface import UNIT
from pgraph.template import match
from pgraph.template.template import Slot

SCRATCH = host_driver._SCRATCH
GUARD = arena._GUARD
GARBAGE = 2
# From the end of an op's scratch to the op's result, which the first capture places right behind it.
TO_THE_RESULT = 3 * UNIT - SCRATCH
DISTANCES = [16, TO_THE_RESULT, -2 * UNIT, 1 << 30, 1 << 44, -(1 << 44)]

Sabotage = Callable[[pytest.MonkeyPatch], None]


def one_layout(patch: pytest.MonkeyPatch) -> None:
    """Two captures whose ranges all lie equally far apart."""
    real = host_driver.HostArena.__init__
    patch.setattr(host_driver.HostArena, "__init__", lambda self, layout: real(self, 0))


def where_it_lands(patch: pytest.MonkeyPatch) -> None:
    """A pointer is taken for one into the region that is nearest to it."""

    def nearest(self: Any, word: Any, value: int, other: int, regions: Any) -> Slot:
        def distance(i: int) -> int:
            r = self._a.allocations[i]
            return max(r.address - value, value - r.address - r.nbytes, 0)

        found = min(range(len(self._a.allocations)), key=distance)
        return Slot(word.node, word.offset, found, value - self._a.allocations[found].address)

    patch.setattr(match._Matcher, "_following", nearest)


def inside_only(patch: pytest.MonkeyPatch) -> None:
    """A pointer beyond its region is taken for padding."""
    real = match._Matcher._following

    def near(self: Any, *args: Any) -> Slot | None:
        slot = real(self, *args)
        size = self._a.allocations[slot.region].nbytes if slot is not None else 0
        return slot if slot is not None and 0 <= slot.delta <= size else None

    patch.setattr(match._Matcher, "_following", near)


@pytest.fixture(autouse=True)
def no_ghost_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that would read or write a ghost, and crash, fails the check instead."""
    ranges: list[tuple[int, int]] = []
    make, at = host_driver.HostArena.__init__, nodes._tensor_at

    def noting(self: Any, layout: int) -> None:
        make(self, layout)
        ranges.append((self.low, self.high))

    def guarded(address: int, *layout: Any) -> Tensor:
        assert not any(low <= address < high for low, high in ranges), "a launch would touch a ghost"
        return at(address, *layout)

    monkeypatch.setattr(host_driver.HostArena, "__init__", noting)
    monkeypatch.setattr(nodes, "_tensor_at", guarded)


def fn(x: Tensor, y: Tensor) -> Tensor:
    b = (x @ y) + 1
    c = b * y
    del b
    return (c @ x).cumsum(0)


def run(faults: HostFaults, after: Callable[[], None] = lambda: None) -> None:
    """Right results by launches, with everything at a new address in each call."""
    compiled, held = host(fn), []
    with inject(faults):
        for call in range(5):
            x, y = torch.randn(4, 4), torch.randn(4, 4)
            with launching(1 if call >= 2 else 0):
                held += [x, y, compiled(x, y)]
            same(held[-1], fn(x, y), rtol=1e-5, atol=1e-5)
            if call >= 2:
                after()
            held += places()


def places() -> list[Tensor]:
    """Tensors where the last launch had its memory, as far as the allocator gives it to the next who ask."""
    (partition,) = pgraph.runtime.registry.live_capturable()[:1]
    return [
        torch.empty(allocation.size, dtype=allocation.dtype)
        for specialization in partition.specializations()
        if specialization.program is not None
        for chunk in specialization.program.chunks
        for allocation in chunk.allocate
        for _ in range(2)
    ]


def words_of_products() -> list[tuple[int, int]]:
    """Per product, as the last launch set them: the addresses of its scratch and of the absent operand."""
    (specialization,) = pgraph.runtime.registry.live_capturable()[0].specializations()
    found, scratch = [], 0
    for exec_ in specialization.built.execs:
        for node, params in zip(exec_._nodes, exec_._params, strict=True):
            if node.name == "scratch":
                (scratch,) = struct.unpack_from("=Q", params)
            elif node.name == "mm":
                found.append((scratch, struct.unpack_from("=Q", params, len(params) - 8 * (GARBAGE + 1))[0]))
    return found


def follows(distance: int) -> None:
    """The absent operand's address lies as far past the end of today's scratch as eager would compute it."""
    seen = []

    def look() -> None:
        found = words_of_products()
        assert len(found) == 2
        for scratch, word in found:
            assert word == (scratch + SCRATCH + distance) % 2**64
        seen.append(tuple(word for _, word in found))

    run(HostFaults(beyond={"mm": distance}, garbage=GARBAGE), look)
    assert len(set(seen)) > 1, "nothing has moved"


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_address_of_an_absent_operand_follows_the_scratch(distance: int) -> None:
    """In a gap, in a neighbour, or out of all ghosts: nothing is read there, and nothing is refused."""
    follows(distance)


@pytest.mark.parametrize("sabotage", [one_layout, where_it_lands, inside_only])
def test_without_the_cure_it_does_not(sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)
    shows(lambda: follows(TO_THE_RESULT), cured=False)


def test_it_leads_into_the_neighbour_of_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sabotage above makes use of: the result of the product begins there, in the first capture."""
    seen = []
    real = match._Matcher._following

    def note(self: Any, word: Any, value: int, *more: Any) -> Any:
        slot = real(self, word, value, *more)
        if word.record.name == "mm" and word.offset == len(word.record.params) - 8:
            seen.append((self._map_a.find(value), slot))
        return slot

    monkeypatch.setattr(match._Matcher, "_following", note)
    run(HostFaults(beyond={"mm": TO_THE_RESULT}))
    assert len(seen) == 2
    for (landed, delta), slot in seen:
        assert (landed, delta) == (slot.region + 1, 0)
        assert slot.delta == SCRATCH + TO_THE_RESULT


@pytest.mark.parametrize("back", [64, GUARD, 3 * UNIT, 1 << 44, -64, -3 * UNIT, -(1 << 44)])
def test_pointers_that_count_from_far_off(back: int) -> None:
    """These are used: the kernel adds the rest, and what it reads there are its operands."""
    run(HostFaults(origin={"mm": back, "mul": -back}))
    (specialization,) = pgraph.runtime.registry.live_capturable()[0].specializations()
    assert f"=r0{-back:+d}" in specialization.built.template.render()


@pytest.mark.parametrize("sabotage", [one_layout, inside_only])
@pytest.mark.parametrize("back", [3 * UNIT, -(1 << 44)])
def test_without_the_cure_they_name_other_memory(
    back: int, sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    shows(lambda: run(HostFaults(origin={"mm": back})), cured=False)


def test_every_misbehaviour_at_once() -> None:
    """Tables, merged scratch and garbage do not hide it, nor it them."""
    faults = HostFaults(
        garbage=2,
        stale=True,
        tables=frozenset({"cumsum"}),
        scratch=frozenset({"mm"}),
        beyond={"mm": TO_THE_RESULT, "mul": -5 * UNIT},
        origin={"add": 4 * UNIT},
    )
    run(faults)
