"""The CUDA driver's execs and recipes over stand-ins for the driver's functions, from C and from Python."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgraph.errors import DriverError
from pgraph.native import libraries
from pgraph.native.structs import LaunchCalls
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

cuda_exec = pytest.importorskip("pgraph.drivers.cuda.exec", reason="needs cuda-bindings")
cuda_recipe = pytest.importorskip("pgraph.drivers.cuda.recipe", reason="needs cuda-bindings")
cuda_nodes = pytest.importorskip("pgraph.drivers.cuda.nodes", reason="needs cuda-bindings")

_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
EXEC, CTX, STREAM, FIRST = 11, 22, 33, 7


class Device:
    """Takes what execs are set to as the driver would: by reading the structs.

    Attributes:
        content: by node, (function, grid, block, shared bytes, context, parameter bytes) or a struct's bytes.
        execs: those that there are.
        contents: of each of them; `content` is that of the one that was set last.
        launched: the content of each launch.
        used: the exec of each launch.
        fail_at: how many calls from now on one fails.
    """

    def __init__(self) -> None:
        self.execs = {EXEC}
        self.content: dict[int, Any] = {}
        self.contents = {EXEC: self.content}
        self.used: list[int] = []
        self.launched: list[dict[int, Any]] = []
        self.fail_at: int | None = None
        self.calls = 0
        made = [_SET(self._kernel), _COPY(self._copy), _COPY(self._fill), _LAUNCH(self._launch)]
        self.functions = made, LaunchCalls(*[ctypes.cast(f, ctypes.c_void_p).value for f in made])

    def _failed(self) -> int:
        self.calls += 1
        if self.fail_at is None:
            return 0
        self.fail_at -= 1
        return 1 if self.fail_at < 0 else 0

    def _kernel(self, exec: int, node: int, params: int) -> int:
        assert exec in self.execs
        self.content = self.contents.setdefault(exec, {})
        if self._failed():
            return 1
        p = cuda_nodes.KernelParams.from_address(params)
        if p.extra:
            assert not p.kernel_params
            data = cuda_nodes._extra_buffer(p.extra)
        else:
            sizes = self.parameters[p.func]
            pointers = (ctypes.c_void_p * max(len(sizes), 1)).from_address(p.kernel_params)
            data = b"".join(ctypes.string_at(a, n) for a, n in zip(pointers, sizes, strict=False))
        self.content[node] = (p.func, tuple(p.grid), tuple(p.block), p.shared, p.ctx, data)
        return 0

    parameters: dict[int, list[int]]

    def _copy(self, exec: int, node: int, params: int, ctx: int) -> int:
        return self._struct(exec, node, params, ctx, 200)

    def _fill(self, exec: int, node: int, params: int, ctx: int) -> int:
        return self._struct(exec, node, params, ctx, 40)

    def _struct(self, exec: int, node: int, params: int, ctx: int, nbytes: int) -> int:
        assert (exec in self.execs, ctx) == (True, CTX)
        self.content = self.contents.setdefault(exec, {})
        if self._failed():
            return 1
        self.content[node] = ctypes.string_at(params, nbytes)
        return 0

    def _launch(self, exec: int, stream: int) -> int:
        assert (exec in self.execs, stream) == (True, STREAM)
        if self._failed():
            return 1
        self.launched.append(dict(self.contents.setdefault(exec, {})))
        self.used.append(exec)
        return 0


class Source:
    """Stands for the graph that an exec was made from."""

    def __init__(self, n: int) -> None:
        self.nodes = [100 + i for i in range(n)]


def exec_of(nodes: list[NodeRecord], slots: list[Slot]) -> Any:
    made = cuda_exec.CudaExec.__new__(cuda_exec.CudaExec)
    made._source = Source(len(nodes))
    made.lock = cuda_exec.threading.Lock()
    made._lay_out(nodes, {slot.node - FIRST for slot in slots}, EXEC, CTX)
    return made


@dataclasses.dataclass
class Size:
    """What a specialization's recipe is made from."""

    nodes: list[NodeRecord]
    slots: list[Slot]


KINDS = ("kernel", "extra", "memcpy", "memset", "fixed", "empty")


def kernel(kind: str, function: int, numbers: list[int]) -> tuple[NodeRecord, list[int]]:
    """A kernel with a parameter of four bytes and further ones of eight, and the offsets of these."""
    dims = tuple(1 + n % 5 for n in numbers[:3])
    tail = (*dims, 1, 1)[:3], (function % 7 + 1, 2, 3), function * 16, CTX
    data = struct.pack(f"=I4x{len(numbers)}Q", function, *numbers)
    offsets = tuple(range(8, len(data), 8))
    passing: tuple[Any, ...] = ("params", (0, *offsets)) if kind == "kernel" else ("extra",)
    return NodeRecord("kernel", f"f{function}", (function, *tail, passing), data), list(offsets)


@st.composite
def sizes(draw: st.DrawFn, kinds: list[str]) -> Size:
    nodes, slots = [], []
    for i, kind in enumerate(kinds):
        numbers = draw(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=9))
        if kind in ("kernel", "extra"):
            # As many parameters as the function has.
            node, offsets = kernel(kind, len(numbers), numbers)
            offsets = [o for o in offsets if draw(st.booleans())]
        elif kind == "empty":
            node, offsets = NodeRecord("empty", "empty", (), b""), []
        else:
            words = 25 if kind == "memcpy" else 5
            data = struct.pack(f"={words}Q", *itertools.islice(itertools.cycle(numbers), words))
            node = NodeRecord("memset" if kind == "fixed" else kind, kind, (), data)
            offsets = {"memcpy": [48, 136], "memset": [0], "fixed": []}[kind]
        nodes.append(node)
        deltas = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-64, 64)
        slots += [Slot(FIRST + i, offset, draw(st.integers(0, 3)), draw(deltas)) for offset in offsets]
    return Size(nodes, slots)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Size], list[tuple[int, list[int], int | None, bool]]]:
    """Sizes of one partition, and what is done: (size, bases, failing call, whether it is only tried)."""
    kinds = draw(st.lists(st.sampled_from(KINDS), max_size=5))
    # Few of each, so that a launch comes again at the same addresses.
    step = st.tuples(
        st.sampled_from((0, 0, 1, 2)),
        st.sampled_from(([1 << 40, 2 << 40, 3 << 40, 4 << 40], [1 << 40, 3 << 40, 2 << 40, 5 << 40])),
        st.sampled_from((None, None, 0, 1, 2, 5)),
        st.sampled_from((False, False, False, True)),
    )
    return [draw(sizes(kinds)) for _ in range(3)], draw(st.lists(step, min_size=1, max_size=9))


def wanted(size: Size, bases: list[int]) -> dict[int, Any]:
    """What each node is to do in a launch, those left out that no launch sets."""
    found: dict[int, Any] = {}
    for i, node in enumerate(size.nodes):
        data = bytearray(node.params)
        mine = [slot for slot in size.slots if slot.node == FIRST + i]
        for slot in mine:
            struct.pack_into("=Q", data, slot.offset, (bases[slot.region] + slot.delta) % (1 << 64))
        if node.kind == "kernel":
            function, grid, block, shared, ctx, passing = node.header
            # Without the gap behind the first parameter, where they are passed one by one.
            passed = bytes(data[:4] + data[8:]) if passing[0] == "params" else bytes(data)
            found[100 + i] = (function, grid, block, shared, ctx, passed)
        elif mine:
            found[100 + i] = bytes(data)
    return found


@pytest.fixture(params=["in C", "in Python"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "in C" and libraries.load() is None:
        pytest.skip("no C compiler, or PGRAPH_NATIVE=0")
    return str(request.param)


def recipes_of(patch: pytest.MonkeyPatch, way: str, all_sizes: list[Size]) -> tuple[Device, Any, list[Any]]:
    device = Device()
    device.parameters = {n: [4, *[8] * n] for n in range(1, 10)}
    patch.setattr(cuda_exec, "_calls", lambda: device.functions)
    for module in (cuda_exec, cuda_recipe):
        patch.setattr(module, "succeeded", succeeded)
    if way == "in Python":
        patch.setattr(cuda_exec.libraries, "load", lambda: None)
    exec = exec_of(all_sizes[0].nodes, all_sizes[0].slots)
    return device, exec, [cuda_recipe.CudaRecipe(exec, s.nodes, s.slots, FIRST) for s in all_sizes]


def succeeded(code: int) -> None:
    if code:
        raise DriverError(f"code {code}")


@given(program=programs())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_launch_does_what_its_size_says(program: Any, way: str) -> None:
    """Whichever size was launched before, and whichever call failed; nothing is launched after a failure."""
    all_sizes, steps = program
    with pytest.MonkeyPatch.context() as patch:
        device, exec, recipes = recipes_of(patch, way, all_sizes)
        before: Any = None
        known: set[int] = set()  # nodes of which it is known what they were set to
        for which, bases, will_fail, tried in steps:
            launches, size = len(device.launched), all_sizes[which]
            want, device.calls, device.fail_at = wanted(size, bases), 0, will_fail
            anew, was = exec.state.held != recipes[which]._entry.number, dict(device.content)
            if tried and not recipes[which]._untried:
                assert recipes[which].fits()
                assert device.calls == 0, "its functions were taken before"
                continue
            if tried:
                kernels = {100 + i for i, node in enumerate(size.nodes) if node.kind == "kernel"}
                fits = recipes[which].fits()
                assert fits == (will_fail is None or will_fail >= len(kernels))
                assert (len(device.launched), exec.state.held) == (launches, 0)
                known, before = (known | kernels if fits else set()), None
                continue
            try:
                count = recipes[which].launch(bases, STREAM)
            except DriverError:
                assert will_fail is not None
                assert len(device.launched) == launches
                # The last call is the launch itself: the nodes are set by then.
                known = set(want) if exec.state.held else set()
                before = (which, bases) if exec.state.held else None
                continue
            assert device.launched[launches:] == [want]
            assert count == device.calls - 1
            if anew:
                assert count == sum(node not in known or was[node] != want[node] for node in want)
            elif before == (which, bases):
                assert count == 0
            before, known = (which, bases), set(want)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Size, Size]:
    """Two sizes whose parameters are as long, with slots in the same words."""
    one = draw(sizes(draw(st.lists(st.sampled_from(KINDS), max_size=5))))
    nodes = []
    for node in one.nodes:
        params = draw(st.binary(min_size=len(node.params), max_size=len(node.params)))
        header = node.header
        if node.kind == "kernel":
            function, grid, *rest = header
            header = draw(st.sampled_from([header, (function, (7, *grid[1:]), *rest), (3, grid, *rest)]))
        nodes.append(node._replace(header=header, params=params))
    slots = [slot._replace(delta=draw(st.sampled_from([slot.delta, 5]))) for slot in one.slots]
    return one, Size(nodes, draw(st.sampled_from([slots, one.slots])))


def words_of(recipe: Any) -> list[int]:
    """What a recipe keeps, with addresses in its block as distances, and without its number."""
    base = ctypes.addressof(recipe._entry)
    words = [word - base if 0 <= word - base < recipe.nbytes else word for word in recipe._words]
    return [0, 0, *words[2:]]


@given(pair=pairs())
@settings(max_examples=150, deadline=None)
def test_what_is_kept_of_one_size_serves_another(pair: tuple[Size, Size]) -> None:
    one, other = pair
    with pytest.MonkeyPatch.context() as patch:
        _, exec, recipes = recipes_of(patch, "in Python", [one, other, one])
        first, second, third = recipes
        assert first._layout is second._layout is third._layout is exec.layout
        _, _, (alone,) = recipes_of(patch, "in Python", [other])
        assert words_of(second) == words_of(alone)
        assert words_of(third) == words_of(first)


def test_slots_that_are_alike_are_kept_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are for most sizes. Where deltas differ, each launch finds its own."""
    node, offsets = kernel("kernel", 9, list(range(9)))
    same = [Slot(FIRST, offset, region % 4, 0) for region, offset in enumerate(offsets)]
    other = [slot._replace(delta=64) for slot in same]
    all_sizes = [Size([node], slots) for slots in (same, list(same), other, same)]
    device, _, recipes = recipes_of(monkeypatch, way, all_sizes)
    rows = [recipe._rows for recipe in recipes]
    assert rows[0] is rows[1] is rows[3] is not rows[2]
    nbytes = [recipe.nbytes for recipe in recipes]
    assert nbytes[0] == nbytes[2] == nbytes[1] + 16 * len(same) == nbytes[3] + 16 * len(same)
    replicated(device, recipes[2], 1)
    assert [other.nbytes for other in recipes[2]._others] == [nbytes[1]]
    del rows, recipes[0]
    for recipe, size in zip(recipes, all_sizes[1:], strict=True):
        recipe.launch(ADDRESSES[0], STREAM)
        assert device.launched[-1] == wanted(size, ADDRESSES[0])


def replicated(device: Device, recipe: Any, count: int, itself: bool = True) -> None:
    """Have so many further execs take turns with the recipe's own, or alone."""
    made = []
    for number in range(count):
        exec = cuda_exec.CudaExec.__new__(cuda_exec.CudaExec)
        old = recipe.exec
        exec._source = old._source
        device.execs.add(EXEC + 100 + number)
        exec._begin(old.nodes, old._rooms, set(old.taken), EXEC + 100 + number, CTX)
        made.append(recipe.replica(exec))
    recipe.take_turns(made, itself or not made)


ADDRESSES = [[k << 40 for k in range(n, n + 4)] for n in (1, 11, 21, 31)]


@given(
    data=st.data(),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from((None, None, None, 0, 1, 3))), max_size=14),
    count=st.integers(0, 3),
    itself=st.booleans(),
)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_execs_that_take_turns_do_the_same(
    data: st.DataObject, kinds: list[str], steps: list[tuple[int, int | None]], count: int, itself: bool
) -> None:
    """Each launch does what it should, whichever exec it takes; C and Python take the same one."""
    size = data.draw(sizes(kinds))
    found = []
    for way in ("in C", "in Python"):
        if way == "in C" and libraries.load() is None:
            continue
        with pytest.MonkeyPatch.context() as patch:
            device, _, (recipe,) = recipes_of(patch, way, [size])
            replicated(device, recipe, count, itself)
            told: list[Any] = []
            for which, will_fail in steps:
                launches, want = len(device.launched), wanted(size, ADDRESSES[which])
                device.fail_at = will_fail
                try:
                    told.append(recipe.launch(ADDRESSES[which], STREAM))
                except DriverError:
                    told.append("failed")
                    assert len(device.launched) == launches
                    continue
                assert device.launched[launches:] == [want]
            found.append((told, device.used))
    assert found[1:] == found[:-1]


def test_layers_keep_their_execs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers in turn: nothing is set from the second round on, nor once they come in another order."""
    node, offsets = kernel("kernel", 4, [1, 2, 3, 4])
    slots = [Slot(FIRST, offset, region, 0) for region, offset in enumerate(offsets)]
    device, _, (recipe,) = recipes_of(monkeypatch, way, [Size([node], slots)])
    replicated(device, recipe, 3)
    rounds = [[recipe.launch(ADDRESSES[which], STREAM) for which in (0, 1, 2, 3)] for _ in range(3)]
    assert rounds == [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert len(set(device.used)) == 4
    assert [recipe.launch(ADDRESSES[which], STREAM) for which in (3, 1, 0, 0, 2)] == [0] * 5
    others = [[address + 7 for address in addresses] for addresses in ADDRESSES]
    rounds = [[recipe.launch(others[which], STREAM) for which in (2, 1, 0, 3)] for _ in range(2)]
    assert rounds == [[1, 1, 1, 1], [0, 0, 0, 0]], "all addresses are new at once"


def test_addresses_are_kept_while_asked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node, offsets = kernel("kernel", 2, [1, 2])
    slots = [Slot(FIRST, offset, region, 5) for region, offset in enumerate(offsets)]
    _, _, (recipe,) = recipes_of(monkeypatch, way, [Size([node], slots)])
    assert recipe.watched() == []
    recipe.launch(ADDRESSES[0], STREAM)
    recipe.watch(2)
    for which in (1, 0, 1):
        recipe.launch(ADDRESSES[which], STREAM)
    rows = [struct.pack("=2Q", *(address + 5 for address in ADDRESSES[which][:2])) for which in (1, 0)]
    assert recipe.watched() == rows
    recipe.launch(ADDRESSES[0], STREAM)
    assert recipe.watched() == []


def test_launches_to_come_take_no_memory_yet(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the time that it takes to have it: a server watches each of its sizes at some time."""
    node, offsets = kernel("kernel", 2, [1, 2])
    slots = [Slot(FIRST, offset, region, 5) for region, offset in enumerate(offsets)]
    _, _, (recipe,) = recipes_of(monkeypatch, way, [Size([node], slots)])
    recipe.launch(ADDRESSES[0], STREAM)
    before = resident()
    recipe.watch((64 << 20) // (8 * len(slots)))
    assert resident() - before < 16 << 20
    recipe.launch(ADDRESSES[1], STREAM)
    assert recipe.watched() == [struct.pack("=2Q", *(address + 5 for address in ADDRESSES[1][:2]))]


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_replica_is_a_block_of_memory_of_its_own(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it points to the recipe that it was made from."""
    nodes = [kernel(kind, n, list(range(n)))[0] for kind in ("kernel", "extra") for n in (1, 5, 9)]
    slots = [Slot(FIRST + i, 8, 0, 0) for i in range(len(nodes))]
    device, _, (recipe,) = recipes_of(monkeypatch, way, [Size(nodes, slots)])
    replicated(device, recipe, 1)
    recipe.launch(ADDRESSES[0], STREAM)
    (other,) = recipe._others
    low = ctypes.addressof(recipe._entry)
    high = low + ctypes.sizeof(recipe._words)
    assert not any(low <= word < high for word in other._words)
    ctypes.memset(low + ctypes.sizeof(recipe._entry), 255, high - low - ctypes.sizeof(recipe._entry))
    assert other.launch(ADDRESSES[1], STREAM) == len(nodes)
    assert device.launched[-1] == wanted(Size(nodes, slots), ADDRESSES[1])


def test_a_function_is_tried_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a node's place: what a driver took there it takes with other dimensions and parameters."""
    made, other = kernel("kernel", 2, [5, 6])[0], kernel("kernel", 3, [7, 8, 9])[0]
    again = kernel("kernel", 3, [1, 2, 3])[0]
    all_sizes = [Size([node], []) for node in (made, other, again)]
    device, _, recipes = recipes_of(monkeypatch, way, all_sizes)
    counts = []
    for recipe in (*recipes, recipes[1]):
        device.calls = 0
        assert recipe.fits()
        counts.append(device.calls)
    assert counts == [0, 1, 1, 0], "the last two were made before the second one was tried"
    assert cuda_recipe.CudaRecipe(recipes[0].exec, [again], [], FIRST)._untried == set()


def test_only_nodes_that_differ_are_set(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sizes that differ in one node of three; after a failure all are set."""
    same = [kernel("kernel", 2, [5, 6])[0], kernel("extra", 3, [7, 8, 9])[0]]
    all_sizes = [Size([*same, kernel("kernel", 1, [n])[0]], [Slot(FIRST, 8, 0, 0)]) for n in (1, 2)]
    device, _, (one, other) = recipes_of(monkeypatch, way, all_sizes)
    counts = [recipe.launch([64], STREAM) for recipe in (one, other, one, other, other)]
    assert counts == [3, 1, 1, 1, 0]
    assert one.launch([128], STREAM) == 2, "and the one whose address changed"
    device.fail_at = 0
    with pytest.raises(DriverError):
        other.launch([128], STREAM)
    device.fail_at = None
    assert other.launch([128], STREAM) == 3
    assert device.launched[-1] == wanted(all_sizes[1], [128])


def test_dimensions_alone_may_differ(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And functions, and shared memory: the parameters are equal."""
    node, _ = kernel("kernel", 2, [5, 6])
    function, grid, block, shared, *rest = node.header
    headers = (
        node.header,
        (function, (9, 9, 9), block, shared, *rest),
        (function, grid, (9, 9, 9), shared, *rest),
        (function, grid, block, shared + 16, *rest),
    )
    all_sizes = [Size([node._replace(header=header)], []) for header in headers]
    device, _, recipes = recipes_of(monkeypatch, way, all_sizes)
    for which in (0, 1, 2, 3, 0, 2, 1, 3):
        assert recipes[which].launch([], STREAM) == 1
        assert device.launched[-1] == wanted(all_sizes[which], [])


def test_parameters_that_there_is_no_room_for_are_always_set(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kernel in a node's place may have many more."""
    small, large = (Size([kernel("kernel", n, list(range(n)))[0]], []) for n in (1, 9))
    device, _, recipes = recipes_of(monkeypatch, way, [small, large, large])
    for which in (0, 1, 2, 1, 2, 0):
        recipes[which].launch([], STREAM)
        assert device.launched[-1] == wanted([small, large, large][which], [])
    monkeypatch.setattr(cuda_exec, "_SPARE", 2)
    device, _, recipes = recipes_of(monkeypatch, way, [small, large, large])
    counts = [recipes[which].launch([], STREAM) for which in (0, 1, 2, 1, 0)]
    assert counts == ([1, 1, 1, 1, 1] if way == "in C" else [1, 1, 0, 0, 1])


def test_a_recipe_is_one_block_of_memory(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of about what its nodes need: a node of a model takes a few hundred bytes."""
    nodes = [kernel("kernel", 6, list(range(6)))[0] for _ in range(40)]
    slots = [Slot(FIRST + i, 8 * k, k, 0) for i in range(40) for k in range(1, 5)]
    _, exec, (recipe,) = recipes_of(monkeypatch, way, [Size(nodes, slots)])
    assert recipe.nbytes <= 40 * 260
    assert (recipe.entry is None) == (way == "in Python")
    assert all(recipe._params_of(setting) % 8 == 0 for setting in recipe._settings)
    big = [kernel("extra", 9, list(range(215)))[0] for _ in range(3)]
    _, _, (recipe,) = recipes_of(monkeypatch, way, [Size(big, [])])
    for setting in recipe._settings:
        p = cuda_nodes.KernelParams.from_address(recipe._params_of(setting))
        words = (ctypes.c_uint64 * 2).from_address(p.extra)
        assert words[1] % 64 == 0, "tensor maps want that"
    assert exec.state.held == 0


def test_regions_and_words_are_not_cut_short(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node, _ = kernel("kernel", 1, [1])
    with pytest.raises(struct.error):
        recipes_of(monkeypatch, way, [Size([node], [Slot(FIRST, 8, 1 << 31, 0)])])
