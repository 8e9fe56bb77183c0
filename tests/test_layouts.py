"""Two arenas never leave two ranges equally far apart: in Python, in C, and in the host's arenas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_native import Range, library

from pgraph.drivers.host.arena import HostArena
from pgraph.drivers.interface import ALIGNMENT, UNIT, next_start
from pgraph.native.structs import ArenaState

__all__ = ["library"]  # the fixture

CUDA_GUARD = 256 << 10
SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(0, 64 << 20),
    st.builds(lambda k, d: max(0, k * UNIT + d), st.integers(0, 64), st.integers(-300, 300)),
)
# (bytes, phase) of each range: small ones, large ones, and such as end about where an address is rounded up.
TAKES = st.lists(st.tuples(SIZES, st.integers(0, ALIGNMENT - 1)), min_size=1, max_size=60)
Takes = Sequence[tuple[int, int]]


def laid_out(takes: Takes, layout: int, low: int, guard: int) -> list[int]:
    """First bytes of the ranges of an arena that begins at `low`, as the arenas place them."""
    found, position = [], low
    for nbytes, phase in takes:
        start = next_start(position, guard, layout, phase)
        assert start >= position + guard
        assert start % ALIGNMENT == phase
        found.append(start)
        position = start + nbytes + guard
    return found


def never_equally_far(takes: Takes, first: Sequence[int], second: Sequence[int]) -> None:
    """Any two ranges lie further apart in the second layout; and what else Note [Two layouts] claims."""
    moved = [b - a for a, b in zip(first, second, strict=True)]
    assert all(y > x + UNIT // 2 for x, y in itertools.pairwise(moved))
    for starts in (first, second):
        ends = [start + nbytes for start, (nbytes, _) in zip(starts, takes, strict=True)]
        assert all(start > end for end, start in zip(ends, starts[1:], strict=False)), "no two overlap"
    # A number of two or four bytes over an old address: the words differ in the upper bytes alone.
    assert all(m % (1 << 16) for m in moved)


@given(
    takes=TAKES,
    lows=st.tuples(st.integers(1 << 30, 1 << 46), st.integers(1 << 30, 1 << 46)),
    guard=st.sampled_from([1, 1 << 16, CUDA_GUARD]),  # with none, two empty ranges may touch
)
@example(takes=[(2 << 20, 0)] * 5000, lows=(0x5A00 << 32, 0x5B00 << 32), guard=CUDA_GUARD)
def test_no_two_ranges_are_equally_far_apart(takes: Takes, lows: tuple[int, int], guard: int) -> None:
    """Whatever the sizes, and wherever the arenas begin."""
    first, second = (laid_out(takes, layout, low, guard) for layout, low in enumerate(lows))
    never_equally_far(takes, first, second)


@given(takes=TAKES)
def test_the_same_of_the_hosts_arenas(takes: Takes) -> None:
    arenas = [HostArena(layout) for layout in (0, 1)]
    try:
        first, second = ([arena.take(*take) for take in takes] for arena in arenas)
    finally:
        for arena in arenas:
            arena.close()
    never_equally_far(takes, first, second)


@given(takes=TAKES)
def test_the_same_of_the_arenas_in_c(library: Any, takes: Takes) -> None:
    arenas = [Range(layout, size=1 << 40, room=1 << 40) for layout in (0, 1)]
    first, second = ([arena.take(library, *take) for take in takes] for arena in arenas)
    never_equally_far(takes, first, second)


def swallowed(position: int, layout: int, k: int) -> int:
    """Gaps of some KiB in front of ranges that are aligned to 2 MiB."""
    return -(-(position + CUDA_GUARD + 4096 * (1 + 2 * layout) * (k % 13 + 1)) // (2 << 20)) * (2 << 20)


def whole_units(position: int, layout: int, k: int) -> int:
    """Gaps that differ, but by multiples of 64 KiB."""
    return -(-(position + CUDA_GUARD) // UNIT) * UNIT + layout * UNIT * 2


@pytest.mark.parametrize("rule", [swallowed, whole_units])
def test_gaps_that_do_not_count_are_found(rule: Callable[[int, int, int], int]) -> None:
    """The check above can fail."""
    takes, starts = [(2 << 20, 0)] * 3, []
    for layout in (0, 1):
        position = 1 << 40
        for k, (nbytes, _) in enumerate(takes):
            starts.append(rule(position, layout, k))
            position = starts[-1] + nbytes + CUDA_GUARD
    with pytest.raises(AssertionError):
        never_equally_far(takes, starts[:3], starts[3:])


@given(takes=TAKES, layout=st.integers(0, 1))
def test_the_cuda_arena_counts_as_the_helper_does(takes: Takes, layout: int) -> None:
    """Its state is the helper's struct; without the helper the same rule places its ranges."""
    cuda_ghost = pytest.importorskip("pgraph.drivers.cuda.ghost", reason="needs cuda-bindings")
    arena = cuda_ghost.CudaArena.__new__(cuda_ghost.CudaArena)
    low, high = 1 << 40, 1 << 41
    # All of it counts as mapped, so that no call of the driver's is made.
    state = {"low": low, "high": high, "position": low, "mapped": high, "guard": CUDA_GUARD}
    arena.state, arena._layout = ArenaState(**state), layout
    assert [arena._take_in_python(*take) for take in takes] == laid_out(takes, layout, low, CUDA_GUARD)
    assert arena.state.count == len(takes)
