"""Memory of launches in both interpreters: workspaces that are lent, small blocks; and where time goes."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import shutil
from typing import Any

import pytest
import torch
from support_native import BOTH, CASE, SIDE, FakeDevice, arguments, in_c, made

from pgraph import compat
from pgraph.launch import allocations
from pgraph.launch.allocations import (
    LARGE_PEAK,
    PIECE_MOST,
    RESULT_MOST,
    RESULTS_MOST,
    Allocation,
    apart,
    in_pieces,
    piece_of,
    smallest,
)
from pgraph.launch.lookup import numbered
from pgraph.launch.native import PHASES, native_launch, native_program, time_calls
from pgraph.launch.program import Result, Source, program_of
from pgraph.launch.views import view
from pgraph.native import libraries
from pgraph.template.lifetimes import Pairs
from pgraph.template.recording import TensorSpec


@pytest.fixture(autouse=True, scope="module")
def _needed() -> None:
    if libraries.load_call() is None:
        pytest.skip("no C compiler or no Python headers, or PGRAPH_NATIVE=0")


SMALL = {
    "nodes": 6,
    "inputs": [(True, 0)],
    "memory": [("temp", i % 4, 2, 5 + i) for i in range(12)] + [("output", 5, 0, 4), ("temp", 1, 1, 1 << 15)],
    "slack": 1 << 30,
}


@BOTH
def test_small_blocks_of_a_chunk_come_in_one_piece(path: Any) -> None:
    device = FakeDevice()
    program = made(device, SMALL)
    call = path(program)
    assert call(arguments(program)) is not None
    blocks = program.built.template.plan.blocks
    small = [b for b in blocks if b.nbytes <= 512 << 10]
    assert len(small) > 3, "one chunk, and more than one block"
    sizes = [event[1] for event in device.events if event[0] == "alloc"]
    assert len(sizes) == 3, f"the result, the large temporary, and all others: {sizes}"
    assert not device.living
    (bases,) = (event[1] for event in device.events if event[0] == "launch")
    regions = [r for r in program.built.template.regions if r.kind == "temp"]
    for a in regions:
        for b in regions:
            if a.index < b.index and a.birth < b.death and b.birth < a.death:
                apart = (
                    bases[a.index] + a.nbytes <= bases[b.index] or bases[b.index] + b.nbytes <= bases[a.index]
                )
                assert apart, f"regions {a} and {b} share bytes"


SAVED = {
    "nodes": 6,
    "inputs": [(True, 0)],
    "memory": [
        *(("output", i % 4, 0, 5 + i) for i in range(6)),
        *(("halves", i % 3, 0, 3 + i) for i in range(6)),
        ("output", 2, 0, 1 << 16),
        ("part", 2, 0, 7),
        ("same", 3, 0, 6),
        ("view", 3, 0, 9),
        ("temp", 1, 2, 5),
        ("temp", 1, 2, 6),
    ],
    "slack": 1 << 30,
    "saved": True,
}


@BOTH
def test_small_results_that_are_saved_come_in_one_piece(path: Any) -> None:
    """Each lies where the kernels wrote it and touches no other one; a large one has memory of its own."""
    device = FakeDevice()
    program = made(device, SAVED)
    results, *_ = path(program)(arguments(program))
    sizes = [event[1] for event in device.events if event[0] == "alloc"]
    assert len(sizes) == 5, (
        f"small results, the large one, two that others are views of, temporaries: {sizes}"
    )
    (bases,) = (event[1] for event in device.events if event[0] == "launch")
    owned: set[int] = set()
    for position, (result, spec) in enumerate(zip(results, program.built.template.outputs, strict=True)):
        if spec.region is None:
            continue
        start, nbytes = result.data_ptr(), result.numel() * result.element_size()
        assert spec.layout is not None
        assert start == bases[spec.region] + spec.layout.offset
        if position not in program.shared:
            continue
        place = bases[spec.region] - result.untyped_storage().data_ptr()
        assert place % 512 == 0, "as the allocator aligns them"
        assert owned.isdisjoint(range(start, start + nbytes))
        owned |= set(range(start, start + nbytes))
        assert result.untyped_storage().nbytes() > nbytes + 512
        assert nbytes <= RESULT_MOST
    assert len(program.shared) == 13
    del results, result
    assert not device.living


@pytest.mark.parametrize(
    ("size", "stride"), [((5, 4), (8, 1)), ((0, 8), (8, 1))], ids=["with-gaps", "without-elements"]
)
def test_a_result_with_gaps_or_without_elements_has_memory_of_its_own(size: Any, stride: Any) -> None:
    """What is copied out of a piece would come out without its gaps."""
    program = made(FakeDevice(), SAVED)
    position, *others = program.shared
    outputs = list(program.built.template.outputs)
    layout = outputs[position].layout
    assert layout is not None
    layout = layout._replace(size=size, stride=stride)
    outputs[position] = outputs[position]._replace(layout=layout)
    template = dataclasses.replace(program.built.template, outputs=tuple(outputs))
    built = dataclasses.replace(program.built, template=template)
    again = program_of(built, program.guards, dict.fromkeys(program.shared, 0), 8 << 20)
    assert list(again.shared) == others


def _saved(block: int, nbytes: int) -> Allocation:
    return Allocation(block, (nbytes,), (1,), torch.uint8, 0, Pairs([(block + 10, 0)]))


def test_results_that_die_one_after_the_other_share_a_piece() -> None:
    """In whatever order they are allocated: then at most one piece is kept for some of its tenants alone."""
    nbytes = PIECE_MOST // 2
    blocks = [_saved(block, nbytes) for block in range(5)]
    made, places = in_pieces(blocks, (), dict.fromkeys((3, 0, 4, 1, 2), nbytes))
    assert places == {3: (3, 0), 0: (3, nbytes), 4: (4, 0), 1: (4, nbytes)}
    assert [(a.block, a.size) for a in made] == [
        (2, (nbytes,)),
        (3, (PIECE_MOST,)),
        (4, (PIECE_MOST,)),
    ]
    assert made[1].tenants == ((13, 0), (10, nbytes))


def test_a_piece_is_no_larger_than_it_may_be() -> None:
    """Neither of results nor of temporaries, whose sizes do not add up to just that."""
    nbytes, most = 3 * 512, 8 * 512
    results = [_saved(block, nbytes) for block in range(5)]
    made, places = in_pieces(results, (), dict.fromkeys(range(5), nbytes), most)
    assert [(a.block, a.size[0]) for a in made] == [(0, 2 * nbytes), (2, 2 * nbytes), (4, nbytes)]
    assert places == {0: (0, 0), 1: (0, nbytes), 2: (2, 0), 3: (2, nbytes)}
    nbytes = 3 * PIECE_MOST // 8
    temporaries = [_saved(block, nbytes)._replace(raw=nbytes) for block in range(5)]
    made, _ = in_pieces(temporaries, range(5), {})
    assert [(a.block, a.raw) for a in made] == [(0, 2 * nbytes), (2, 2 * nbytes), (4, nbytes)]


def test_gradients_share_a_piece_with_those_of_about_their_size() -> None:
    """Whoever keeps one holds at most eight times its memory; and a piece is no larger than another."""
    sizes = {0: 512, 1: 8 * 512, 2: 512, 3: 2 * 512, 4: 5 * 512, 5: 512, 6: 7 * 512}
    blocks = [_saved(block, nbytes) for block, nbytes in sizes.items()]
    made, places = in_pieces(blocks, (), {}, gradients=sizes)
    assert [(a.block, a.size[0]) for a in made] == [(0, 5 * 512), (1, 20 * 512)]
    assert places == {
        0: (0, 0),
        2: (0, 512),
        3: (0, 2 * 512),
        5: (0, 4 * 512),
        1: (1, 0),
        4: (1, 8 * 512),
        6: (1, 13 * 512),
    }
    large = [_saved(block, PIECE_MOST // 2) for block in range(3)]
    made, _ = in_pieces(large, (), {}, gradients=dict.fromkeys(range(3), PIECE_MOST // 2))
    assert [(a.block, a.size[0]) for a in made] == [(0, PIECE_MOST), (2, PIECE_MOST // 2)]


def test_pieces_follow_the_order_in_which_results_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocations, "PIECE_MOST", 2048)
    monkeypatch.setattr(allocations, "RESULTS_MOST", 2048)
    program = made(FakeDevice(), SAVED)
    pieces: dict[int, list[int]] = {}
    for position in program.shared:
        pieces.setdefault(program.results[position].index, []).append(7 * position % 17)
    spans = sorted((min(deaths), max(deaths)) for deaths in pieces.values())
    assert len(spans) >= 3, spans
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(spans)), spans


def test_all_small_results_share_memory_where_a_piece_may_be_kept_longer() -> None:
    sizes = dict.fromkeys(range(100), 256 << 10)
    assert smallest({**sizes, 100: RESULT_MOST + 512}, PIECE_MOST, 1) == frozenset(sizes)
    assert smallest(sizes, PIECE_MOST - 1, 1) == {0, 1, 2}
    assert smallest(sizes, PIECE_MOST, 2) == {0, 1, 2, 3}


def test_pieces_are_as_large_as_there_is_room_for() -> None:
    """One for each chunk may be kept longer than needed."""
    assert piece_of(8 << 20, 1, LARGE_PEAK) == piece_of(1 << 30, 2, LARGE_PEAK) == RESULTS_MOST
    assert piece_of(8 << 20, 2, LARGE_PEAK) == 4 << 20
    assert piece_of(10_000_000, 3, LARGE_PEAK) == 3_333_120, "whole granules"
    assert piece_of(PIECE_MOST, 2, LARGE_PEAK) == piece_of(0, 1, LARGE_PEAK) == PIECE_MOST
    assert piece_of(8 << 20, 1, LARGE_PEAK - 1) == PIECE_MOST, "small programs take no large segments"
    blocks = [_saved(block, RESULT_MOST) for block in range(6)]
    made, places = in_pieces(blocks, (), dict.fromkeys(range(6), RESULT_MOST), 4 << 20)
    assert [(a.block, a.size[0]) for a in made] == [(0, 4 << 20), (4, 2 << 20)]
    assert places[3] == (0, 3 << 20)
    assert places[5] == (4, 1 << 20)


def test_the_smallest_results_share_memory() -> None:
    sizes = {block: 512 * (100 - block) for block in range(100)}
    assert smallest(sizes, 8 << 20, 1) == frozenset(sizes)
    assert smallest({**sizes, 100: RESULT_MOST + 512}, 8 << 20, 1) == frozenset(sizes)
    assert smallest(sizes, 512 * 6, 1) == {97, 98, 99}, "of 1,536, 1,024 and 512 bytes"
    assert smallest(sizes, 511, 1) == smallest({}, 8 << 20, 1) == frozenset()


def test_results_come_out_of_their_piece_with_their_values() -> None:
    device = FakeDevice()
    program = made(device, SAVED)
    results, *_ = in_c(program)(arguments(program))
    shared = [results[position] for position in program.shared]
    for i, result in enumerate(shared):
        result.fill_(i)
    apart(results, program.shared)
    for i, position in enumerate(program.shared):
        result = results[position]
        assert (result == i).all()
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()
        assert (result.size(), result.stride()) == (shared[i].size(), shared[i].stride())


@pytest.mark.parametrize("case", [SMALL, CASE, SAVED])
def test_tensors_made_in_cpp_are_those_that_python_makes(case: dict[str, Any]) -> None:
    found: dict[int | None, Any] = {}
    for maker in (None, -1):
        device = FakeDevice()
        device.made_on = maker
        done = in_c(program := made(device, case))(arguments(program))
        assert done is not None
        tensors = [r for r in done[0] if isinstance(r, torch.Tensor)]
        fresh = [i not in program.shared for i, r in enumerate(done[0]) if isinstance(r, torch.Tensor)]
        found[maker] = [
            (
                *(type(t), t.shape, t.stride(), t.dtype, t.device, t.storage_offset()),
                *(t.untyped_storage().nbytes(), t.requires_grad, t._is_view(), t.is_leaf),
                t._version if counted else None,  # in Python one more: a piece is of another type
            )
            for t, counted in zip(tensors, fresh, strict=True)
        ]
        blocks = [block for chunk in program.chunks for block in chunk.allocate]
        raw = sum(block.raw > 0 for block in blocks)
        allocated = sum(event[0] == "alloc" for event in device.events)
        assert allocated == (raw if maker == -1 else len(blocks)), "nobody asked Python"
        # The launch was told where each one lies.
        bases = {r: b for event in device.events if event[0] == "launch" for r, b in event[1].items()}
        for result, spec in zip(done[0], program.built.template.outputs, strict=True):
            if spec.region is not None:
                assert spec.layout is not None
                assert result.data_ptr() == bases[spec.region] + spec.layout.offset
        del done, tensors, result
        gc.collect()
        assert not device.living
    assert found[None] == found[-1]


@BOTH
@pytest.mark.parametrize("source", [Source.BLOCK, Source.INPUT])
@pytest.mark.parametrize(
    ("dtype", "conj", "neg"),
    [
        (torch.float32, False, False),
        (torch.float32, False, True),
        (torch.int32, False, False),
        (torch.complex64, False, False),
        (torch.complex64, True, False),
        (torch.complex64, True, True),
    ],
)
def test_views_begin_where_they_should_and_keep_their_bits(
    path: Any, source: Source, dtype: torch.dtype, conj: bool, neg: bool
) -> None:
    """Of a block, and of an argument that begins late in its storage; of the same type or another."""
    device = FakeDevice()
    device.made_on = -1
    program = made(device, CASE)
    index = next(r.index for r in program.results if r.source is source)
    layout = TensorSpec((3,), (1,), dtype, 8, conj, neg)
    results = (Result(source, index), Result(source, index, make=view, args=(layout, 16)))
    late = torch.randn(12 * SIDE)[2 * SIDE : 10 * SIDE].view(SIDE, SIDE)
    args = [42, late, *arguments(program)[2:]]
    done = path(dataclasses.replace(program, results=results))(args)
    assert done is not None
    owner, part = done[0]
    assert (owner is late) == (source is Source.INPUT)
    assert part.data_ptr() == owner.data_ptr() + 24
    assert (part.is_conj(), part.is_neg(), part.dtype) == (conj, neg, dtype)
    assert (tuple(part.size()), part.stride()) == ((3,), (1,))


@BOTH
def test_a_view_as_inductor_makes_them_counts_from_where_its_owner_begins(path: Any) -> None:
    """And not from where the storage begins."""
    device = FakeDevice()
    device.made_on = -1
    program = made(device, CASE)
    index = next(r.index for r in program.results if r.source is Source.INPUT)
    part = Result(Source.INPUT, index, make=compat.reinterpret, args=((3,), (1,), 4))
    args = arguments(program)
    late = args[1] = torch.randn(12 * SIDE)[2 * SIDE : 10 * SIDE].view(SIDE, SIDE)
    done = path(dataclasses.replace(program, results=(part,)))(args)
    assert done is not None
    assert done[0][0].data_ptr() == late.data_ptr() + 16


def test_tensors_in_inference_mode_are_those_that_python_makes() -> None:
    kinds = []
    for maker in (None, -1):
        device = FakeDevice()
        device.made_on = maker
        program = made(device, CASE)
        with torch.inference_mode():
            done = in_c(program)(arguments(program))
        assert done is not None
        kinds.append([t.is_inference() for t in done[0] if isinstance(t, torch.Tensor)])
    assert kinds[0] == kinds[1]
    assert any(kinds[0])


def test_where_cpp_makes_none_python_does_and_its_error_shows() -> None:
    device = FakeDevice()
    device.made_on = 5  # a device that this machine does not have
    program = made(device, CASE)
    call = in_c(program)
    assert call(arguments(program)) is not None
    asked = [event for event in device.events if event[0] == "alloc"]
    assert len(asked) == sum(len(chunk.allocate) for chunk in program.chunks)
    device.refuse_all = device.refuse_raw = True
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        call(arguments(program))


def test_without_a_cpp_compiler_python_makes_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "load_tensors", lambda: None)
    device = FakeDevice()
    device.made_on = -1
    program = made(device, CASE)
    assert in_c(program)(arguments(program)) is not None
    asked = [event for event in device.events if event[0] == "alloc"]
    assert len(asked) == sum(len(chunk.allocate) for chunk in program.chunks)


def test_the_maker_of_tensors_is_built_here() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    assert libraries.load_tensors() is not None


LENT = {**CASE, "workspace": 1 << 20}


@BOTH
def test_a_lent_workspace_is_asked_for_at_each_launch(path: Any) -> None:
    device = FakeDevice()
    program = made(device, LENT)
    assert program.workspace is not None
    region, nbytes = program.workspace
    call = path(program)
    assert call(arguments(program)) is not None
    launches = [event[1] for event in device.events if event[0] == "launch"]
    asked = [event for event in device.events if event[0] == "workspace"]
    assert asked == [("workspace", nbytes)] * len(launches)
    found = [bases[region] for bases in launches if region in bases]
    assert found == [0x7000_0000 + 4096 * (i + 1) for i in range(len(launches))]


@BOTH
@pytest.mark.parametrize("ran", [False, True])
def test_no_workspace(path: Any, ran: bool) -> None:
    """Before the first launch the caller has its arguments back; later the error says that a part has run."""
    device = FakeDevice()
    program = made(device, LENT)
    call = path(program)
    if ran:
        device.at_launch = lambda: setattr(device, "lent", 0)
    else:
        device.lent = 0
    args = arguments(program)
    before = list(args)
    with pytest.raises(torch.OutOfMemoryError, match="no workspace of 1048576 bytes") as caught:
        call(args)
    assert caught.value.pgraph_launch == (0, ran)  # type: ignore[attr-defined]
    assert device.launches == ran
    if not ran:
        assert all(a is b for a, b in zip(args, before, strict=True))
    del caught
    gc.collect()
    assert not device.living


def test_a_device_that_lends_none_is_left_to_python() -> None:
    device = FakeDevice()
    program = made(device, LENT)
    calls = device.native_calls()
    device.native_calls = lambda: dataclasses.replace(calls, workspace=None)  # type: ignore[method-assign]
    assert native_program(program) is None


def test_calls_are_timed_while_it_is_switched_on() -> None:
    device = FakeDevice()
    made_program = made(device, CASE)
    program = native_program(made_program)
    call = native_launch([program], numbered([made_program.guards]))
    assert call is not None
    args = arguments(made(FakeDevice(), CASE))
    assert call(list(args)) is not None
    assert set(time_calls(program, True).values()) == {0}, "timed before it was switched on"
    assert call(list(args)) is not None
    spent = time_calls(program, False)
    assert list(spent) == list(PHASES)
    assert all(ns > 0 for ns in spent.values()), spent
    assert call(list(args)) is not None
    assert set(time_calls(program, False).values()) == {0}, "timed after it was switched off"
