"""The native helper does what its Python twin does; the driver's functions are stood in for here."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pgraph
from pgraph.drivers.interface import UNIT, further, next_start
from pgraph.native import libraries
from pgraph.native.structs import ArenaState, ExecEntry, NodeEntry, RecipeEntry, SettingEntry, SlotEntry

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


KERNEL, MEMCPY, MEMSET, FIXED = range(4)
NAMES = ("kernel", "copy", "fill")
Slots = list[list[tuple[int, int, int]]]  # of each node: (word, region, delta); each word belongs to one slot


@dataclasses.dataclass
class Graph:
    """An exec's nodes, and recipes for them."""

    kinds: list[int]
    recipes: list[Slots]


@dataclasses.dataclass
class Step:
    """A launch of a recipe, or a trial whether it fits; and the call of the driver that fails in it."""

    recipe: int
    bases: list[int]
    fits: bool = False
    fail_at: int | None = None


@st.composite
def slots_for(draw: st.DrawFn, kinds: list[int]) -> Slots:
    found: Slots = []
    count = 0
    delta = st.integers(-300, 300) | st.integers(-(1 << 63), (1 << 63) - 1)
    for kind in kinds:
        n = 0 if kind == FIXED else draw(st.integers(0, 3))
        found.append([(count + k, draw(st.integers(0, 2)), draw(delta)) for k in range(n)])
        count += n
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, list[Step]]:
    """Recipes of one exec that take turns, with failures."""
    kinds = draw(st.lists(st.integers(0, 3), max_size=5))
    recipes = draw(st.lists(slots_for(kinds), min_size=1, max_size=3))
    base = st.integers(0, 3).map(lambda x: x << 40)
    step = st.builds(
        Step,
        st.integers(0, len(recipes) - 1),
        st.lists(base, min_size=3, max_size=3),
        st.integers(0, 5).map(lambda x: x == 0),
        st.none() | st.integers(0, 6),
    )
    return Graph(kinds, recipes), draw(st.lists(step, min_size=1, max_size=8))


class InPython:
    """The loop as it is specified."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.words = [[0] * sum(map(len, slots)) for slots in graph.recipes]
        self.held: int | None = None
        self.calls: list[Any] = []

    def do(self, step: Step) -> int:
        """Nodes set, or minus the code of the call that failed."""
        self.calls = []
        mine, anew = self.words[step.recipe], self.held != step.recipe
        self.held = None
        count = 0
        for i, (kind, slots) in enumerate(
            zip(self.graph.kinds, self.graph.recipes[step.recipe], strict=True)
        ):
            new = {} if step.fits else {w: (step.bases[r] + d) & U64 for w, r, d in slots}
            changed = any(mine[w] != v for w, v in new.items()) or anew or step.fits
            if kind == FIXED or not changed or (step.fits and kind != KERNEL):
                continue
            for w, v in new.items():
                mine[w] = v
            count += 1
            if self._call((NAMES[kind], 100 + i, params_of(step.recipe, i)), step):
                return 7 if step.fits else -7
        if step.fits:
            return 0
        self.held = step.recipe
        return -9 if self._call(("launch", 11, 33), step) else count

    def _call(self, call: Any, step: Step) -> bool:
        self.calls.append(call)
        return len(self.calls) - 1 == step.fail_at


def params_of(recipe: int, node: int) -> int:
    """Stands for the struct that a recipe has a node set to."""
    return 1000 * (recipe + 1) + node


class InC:
    """`pg_launch` and `pg_fits` over callbacks that note who was called with what, and what the exec holds.

    Attributes:
        content: of each node, what it was set to last: the struct, and the words that were in its slots then.
        launched: the content at each launch.
    """

    def __init__(self, library: Any, graph: Graph) -> None:
        self.library, self.graph = library, graph
        self.calls: list[Any] = []
        self.fail_at: int | None = None
        made = [
            _SET(lambda e, n, p: self._note("kernel", n, p)),
            _COPY(lambda e, n, p, c: self._note("copy", n, p, c)),
            _COPY(lambda e, n, p, c: self._note("fill", n, p, c)),
            _LAUNCH(lambda e, s: self._note("launch", e, s)),
        ]
        self.content: dict[int, Any] = {}
        self.launched: dict[int, Any] | None = None
        table = (ctypes.c_void_p * 4)(*[ctypes.cast(f, ctypes.c_void_p).value for f in made])
        nodes = (NodeEntry * max(len(graph.kinds), 1))(
            *((kind, 100 + i) for i, kind in enumerate(graph.kinds))
        )
        self.exec = ExecEntry(ctypes.addressof(table), 11, 22, ctypes.addressof(nodes), len(graph.kinds))
        self.keep: list[Any] = [made, table, nodes]
        self.words, self.recipes = [], []
        self.structs: dict[int, int] = {}  # by their addresses
        for number, recipe in enumerate(graph.recipes):
            flat = [slot for slots in recipe for slot in slots]
            ends = [sum(map(len, recipe[: i + 1])) for i in range(len(recipe))]
            settings = (SettingEntry * max(len(ends), 1))(*enumerate(ends))
            slots = (SlotEntry * max(len(flat), 1))(*flat)
            words = (ctypes.c_uint64 * max(len(flat), len(ends), 1))()
            at = ctypes.addressof(words)
            self.structs |= {at + 8 * i: params_of(number, i) for i in range(len(ends))}
            places = map(ctypes.addressof, (settings, slots, words))
            self.recipes.append(RecipeEntry(ctypes.addressof(self.exec), number + 1, *places))
            self.words.append(words)
            self.keep += [settings, slots]

    def _note(self, name: str, first: int, second: int, ctx: int | None = 22) -> int:
        assert ctx == 22
        second = second if name == "launch" else self.structs[second]
        self.calls.append((name, first, second))
        failed = len(self.calls) - 1 == self.fail_at
        if name == "launch":
            self.launched = dict(self.content)
        elif not failed:
            recipe, node = second // 1000 - 1, second % 1000
            slots = self.graph.recipes[recipe][node]
            self.content[first - 100] = second, [self.words[recipe][w] for w, _, _ in slots]
        return (9 if name == "launch" else 7) if failed else 0

    def do(self, step: Step) -> int:
        self.calls, self.fail_at, self.launched = [], step.fail_at, None
        recipe = ctypes.addressof(self.recipes[step.recipe])
        if step.fits:
            return int(self.library.pg_fits(recipe))
        today = (ctypes.c_uint64 * len(step.bases))(*step.bases)
        return int(self.library.pg_launch(recipe, 33, ctypes.addressof(today)))

    def launch(self, recipe: int, bases: list[int], fail_at: int | None = None) -> int:
        return self.do(Step(recipe, bases, fail_at=fail_at))


@given(case=cases())
@settings(max_examples=300)
def test_launch_equals_the_loop_in_python(library: Any, case: tuple[Graph, list[Step]]) -> None:
    """Same calls in the same order, same words, same counts, same code of the call that fails."""
    graph, steps = case
    native_side, spec = InC(library, graph), InPython(graph)
    for step in steps:
        assert native_side.do(step) == spec.do(step)
        assert native_side.calls == spec.calls
        assert [
            list(w)[: len(mine)] for w, mine in zip(native_side.words, spec.words, strict=True)
        ] == spec.words
        assert native_side.exec.held == (0 if spec.held is None else spec.held + 1)


@given(case=cases())
@settings(max_examples=300)
def test_what_is_launched_is_the_recipe(library: Any, case: tuple[Graph, list[Step]]) -> None:
    """Whatever the exec held, whichever call failed before: each node has this recipe's struct and words."""
    graph, steps = case
    side = InC(library, graph)
    for step in steps:
        side.do(step)
        if side.launched is None:
            continue
        recipe = graph.recipes[step.recipe]
        assert side.launched == {
            i: (params_of(step.recipe, i), [(step.bases[r] + d) & U64 for _, r, d in recipe[i]])
            for i, kind in enumerate(graph.kinds)
            if kind != FIXED
        }


TWO: Slots = [[(0, 0, 8)], [(1, 1, -8)]]


def test_the_second_launch_on_the_same_addresses_sets_nothing(library: Any) -> None:
    side = InC(library, Graph([KERNEL, MEMCPY], [TWO]))
    assert side.launch(0, [1 << 40, 2 << 40, 0]) == 2
    assert side.launch(0, [1 << 40, 2 << 40, 0]) == 0
    assert side.launch(0, [1 << 40, 3 << 40, 0]) == 1
    assert list(side.words[0]) == [(1 << 40) + 8, (3 << 40) - 8]


def test_recipes_in_turn_set_all_each_time(library: Any) -> None:
    """Also nodes without slots, and at addresses that a recipe has seen; never those that are fixed."""
    side = InC(library, Graph([KERNEL, FIXED, KERNEL], [[[(0, 0, 0)], [], []], [[(0, 1, 0)], [], []]]))
    bases = [1 << 40, 2 << 40, 0]
    for recipe in (0, 1, 0, 1):
        assert side.launch(recipe, bases) == 2
        assert [node for _, node, _ in side.calls] == [100, 102, 11]
    assert side.launch(1, bases) == 0


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_after_a_failure_all_nodes_are_set(library: Any, failing: int) -> None:
    """Also at the same addresses: nobody knows what the exec holds."""
    bases = [1 << 40, 2 << 40, 3 << 40]
    slots: Slots = [[(0, 0, 8)], [(1, 1, 0), (2, 1, -8)], [(3, 2, 0)]]
    side = InC(library, Graph([KERNEL, MEMCPY, MEMSET], [slots]))
    assert side.launch(0, bases, fail_at=failing) == -7
    assert side.launched is None, "nothing may be launched that nobody knows"
    assert side.exec.held == 0
    assert side.launch(0, bases) == 3
    assert [node for _, node, _ in side.calls] == [100, 101, 102, 11]
    assert side.launch(0, bases) == 0
    moved = [4 << 40, 2 << 40, 3 << 40]
    assert side.launch(0, moved, fail_at=0) == -7
    assert side.launch(0, moved) == 3


def test_a_failed_launch_leaves_the_nodes_set(library: Any) -> None:
    side = InC(library, Graph([KERNEL], [[[(0, 0, 0)]]]))
    assert side.launch(0, [1 << 40, 0, 0], fail_at=1) == -9
    assert side.launch(0, [1 << 40, 0, 0]) == 0
    assert list(side.words[0]) == [1 << 40]


def test_a_trial_sets_kernels_only_and_launches_nothing(library: Any) -> None:
    """A copy takes no ghost, and no address of today's is known then."""
    side = InC(library, Graph([KERNEL, MEMCPY, MEMSET, KERNEL], [[[]] * 4, [[]] * 4]))
    side.launch(0, [0, 0, 0])
    trial = Step(1, [], fits=True)
    assert side.do(trial) == 0
    assert [(name, node) for name, node, _ in side.calls] == [("kernel", 100), ("kernel", 103)]
    assert side.launch(0, [0, 0, 0]) == 4, "it holds what was tried"
    trial.fail_at = 1
    assert side.do(trial) == 7
    assert side.launch(0, [0, 0, 0]) == 4


def test_one_thread_at_a_time_sets_and_launches(library: Any) -> None:
    """What it set is what it launches: recipes of one exec, from several threads at once."""
    kinds = [KERNEL] * 4
    recipes: list[Slots] = [[[(i, i % 3, k)] for i in range(4)] for k in range(3)]
    side = InC(library, Graph(kinds, recipes))
    wrong: list[Any] = []
    note = side._note

    def noting(name: str, first: int, second: int, ctx: int | None = 22) -> int:
        time.sleep(1e-4)  # another thread's turn
        code = note(name, first, second, ctx)
        if name == "launch" and len({params // 1000 for params, _ in side.content.values()}) != 1:
            wrong.append(dict(side.content))
        return code

    side._note = noting  # type: ignore[method-assign]

    def launches(recipe: int) -> None:
        for i in range(20):
            side.launch(recipe, [i << 40, recipe << 40, 0])

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(launches, range(3)))
    assert wrong == []


NUMBERS = (
    "low",
    "high",
    "position",
    "mapped",
    "chunk",
    "handle",
    "guard",
    "unit",
    "further",
    "ahead",
    "count",
)


class Range:
    """An arena over nothing: mapping is noted, and fails after `room` chunks."""

    def __init__(
        self, layout: int = 0, size: int = 1 << 30, room: int = 1000, closed: int = 0, ahead: int = 0
    ) -> None:
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
        self.state = ArenaState(
            low, low + size, low, low, 2 << 20, 5, 1 << 16, *rule, ahead, 0, 0, *pointers, None
        )

    def take(self, library: Any, nbytes: int, phase: int = 0) -> int:
        return library.pg_arena_take(ctypes.addressof(self.state), nbytes, phase)


@given(
    takes=st.lists(st.tuples(st.integers(0, 5 << 20), st.integers(0, 255)), max_size=20),
    layout=st.integers(0, 1),
    ahead=st.sampled_from([0, 3 << 20, 40 << 20]),
)
def test_arena_places_ranges_by_the_rule(
    library: Any, takes: list[tuple[int, int]], layout: int, ahead: int
) -> None:
    """Same gaps, guards, rounding and phase as the rule written in Python."""
    arena = Range(layout, ahead=ahead)
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
    assert len(arena.opened) <= (len(takes) if not ahead else arena.state.position // ahead + 1)


def test_no_more_than_there_is_is_mapped_ahead(library: Any) -> None:
    arena = Range(size=9 << 20, ahead=40 << 20)
    assert arena.take(library, 1 << 20)
    assert arena.state.mapped == arena.state.low + (8 << 20)
    assert arena.take(library, 6 << 20)
    assert arena.opened == [(arena.state.low, arena.state.low + (8 << 20))]


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
