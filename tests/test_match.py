"""The matcher: each row of its table, and structure that must not differ."""

from __future__ import annotations

import dataclasses
import re
import struct

import pytest

from pgraph.drivers.interface import UNIT, next_start
from pgraph.errors import MatchError
from pgraph.template.match import match
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording
from pgraph.template.template import Slot
from pgraph.template.topology import chain

A, B = 0x7000_0000_0000, 0x7100_0000_0000
FRAMEWORK = 0x7F00_0000_0000
SPAN = 1 << 20


def recording(base: int, *words: int, gap: int = 0, death: int | None = None, nbytes: int = 64) -> Recording:
    """One node with these words; an input of 64 bytes at base + 0x1000, a temporary at + 0x8000 + gap."""
    node = NodeRecord("kernel", "k", ("grid", 1), struct.pack(f"={len(words)}Q", *words))
    allocations = (
        GhostAllocation(base + 0x1000, 64, 0, None, margin=256),
        GhostAllocation(base + 0x8000 + gap, nbytes, 0, death, margin=256),
    )
    return Recording((node,), chain(1), allocations, 1, (OutputSpec(region=1),), (base, base + SPAN), None)


def pair(a: tuple[int, ...], b: tuple[int, ...], **how: int | None) -> tuple[Recording, Recording]:
    """Two recordings that differ in the words and in where the second region lies."""
    return recording(A, *a, **how), recording(B, *b, gap=0x200, **how)


def outside() -> RangeMap:
    return RangeMap([(FRAMEWORK, 4096, 0)])


def test_equal_words_are_constants() -> None:
    """Row 2: a size, or a host address, is never rewritten, whatever it looks like."""
    a, b = pair((7, 0x5555_0000_1234), (7, 0x5555_0000_1234))
    assert match(a, b, framework=outside()) == ()


@pytest.mark.parametrize("word", [A + 0x8000, B + 0x8200, A + 0x4000])
def test_an_equal_word_in_a_ghost_range_is_a_constant(word: int) -> None:
    """Row 2: a pointer to ghost memory is never the same in both captures."""
    a, b = pair((word,), (word,))
    assert match(a, b, framework=outside()) == ()


def test_an_equal_word_in_framework_memory_is_refused() -> None:
    """Row 1: memory that is no argument may be gone tomorrow."""
    a, b = pair((FRAMEWORK + 8,), (FRAMEWORK + 8,))
    with pytest.raises(MatchError, match=r"hidden-pointer.*word 0 of node 0 \(kernel k\)"):
        match(a, b, framework=outside())
    assert match(a, b) == (), "without knowing the framework's memory there is nothing to refuse"


def test_the_codes_own_constants_may_be_pointed_to() -> None:
    """Row 1's exception: tensors that live as long as the template."""
    a, b = pair((FRAMEWORK + 8,), (FRAMEWORK + 8,))
    assert match(a, b, framework=outside(), constants=RangeMap([(FRAMEWORK, 64, 0)])) == ()
    with pytest.raises(MatchError, match="hidden-pointer"):
        match(a, b, framework=outside(), constants=RangeMap([(FRAMEWORK + 64, 64, 0)]))


@pytest.mark.parametrize("delta", [0, 8, 63, 64, 255, -1, -256])
def test_same_region_and_delta_is_a_slot(delta: int) -> None:
    """Row 3, with pointers into, before and past the range."""
    a, b = pair((3, A + 0x8000 + delta), (3, B + 0x8200 + delta))
    assert match(a, b) == (Slot(0, 8, 1, delta),)


FAR = [
    0x3000,  # between the regions
    0x7000,  # where the other region begins in the first capture
    0x7200,  # where it begins in the second
    0x7240,  # around it in both
    -0x3000,
    -0x1000,  # where the ghosts begin
    -(2**20),  # out of the ghosts
    2**21,
    FRAMEWORK - A,  # into memory of the framework, in the first capture
    -A,  # word 0 there
    -A - 0x4000,  # below address 0 there
    2**63 - 1 - 0x8000,
]


def of_kind(kind: str, r: Recording) -> Recording:
    return dataclasses.replace(r, nodes=(r.nodes[0]._replace(kind=kind),))


@pytest.mark.parametrize("delta", FAR)
@pytest.mark.parametrize("region", [0, 1])
def test_a_word_beyond_its_region_follows_it(region: int, delta: int) -> None:
    """Row 3: whatever lies there."""
    here, there = ((A + 0x1000, B + 0x1000), (A + 0x8000, B + 0x8200))[region]
    a, b = pair((3, (here + delta) % 2**64), (3, (there + delta) % 2**64), nbytes=0x300)
    slots = (Slot(0, 8, region, delta),)
    assert match(loose(a), loose(b), framework=outside()) == slots
    if (region, delta) not in [(0, 0x7200), (0, 0x7240)]:
        for kind, own in (("kernel", False), ("memcpy", False), ("memcpy", True)):
            x, y = (of_kind(kind, loose(r, own=own, until=0)) for r in (a, b))
            assert match(x, y, framework=outside()) == slots


@pytest.mark.parametrize(("delta", "text"), [(0x7200, r"1\+512.*1\+0"), (0x7240, r"1\+576.*1\+64")])
def test_a_word_in_other_regions_in_both_captures(delta: int, text: str) -> None:
    """Row 4: an op of PyTorch's own knows what it was given, another one may have used its memory in turn."""
    a, b = pair((3, A + 0x1000 + delta), (3, B + 0x1000 + delta), nbytes=0x300)
    assert match(loose(a), loose(b)) == (Slot(0, 8, 0, delta),)
    for change in ({"own": False}, {"until": 8}):
        with pytest.raises(MatchError, match=f"ambiguous-word.*word 8 of node 0.*{text}"):
            match(loose(a, **change), loose(b, **change))
    # Nobody uses memory that is dead: what lies there is all the same.
    dead = pair((3, A + 0x1000 + delta), (3, B + 0x1000 + delta), nbytes=0x300, death=0)
    assert match(*(loose(r, own=False) for r in dead)) == (Slot(0, 8, 0, delta),)


def test_regions_used_in_turn_as_far_apart_as_a_third_moved() -> None:
    """Row 4: what looks like a pointer far beyond the third may be none at all."""

    def recorded(base: int, at: tuple[int, ...], word: int) -> Recording:
        r = recording(base, 3, base + at[word])
        return dataclasses.replace(
            r, allocations=tuple(GhostAllocation(base + x, 64, 0, None, 256) for x in at)
        )

    a = recorded(A, (0x1000, 0x2000, 0x4000), 0)
    b = recorded(B, (0x1000, 0x3000, 0x6000), 1)  # the third one moved by as much as lies between these
    assert match(loose(a), loose(b)) == (Slot(0, 8, 2, -0x3000),)
    for change in ({"own": False}, {"until": 8}):
        with pytest.raises(MatchError, match=r"region 0\+0 in one capture and region 1\+0 in another"):
            match(loose(a, **change), loose(b, **change))


def test_a_word_beyond_an_empty_region_follows_it() -> None:
    """Row 3: a region of no bytes has an address of its own, too."""
    a, b = pair((A + 0x8000 + 0x900,), (B + 0x8200 + 0x900,), nbytes=0)
    assert match(a, b) == (Slot(0, 0, 1, 0x900),)


@pytest.mark.parametrize("offset", [0x1000, 0x1010, 0x8000, 0x4000, 2**21])
def test_two_regions_that_moved_equally_far(offset: int) -> None:
    """Row 5: either may be meant, wherever the word lies; unless one of them is dead by then."""
    a, b = (recording(base, base + offset) for base in (A, B))
    names = rf"region 0{offset - 0x1000:+d} or region 1{offset - 0x8000:+d}: they moved equally far"
    for change in ({}, {"own": False}, {"until": 0}):
        with pytest.raises(MatchError, match=rf"ambiguous-word.*word 0 of node 0.*{re.escape(names)}"):
            match(loose(a, **change), loose(b, **change))
    a, b = (recording(base, base + offset, death=0) for base in (A, B))
    for change in ({}, {"own": False}):
        assert match(loose(a, **change), loose(b, **change)) == (Slot(0, 0, 0, offset - 0x1000),)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("delta", FAR)
def test_a_word_beyond_a_dead_region_is_left_over_padding(delta: int, both: bool) -> None:
    """Row 6: also where it leads into a region that is alive; and where several are dead."""
    a, b = (
        recording(base, (base + 0x8000 + gap + delta) % 2**64, gap=gap, death=0)
        for base, gap in ((A, 0), (B, 0 if both else 0x200))
    )
    if both:
        a, b = (
            dataclasses.replace(r, allocations=tuple(x._replace(death=0) for x in r.allocations))
            for r in (a, b)
        )
    for until in (16, 0):
        assert match(loose(a, until=until), loose(b, until=until), framework=outside()) == ()
        with pytest.raises(MatchError, match=r"ambiguous-word.*word 0 of node 0.*not in use"):
            match(loose(a, own=False, until=until), loose(b, own=False, until=until), framework=outside())


def test_a_region_already_dead_in_one_capture_only_is_alive() -> None:
    """Row 3: what frees it may come a node earlier or later."""
    a, b = recording(A, A + 0x9000, death=0), recording(B, B + 0x9200, gap=0x200)
    assert match(a, b) == match(b, a) == (Slot(0, 0, 1, 0x1000),)


@pytest.mark.parametrize("number", [0, 1, 7, 0x8000, 0xFFFF, 0x7FFF_FFFF])
@pytest.mark.parametrize("nbytes", [2, 4])
def test_numbers_over_old_addresses_are_padding(nbytes: int, number: int) -> None:
    """Row 8's star: a struct's field of two or four bytes, beside what was left of an address."""
    assert UNIT // 2 % 2**16, "the layouts differ in the lower two bytes"
    low = 256**nbytes
    recordings = []
    for layout, base in enumerate((A, B)):
        start = next_start(base, 256, layout)
        r = recording(base, 3, start // low * low + number % low)
        recordings.append(
            loose(
                dataclasses.replace(
                    r,
                    allocations=(GhostAllocation(start, 1 << 16, 0, None, margin=256),),
                    n_inputs=1,
                    outputs=(),
                )
            )
        )
    assert match(*recordings) == ()


def test_a_region_already_dead_is_left_over_padding() -> None:
    """Row 6: program order says the region is dead before this node."""
    a, b = pair((A + 0x8000,), (B + 0x8200,), death=0)
    assert match(loose(a), loose(b)) == ()
    a, b = pair((A + 0x8000,), (B + 0x8200,), death=1)
    assert match(loose(a), loose(b)) == (Slot(0, 0, 1, 0),)


@pytest.mark.parametrize(
    ("kind", "own", "until", "left_over"),
    [
        ("kernel", True, 0, True),
        ("kernel", False, 16, False),  # scratch that one custom op handed to another, and freed
        ("kernel", False, 0, False),
        ("memset", True, 0, False),
        ("memcpy", False, 0, False),
    ],
)
def test_a_dead_region_that_may_be_meant_is_refused(
    kind: str, own: bool, until: int, left_over: bool
) -> None:
    """Row 6's stars: a launch would use an address of the capture."""
    recordings = [loose(r, own=own, until=until) for r in pair((A + 0x8000,), (B + 0x8200,), death=0)]
    a, b = (dataclasses.replace(r, nodes=(r.nodes[0]._replace(kind=kind),)) for r in recordings)
    if left_over:
        assert match(a, b) == ()
    else:
        with pytest.raises(MatchError, match=rf"ambiguous-word.*word 0 of node 0 \({kind} k\).*not in use"):
            match(a, b)


def test_a_region_not_yet_born_is_left_over_padding() -> None:
    """Row 6, the other end of a lifetime."""
    a, b = map(loose, pair((A + 0x8000,), (B + 0x8200,)))

    def late(r: Recording) -> Recording:
        born = r.allocations[1]._replace(birth=1)
        return dataclasses.replace(r, allocations=(r.allocations[0], born))

    assert match(late(a), late(b)) == ()
    assert match(a, b) != ()


@pytest.mark.parametrize(
    ("word_a", "word_b", "text"),
    [
        (A + 0x8000, B + 0x8208, r"region 1\+0 in one capture and region 1\+8"),
        (A + 0x8000, B + 0x1000, r"region 1\+0 in one capture and region 0\+0"),
        (A + 0x8000, B + 0x4000, r"region 1\+0 in one capture and no region"),
        (A + 0x4000, B + 0x4008, "no region in one capture and no region"),
    ],
)
def test_ghosts_that_disagree_are_ambiguous(word_a: int, word_b: int, text: str) -> None:
    """Row 8: never a guess."""
    a, b = pair((word_a,), (word_b,))
    with pytest.raises(MatchError, match=f"ambiguous-word.*({text})"):
        match(a, b)


@pytest.mark.parametrize(
    ("word_a", "word_b"),
    [
        (A + 0x8000, FRAMEWORK + 8),
        (FRAMEWORK + 8, B + 0x8200),
        (A + 0x4000, FRAMEWORK + 8),  # between the regions
    ],
)
def test_a_word_that_moved_out_of_its_ghosts_is_ambiguous(word_a: int, word_b: int) -> None:
    """Row 9: device memory on both sides may be a pointer."""
    a, b = pair((word_a,), (word_b,))
    with pytest.raises(MatchError, match=r"ambiguous-word.*device memory"):
        match(a, b, framework=outside())


def test_a_word_that_moved_within_framework_memory() -> None:
    """Row 10: a custom op may use buffers of its own in turn; PyTorch's ops have ghosts only."""
    a, b = pair((FRAMEWORK + 8,), (FRAMEWORK + 16,))
    own_a, own_b = (dataclasses.replace(r, builtin=frozenset({0})) for r in (a, b))
    assert match(own_a, own_b, framework=outside()) == ()
    others = tuple(dataclasses.replace(r, builtin=frozenset({1})) for r in (a, b))  # another node's op
    for x, y in ((a, b), (own_a, b), (a, own_b), others):
        with pytest.raises(MatchError, match=r"ambiguous-word.*device memory"):
            match(x, y, framework=outside())


def loose(r: Recording, *, own: bool = True, until: int = 16) -> Recording:
    """The same, its words up to byte `until` in a struct that one of PyTorch's own ops passes."""
    node = r.nodes[0]._replace(structs=((0, until),) if until else ())
    return dataclasses.replace(r, nodes=(node,), builtin=frozenset({0} if own else ()))


@pytest.mark.parametrize(
    ("word_a", "word_b", "left_over"),
    [
        # A number beside half of an old pointer looks like an address inside some block.
        (FRAMEWORK + 0x3E7, FRAMEWORK + 0x3E7, True),
        (FRAMEWORK, FRAMEWORK, False),  # where a block begins: a buffer that somebody kept?
        # The same number beside the upper half of either arena's addresses.
        (A + 0x8000, B + 0x8100, True),
        (A + 0x4000, B + 0x4300, True),
        # A ghost in one capture only.
        (A + 0x8000, FRAMEWORK + 8, True),
        (FRAMEWORK + 8, B + 0x8200, True),
        (A + 0x4000, FRAMEWORK, True),
    ],
)
def test_words_of_a_struct_may_be_padding(word_a: int, word_b: int, left_over: bool) -> None:
    """The rows with a star: what cannot be a pointer of PyTorch's own op is left-over bytes."""
    a, b = pair((3, word_a), (3, word_b))
    if left_over:
        assert match(loose(a), loose(b), framework=outside()) == ()
    for change in ({"own": False}, {"until": 8}) if left_over else ({},):
        with pytest.raises(MatchError, match="word 8 of node 0"):
            match(loose(a, **change), loose(b, **change), framework=outside())


BROADCAST = "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_implINS0_10AddFunctorEEEvRT_"


@pytest.mark.parametrize(
    ("name", "left_over"),
    [
        (BROADCAST, True),
        ("_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT1_", True),
        ("_ZN2at6native12_GLOBAL__N_119CatArrayBatchedCopyINS1_10OpaqueTypeILj4EEEEEvPT_", True),
        ("_ZN2at6native40_GLOBAL__N__7c47464f_8_Shape_cu_49f7391c26CatArrayBatchedCopy_contigIfEEvPT_", True),
        (
            "_Z39fmha_cutlassF_f32_aligned_64x64_rf_sm80N22PyTorchMemEffAttention15AttentionKernelIfN7cutlass"
            "4arch4Sm80ELb1ELi64ELi64ELi64ELb1ELb1EE6ParamsE",
            True,
        ),
        (
            "_Z40fmha_cutlassB_f32_aligned_64x64_k32_sm80N22PyTorchMemEffAttention23AttentionBackwardKernelI"
            "N7cutlass4arch4Sm80EfLb1ELb0ELb0ELi64ELi64ELi32ELb0EE6ParamsE",
            True,
        ),
        # cuDNN is given operands and the call's own workspace.
        ("_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionEEEvNT_6ParamsE", True),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_t1r3s3_execute_kernel__5x_cudnn", True),
        # A random generator's state is no operand.
        ("_ZN2at6native43distribution_elementwise_grid_stride_kernelIfLi4EEEvlNS_15PhiloxCudaStateE", False),
        ("_ZN5other18elementwise_kernelIfEEvT_", False),
        ("elementwise_kernel", False),
    ],
)
def test_where_a_block_begins_some_kernels_point_for_operands_only(name: str, left_over: bool) -> None:
    """The lower half is zero there as in an unused field, beside half of an address of the host's."""
    a, b = (
        dataclasses.replace(r, nodes=(r.nodes[0]._replace(name=name),))
        for r in pair((3, FRAMEWORK), (3, FRAMEWORK))
    )
    if left_over:
        assert match(loose(a), loose(b), framework=outside()) == ()
    for change in ({"own": False}, {"until": 8}) if left_over else ({},):
        with pytest.raises(MatchError, match=r"hidden-pointer.*word 8 of node 0"):
            match(loose(a, **change), loose(b, **change), framework=outside())


def test_no_kernel_is_given_the_workspace_of_another_stream() -> None:
    a, b = pair((3, FRAMEWORK), (3, FRAMEWORK))
    known = frozenset({FRAMEWORK})
    assert match(loose(a), loose(b), framework=outside(), workspaces=known) == ()
    with pytest.raises(MatchError, match=r"hidden-pointer.*word 8 of node 0"):
        match(loose(a), loose(b), framework=outside(), workspaces=frozenset({FRAMEWORK + 512}))
    # A custom op may use streams of its own; and a parameter of eight bytes has no padding.
    for change in ({"own": False}, {"until": 8}):
        with pytest.raises(MatchError, match=r"hidden-pointer.*word 8 of node 0"):
            match(loose(a, **change), loose(b, **change), framework=outside(), workspaces=known)


def test_slots_are_found_among_padding() -> None:
    """A pointer in a struct is one as anywhere."""
    a, b = pair((A + 0x1010, A + 0x8000), (B + 0x1010, B + 0x8200))
    assert match(loose(a), loose(b), framework=outside()) == (Slot(0, 0, 0, 0x10), Slot(0, 8, 1, 0))


@pytest.mark.parametrize(
    ("word_a", "word_b"),
    [
        (1, 2),
        (2**64 - 1, 0),
        (A + 0x8000, 5),
        (5, B + 0x8200),
        (B + 0x8200, A + 0x8000),  # each in the other's ghosts
        (A + 0x8000, A + 0x8200),
        (FRAMEWORK + 8, 0),
        (0, FRAMEWORK + 8),
        (FRAMEWORK + 8, A + 0x8000),
    ],
)
def test_other_words_that_differ_are_padding(word_a: int, word_b: int) -> None:
    """Row 11: garbage is common and harmless, even if one side looks like an address."""
    a, b = pair((word_a,), (word_b,))
    assert match(a, b, framework=outside()) == ()


def test_bytes_after_the_last_whole_word_are_no_pointer() -> None:
    """Parameters need not be a multiple of eight bytes long."""
    a, b = pair((A + 0x8000,), (B + 0x8200,))

    def longer(r: Recording, tail: bytes) -> Recording:
        node = r.nodes[0]._replace(params=r.nodes[0].params + tail)
        return dataclasses.replace(r, nodes=(node,))

    assert match(longer(a, b"abc"), longer(b, b"xyz")) == (Slot(0, 0, 1, 0),)


def _without_nodes(r: Recording) -> Recording:
    return dataclasses.replace(r, nodes=())


def _node(**change: object) -> object:
    return lambda r: dataclasses.replace(r, nodes=(r.nodes[0]._replace(**change),))


def _second(**change: object) -> object:
    def edit(r: Recording) -> Recording:
        other = r.allocations[1]._replace(**change)
        return dataclasses.replace(r, allocations=(r.allocations[0], other))

    return edit


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (_without_nodes, "nodes-differ"),
        (_node(kind="memcpy"), "nodes-differ"),
        (_node(header=("grid", 2)), "nodes-differ"),
        (_node(params=b"\0" * 16), "nodes-differ"),
        (_second(nbytes=65), "allocations-differ"),
        (_second(birth=1), "allocations-differ"),
        (lambda r: dataclasses.replace(r, allocations=r.allocations[:1]), "allocations-differ"),
        (lambda r: dataclasses.replace(r, n_inputs=2), "allocations-differ"),
        (lambda r: dataclasses.replace(r, outputs=(OutputSpec(region=0),)), "outputs-differ"),
        (lambda r: dataclasses.replace(r, ghost_range=(A, A + SPAN)), "ghosts-overlap"),
    ],
)
def test_two_captures_must_have_one_structure(edit: object, code: str) -> None:
    """Anything but addresses that differs means that the two runs did not do the same."""
    a, b = pair((A + 0x8000,), (B + 0x8200,))
    assert match(a, b)
    with pytest.raises(MatchError) as caught:
        match(a, edit(b))  # type: ignore[operator]
    assert caught.value.reason.code == code
    assert caught.value.reason.fix


class Ambiguous:
    """Like a tensor: to compare two of them gives no truth value."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")

    __hash__ = object.__hash__


def test_returned_constants_are_compared_by_identity() -> None:
    """A tensor that the code holds and returns is the same object in both captures."""
    a, b = pair((A + 0x8000,), (B + 0x8200,))
    held, other = Ambiguous(), Ambiguous()

    def returning(r: Recording, value: object) -> Recording:
        return dataclasses.replace(r, outputs=(OutputSpec(constant=value),))

    assert match(returning(a, held), returning(b, held))
    assert match(returning(a, 3), returning(b, 3))
    for x, y in ((held, other), (3, 4), (1, True)):
        with pytest.raises(MatchError, match="outputs-differ"):
            match(returning(a, x), returning(b, y))


def test_results_that_nobody_reads_may_differ() -> None:
    """Host tensors that a captured partition hands on to its backward, say."""
    a, b = pair((A + 0x8000,), (B + 0x8200,))

    def returning(r: Recording, *, unread: bool) -> Recording:
        return dataclasses.replace(r, outputs=(OutputSpec(constant=Ambiguous(), unread=unread),))

    assert match(returning(a, unread=True), returning(b, unread=True))
    for x, y in ((True, False), (False, True), (False, False)):
        with pytest.raises(MatchError, match="outputs-differ"):
            match(returning(a, unread=x), returning(b, unread=y))


def test_range_map_finds_only_what_lies_inside() -> None:
    """First and last byte, slack on either side, empty ranges as one byte."""
    ranges = RangeMap([(1000, 10, 0), (100, 0, 0), (2000, 10, 5)])
    assert ranges.find(999) is None
    assert ranges.find(1000) == (0, 0)
    assert ranges.find(1009) == (0, 9)
    assert ranges.find(1010) is None
    assert ranges.find(100) == (1, 0)
    assert ranges.find(101) is None
    assert ranges.find(1995) == (2, -5)
    assert ranges.find(2014) == (2, 14)
    assert ranges.find(2015) is None
    assert RangeMap([]).find(0) is None
