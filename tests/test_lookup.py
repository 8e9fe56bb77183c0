"""What is for today's sizes is found in one step, and nothing that fits is ever missed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import host
from support_native import CASE, FakeDevice, in_c, in_python, made
from torch import Tensor
from torch._subclasses import FakeTensorMode

from pgraph.compat import lazy_bits
from pgraph.launch.guards import Guards, TensorGuard, TraitGuard, ValueGuard
from pgraph.launch.lookup import Lookup, PartKind, numbered
from pgraph.launch.native import native_addresses
from pgraph.launch.program import Program
from pgraph.native import libraries
from pgraph.runtime import cache, registry
from pgraph.runtime.keeping import WAITING

SMALL = st.integers(0, 3)
NUMBERS = (-1, 0, 1, True, 1.0, 0.0, -0.0, 2.5, 1 << 70)


@st.composite
def guards(draw: st.DrawFn) -> Guards:
    """Of a number at 0 and two tensors at 1 and 2; seldom of fewer, or with other dimensions."""
    tensors = []
    for position in (1, 2) if draw(st.integers(0, 9)) else (1,):
        ndim = 2 if draw(st.integers(0, 9)) else 1
        size = tuple(draw(SMALL) for _ in range(ndim))
        stride = (draw(st.sampled_from([1, 5, 9])), 1)[-ndim:]
        tensors.append(TensorGuard(position, size, stride, draw(st.sampled_from([0, 15, 63]))))
    trait = (TraitGuard(1, lazy_bits, (False, draw(st.booleans()))),) if draw(st.booleans()) else ()
    return Guards(
        tuple(tensors),
        (ValueGuard(0, draw(st.sampled_from([-1, 0, 1, True, 1.0, 0.0, -0.0, 2.5, 1 << 70]))),),
        trait,
    )


def arguments_of(guards: Guards, shift: int) -> list[Any]:
    """Arguments for which these guards hold, but for the alignment: `shift` bytes past an aligned address."""
    args: list[Any] = [guards.values[0].value, None, None]
    for guard in guards.tensors:
        memory = torch.zeros(256, dtype=torch.uint8)
        start = -memory.data_ptr() % 64 + shift
        args[guard.position] = memory[start:].as_strided(guard.size, guard.stride)
    for told in guards.traits:
        if told.value[1]:
            args[told.position] = torch._neg_view(args[told.position])
    return args


@pytest.fixture(scope="module")
def program() -> Program:
    case = {**CASE, "inputs": [(True, 0)], "nodes": 1, "memory": []}
    return made(FakeDevice(), case)


def serves(program: Program, all_guards: Sequence[Guards]) -> tuple[Any, Any]:
    """The programs with these guards in both interpreters: which of them serves arguments, or None."""

    def which(path: Any) -> Any:
        device = program.built.driver
        programs = [
            dataclasses.replace(program, guards=g, chunks=(), results=(), n_regions=2, n_blocks=0)
            for g in all_guards
        ]
        call = path(*programs)
        assert device is not None

        def number(args: list[Any]) -> int | None:
            done = call(list(args))
            return None if done is None else done[2]

        return number

    return which(in_c), which(in_python)


@given(known=st.lists(guards(), min_size=1, max_size=12), more=st.lists(guards(), max_size=4), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_first_that_fits_is_found(
    known: list[Guards], more: list[Guards], data: st.DataObject, program: Program
) -> None:
    """In C and in Python, as if all of them were tried one after the other."""
    lookup = numbered(known)
    in_c_, in_python_ = serves(program, known) if libraries.load_call() is not None else (None, None)
    for mine in (*known, *more):
        args = arguments_of(mine, data.draw(st.sampled_from([0, 0, 1, 16])))
        right = [i for i, g in enumerate(known) if g.addresses(args) is not None]
        found = [i for _, i in lookup.candidates(args)]
        assert found == sorted(found)
        assert [i for i in found if known[i].addresses(args) is not None] == right
        if in_c_ is not None:
            assert in_c_(args) == in_python_(args) == next(iter(right), None)


def test_strides_of_single_elements_are_not_in_the_key(program: Program) -> None:
    """Guards do not look at them."""
    layouts = [((3, 2), (5, 1)), ((3, 2), (9, 1)), ((1, 2), (9, 1)), ((0, 2), (9, 1))]
    known = [Guards((TensorGuard(1, *layout, 0),), (ValueGuard(0, 42),)) for layout in layouts]
    assert [part.number for part in numbered(known).parts] == [PartKind.STRIDE, PartKind.SIZE]
    calls = serves(program, known) if libraries.load_call() is not None else ()
    memory = torch.randn(64)
    cases = [((3, 2), (9, 1), 1), ((1, 2), (7, 1), 2), ((0, 2), (7, 1), 3), ((3, 2), (7, 1), None)]
    for size, stride, right in cases:
        args = [42, memory.as_strided(size, stride)]
        found = [i for _, i in numbered(known).candidates(args) if known[i].addresses(args) is not None]
        assert found == ([] if right is None else [right])
        assert [call(args) for call in calls] == [right] * len(calls)


@given(known=st.lists(guards(), min_size=1, max_size=8), gone=st.sets(st.integers(0, 7)))
def test_what_was_discarded_is_not_found(known: list[Guards], gone: set[int]) -> None:
    lookup: Lookup[str] = Lookup()
    names = [f"number {i}" for i in range(len(known))]
    for mine, name in zip(known, names, strict=True):
        lookup.add(mine, name)
    for i in gone & set(range(len(known))):
        lookup.discard(known[i], names[i])
    for i, mine in enumerate(known):
        found = [name for _, name in lookup.candidates(arguments_of(mine, 0))]
        assert (names[i] in found) == (i not in gone)


def sized(*size: int, **more: Any) -> Guards:
    return Guards((TensorGuard(0, (7, 7), (7, 1), 15), TensorGuard(1, size, (size[-1], 1), 15)), **more)


@settings(deadline=None)
@given(
    known=st.lists(guards(), max_size=8),
    more=st.lists(guards(), max_size=4),
    gone=st.sets(st.integers(0, 7)),
)
def test_a_lookup_after_another_is_as_one_from_nothing(
    known: list[Guards], more: list[Guards], gone: set[int]
) -> None:
    before = numbered(known)
    now = [g for i, g in enumerate(known) if i not in gone] + more
    lookup, fresh = numbered(now, before), numbered(now)
    assert (lookup.parts, lookup.entries) == (fresh.parts, fresh.entries)
    assert [lookup.key(g) for g in now] == [fresh.key(g) for g in now]
    for mine, anew, all_guards in ((lookup, fresh, now), (before, numbered(known), known)):
        for one in all_guards:
            arguments = arguments_of(one, 0)
            assert mine.candidates(arguments) == anew.candidates(arguments)


def test_what_was_there_is_not_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the hundredth size takes a hundred times as long to add as the first."""
    known = [Guards((TensorGuard(0, (n, 2), (2, 1), 15),)) for n in range(2, 100)]
    before, added = numbered(known), []
    add = Lookup.add
    monkeypatch.setattr(Lookup, "add", lambda self, *entry: added.append(entry) or add(self, *entry))
    numbered([*known, new := Guards((TensorGuard(0, (1, 2), (2, 1), 15),))], before)
    assert added == [(new, len(known))]
    added.clear()
    numbered([*known[1:], new], before)
    assert len(added) == len(known), "the numbers of all have changed"


def test_only_what_differs_is_read() -> None:
    """Of a hundred sizes each is the only candidate, by one number or by two."""
    one = numbered(sized(n, 8) for n in range(2, 102))
    assert [(part.number, part.position, part.dim) for part in one.parts] == [(PartKind.SIZE, 1, 0)]
    assert [i for _, i in one.candidates([None, torch.empty(52, 8)])] == [50]
    two = numbered(sized(n, m) for n in range(2, 12) for m in range(2, 12))
    assert len(two.parts) == 2
    assert [i for _, i in two.candidates([None, torch.empty(5, 9)])] == [37]
    values = numbered(sized(4, 4, values=(ValueGuard(2, n),)) for n in range(9))
    assert [part.number for part in values.parts] == [PartKind.VALUE]
    assert [i for _, i in values.candidates([None, None, 6.0])] == [6]


def test_guards_of_another_size_take_little_memory() -> None:
    """What they have in common is there once; what differs stays their own."""
    one, other = sized(4, 4), sized(5, 4)
    alike = other.alike(one)
    assert alike == other
    assert alike.shape is one.shape
    assert alike.tensors[0] is one.tensors[0]
    deeper = sized(5, 4, 4)
    assert deeper.alike(one).shape == deeper.shape != one.shape


def test_what_a_key_cannot_tell_apart_is_tried_in_turn() -> None:
    aligned, loose = sized(4, 4), Guards(tuple(dataclasses.replace(g, mask=3) for g in sized(4, 4).tensors))
    lookup = numbered([aligned, sized(5, 4), loose])
    assert [i for _, i in lookup.candidates([None, torch.empty(4, 4)])] == [0, 2]


def test_arguments_of_another_kind_fit_nothing() -> None:
    lookup = numbered([sized(4, 4), sized(5, 4)])
    for args in ([], [None, 3], [None, torch.empty(())], [None, None]):
        assert not lookup.candidates(args)
    assert not numbered([sized(4, 4, values=(ValueGuard(2, n),)) for n in (1, 2)]).candidates(
        [None, None, []]
    )


@pytest.mark.parametrize("parts", [((),), ((), ()), ((), ((1,),), ())])
def test_malformed_sets_are_errors(parts: tuple[Any, ...], program: Program) -> None:
    module = libraries.load_call()
    if module is None:
        pytest.skip("no C compiler or no Python headers, or PGRAPH_NATIVE=0")
    with pytest.raises((TypeError, ValueError), match="program"):
        module.programs(*parts)


def test_guards_alone_are_not_launched(program: Program) -> None:
    module = libraries.load_call()
    if module is None:
        pytest.skip("no C compiler or no Python headers, or PGRAPH_NATIVE=0")
    addresses: Any = native_addresses(program.built.driver)(program.guards)
    x = torch.randn(program.guards.tensors[0].size)
    assert addresses([42, x]) == [x.data_ptr()]
    assert addresses([41, x]) is None
    (capsule,) = addresses.args
    with pytest.raises(ValueError, match="PyCapsule"):
        module.programs((), ((),), (capsule,))


def test_tensors_that_lie_nowhere_have_no_addresses(program: Program) -> None:
    """Neither in C nor in Python, which agree on what else is no ordinary tensor."""
    x = torch.randn(program.guards.tensors[0].size)
    seen: list[Any] = []

    def look(one: Tensor) -> Tensor:
        for addresses in (native_addresses(program.built.driver)(program.guards), program.guards.addresses):
            seen.append(addresses([42, one]))
        return one

    torch.vmap(look)(torch.stack([x, x]))
    assert seen == [None] * 2
    look(FakeTensorMode().from_tensor(x))
    torch.func.functionalize(look)(x)
    look(x)
    assert seen[::2] == seen[1::2]
    assert seen[-1] == [x.data_ptr()]


# -- in a partition --------------------------------------------------------------------------------


def test_a_captured_size_is_found_by_what_its_program_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What C reads of the inputs is read once: the very guards of a specialization are its program's."""
    given: list[Any] = []
    real = cache.native_program

    def seen(program: Program, calls: Any, addresses: Any) -> Any:
        given.append(addresses)
        return real(program, calls, addresses)

    monkeypatch.setattr(cache, "native_program", seen)
    compiled = host(lambda x: torch.tanh(x @ x.T) + 1, dynamic=True, step_aside=False)
    for n in (3, 5, 7) * 3:
        compiled(torch.randn(n, 4))
    captured = [s for p in registry.live_capturable() for s in p.specializations() if s.program is not None]
    assert [s.addresses for s in captured] == given
    assert len(captured) == 3
    assert all(s.program.guards is s.guards for s in captured if s.program is not None)


def test_a_size_that_waits_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guards are made when it comes for the first time, and never again."""
    made_of: list[Any] = []
    original = cache.guards_of

    def counted(args: Sequence[Any], *rest: Any) -> Guards | None:
        made_of.append(args[0].size(0) if isinstance(args[0], Tensor) else None)
        return original(args, *rest)

    monkeypatch.setattr(cache, "guards_of", counted)
    compiled = host(lambda x: (x + 1).cumsum(0), dynamic=True, warmup=100)
    for n in (3, 4, 5) * 6:
        compiled(torch.randn(n, 2))
    assert len(made_of) == 3
    (partition,) = registry.live_capturable()
    assert [s.standing.runs for s in partition.specializations()] == [6, 6, 6]
    assert [s.guards.tensors[0].size[0] for s in partition.specializations()] == [3, 4, 5]


def test_what_is_aligned_better_is_another_specialization() -> None:
    """Although guards that ask for less would let it in."""
    compiled = host(lambda x: (x + 1).cumsum(0), dynamic=True, warmup=100)
    memory = torch.randn(256)
    first = -memory.data_ptr() % 256 // 4
    for start, times in ((1, 2), (0, 3), (1, 1)):
        for _ in range(times):
            compiled(memory[first + start :][:8])
    (partition,) = registry.live_capturable()
    assert [s.standing.runs for s in partition.specializations()] == [3, 3]
    best, loose = (s.guards.tensors[0].mask for s in partition.specializations())  # the latest comes last
    assert best > loose


def test_sizes_that_wait_are_forgotten_in_order() -> None:
    compiled = host(lambda x: (x + 1).cumsum(0), dynamic=True, warmup=1000)
    for n in range(2, 2 + WAITING + 3):
        compiled(torch.randn(n))
        compiled(torch.randn(2))  # asked for all the time
    (partition,) = registry.live_capturable()
    known = [s.guards.tensors[0].size[0] for s in partition.specializations()]
    assert len(known) == WAITING
    assert 2 in known
    assert {3, 4, 5}.isdisjoint(known)
