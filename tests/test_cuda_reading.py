"""Captured CUDA graphs as they are read, over stand-ins for the driver's functions."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import types
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgraph.errors import CaptureError, DriverError
from pgraph.native import libraries
from pgraph.native.structs import NodeReaders
from pgraph.template.recording import NodeRecord
from pgraph.template.topology import chain, in_order, topology

cuda_edges = pytest.importorskip("pgraph.drivers.cuda.edges", reason="needs cuda-bindings")
cuda_kept = pytest.importorskip("pgraph.drivers.cuda.kept", reason="needs cuda-bindings")
cuda_nodes = pytest.importorskip("pgraph.drivers.cuda.nodes", reason="needs cuda-bindings")

P, INT = ctypes.c_void_p, ctypes.c_int
KERNEL, HOST, EMPTY = 0, 3, 5

# By function: the layout of its parameters, as (offset, bytes), and whether it has its demands.
LAYOUTS: dict[int, tuple[tuple[int, int], ...]] = {
    0x10: (),
    0x20: ((0, 8),),
    0x30: ((0, 4), (8, 8), (16, 20), (40, 3)),
    0x40: ((0, 1),),
}


@dataclasses.dataclass
class Node:
    """What the stand-in tells of one node.

    Attributes:
        fails: name of the call that fails for it.
        handle: of a kernel that names its function only by that.
        unknown: attributes that the driver does not know.
    """

    kind: int
    function: int
    passing: str
    numbers: list[int]
    data: bytes
    attributes: dict[int, bytes]
    fails: str | None = None
    by_handle: bool = False
    unknown: frozenset[int] = frozenset()


class Driver:
    """The driver's functions, told by `Node`s; a node's handle is 0x1000 and its position."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes, self.held, self.asked = nodes, [], 0
        self.demanded: list[int] = []
        made = [
            ctypes.CFUNCTYPE(INT, P, P)(self._type),
            ctypes.CFUNCTYPE(INT, P, P)(self._kernel),
            ctypes.CFUNCTYPE(INT, P, P)(self._function),
            ctypes.CFUNCTYPE(INT, P, INT, P)(self._attribute),
            ctypes.CFUNCTYPE(INT, P, INT, P)(self._demand),
        ]
        self.type, self.kernel, self.function, self.attribute, self.demand = made
        self.table = NodeReaders(*[ctypes.cast(f, P).value for f in made])

    def _type(self, handle: int, found: int) -> int:
        node = self.nodes[handle - 0x1000]
        INT.from_address(found).value = node.kind
        return 1 if node.fails == "type" else 0

    def _kernel(self, handle: int, found: int) -> int:
        node = self.nodes[handle - 0x1000]
        if node.fails == "kernel":
            return 400
        p = cuda_nodes.KernelParams.from_address(found)
        p.func, p.kern = (None, node.function + 1) if node.by_handle else (node.function, None)
        p.grid, p.block, p.shared = tuple(node.numbers[:3]), tuple(node.numbers[3:6]), node.numbers[6]
        p.ctx = node.numbers[7] or None
        if node.passing == "params":
            values = [ctypes.create_string_buffer(node.data, 32) for _ in LAYOUTS[node.function]]
            table = (P * (len(values) + 1))(*map(ctypes.addressof, values))
            p.kernel_params = ctypes.addressof(table)
            self.held += [*values, table]
        elif node.passing == "extra":
            size = ctypes.c_size_t(len(node.data))
            data = ctypes.create_string_buffer(node.data, max(len(node.data), 1))
            words = [[1, ctypes.addressof(data)], [2, ctypes.addressof(size)]]
            words = words[:: -1 if node.numbers[0] % 2 else 1]
            items = (ctypes.c_uint64 * 5)(*itertools.chain(*words), 0)
            p.extra = ctypes.addressof(items)
            self.held += [size, data, items]
        return 0

    def _function(self, found: int, kernel: int) -> int:
        P.from_address(found).value = kernel - 1
        return 0

    def _attribute(self, handle: int, attribute: int, found: int) -> int:
        self.asked += 1
        node = self.nodes[handle - 0x1000]
        value = node.attributes.get(attribute, bytes([attribute]) * 64)
        ctypes.memmove(found, value, len(value))
        return 1 if attribute in node.unknown else 0

    def _demand(self, found: int, attribute: int, function: int) -> int:
        self.demanded.append(function)
        INT.from_address(found).value = function * attribute - 900
        return 1 if function == 0x40 and attribute == 15 else 0

    def in_place(self, patch: pytest.MonkeyPatch) -> None:
        """Have them called in place of the driver's."""
        functions = cuda_nodes.cu

        def function_of(kernel: Any) -> tuple[Any, int]:
            return functions.CUresult.CUDA_SUCCESS, int(kernel) - 1

        patch.setattr(cuda_nodes, "_readers", lambda: (self.type, self.kernel))
        patch.setattr(cuda_nodes, "_table", lambda: self.table)
        patch.setattr(cuda_nodes.cu, "cuKernelGetFunction", function_of)
        patch.setattr(cuda_nodes.cu, "cuGetErrorString", lambda error: (0, b"no"))
        patch.setattr(cuda_kept, "_functions", lambda: (self.attribute, self.demand))
        patch.setattr(cuda_nodes, "_function_facts", lambda function: (f"f{function}", LAYOUTS[function]))


@st.composite
def graph_nodes(draw: st.DrawFn) -> Node:
    known = [*cuda_kept._ATTRIBUTES, *cuda_kept._HINTS]
    numbers = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=8, max_size=8))
    numbers[7] = draw(st.sampled_from((0, 7, (1 << 47) + 8)))
    return Node(
        draw(st.sampled_from((KERNEL, KERNEL, KERNEL, KERNEL, EMPTY, HOST))),
        draw(st.sampled_from(list(LAYOUTS))),
        draw(st.sampled_from(("params", "params", "extra", "neither"))),
        numbers,
        draw(st.binary(max_size=32)),
        draw(st.dictionaries(st.sampled_from(known), st.binary(min_size=64, max_size=64), max_size=2)),
        draw(st.sampled_from((None,) * 8 + ("type", "kernel"))),
        draw(st.booleans()),
        draw(st.frozensets(st.sampled_from(known), max_size=1)),
    )


def told(driver: Driver, with_kept: bool) -> Any:
    """The records of all nodes, or what was raised."""
    handles = range(0x1000, 0x1000 + len(driver.nodes))
    try:
        return cuda_nodes.read_nodes(list(handles), with_kept)
    except (CaptureError, DriverError) as e:
        return type(e), str(e), getattr(e, "node", None)


@pytest.mark.skipif(libraries.load() is None, reason="no C compiler, or PGRAPH_NATIVE=0")
@given(nodes=st.lists(graph_nodes(), max_size=6), with_kept=st.booleans())
@settings(max_examples=300, deadline=None)
def test_all_nodes_are_read_alike_in_c(nodes: list[Node], with_kept: bool) -> None:
    driver = Driver(nodes)
    with pytest.MonkeyPatch.context() as patch:
        driver.in_place(patch)
        found = told(driver, with_kept)
        assert with_kept or not driver.asked, "what nobody wants is not asked for"
        patch.setattr(cuda_nodes.libraries, "load", lambda: None)
        assert found == told(driver, with_kept)
    if found and isinstance(found[0], NodeRecord):
        for node, record in zip(nodes, found, strict=True):
            assert (node.kind == KERNEL) == (record.kind == "kernel")


@pytest.mark.skipif(libraries.load() is None, reason="no C compiler, or PGRAPH_NATIVE=0")
def test_kernels_are_read_by_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one after the other in Python; and what it says is right for one of each kind."""
    plain: dict[str, Any] = {"attributes": {}, "numbers": [1, 2, 3, 4, 5, 6, 96, 7]}
    packed = Node(KERNEL, 0x30, "params", data=bytes(range(1, 21)), **plain)
    buffered = Node(KERNEL, 0x10, "extra", data=bytes(range(12)), unknown=frozenset({14}), **plain)
    driver = Driver([packed, buffered])
    driver.in_place(monkeypatch)
    monkeypatch.setattr(cuda_nodes, "_read_kernel", lambda *args: pytest.fail("read in Python"))
    one, two = told(driver, True)
    b = bytes(range(1, 21))
    assert one.params == b[:4] + bytes(4) + b[:8] + b + bytes(4) + b[:3] + bytes(5)
    assert one.structs == ((16, 36),)
    assert one.header == (0x30, (1, 2, 3), (4, 5, 6), 96, 7, ("params", (0, 8, 16, 40)))
    assert two.params == bytes(range(12)) + bytes(4)
    assert (two.structs, two.header[-1]) == (((0, 16),), ("extra",))
    ctx, passing, demands, attributes = two.kept
    assert (ctx, passing, demands) == (7, "extra", tuple(0x10 * d - 900 for d in cuda_kept._DEMANDS))
    sizes = {**cuda_kept._ATTRIBUTES, **cuda_kept._HINTS}
    assert attributes == tuple(None if a == 14 else bytes([a]) * n for a, n in sizes.items())


@pytest.mark.skipif(libraries.load() is None, reason="no C compiler, or PGRAPH_NATIVE=0")
def test_functions_are_asked_once_what_they_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many nodes launch them; but anew at the next capture, when a handle may be another one's."""
    plain: dict[str, Any] = {"attributes": {}, "numbers": [1] * 8, "data": bytes(32)}
    driver = Driver([Node(KERNEL, function, "params", **plain) for function in (0x20, 0x30, 0x20, 0x30)])
    driver.in_place(monkeypatch)
    for captures in (1, 2):
        records = told(driver, True)
        assert [r.kept[2][0] for r in records] == [f * cuda_kept._DEMANDS[0] - 900 for f in (32, 48) * 2]
        assert sorted(driver.demanded) == sorted([0x20, 0x30] * len(cuda_kept._DEMANDS) * captures)


@pytest.mark.parametrize("helper", [True, False])
def test_a_handle_that_was_given_anew(helper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is unloaded together with its code, and the next one may be found under its handle."""
    if helper and libraries.load() is None:
        pytest.skip("no C compiler, or PGRAPH_NATIVE=0")
    facts, cu, success = cuda_nodes._function_facts, cuda_nodes.cu, cuda_nodes.cu.CUresult.CUDA_SUCCESS
    known = {"name": b"gone", "layout": [(0, 8)]}

    def parameter(function: Any, i: int) -> tuple[Any, int, int]:
        told = dict(enumerate(known["layout"]))
        return (success, *told[i]) if i in told else (cu.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0)

    plain: dict[str, Any] = {"attributes": {}, "numbers": [1] * 8}
    driver = Driver([Node(KERNEL, 0x20, "params", data=bytes(range(32)), **plain)])
    driver.in_place(monkeypatch)
    monkeypatch.setattr(cuda_nodes, "_function_facts", facts)
    monkeypatch.setattr(cu, "cuFuncGetName", lambda function: (success, known["name"]))
    monkeypatch.setattr(cu, "cuFuncGetParamInfo", parameter)
    if not helper:
        monkeypatch.setattr(cuda_nodes.libraries, "load", lambda: None)
    (before,) = told(driver, False)
    assert (before.name, before.params) == ("gone", bytes(range(8)))
    known |= {"name": b"new", "layout": [(0, 4)]}
    (after,) = told(driver, False)
    assert (after.name, after.params) == ("new", bytes(range(4)) + bytes(4))


# -- edges --------------------------------------------------------------------------------------


class Edges:
    """A graph whose nodes have the handles 100, 101, ... and are listed in any order."""

    def __init__(self, listed: list[int], edges: list[tuple[int, int, bytes]]) -> None:
        self.listed, self.edges = listed, edges

    def nodes(self, graph: int, found: int | None, count: int) -> int:
        assert graph == 9
        ctypes.c_size_t.from_address(count).value = len(self.listed)
        if found is not None:
            (ctypes.c_uint64 * len(self.listed)).from_address(found)[:] = [100 + i for i in self.listed]
        return 0

    def get(self, graph: int, befores: Any, afters: Any, data: Any, count: int) -> int:
        if self.plain(graph, befores, afters, count):
            for i, (_, _, how) in enumerate(self.edges):
                ctypes.memmove(data + 8 * i, how + bytes(5), 8)
        return 0

    def old(self, graph: int, befores: Any, afters: Any, count: int) -> int:
        if any(any(how) for _, _, how in self.edges):
            return 1
        self.plain(graph, befores, afters, count)
        return 0

    def plain(self, graph: int, befores: Any, afters: Any, count: int) -> bool:
        assert graph == 9
        ctypes.c_size_t.from_address(count).value = len(self.edges)
        if befores is None:
            return False
        (ctypes.c_uint64 * len(self.edges)).from_address(befores)[:] = [100 + a for a, _, _ in self.edges]
        (ctypes.c_uint64 * len(self.edges)).from_address(afters)[:] = [100 + b for _, b, _ in self.edges]
        return True


@st.composite
def graphs(draw: st.DrawFn) -> Edges:
    n = draw(st.integers(0, 7))
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    edges = draw(st.just([(a, a + 1) for a in range(n - 1)]) | st.lists(st.sampled_from(pairs), unique=True)
                 if pairs else st.just([]))  # fmt: skip
    how = st.sampled_from((bytes(3), bytes(3), bytes(3), b"\1\0\1"))
    plain = draw(st.booleans())
    numbers = draw(st.permutations(range(n)) | st.just(list(range(n))))
    told = [
        (numbers[a], numbers[b], bytes(3) if plain else draw(how)) for a, b in draw(st.permutations(edges))
    ]
    return Edges(draw(st.just(list(range(n))) | st.permutations(range(n))), told)


@given(graph=graphs(), older=st.booleans())
@settings(max_examples=300)
def test_nodes_come_in_an_order_that_their_edges_allow(graph: Edges, older: bool) -> None:
    """Chains, which are told at once, are no exception."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_nodes.cu, "cuGetErrorString", lambda error: (0, b"no"))
        patch.setattr(
            cuda_edges, "_functions", lambda: (graph.nodes, None if older else graph.get, graph.old)
        )
        odd = any(any(how) for _, _, how in graph.edges)
        if older and odd:
            with pytest.raises(DriverError):
                cuda_edges.ordered_nodes(9)
            return
        nodes, order = cuda_edges.ordered_nodes(9)
    listed = {node: i for i, node in enumerate(graph.listed)}
    positions = in_order(len(listed), [(listed[a], listed[b]) for a, b, _ in graph.edges])
    assert positions is not None
    assert nodes == [100 + graph.listed[i] for i in positions]
    place = {node - 100: i for i, node in enumerate(nodes)}
    odd = tuple(sorted((place[a], place[b], how) for a, b, how in graph.edges if any(how)))
    assert order == topology(len(nodes), [(place[a], place[b]) for a, b, _ in graph.edges], odd)


def test_a_chain_in_its_order_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Edges([3, 1, 2], [(1, 2, bytes(3)), (3, 1, bytes(3))])
    monkeypatch.setattr(cuda_edges, "_functions", lambda: (graph.nodes, graph.get, graph.old))
    monkeypatch.setattr(cuda_edges, "in_order", lambda *args: pytest.fail("sorted"))
    assert cuda_edges.ordered_nodes(9) == ([103, 101, 102], chain(3))


class Added:
    """Graphs made by hand, over a stand-in: nodes that are added have the attributes of their function.

    Attributes:
        fresh: of a node that was only just added, by function.
        reads: how often a whole graph was read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, setting: bool) -> None:
        self.assemble = pytest.importorskip("pgraph.drivers.cuda.assemble", reason="needs cuda-bindings")
        self.fresh = dict.fromkeys((1, 2), (bytes(4),) * 13)
        self.reads, self._setting = 0, setting
        self._nodes: list[tuple[NodeRecord, dict[int, bytes]]] = []
        for name, stands_in in {
            "check": lambda told: (1,),
            "cu": types.SimpleNamespace(cuGraphCreate=lambda flags: None),
            "CudaGraph": lambda raw, nodes: types.SimpleNamespace(nodes=nodes, anchored=False),
            "rebound_copies": lambda nodes, slots: [],
            "_added": self._added,
            "read_nodes": self._read,
            "_fresh": {},
        }.items():
            monkeypatch.setattr(self.assemble, name, stands_in)
        monkeypatch.setattr(cuda_kept, "_functions", lambda: (None, None, self._set))

    def _added(self, graph: int, nodes: Sequence[NodeRecord], order: Any) -> list[int]:
        self._nodes = [(node, {}) for node in nodes]
        return list(range(len(nodes)))

    def _set(self, node: int, attribute: int, value: Any) -> None:
        if self._setting:
            self._nodes[node][1][attribute] = value.raw

    def _read(self, handles: Sequence[int]) -> tuple[NodeRecord, ...]:
        self.reads += 1
        every = (*cuda_kept._ATTRIBUTES, *cuda_kept._HINTS)
        found = []
        for node, told in self._nodes:
            has = zip(every, self.fresh[node.header[0]], strict=True)
            stays = tuple(told[i][: len(v)] if i in told else v for i, v in has)
            found.append(node._replace(kept=(5, "params", (), stays)))
        return tuple(found)

    def kernel(self, function: int, *wanted: tuple[int, bytes]) -> NodeRecord:
        """A node with these attributes, by their places, and otherwise those that are usual."""
        stays = [bytes(4)] * 13
        for place, value in wanted:
            stays[place] = value
        header = (function, (1, 1, 1), (1, 1, 1), 0, 5, ("params", ()))
        return NodeRecord("kernel", "k", header, b"", kept=(5, "params", (), tuple(stays)))

    def made(self, *nodes: NodeRecord) -> int | None:
        """How often the graph of these was read until it was right; None if it never was."""
        self.reads = 0
        found = self.assemble.assembled(nodes, chain(len(nodes)), (), 0)
        return None if found is None else self.reads


def test_what_nodes_are_added_with_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their attributes are guessed from then on; a guess that is wrong costs another look, and no more."""
    graphs = Added(monkeypatch, setting=True)
    nodes = [graphs.kernel(1, (3, b"abcd")), graphs.kernel(2), graphs.kernel(1, (3, b"ef\0\0"), (0, b"wxyz"))]
    assert [graphs.made(*nodes), graphs.made(*nodes), graphs.made(*nodes[::-1])] == [2, 1, 1]
    graphs.fresh[1] = (b"hhhh", *graphs.fresh[1][1:])  # another function has the handle
    assert [graphs.made(*nodes), graphs.made(*nodes), graphs.made(*nodes)] == [2, 2, 1]


def test_attributes_that_cannot_be_set_make_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Added(monkeypatch, setting=False)
    node = graphs.kernel(1, (3, b"abcd"))
    assert [graphs.made(node), graphs.made(node), graphs.made(graphs.kernel(1))] == [None, None, 1]
