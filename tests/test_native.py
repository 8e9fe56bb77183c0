"""The native helper does what its Python twin does; the driver's functions are stood in for here."""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pgraph
from pgraph.drivers.interface import UNIT, further, next_start
from pgraph.native import libraries
from pgraph.native.structs import ArenaState, ExecEntry

U64 = 0xFFFFFFFFFFFFFFFF
_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_MAP = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 5)
_ACCESS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)


@pytest.fixture(scope="module")
def library() -> Any:
    found = libraries.load()
    if found is None:
        pytest.skip("no C compiler, or PGRAPH_NATIVE=0")
    return found


@dataclasses.dataclass
class Nodes:
    """Nodes with slots (word, region, delta); each word belongs to one slot."""

    kinds: list[int]
    slots: list[list[tuple[int, int, int]]]
    words: list[int]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Nodes, list[list[int]], int | None]:
    """Nodes, the bases of three launches, and the setter call that fails."""
    kinds = draw(st.lists(st.integers(0, 2), max_size=5))
    slots: list[list[tuple[int, int, int]]] = []
    count = 0
    for _ in kinds:
        slots.append([])
        for _ in range(draw(st.integers(0, 3))):
            slots[-1].append(
                (
                    count,
                    draw(st.integers(0, 2)),
                    draw(st.integers(-300, 300) | st.integers(-(1 << 63), (1 << 63) - 1)),
                )
            )
            count += 1
    launches = draw(
        st.lists(
            st.lists(st.integers(0, 4).map(lambda x: x << 40), min_size=3, max_size=3), min_size=3, max_size=3
        )
    )
    return Nodes(kinds, slots, [0] * count), launches, draw(st.none() | st.integers(0, 6))


def in_python(graph: Nodes, bases: list[int], calls: list[Any], fail_at: int | None) -> int:
    """The loop as it is specified: nodes rewritten, or minus the error code."""
    rewritten = 0
    for i, (kind, slots) in enumerate(zip(graph.kinds, graph.slots, strict=True)):
        new = {w: (bases[r] + d) & U64 for w, r, d in slots}
        if all(graph.words[w] == v for w, v in new.items()):
            continue
        for w, v in new.items():
            graph.words[w] = v
        rewritten += 1
        calls.append((("kernel", "copy", "fill")[kind], 100 + i, 200 + i))
        if len(calls) - 1 == fail_at:
            for w in new:
                graph.words[w] = U64
            return -7
    calls.append(("launch", 11, 33))
    return -9 if len(calls) - 1 == fail_at else rewritten


class InC:
    """`pg_launch` over callbacks that note who was called with what."""

    def __init__(self, library: Any, graph: Nodes) -> None:
        self.library, self.calls, self.fail_at = library, [], None
        made = [
            _SET(lambda e, n, p: self._note("kernel", n, p)),
            _COPY(lambda e, n, p, c: self._note("copy", n, p, c)),
            _COPY(lambda e, n, p, c: self._note("fill", n, p, c)),
            _LAUNCH(lambda e, s: self._note("launch", e, s)),
        ]
        self.keep = made
        self.table = (ctypes.c_void_p * 4)(*[ctypes.cast(f, ctypes.c_void_p).value for f in made])
        flat = [s for slots in graph.slots for s in slots]
        rows, first = [], 0
        for i, (kind, slots) in enumerate(zip(graph.kinds, graph.slots, strict=True)):
            rows += [kind, 100 + i, 200 + i, first, first + len(slots)]
            first += len(slots)
        self.nodes = (ctypes.c_int64 * max(len(rows), 1))(*rows)
        self.slots = (ctypes.c_int64 * max(3 * len(flat), 1))(*[x for s in flat for x in s])
        self.words = (ctypes.c_uint64 * max(len(graph.words), 1))(*graph.words)
        nodes, slots, words = map(ctypes.addressof, (self.nodes, self.slots, self.words))
        self.exec = ExecEntry(ctypes.addressof(self.table), 11, 22, nodes, len(graph.kinds), slots, words)

    def _note(self, name: str, first: int, second: int, ctx: int | None = 22) -> int:
        assert ctx == 22
        self.calls.append((name, first, second))
        failed = len(self.calls) - 1 == self.fail_at
        return (9 if name == "launch" else 7) if failed else 0

    def launch(self, bases: list[int]) -> int:
        today = (ctypes.c_uint64 * len(bases))(*bases)
        return self.library.pg_launch(ctypes.addressof(self.exec), 33, ctypes.addressof(today))


@given(case=graphs())
def test_launch_equals_the_loop_in_python(
    library: Any, case: tuple[Nodes, list[list[int]], int | None]
) -> None:
    """Same calls in the same order, same words, same counts, same code of the call that fails."""
    graph, launches, fail_at = case
    native_side = InC(library, graph)
    calls: list[Any] = []
    for bases in launches:
        calls.clear()
        native_side.calls.clear()
        native_side.fail_at = fail_at
        assert native_side.launch(bases) == in_python(graph, bases, calls, fail_at)
        assert native_side.calls == calls
        assert list(native_side.words)[: len(graph.words)] == graph.words


def test_the_second_launch_on_the_same_addresses_sets_nothing(library: Any) -> None:
    side = InC(library, Nodes([0, 1], [[(0, 0, 8)], [(1, 1, -8)]], [0, 0]))
    assert side.launch([1 << 40, 2 << 40, 0]) == 2
    assert side.launch([1 << 40, 2 << 40, 0]) == 0
    assert side.launch([1 << 40, 3 << 40, 0]) == 1
    assert list(side.words) == [(1 << 40) + 8, (3 << 40) - 8]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_node_that_could_not_be_set_is_set_at_the_next_launch(library: Any, failing: int) -> None:
    """Also at the same addresses: the driver still has the node's old parameters."""
    bases = [1 << 40, 2 << 40, 3 << 40]
    fresh = [(1 << 40) + 8, 2 << 40, (2 << 40) - 8, 3 << 40]
    of_node = ([0], [1, 2], [3])
    side = InC(library, Nodes([0, 1, 2], [[(0, 0, 8)], [(1, 1, 0), (2, 1, -8)], [(3, 2, 0)]], [0] * 4))
    side.fail_at = failing
    assert side.launch(bases) == -7
    want = [0] * 4
    for node in range(failing + 1):
        for word in of_node[node]:
            want[word] = U64 if node == failing else fresh[word]
    assert list(side.words) == want
    side.calls.clear()
    side.fail_at = None
    assert side.launch(bases) == 3 - failing, "that node and those behind it"
    assert [node for _, node, _ in side.calls] == [*range(100 + failing, 103), 11]
    assert list(side.words) == fresh
    assert side.launch(bases) == 0


def test_a_failed_launch_leaves_the_nodes_set(library: Any) -> None:
    side = InC(library, Nodes([0], [[(0, 0, 0)]], [0]))
    side.fail_at = 1
    assert side.launch([1 << 40, 0, 0]) == -9
    side.fail_at = None
    assert side.launch([1 << 40, 0, 0]) == 0
    assert list(side.words) == [1 << 40]


NUMBERS = ("low", "high", "position", "mapped", "chunk", "handle", "guard", "unit", "further", "count")


class Range:
    """An arena over nothing: mapping is noted, and fails after `room` chunks."""

    def __init__(self, layout: int = 0, size: int = 1 << 30, room: int = 1000, closed: int = 0) -> None:
        self.mapped: list[int] = []

        def map_chunk(address: int, size: int, offset: int, handle: int, flags: int) -> int:
            self.mapped.append(address)
            return 2 if len(self.mapped) > room else 0

        self.opened: list[tuple[int, int]] = []

        def access(address: int, size: int, desc: int | None, count: int) -> int:
            self.opened.append((address, address + size))
            return closed

        self.keep = (_MAP(map_chunk), _ACCESS(access))
        low = 1 << 40
        pointers = [ctypes.cast(f, ctypes.c_void_p).value for f in self.keep]
        rule = (UNIT, further(layout))
        self.state = ArenaState(low, low + size, low, low, 2 << 20, 5, 1 << 16, *rule, 0, 0, *pointers, None)

    def take(self, library: Any, nbytes: int, phase: int = 0) -> int:
        return library.pg_arena_take(ctypes.addressof(self.state), nbytes, phase)


@given(
    takes=st.lists(st.tuples(st.integers(0, 5 << 20), st.integers(0, 255)), max_size=20),
    layout=st.integers(0, 1),
)
def test_arena_places_ranges_by_the_rule(library: Any, takes: list[tuple[int, int]], layout: int) -> None:
    """Same gaps, guards, rounding and phase as the rule written in Python."""
    arena = Range(layout)
    for nbytes, phase in takes:
        expected = next_start(arena.state.position, arena.state.guard, layout, phase)
        address = arena.take(library, nbytes, phase)
        assert address == expected
        assert arena.state.position == address + nbytes + arena.state.guard
        assert arena.state.mapped >= arena.state.position
    assert arena.state.count == len(takes)
    assert arena.mapped == [arena.state.low + i * (2 << 20) for i in range(len(arena.mapped))], (
        "each chunk once"
    )
    ends = [arena.state.low, *(end for _, end in arena.opened)]
    assert arena.opened == list(pairwise(ends)), "access to all of them, once for each range"
    assert ends[-1] == arena.state.mapped
    assert len(arena.opened) <= len(takes)


def test_arena_says_no(library: Any) -> None:
    """Used up, or nothing to map any more: 0 and the error of the call, and nothing moves."""
    small = Range(size=1 << 20)
    assert small.take(library, 2 << 20) == 0
    assert (small.state.position, small.state.error) == (small.state.low, 0)
    assert small.take(library, 1 << 10) != 0
    poor = Range(room=1)
    assert poor.take(library, 1 << 20) != 0
    assert poor.take(library, 8 << 20) == 0
    assert poor.state.error == 2
    assert poor.take(library, 1 << 10) == 0, "nothing after an error"
    shut = Range(closed=3)
    assert shut.take(library, 1 << 10) == 0
    assert (shut.state.error, shut.state.position) == (3, shut.state.low)
    assert shut.state.mapped == shut.state.low + (2 << 20), "to be unmapped in the end"
    assert shut.take(library, 1 << 10) == 0, "it is mapped, but nothing may look at it"


LEFT_ON_THE_STACK = """
void leave(void) { volatile char a[4096]; for (int i = 0; i < 4096; i++) a[i] = 0x5A; }
int count(void) {
    volatile char a[4096];
    int n = 0;
    for (int i = 0; i < 4096; i++) n += a[i] == 0x5A;
    return n;
}
int left(void (*scrub)(void)) { leave(); if (scrub) scrub(); return count(); }
"""


def test_the_stack_below_is_cleared(library: Any, tmp_path: pathlib.Path) -> None:
    """What an earlier call left there is gone, though nobody reads what the helper writes."""
    source, made = tmp_path / "stack.c", tmp_path / "stack.so"
    source.write_text(LEFT_ON_THE_STACK)
    subprocess.run(
        [*libraries._compiler(".c"), "-O0", "-w", "-shared", "-fPIC", "-o", str(made), str(source)],
        check=True,
    )
    left = ctypes.CDLL(str(made)).left
    left.argtypes = [ctypes.c_void_p]
    assert left(None) > 4000
    assert left(libraries.address_of(library.pg_scrub_stack)) < 100


def test_allocator_needs_an_active_arena(library: Any) -> None:
    """Without one it has no memory, and never the last one's."""
    library.pg_ghost_alloc.restype = ctypes.c_void_p
    library.pg_ghost_alloc.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    arena = Range()
    library.pg_arena_activate(ctypes.addressof(arena.state))
    try:
        assert library.pg_ghost_alloc(100, 0, None) % UNIT == 0
    finally:
        library.pg_arena_activate(None)
    assert library.pg_ghost_alloc(100, 0, None) is None


@pytest.fixture
def forgotten() -> Iterator[None]:
    libraries.load.cache_clear()
    yield
    libraries.load.cache_clear()
    libraries._missing.clear()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("word", ["0", "off", "False"])
def test_it_can_be_switched_off(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGRAPH_NATIVE", word)
    assert libraries.load() is None


@pytest.mark.usefixtures("forgotten")
def test_a_word_that_is_neither_is_told(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PGRAPH_NATIVE", "banana")
    libraries.load.cache_clear()
    assert libraries.load() is not None
    assert "PGRAPH_NATIVE is 'banana'; it must be 1 or 0" in caplog.text


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler"])
def test_no_compiler_is_no_error(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.delenv("PGRAPH_NATIVE", raising=False)
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert libraries.load() is None
    assert list((tmp_path / "pgraph").iterdir()) == [], "nothing half-built stays"
    assert "  no native helper, launching from Python instead: " in str(pgraph.report())
    assert pgraph.report().to_dict()["missing"] == list(libraries.missing())
    monkeypatch.setenv("CC", "cc")
    libraries.load.cache_clear()
    assert libraries.load() is not None
    assert pgraph.report().missing == ()


@pytest.mark.usefixtures("forgotten")
def test_what_the_compiler_says_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper = tmp_path / "wrapped"
    wrapper.write_text("#!/bin/sh\necho no licence for $1 >&2\nexit 3\n")
    wrapper.chmod(0o755)
    monkeypatch.delenv("PGRAPH_NATIVE", raising=False)
    monkeypatch.setenv("CC", f"{wrapper} cc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level("INFO", "pgraph.native.libraries"):
        assert libraries.load() is None
    assert "no licence for cc" in caplog.text


@pytest.mark.usefixtures("forgotten")
def test_a_compiler_may_be_a_command_with_arguments(
    library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("CC", "env LC_ALL=C cc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    libraries.load.cache_clear()
    assert libraries.load() is not None
    assert list((tmp_path / "pgraph").glob("*.so"))


def test_two_processes_may_build_at_once(library: Any, tmp_path: pathlib.Path) -> None:
    code = "from pgraph.native import libraries; assert libraries.load() is not None"
    environment = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [p.wait(timeout=120) for p in both] == [0, 0]
    assert len(list((tmp_path / "pgraph").glob("*.so"))) == 1
