"""What the CUDA driver knows without a device."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
import traceback
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pgraph.drivers.interface import HiddenAllocation
from pgraph.errors import DriverError
from pgraph.ops import op_names
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

cuda = pytest.importorskip("pgraph.drivers.cuda.driver", reason="needs cuda-bindings")
sessions = pytest.importorskip("pgraph.drivers.cuda.session", reason="needs cuda-bindings")
allocator_log = pytest.importorskip("pgraph.drivers.cuda.allocator_log", reason="needs cuda-bindings")
cuda_nodes = pytest.importorskip("pgraph.drivers.cuda.nodes", reason="needs cuda-bindings")
cuda_graph = pytest.importorskip("pgraph.drivers.cuda.graph", reason="needs cuda-bindings")
cuda_kept = pytest.importorskip("pgraph.drivers.cuda.kept", reason="needs cuda-bindings")


def test_seeds_of_attention_are_where_a_plain_run_has_them() -> None:
    """Numbers of the host's kind for the 0-dim integers, everything else as it was."""
    attended, sums = torch.randn(2, 3), torch.randn(2)
    seed = torch.empty((), dtype=torch.int64, device="meta")  # stands for the device
    got = sessions._host_seeds((attended, sums, seed, seed, 7))
    assert got[0] is attended
    assert got[1] is sums
    assert [(t.device.type, t.dtype, tuple(t.shape)) for t in got[2:4]] == [("cpu", torch.int64, ())] * 2
    assert got[4] == 7


def test_only_the_memory_efficient_kernel_has_its_seeds_on_the_host() -> None:
    """cuDNN's backward refuses seeds that are not on the device."""
    assert op_names.HOST_SEEDS < op_names.ATTENTION_OPS
    assert all("efficient" in name for name in op_names.HOST_SEEDS)
    assert not any("backward" in name for name in op_names.HOST_SEEDS)


def test_copies_that_no_launch_changes_are_not_sent_elsewhere() -> None:
    """The anchor is somebody's memory: a node that keeps its parameters must not get that address."""
    kinds = ("kernel", "memset", "memcpy", "memset")
    nodes = [NodeRecord(kind, kind, (), bytes(16)) for kind in kinds]
    slots = [Slot(0, 0, 0, 0), Slot(2, 0, 1, 0), Slot(2, 8, 0, 0), Slot(3, 0, 0, 0)]
    assert cuda_graph.rebound_copies(nodes, slots) == [(2, nodes[2]), (3, nodes[3])]


def test_peaks_that_cannot_be_made_right_lose_no_capture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peaks = iter([(1, 1), (2, 2)])
    monkeypatch.setattr(cuda.CudaDriver, "_peaks", lambda self: next(peaks))
    monkeypatch.setattr(cuda, "restore", lambda *args: 1 / 0)
    with cuda.CudaDriver(0).capture_lock():
        pass
    assert "peak statistics were not made right" in caplog.text


class Ghost:
    """Counts as allocated for as long as somebody has it."""


def test_a_capture_that_fails_leaves_no_ghosts_in_the_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it added was taken for the program's own peak by the next capture, and stayed for ever."""
    alive = weakref.WeakSet[Ghost]()
    peak, restored = 100, list[tuple[int, ...]]()

    def capture(cause: bool) -> None:
        nonlocal peak
        ghost = Ghost()
        alive.add(ghost)
        peak += 40
        try:
            again = Ghost()
            alive.add(again)
            raise KeyError("first")
        except KeyError as e:
            if cause:
                raise DriverError("second") from e
            raise DriverError("second")  # noqa: B904 - both kinds leave frames

    def restore(_: Any, *peaks: int) -> bool:
        nonlocal peak
        assert not alive, "they would count as in use"
        restored.append(peaks)
        peak = peaks[0]
        return True

    monkeypatch.setattr(cuda.CudaDriver, "_peaks", lambda self: (peak, peak))
    monkeypatch.setattr(cuda, "restore", restore)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    driver = cuda.CudaDriver(0)
    for cause in (True, False):
        with pytest.raises(DriverError, match="second"), driver.capture_lock():
            capture(cause)
    with driver.capture_lock():
        peak += 20
    assert (restored, peak) == ([(100, 100)] * 3, 100)


def test_errors_that_name_each_other_as_causes_are_let_go() -> None:
    first, second = DriverError("first"), DriverError("second")
    first.__cause__, second.__cause__ = second, first
    cuda._let_go(first, None)


def test_an_error_of_the_programs_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is being handled while pgraph captures: a debugger may look at it later."""

    def own() -> None:
        mine = "own"
        raise ValueError(mine)

    monkeypatch.setattr(cuda.CudaDriver, "_peaks", lambda self: (1, 1))
    kept: list[BaseException] = []
    try:
        own()
    except ValueError as e:
        kept.append(e)
        with contextlib.suppress(DriverError), cuda.CudaDriver(0).capture_lock():
            raise DriverError("capture") from None
        with contextlib.suppress(DriverError), cuda.CudaDriver(0).capture_lock():
            raise DriverError("capture") from e
    frames = [frame for frame, _ in traceback.walk_tb(kept[0].__traceback__)]
    assert frames[-1].f_locals == {"mine": "own"}


class Graphs:
    """Graphs as the driver has them: lists of (graph, number of the node); copies keep the numbers."""

    def __init__(self, n_nodes: int) -> None:
        self.graphs = {0: [(0, i) for i in range(n_nodes)]}
        self.fresh = itertools.count(1)
        self.copied = 0

    def cuGraphClone(self, graph: int) -> tuple[Any, int]:  # noqa: N802 - the driver's names
        clone = next(self.fresh)
        self.graphs[clone] = [(clone, i) for _, i in self.graphs[graph]]
        self.copied += len(self.graphs[clone])
        return self.CUresult.CUDA_SUCCESS, clone

    def cuGraphNodeFindInClone(self, node: tuple[int, int], clone: int) -> tuple[Any, tuple[int, int]]:  # noqa: N802
        assert (clone, node[1]) in self.graphs[clone]
        return self.CUresult.CUDA_SUCCESS, (clone, node[1])

    def cuGraphDestroyNode(self, node: tuple[int, int]) -> tuple[Any]:  # noqa: N802
        self.graphs[node[0]].remove(node)
        return (self.CUresult.CUDA_SUCCESS,)

    def cuGraphDestroy(self, graph: int) -> tuple[Any]:  # noqa: N802
        del self.graphs[graph]
        return (self.CUresult.CUDA_SUCCESS,)

    CUresult = cuda_graph.cu.CUresult


def test_a_graph_is_cut_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has its nodes, nothing else is left, and nodes are copied a few times each."""
    driver = Graphs(160)
    monkeypatch.setattr(cuda_graph, "cu", driver)
    graph = cuda_graph.CudaGraph(0, list(driver.graphs[0]))
    chunks = [(first, min(first + 7, 160)) for first in range(0, 160, 7)]
    graph.cut(chunks)
    parts = [graph.part(*chunk) for chunk in chunks]
    for part, (first, last) in zip(parts, chunks, strict=True):
        assert [number for _, number in part.nodes] == list(range(first, last))
        assert driver.graphs[part.graph] == part.nodes
    assert len(driver.graphs) == len(chunks)
    assert driver.copied <= 160 * 5, "23 parts: five halvings, each copies all nodes once"
    assert parts[-1] is graph, "it is of no other use"
    del parts, part, graph
    assert driver.graphs == {}


def test_a_graph_that_is_not_cut_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Graphs(16)
    monkeypatch.setattr(cuda_graph, "cu", driver)
    graph = cuda_graph.CudaGraph(0, list(driver.graphs[0]))
    alone = graph.part(3, 9)
    assert [number for _, number in alone.nodes] == list(range(3, 9)), "nobody told of this one"
    assert graph.part(0, 16) is graph
    graph.cut([(0, 16)])
    assert graph.part(0, 16) is graph
    del alone, graph
    assert driver.graphs == {}


def test_a_kernel_is_read_as_the_driver_lays_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    word, pair = ctypes.c_uint64(0x1234_5678_9ABC), (ctypes.c_uint32 * 3)(7, 8, 9)
    table = (ctypes.c_void_p * 2)(ctypes.addressof(word), ctypes.addressof(pair))

    def type_of(node: int, found: int) -> int:
        assert node == 0xBEEF
        ctypes.c_int.from_address(found).value = 0
        return 0

    def kernel(node: int, found: int) -> int:
        # CUDA_KERNEL_NODE_PARAMS_v2 by hand: func, grid, block, shared, params, extra, kern, ctx.
        memory = (ctypes.c_uint32 * 18).from_address(found)
        memory[0:2] = 0x11, 0
        memory[2:9] = 2, 3, 4, 5, 6, 7, 96
        ctypes.c_void_p.from_address(found + 40).value = ctypes.addressof(table)
        ctypes.c_void_p.from_address(found + 64).value = 0x77
        return 0

    monkeypatch.setattr(cuda_nodes, "_readers", lambda: (type_of, kernel))
    monkeypatch.setattr(cuda_nodes, "_function_facts", lambda function: (f"f{function:x}", ((0, 8), (8, 12))))
    monkeypatch.setattr(cuda_kept, "of_kernel", lambda *facts: facts)
    record = cuda_nodes.read_node(0xBEEF)
    assert record == NodeRecord(
        "kernel",
        "f11",
        (0x11, (2, 3, 4), (5, 6, 7), 96, 0x77, ("params", (0, 8))),
        bytes(word) + bytes(pair) + bytes(4),
        ((8, 20),),
        (0xBEEF, 0x11, 0x77, "params"),
        ("params", (0, 8)),
    )
    monkeypatch.setattr(cuda_nodes, "_readers", lambda: (type_of, lambda node, found: 1))
    monkeypatch.setattr(cuda_nodes.cu, "cuGetErrorString", lambda error: (0, b"no"))
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE: no"):
        cuda_nodes.read_node(0xBEEF)


@given(sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=6), data=st.data())
def test_parameters_are_packed_alike_in_c(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    """The helper's loop and Python's, each with the parameters in places of their own."""
    values = [data.draw(st.binary(min_size=size, max_size=size)) for size, _ in sizes]
    layout, at = [], 0
    for size, gap in sizes:
        layout.append((at, size))
        at += size + gap
    held = [ctypes.create_string_buffer(value, len(value)) for value in values]
    table = (ctypes.c_void_p * max(len(held), 1))(*map(ctypes.addressof, held))
    packed = cuda_nodes._packed(ctypes.addressof(table), tuple(layout))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_nodes.libraries, "load", lambda: None)
        assert packed == cuda_nodes._packed(ctypes.addressof(table), tuple(layout))
    assert len(packed[0]) % 8 == 0
    for (offset, size), value in zip(layout, values, strict=True):
        assert packed[0][offset : offset + size] == value


@pytest.mark.parametrize("can", [True, False])
def test_the_log_has_what_is_read(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else, where PyTorch can leave that out."""
    asked: list[dict[str, Any]] = []

    def able(enabled: Any, context: Any, clear_history: bool, skip_actions: Any = None) -> None:
        asked.append({"cleared": clear_history, "left out": skip_actions})

    def unable(enabled: Any, context: Any, clear_history: bool) -> None:
        asked.append({"cleared": clear_history, "left out": None})

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", able if can else unable)
    monkeypatch.setattr(allocator_log, "_left_out", allocator_log._left_out.__wrapped__)
    allocator_log.clear_trace()
    (told,) = asked
    assert told["cleared"]
    assert (told["left out"] is not None) == can
    if can:
        assert {"alloc", "free_requested"}.isdisjoint(told["left out"])
        assert {"free_completed", "segment_alloc"} <= set(told["left out"])


@pytest.fixture
def launch_attributes(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], bytes]:
    """What the driver tells of (node or function, attribute); it fails for what is not there."""
    told: dict[tuple[int, int], bytes] = {(5, i): bytes([i, 1]) for i in cuda_kept._ATTRIBUTES}
    told |= {(9, i): bytes([i]) for i in cuda_kept._DEMANDS}

    def of_node(node: int, attribute: int, value: Any) -> int:
        found = told.get((node, attribute))
        ctypes.memmove(value, found or b"?", len(found or b"?"))
        return 0 if found is not None else 1

    def of_function(value: int, attribute: int, function: int) -> int:
        found = told.get((function, attribute))
        ctypes.c_int.from_address(value).value = int.from_bytes(found or b"?", "little")
        return 0 if found is not None else 1

    monkeypatch.setattr(cuda_kept, "_functions", lambda: (of_node, of_function))
    return told


def test_launch_attributes_are_what_an_exec_keeps(launch_attributes: dict[tuple[int, int], bytes]) -> None:
    """Each one, the function's demands, its context and the way parameters are passed tell nodes apart."""
    before = cuda_kept.of_kernel(5, 9, 1, "params")
    assert before is not None
    assert cuda_kept.of_kernel(5, 9, 1, "params") == before
    assert cuda_kept.of_kernel(5, 9, 2, "params") != before
    assert cuda_kept.of_kernel(5, 9, 1, "extra") != before
    for key in list(launch_attributes):
        was = launch_attributes[key]
        launch_attributes[key] = bytes([was[0] + 1, *was[1:]])
        assert cuda_kept.of_kernel(5, 9, 1, "params") not in (None, before), key
        launch_attributes[key] = was
    for hint in cuda_kept._HINTS:
        launch_attributes[5, hint] = b"\1"
        assert cuda_kept.of_kernel(5, 9, 1, "params") not in (None, before), hint
        del launch_attributes[5, hint]
    assert cuda_kept.of_kernel(5, 9, 1, "params") == before


def test_what_cannot_be_read_is_not_known(launch_attributes: dict[tuple[int, int], bytes]) -> None:
    for key in list(launch_attributes):
        was = launch_attributes.pop(key)
        assert cuda_kept.of_kernel(5, 9, 1, "params") is None, key
        launch_attributes[key] = was
    assert cuda_kept.of_kernel(5, 9, 1, "params") is not None


def test_hints_that_no_driver_knows_do_not_keep_sizes_apart(
    launch_attributes: dict[tuple[int, int], bytes],
) -> None:
    """An H200's driver tells no node's preferred cluster dimension; every kernel counted as unknown."""
    assert 11 in cuda_kept._HINTS
    assert not any((5, hint) in launch_attributes for hint in cuda_kept._HINTS)
    assert cuda_kept.of_kernel(5, 9, 1, "params") is not None


def test_attributes_are_those_that_are_valid_for_nodes() -> None:
    """By the driver's own words; the numbers are the driver's."""
    ids = cuda_nodes.cu.CUlaunchAttributeID
    told = {a.value: a.__doc__ or "" for a in ids}
    for_nodes = {value for value, doc in told.items() if doc.startswith("Valid for") and "graph nodes" in doc}
    assert for_nodes <= {*cuda_kept._ATTRIBUTES, *cuda_kept._HINTS}
    demands = cuda_nodes.cu.CUfunction_attribute
    assert [demands(i).name.removeprefix("CU_FUNC_ATTRIBUTE_") for i in cuda_kept._DEMANDS] == [
        "CLUSTER_SIZE_MUST_BE_SET",
        "REQUIRED_CLUSTER_WIDTH",
        "REQUIRED_CLUSTER_HEIGHT",
        "REQUIRED_CLUSTER_DEPTH",
        "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
    ]


def test_copies_keep_all_but_their_length_and_fills_all_but_their_value() -> None:
    """A copy of rows takes no other length; the driver may refuse a fill of another one."""
    copy = cuda_nodes.cu.CUDA_MEMCPY3D()

    def copied(length: int, rows: int = 1, **change: Any) -> bytes:
        copy.srcMemoryType = copy.dstMemoryType = cuda_nodes.cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.dstDevice, copy.srcXInBytes = 1 << 40, 2 << 40, 0
        copy.WidthInBytes, copy.Height, copy.Depth, copy.srcPitch = length, rows, 1, length
        for name, value in change.items():
            setattr(copy, name, value)
        return cuda_kept.of_copy(ctypes.string_at(copy.getPtr(), 200))

    assert copied(8) == copied(64)
    assert copied(8, 2) != copied(64, 2)
    assert copied(8) != copied(8, 2)
    assert copied(8) != copied(8, srcXInBytes=4)
    assert copied(8, srcMemoryType=cuda_nodes.cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED) != copied(8)
    assert struct.unpack("=25Q", copied(8))[6] == 1 << 40, "the addresses are for the slots to say"
    fill = cuda_nodes.cu.CUDA_MEMSET_NODE_PARAMS()

    def filled(**change: int) -> bytes:
        fill.dst, fill.pitch, fill.value, fill.elementSize, fill.width, fill.height = 1 << 40, 0, 7, 4, 16, 1
        for name, value in change.items():
            setattr(fill, name, value)
        return cuda_kept.of_fill(ctypes.string_at(fill.getPtr(), 40))

    assert filled() == filled(value=9)
    for change in ({"elementSize": 1}, {"width": 8}, {"height": 2}, {"pitch": 64}, {"dst": 2 << 40}):
        assert filled() != filled(**change), change


def test_the_log_of_one_pool_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read is not read again; all is asked for where the pool's own log lacks something."""
    arena = SimpleNamespace(low=1000, high=2000, segments=2, device=torch.device("cuda", 0))
    arena.since = arena.stream = -1
    log: list[dict[str, Any]] = []
    asked: list[Any] = []

    def note(action: str, addr: int, size: int = 0) -> None:
        log.append({"action": action, "addr": addr, "size": size})

    def snapshot(which: Any) -> dict[str, Any]:
        asked.append(which)
        return {"device_traces": [log if which[1] == 0 or not hide else []]}

    hide = False
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", snapshot, raising=False)
    note("alloc", 1000, 8)
    note("alloc", 1100, 16)
    note("alloc", 5000, 16)
    note("free_requested", 1000)
    note("alloc", 1000, 32)
    note("free_completed", 1000)
    first = allocator_log.read_trace(arena, (0, 7))
    assert first == [HiddenAllocation(1000, 32, True), HiddenAllocation(1100, 16, False)]
    assert asked == [(0, 7, True)]
    assert allocator_log.still_held(arena, (0, 7)) == {1100}
    log.clear()
    assert allocator_log.still_held(arena, (0, 7), first) == {1100}
    note("free_requested", 1100)
    assert allocator_log.still_held(arena, (0, 7), first) == set()
    log.clear()
    note("alloc", 1000, 8)
    note("alloc", 1100, 16)
    asked.clear()
    hide = True
    assert len(allocator_log.read_trace(arena, (0, 7))) == 2
    assert asked == [(0, 7, True), (0, 0, True)]


def test_a_status_that_the_bindings_do_not_know() -> None:
    """It is an error like any other: a launch that failed goes on uncaptured."""
    cuda_nodes.succeeded(0)
    assert cuda_nodes.status_name(700) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert cuda_nodes.status_name(31999) == "CUDA error 31999"
    with pytest.raises(DriverError, match="CUDA error 31999: no description"):
        cuda_nodes.succeeded(31999)
    with pytest.raises(DriverError, match="CUDA error 31999"):
        pytest.importorskip("pgraph.drivers.cuda.native")._launch_failed(31999)
    told = pytest.importorskip("pgraph.drivers.cuda.counts").lost("it ended", 31999)
    assert "it ended: CUDA error 31999" in str(told)
