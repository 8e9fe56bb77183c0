"""Both interpreters run a launch program alike: same memory, same words, same results, same errors."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
import threading
import types
import weakref
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_native import BOTH, CASE, SIDE, FakeDevice, arguments, in_c, in_python, made

from pgraph import compat
from pgraph.compat import lazy_bits
from pgraph.errors import DriverError
from pgraph.launch.guards import Guards, TensorGuard, TraitGuard
from pgraph.launch.lookup import PartKind, numbered
from pgraph.launch.native import native_launch, native_program
from pgraph.launch.program import Program, Result, Source
from pgraph.launch.views import view
from pgraph.native import libraries, structs
from pgraph.template.plan import GRANULE


@pytest.fixture(autouse=True, scope="module")
def _needed() -> None:
    if libraries.load_call() is None:
        pytest.skip("no C compiler or no Python headers, or PGRAPH_NATIVE=0")


CARRIED: dict[str, Any] = {
    "nodes": 6,
    "inputs": [(True, 0), (False, 2), (False, 4), (False, 6)],
    "memory": [
        *(("temp", 0, 3, 9), ("temp", 1, 0, 30), ("temp", 2, 2, 14)),
        *(("output", 3, 0, 20), ("temp", 4, 0, 30)),
    ],
    "slack": 0,
}
"""Three chunks, each of which releases an input; after the later ones, blocks of earlier ones are freed."""


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Nodes, inputs (kept, death), memory (kind, birth, length, rows), slack of the plan.

    Many have several chunks, and blocks that are freed after a later one than their first: these take
    several temporaries, and no slack.
    """
    memory = st.tuples(
        st.sampled_from([*["temp"] * 5, "output", "halves", "view", "same", "part"]),
        st.integers(0, 9),
        st.integers(0, 4),
        st.integers(1, 40),
    )
    return {
        "nodes": draw(st.integers(1, 10)),
        "inputs": [(True, 0), *draw(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=4))],
        "memory": draw(st.lists(memory, min_size=draw(st.sampled_from([6, 4, 0])), max_size=9)),
        "slack": draw(st.sampled_from([0, 0, 0, 4096, 1 << 20])),
        "workspace": draw(st.sampled_from([0, 1 << 20])),
        "saved": draw(st.booleans()),
    }


def by_path(case: dict[str, Any], path: Any) -> tuple[list[Any], list[Any], int]:
    """(events, inputs alive at each launch, results as (type, layout), rewritten) of two launches."""
    device = FakeDevice()
    program = made(device, case)
    call = path(program)
    seen: list[Any] = []
    inputs: list[weakref.ref[torch.Tensor]] = []
    device.at_launch = lambda: seen.append([tensor() is not None for tensor in inputs])
    rewritten = 0
    for _ in range(2):
        args = arguments(program)
        kept, inputs = args[1], [weakref.ref(tensor) for tensor in args[1:]]
        addresses = [tensor.data_ptr() for tensor in args[1:]]
        done = call(args)
        assert done is not None
        assert args == [42] + [None] * len(inputs)
        results, count, index = done
        assert index == 0
        del done  # it holds the results too
        rewritten += count
        for event in device.events:
            if event[0] == "launch":  # addresses of inputs are known, the others must be somewhere
                known = {r: b - addresses[r] for r, b in event[1].items() if r < len(inputs)}
                seen.append(("launch", known, sorted(event[1])))
            else:
                seen.append(event)
        device.events.clear()
        seen += [
            (tuple(r.shape), r.stride(), r.dtype, r.storage_offset()) if isinstance(r, torch.Tensor) else r
            for r in results
        ]
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        # Which are one object, and which count changes in place together.
        seen.append([[a is b for b in tensors] for a in tensors])
        seen.append([[compat.same_counter(a, b) for b in tensors] for a in tensors])
        view = results[1]
        assert torch.equal(view, kept.flatten()[2:10:2])
        assert results[2] is kept
        del results, view, tensors
        device.events.clear()
    assert not device.living
    return seen, [len(program.chunks)], rewritten


@given(case=cases())
@example(case=CARRIED)
@settings(max_examples=80)
def test_c_equals_python(case: dict[str, Any]) -> None:
    """Allocations, launches, frees and releases in the same order; equal sizes, results and counts."""
    assert by_path(case, in_c) == by_path(case, in_python)


@pytest.mark.parametrize("layout", ["unknown", "of another class", "a place with nothing"])
def test_without_handles_in_place_torch_makes_them(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note [Handles in place]: what is not seen to be a tensor is read as before."""
    offset, table = compat.tensor_layout()
    found = {"unknown": (0, 0), "of another class": (offset, table + 8), "a place with nothing": (32, table)}
    reference = by_path(CASE, in_python)
    shims = compat.tensor_shims()
    assert shims is not None
    handles_of, functions = shims
    asked: list[int] = []

    def counted(tensors: list[torch.Tensor]) -> list[Any]:
        asked.append(len(tensors))
        return handles_of(tensors)

    monkeypatch.setattr(compat, "tensor_shims", lambda: (counted, functions))
    assert by_path(CASE, in_c) == reference
    assert not asked, "where the place is known nobody asks"
    monkeypatch.setattr(compat, "tensor_layout", lambda: found[layout])
    assert by_path(CASE, in_c) == reference
    assert asked == [len(CASE["inputs"])] * 2, "once for each launch"


@pytest.mark.parametrize("layout", ["known", "unknown"])
@pytest.mark.parametrize("kind", ["parameter", "subclass", "number"])
def test_only_tensors_are_read_in_place(kind: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.Tensor):
        pass

    if layout == "unknown":
        monkeypatch.setattr(compat, "tensor_layout", lambda: (0, 0))
    device = FakeDevice()
    program = made(device, CASE)
    call = in_c(program)
    args = arguments(program)
    x = args[2]
    args[2] = {
        "parameter": lambda: torch.nn.Parameter(x),
        "subclass": lambda: x.as_subclass(Mine),
        "number": lambda: 3.0,
    }[kind]()
    assert (call(args) is not None) == (kind != "number")


def test_the_case_has_several_chunks_and_raw_memory() -> None:
    seen, (chunks,), _ = by_path(CASE, in_c)
    assert chunks >= 3, seen
    assert sum(event[0] == "launch" for event in seen if isinstance(event, tuple)) == 2 * chunks


@BOTH
@pytest.mark.parametrize(
    "wrong", ["value", "size", "stride", "alignment", "trait", "device", "capturing", "no tensor", "short"]
)
def test_wrong_arguments_are_declined_untouched(wrong: str, path: Any) -> None:
    if (wrong, path) in (("device", in_python), ("short", in_python)):
        pytest.skip("the path in Python makes the device current, and is never given a list that is short")
    device = FakeDevice()
    program = made(device, CASE, traits=(TraitGuard(2, lazy_bits, (False, False)),))
    call = path(program)
    args = arguments(program)
    if wrong == "trait":
        args[2] = torch._neg_view(args[2])
    elif wrong == "value":
        args[0] = 43
    elif wrong == "size":
        args[2] = torch.randn(SIDE, SIDE + 1)
    elif wrong == "stride":
        args[2] = torch.randn(SIDE, SIDE).t()
    elif wrong == "alignment":
        raw = torch.empty(SIDE * SIDE * 4 + 8, dtype=torch.uint8)
        args[3] = torch.frombuffer(raw.numpy(), dtype=torch.uint8, offset=2, count=SIDE * SIDE * 4)
        args[3] = torch.empty(0).set_(args[3].untyped_storage(), 0, (SIDE, SIDE), (SIDE, 1))
        assert args[3].data_ptr() % 4 == 2
    elif wrong == "no tensor":
        args[1] = None
    elif wrong == "short":
        args = args[:2]
    device.current = 1 if wrong == "device" else 0
    device.capturing_status = 1 if wrong == "capturing" else 0
    before = list(args)
    assert call(args) is None
    assert all(a is b for a, b in zip(args, before, strict=True))
    assert not device.events


@BOTH
@pytest.mark.parametrize("layout", ["known", "unknown"])
@pytest.mark.parametrize("needed", [4, 8, 16, 32, 64])
def test_every_bit_below_the_alignment_counts(
    needed: int, layout: str, path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address aligned to 8 bytes is no substitute for the one aligned to 16 that was captured."""
    if layout == "unknown":
        monkeypatch.setattr(compat, "tensor_layout", lambda: (0, 0))
    call = path(with_input(TensorGuard(1, (SIDE, SIDE), (SIDE, 1), needed - 1)))
    for low in (4, 8, 16, 32, 64):
        base = torch.randn(SIDE * SIDE + 32)
        start = next(k for k in range(32) if (a := base.data_ptr() + 4 * k) & -a == low)
        x = base[start : start + SIDE * SIDE].view(SIDE, SIDE)
        assert (call([42, x]) is not None) is (low >= needed), low


@BOTH
def test_a_trait_that_is_as_it_was_does_not_hinder(path: Any) -> None:
    program = made(FakeDevice(), CASE, traits=(TraitGuard(2, lazy_bits, (False, False)),))
    call = path(program)
    assert call(arguments(program)) is not None


@pytest.mark.parametrize("layout", ["known", "unknown"])
def test_a_trait_counts_however_tensors_are_read(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if layout == "unknown":
        monkeypatch.setattr(compat, "tensor_layout", lambda: (0, 0))
    for bits, launched in (((False, False), True), ((True, False), False)):
        program = made(FakeDevice(), CASE, traits=(TraitGuard(2, lazy_bits, bits),))
        assert (in_c(program)(arguments(program)) is not None) is launched


def with_input(guard: TensorGuard) -> Program:
    """A program of one input, of which this must hold."""
    program = made(FakeDevice(), {**CASE, "inputs": [(True, 0)]})
    return dataclasses.replace(program, guards=Guards((guard,), program.guards.values))


@BOTH
def test_strides_of_single_elements_do_not_matter(path: Any) -> None:
    call = path(with_input(TensorGuard(1, (SIDE * SIDE, 1), (1, 99), 3)))
    assert call([42, torch.randn(SIDE * SIDE, 1)]) is not None


@BOTH
@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_launch_raises_and_leaks_nothing(failing: int, path: Any) -> None:
    """Before anything has run the arguments come back; the error says which program it was, and if it had."""
    device = FakeDevice()
    program = made(device, CASE)
    call = path(made(device, CASE, side=SIDE + 1), program)
    device.fail_launch = failing
    args = arguments(program)
    before = list(args)
    with pytest.raises(DriverError, match="code 9") as caught:
        call(args)
    assert caught.value.pgraph_launch == (1, failing == 2)  # type: ignore[attr-defined]
    del caught  # its frames hold memory
    if failing == 1:
        assert all(a is b for a, b in zip(args, before, strict=True))
    assert not device.living
    gc.collect()
    sizes = [e[1] for e in device.events if e[0] == "alloc"]
    assert sorted(sizes) == sorted(e[1] for e in device.events if e[0] == "free")
    device.fail_launch = None
    assert call(arguments(program)) is not None


def test_memory_refused_is_asked_for_as_a_tensor_and_the_frameworks_error_shows() -> None:
    device = FakeDevice()
    program = made(device, CASE)
    call = in_c(program)
    device.refuse_raw = True
    assert call(arguments(program)) is not None
    device.refuse_all = True
    args = arguments(program)
    before = list(args)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        call(args)
    assert all(a is b for a, b in zip(args, before, strict=True))
    assert not device.living


def test_inputs_die_between_the_chunks() -> None:
    """The second input is released by the plan before the last launch."""
    device = FakeDevice()
    program = made(device, CASE)
    call = in_c(program)
    args = arguments(program)
    ref = weakref.ref(args[2])
    alive: list[bool] = []
    device.at_launch = lambda: alive.append(ref() is not None)
    assert call(args) is not None
    assert (alive[0], alive[-1]) == (True, False), alive


@BOTH
def test_each_launch_finds_alive_what_the_plan_says(path: Any) -> None:
    """Blocks that are carried from chunk to chunk, too: one freed early would be overwritten, or gone."""
    device = FakeDevice()
    program = made(device, CARRIED)
    plan = program.built.template.plan
    blocks, inputs = set[int](), dict.fromkeys(range(len(CARRIED["inputs"])), True)
    want, carried = [], []
    for chunk in plan.chunks:
        carried.append(blocks.intersection(chunk.free))
        blocks |= set(chunk.allocate)
        want.append((sum(plan.blocks[block].nbytes for block in blocks), list(inputs.values())))
        blocks -= set(chunk.free)
        inputs |= dict.fromkeys(chunk.release, False)
    assert len(want) == 3
    assert all(carried[1:]), "blocks that are freed after a later chunk"
    assert all(chunk.release for chunk in plan.chunks)

    call, args = path(program), arguments(program)
    given = [weakref.ref(tensor) for tensor in args[1:]]
    found: list[Any] = []

    def look() -> None:
        held = sum(
            (1 if what == "alloc" else -1) * -(-nbytes // GRANULE) * GRANULE
            for what, nbytes in device.events
            if what != "launch"
        )
        found.append((held, [tensor() is not None for tensor in given]))

    device.at_launch = look
    assert call(args) is not None
    assert found == want


def test_threads_launch_what_they_have_set() -> None:
    """One exec, several threads, different addresses: no launch mixes two threads' words."""
    device = FakeDevice()
    program = made(device, CASE)
    call = in_c(program)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(150):
                args = arguments(program)
                mine = args[1].data_ptr()
                keep = args[1]  # nobody else may get its address
                done = call(args)
                assert done is not None
                assert done[0][1].untyped_storage().data_ptr() == mine
                del keep
        except BaseException as e:
            problems.append(e)

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(old)
    assert not problems, problems
    launches = [e[1] for e in device.events if e[0] == "launch"]
    assert len(launches) == 4 * 150 * len(program.chunks)


def test_without_the_module_there_is_no_native_path(monkeypatch: pytest.MonkeyPatch) -> None:
    program = made(FakeDevice(), CASE)
    monkeypatch.setattr(libraries, "load_call", lambda: None)
    assert native_program(program) is None
    assert native_launch([None], numbered([program.guards])) is None


def test_an_exec_without_an_entry_keeps_the_python_path() -> None:
    program = made(FakeDevice(), CASE)
    good = native_program(program)
    program.built.recipes[0].entry = None
    assert native_program(program) is None
    assert native_launch([good, None], numbered([program.guards] * 2)) is None, (
        "all of a partition's programs, or none"
    )


def test_malformed_programs_are_errors() -> None:
    module = libraries.load_call()
    assert isinstance(module, types.ModuleType)
    with pytest.raises(TypeError):
        module.program(1, 2)
    with pytest.raises(AttributeError):
        module.program(1, 2, None)
    with pytest.raises((TypeError, ValueError)):
        module.call(object(), [])
    with pytest.raises(ValueError, match="PyCapsule"):
        module.call((object(),), [])


@pytest.mark.parametrize(
    "wrong", ["block", "input", "result", "region", "source", "view", "free", "release", "stride"]
)
def test_a_program_that_names_what_is_not_there_is_an_error(wrong: str) -> None:
    program = made(FakeDevice(), CASE)
    first, *rest = program.chunks
    bad = {
        "block": {"results": (Result(Source.BLOCK, program.n_blocks),)},
        "input": {"results": (Result(Source.INPUT, len(CASE["inputs"])),)},  # type: ignore[arg-type]
        "result": {"results": (Result(Source.RESULT, 0),)},
        "source": {"results": (Result(7, 0),)},  # type: ignore[arg-type]
        "view": {"results": (Result(Source.INPUT, 0, make=view, args=(1, 2, 3, 4)),)},
        "region": {"n_regions": 1},
        "free": {"chunks": (dataclasses.replace(first, free=(program.n_blocks,)), *rest)},
        "release": {"chunks": (dataclasses.replace(first, release=(-1,)), *rest)},
        "stride": {"guards": Guards((TensorGuard(1, (SIDE, SIDE), (SIDE,), 3),))},
    }[wrong]
    assert first.allocate or rest
    with pytest.raises(ValueError, match=r"result|launch program|view|layout"):
        native_program(dataclasses.replace(program, **bad))  # type: ignore[arg-type]


@BOTH
def test_results_that_are_one_tensor_stay_one(path: Any) -> None:
    """In a block with an earlier tenant, so that each would be a view of its own."""
    memory = [("temp", 0, 0, 4), ("same", 2, 0, 4), ("part", 3, 0, 4)]
    case = {"nodes": 6, "inputs": [(True, 0)], "memory": memory, "slack": 1 << 20}
    program = made(FakeDevice(), case)
    done = path(program)(arguments(program))
    assert done is not None
    *_, first, again, whole, partition = done[0]
    assert first is again
    assert first.untyped_storage().nbytes() > 0
    assert partition.shape == (4, 1)
    assert partition.data_ptr() == whole.data_ptr() + 8
    whole.add_(1)
    assert partition._version == whole._version == 1


@given(cases=st.lists(cases(), min_size=2, max_size=4), turns=st.lists(st.integers(0, 4), max_size=12))
@settings(max_examples=25)
def test_every_program_is_launched_by_both(cases: list[dict[str, Any]], turns: list[int]) -> None:
    """Sizes in any order, one among them that no program is for."""

    def launches(path: Any) -> list[Any]:
        devices = [FakeDevice() for _ in cases]
        programs = [
            made(d, {**c, "inputs": cases[0]["inputs"]}, side=SIDE + i)
            for i, (d, c) in enumerate(zip(devices, cases, strict=True))
        ]
        call = path(*programs)
        found: list[Any] = []
        for turn in turns:
            done = call(arguments(programs[0], SIDE + turn))
            found.append(done if done is None else (len(done[0]), done[2]))
            found.append([device.launches for device in devices])
        return found

    seen = launches(in_c)
    assert seen == launches(in_python)
    for turn, done in zip(turns, seen[::2], strict=True):
        assert (done is None) == (turn >= len(cases))
        assert done is None or done[1] == turn


def test_what_c_numbers_is_what_python_numbers() -> None:
    module = libraries.load_call()
    for numbered_there in (Source, PartKind):
        assert {x.name: getattr(module, x.name) for x in numbered_there} == {
            x.name: x for x in numbered_there
        }


def test_structs_of_another_size_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(structs.SlotEntry):
        _fields_: ClassVar[Any] = [("more", ctypes.c_int64)]

    library = libraries.load()
    assert library is not None
    structs.check_sizes(library)
    monkeypatch.setattr(structs, "_IN_ORDER", (*structs._IN_ORDER[:4], Longer, *structs._IN_ORDER[5:]))
    with pytest.raises(OSError, match="Longer has 24 bytes in Python and 16 in C"):
        structs.check_sizes(library)
