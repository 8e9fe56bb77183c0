"""The CUDA driver over stand-ins for the driver's functions and for PyTorch's."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import struct
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from pgraph.drivers.interface import HiddenAllocation
from pgraph.errors import DriverError
from pgraph.template.recording import NodeRecord

cuda = pytest.importorskip("pgraph.drivers.cuda.driver", reason="needs cuda-bindings")
sessions = pytest.importorskip("pgraph.drivers.cuda.session", reason="needs cuda-bindings")
allocator_log = pytest.importorskip("pgraph.drivers.cuda.allocator_log", reason="needs cuda-bindings")
graphs = pytest.importorskip("pgraph.drivers.cuda.graph", reason="needs cuda-bindings")
cuda_ghost = pytest.importorskip("pgraph.drivers.cuda.ghost", reason="needs cuda-bindings")
peaks = pytest.importorskip("pgraph.drivers.cuda.peaks", reason="needs cuda-bindings")

GPU = torch.device("cuda", 0)
SUCCESS, FAILURE = cuda.cu.CUresult.CUDA_SUCCESS, cuda.cu.CUresult.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("code", [SUCCESS, FAILURE])
def test_a_capture_that_cannot_be_counted_is_ended(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was begun: nobody else would end it, and the thread could allocate nothing from then on."""
    done: list[str] = []

    def told(name: str, *values: Any) -> None:
        def function(*_: Any) -> tuple[Any, ...]:
            done.append(name)
            return values

        monkeypatch.setattr(cuda.cu, name, function)

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    told("cuStreamBeginCapture", SUCCESS)
    told("cuStreamGetCaptureInfo", code, 1, 1, 9)
    told("cuStreamEndCapture", SUCCESS, 9)
    told("cuGraphDestroy", SUCCESS)
    monkeypatch.setattr(cuda.cu, "cuGetErrorString", lambda error: (SUCCESS, b"no"))
    monkeypatch.setattr(sessions, "NodeCount", fails)
    monkeypatch.setattr(cuda.workspaces, "drop", lambda *_: done.append("drop"))
    stream = SimpleNamespace(cuda_stream=5)
    with pytest.raises(KeyboardInterrupt if code == SUCCESS else DriverError):
        sessions.CudaSession(None, stream, None, False, cuda.Counting())
    assert done[-3:] == ["cuStreamEndCapture", "cuGraphDestroy", "drop"]


class Devices:
    """Two devices as PyTorch shows them.

    Attributes:
        capturing: those whose current stream is captured.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.capturing = 0, set[int]()
        patch.setattr(torch.cuda, "device", self.device)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current in self.capturing)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: self.current, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before


def test_a_library_is_asked_on_the_drivers_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is current: its handles and workspaces are each device's own."""
    devices, asked = Devices(monkeypatch), []
    monkeypatch.setattr(
        cuda.workspaces, "lends", lambda *given: asked.append((devices.current, *given)) or True
    )
    assert cuda.CudaDriver(1).lends_workspace(4096)
    assert asked == [(1, 71, 4096)]
    assert devices.current == 0


@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_of_either_device_is_seen(capturing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches go to the stream that is current on the driver's device, whichever is current."""
    devices = Devices(monkeypatch)
    driver = cuda.CudaDriver(1)
    assert not driver.is_capturing()
    devices.capturing.add(capturing)
    assert driver.is_capturing()
    assert devices.current == 0


def test_what_the_log_says_of_earlier_arenas_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own log goes back further than a capture, and addresses come again after many of them."""
    log: list[dict[str, Any]] = []

    def note(time: int, action: str, address: int, size: int = 0) -> None:
        log.append({"time_us": time, "action": action, "addr": address, "size": size})

    monkeypatch.setattr(allocator_log.snapshot, "log", lambda device, pool=None: log)
    assert allocator_log.last_logged(0) == -1
    note(5, "alloc", 1000, 4096)
    note(6, "alloc", 1200, 64)
    note(7, "free_requested", 1000)
    note(7, "free_requested", 1200)
    arena = SimpleNamespace(low=1000, high=2000, segments=1, device=torch.device("cuda", 0), stream=7)
    arena.since = allocator_log.last_logged(0)
    note(9, "alloc", 1000, 512)
    assert allocator_log.read_trace(arena, (0, 7)) == [HiddenAllocation(1000, 512, False)]


def test_a_log_that_tells_of_want_of_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an entry has no address. It may be the program's own, from long before."""
    log = [
        {"action": "oom", "device_free": 4096, "size": 1 << 40},
        {"action": "alloc", "addr": 1000, "size": 64},
    ]
    monkeypatch.setattr(allocator_log.snapshot, "log", lambda device, pool=None: log)
    arena = SimpleNamespace(low=1000, high=2000, segments=1, device=torch.device("cuda", 0))
    arena.since, arena.stream = -1, 7
    assert allocator_log.read_trace(arena, (0, 7)) == [HiddenAllocation(1000, 64, False)]


@pytest.mark.parametrize("entry", [{}, {"stream": 6}, {"time_us": 3}, {"action": "free_requested"}])
def test_memory_of_a_pool_of_the_programs_own_is_no_ghost(
    entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured op was given it, and each launch would write there. Other streams may have some."""
    arena = SimpleNamespace(low=1000, high=2000, segments=1, device=torch.device("cuda", 0))
    arena.since, arena.stream, dropped = 5, 7, list[Any]()
    log = [
        {"time_us": 8, "stream": 7, "action": "alloc", "addr": 1000, "size": 64},
        {"time_us": 9, "stream": 7, "action": "alloc", "addr": 9000, "size": 512, **entry},
    ]
    monkeypatch.setattr(allocator_log.snapshot, "log", lambda device, pool=None: log)
    monkeypatch.setattr(cuda.workspaces, "drop", lambda *given: dropped.append(given))
    monkeypatch.setattr(cuda.workspaces, "kept", frozenset)
    session = object.__new__(sessions.CudaSession)
    session.arena, session._stream, session._shared_history = arena, SimpleNamespace(cuda_stream=7), True
    session._pools = SimpleNamespace(latest=(0, 7), renew=lambda: None)
    if not entry:
        with pytest.raises(DriverError, match="512 bytes came from elsewhere"):
            session._read_hidden()
    else:
        assert [h.address for h in session._read_hidden()] == [1000]
    assert dropped == [(7, arena)]


@pytest.mark.parametrize("unknown", [False, True])
def test_the_log_is_read_once_where_only_workspaces_and_tensors_are_held(
    unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than most calls of libraries. What else is held is looked for in it again."""
    arena = SimpleNamespace(low=1000, high=2000, segments=3, device=torch.device("cuda", 0))
    arena.since, arena.stream, dropped, reads = -1, 7, list[Any](), list[int]()
    log = [{"action": "alloc", "addr": address, "size": 64} for address in (1000, 1100, 1200)]
    monkeypatch.setattr(allocator_log.snapshot, "log", lambda *_: reads.append(len(log)) or log)
    monkeypatch.setattr(cuda.workspaces, "drop", lambda *given: dropped.append(given))
    monkeypatch.setattr(cuda.workspaces, "kept", lambda: frozenset() if dropped else frozenset({1000}))
    monkeypatch.setattr(sessions, "clear_trace", log.clear)
    session = object.__new__(sessions.CudaSession)
    session.arena, session._stream, session._shared_history = arena, SimpleNamespace(cuda_stream=7), False
    session._pools = SimpleNamespace(latest=(0, 7), renew=lambda: None)
    found = session._read_hidden({1100} if unknown else {1100, 1200})
    assert [(h.address, h.freed) for h in found] == [(1000, False), (1100, False), (1200, False)]
    assert [h.kept for h in found] == [unknown] * 3, "nobody asks that of tensors that are tracked"
    assert dropped == [(7, arena)]
    assert (len(reads) == 1) is not unknown


class Pools:
    """PyTorch's memory pools: what is in use, what is gone.

    Args:
        before: pools that the program has made.
        segment: id of the pool that memory comes from, and where it begins.
    """

    def __init__(self, patch: pytest.MonkeyPatch, before: int = 0, segment: Any = ((0, 0), 4096)) -> None:
        self.used: list[tuple[int, int]] = []
        self.made: list[weakref.ref[Any]] = []
        self.given_back: list[int] = []
        self.count = 0  # ranges that the allocator was given
        pools = self

        class MemPool:
            def __init__(self, allocator: Any, no_split: bool) -> None:
                pools.made.append(weakref.ref(self))
                self.id = 0, before + len(pools.made)

        pool, address = segment
        told = {"address": address, "total_size": 2 << 20, "segment_pool_id": pool}
        patch.setattr(cuda_ghost.snapshot, "segments", lambda: [told])
        patch.setattr(cuda_ghost, "_made", 0)
        patch.setattr(cuda_ghost, "_allocator", lambda: None)
        patch.setattr(cuda_ghost.libraries, "load", lambda: None)
        for name, function in {
            "MemPool": MemPool,
            "default_stream": lambda device: None,
            "caching_allocator_alloc": lambda nbytes, device, stream: 8192,
            "caching_allocator_delete": self.given_back.append,
        }.items():
            patch.setattr(torch.cuda, name, function)
        for name, function in {
            "_cuda_beginAllocateCurrentThreadToPool": lambda device, pool: self.used.append(pool),
            "_cuda_endAllocateToPool": lambda device, pool: self.used.remove(pool),
            "_cuda_releasePool": lambda device, pool: None,
        }.items():
            patch.setattr(torch._C, name, function, raising=False)
        self.arena = object.__new__(cuda_ghost.CudaArena)
        self.arena._device, self.arena._direct, self.arena.state = torch.device("cuda", 0), 0, self

    @property
    def alive(self) -> list[bool]:
        return [pool() is not None for pool in self.made]


def test_nothing_is_captured_inside_a_pool_of_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends the process if a pool is destroyed there."""
    pools = Pools(monkeypatch, before=1, segment=((0, 1), 4096))
    with pytest.raises(DriverError, match="pool of the program's own"), cuda_ghost.GhostPools(pools.arena):
        pass
    gc.collect()
    assert pools.alive == [True]
    assert pools.used == []
    assert pools.given_back == [8192]
    assert cuda_ghost._current is None


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("segment", [((0, 0), 4096), ((0, 1), 16384), ((0, 1), 0)])
def test_pools_that_are_not_in_use_are_in_nobodys_way(
    before: int, segment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the program has none, nothing is asked."""
    if segment == ((0, 1), 0):
        segment = (0, 1), 8192 - (2 << 20)  # ends where the memory begins
    pools = Pools(monkeypatch, before, segment)
    with cuda_ghost.GhostPools(pools.arena) as ghosts:
        assert pools.used == [(0, before + 1)] == [ghosts.latest]
        ghosts.refresh(held=0)
        assert ghosts.latest == (0, before + 1), "nothing was taken of it"
        pools.count += 2
        ghosts.refresh(held=2)
        assert ghosts.latest == (0, before + 1), "all that it gave is held"
        pools.count += 3
        ghosts.refresh(held=4)
        assert pools.used == [(0, before + 2)] == [ghosts.latest], "one of five may be handed out again"
        pools.count += 1
        ghosts.refresh(held=5)
        assert ghosts.latest == (0, before + 2), "not of this pool"
        ghosts.renew()
        assert pools.used == [(0, before + 3)] == [ghosts.latest]
    assert pools.alive == [False, False, False]
    assert pools.used == []
    assert pools.given_back == ([8192] if before else [])


@pytest.mark.parametrize("taken", [150 << 10, 900 << 20, -(64 << 20)])
def test_what_other_processes_take_meanwhile_is_no_memory_of_an_exec(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver tells of the whole device only: 900 MB would be more than all captures may take."""
    cuda_exec = pytest.importorskip("pgraph.drivers.cuda.exec", reason="needs cuda-bindings")
    graph = SimpleNamespace(part=lambda first, last: SimpleNamespace(graph=0, nodes=[1, 2]))
    nodes = [NodeRecord("kernel", "k", (7,), b"12345678")] * 2
    readings = iter([100 << 20, (100 << 20) + taken])
    monkeypatch.setattr(cuda_exec, "_outside_allocator", lambda: next(readings))
    monkeypatch.setattr(cuda_exec.CudaExec, "_lay_out", lambda *_: None)
    monkeypatch.setattr(cuda_exec.CudaExec, "__del__", lambda _: None)  # nothing is there to be destroyed
    for name, values in {
        "cuGraphInstantiate": (5,),
        "cuGraphUpload": (),
        "cuStreamSynchronize": (),
        "cuCtxGetCurrent": (6,),
    }.items():
        monkeypatch.setattr(cuda_exec.cu, name, lambda *_, values=values: (SUCCESS, *values))
    made = cuda_exec.CudaExec(graph, nodes, 0, 2, [], 0)
    assert made.nbytes == min(max(taken, 0), cuda_exec._at_most(nodes))
    assert 8 << 20 <= cuda_exec._at_most(nodes) <= 9 << 20
    assert cuda_exec._at_most(nodes * 500) >= 1000 * (4 << 10), "as many bytes as a node takes"


@given(total=st.integers(1 << 30, 1 << 40), share=st.floats(0.001, 0.999))
@example(total=85_017_755_648, share=8192 * 2**20 / 85_017_755_648)
def test_the_limit_is_what_it_was_after_a_capture(total: int, share: float) -> None:
    """PyTorch rounds down what is set, and tells the quotient."""
    allowed = [int(share * total)]

    def setting(fraction: float, _: Any) -> None:
        allowed.append(int(fraction * total))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: allowed[-1] / total)
        patch.setattr(torch.cuda, "set_per_process_memory_fraction", setting)
        with cuda_ghost.unlimited(torch.device("cuda", 0)):
            assert allowed[-1] == total
    assert allowed[-1] == allowed[0]


class NoOps(TorchFunctionMode):
    """Nobody may call a function of torch's: a fill would come with deterministic algorithms."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class Blocks:
    """The caching allocator's raw blocks.

    Attributes:
        sizes, given_back: of those that were taken; numbers of those that came back.
    """

    def __init__(self, patch: pytest.MonkeyPatch, most: int = 99) -> None:
        self.sizes: list[int] = []
        self.given_back: list[int] = []
        self._most = most
        patch.setattr(torch.cuda, "caching_allocator_alloc", self._allocate)
        patch.setattr(torch.cuda, "caching_allocator_delete", self.given_back.append)
        patch.setattr(torch.cuda, "current_stream", lambda device: 7)

    def _allocate(self, nbytes: int, device: torch.device, stream: int) -> int:
        assert (device, stream) == (GPU, 7)
        if len(self.sizes) == self._most:
            raise torch.OutOfMemoryError("no memory")
        self.sizes.append(nbytes)
        return len(self.sizes)


@pytest.mark.parametrize(
    ("ghosts", "sizes"),
    [
        ([6 << 20], [1 << 20] * 3),
        ([64 << 20], [64 << 20]),
        ([64 << 20, 4 << 20], [64 << 20, 1 << 20, 1 << 20]),
    ],
    ids=["small", "large", "two"],
)
def test_no_op_makes_the_ghosts_that_raise_a_peak(
    ghosts: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Note [Blocks that nobody fills]: an illegal access ended the process, some time later."""
    blocks, order = Blocks(monkeypatch), list[str]()

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[Any]:
        order.append(name)
        yield SimpleNamespace(renew=lambda: order.append(f"another, {len(blocks.given_back)} given back"))
        order.append(f"{name} left, {len(blocks.given_back)} given back")

    arena = SimpleNamespace(close=lambda: order.append("closed"))
    monkeypatch.setattr(peaks, "CudaArena", lambda *_: arena)
    monkeypatch.setattr(peaks, "GhostPools", lambda _: noted("pools"))
    monkeypatch.setattr(peaks, "unlimited", lambda _: noted("limit"))
    with NoOps():
        peaks._allocate_ghosts(GPU, ghosts)
    assert blocks.sizes == sizes
    back = f"{len(sizes)} given back"
    others = ["another, 1 given back"] * (len(ghosts) - 1)
    assert order == ["limit", "pools", *others, f"pools left, {back}", f"limit left, {back}", "closed"]


def test_blocks_are_given_back_if_there_is_no_memory_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(monkeypatch, most=2)
    with (
        pytest.raises(torch.OutOfMemoryError),
        cuda_ghost.snapshot.taken([5, 6, 7], GPU, 7),
    ):
        pass
    assert (blocks.sizes, blocks.given_back) == ([5, 6], [1, 2])


@pytest.mark.parametrize("forked", [False, True])
def test_a_forked_process_frees_nothing_of_its_parents(forked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its garbage collector may drop what the parent's would: the driver answers with errors there."""
    freed: list[str] = []
    monkeypatch.setattr(cuda.cu, "cuGraphExecDestroy", lambda exec: freed.append(exec) or (SUCCESS,))
    monkeypatch.setattr(cuda.cu, "cuGraphDestroy", lambda graph: freed.append(graph) or (SUCCESS,))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: forked)
    exec = object.__new__(cuda.CudaExec)
    exec._exec = "exec"
    graph = cuda.CudaGraph("graph", ())
    del exec, graph
    assert freed == ([] if forked else ["exec", "graph"])


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stands for the driver's memory, and the framework's."""
    seen = SimpleNamespace(looks=0, allocated=[], modes=[], full=False, grow=False)

    def segments() -> list[dict[str, Any]]:
        seen.looks += 1
        segment = {"device": 0, "segment_pool_id": (0, 0), "total_size": 64 << 20, "address": 1 << 40}
        return [segment | {"is_expandable": seen.grow}]

    def allocate(nbytes: int) -> tuple[Any, ...]:
        seen.allocated.append(nbytes)
        if seen.full:
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY")  # as `check` does, which asks the driver for a text
        return SUCCESS, 1 << 41

    def exchange(mode: Any) -> tuple[Any, ...]:
        seen.modes.append(mode)
        return SUCCESS, "as it was"

    monkeypatch.setattr(graphs.snapshot, "segments", segments)
    monkeypatch.setattr(graphs.cu, "cuMemAlloc", allocate)
    monkeypatch.setattr(graphs.cu, "cuThreadExchangeStreamCaptureMode", exchange)
    graphs._small_range.cache_clear()
    yield seen
    graphs._small_range.cache_clear()


def a_fill(nbytes: int) -> NodeRecord:
    return NodeRecord("memset", "memset", (), struct.pack("=5Q", 0, nbytes, 1 << 32, nbytes, 1))


def test_a_small_copy_is_anchored_without_a_look_at_all_memory(memory: SimpleNamespace) -> None:
    """To be told of all segments takes longer than all else that a replica needs, in a large program."""
    small = graphs._SMALL
    for _ in range(2):
        assert graphs.ordinary_range([a_fill(8), a_fill(small)], 0) == (1 << 41, graphs.LASTING)
    assert (memory.looks, memory.allocated) == (1, [small]), "once, for all that come later"
    assert memory.modes == [graphs._RELAXED, "as it was"], "while another thread captures, too"
    assert graphs.ordinary_range([a_fill(8), a_fill(small + 1)], 0) == (1 << 40, None)
    memory.full = True
    graphs._small_range.cache_clear()
    assert graphs.ordinary_range([a_fill(8)], 0) == (1 << 40, None)
    assert memory.modes[2:] == [graphs._RELAXED, "as it was"]
    memory.grow = True
    graphs._small_range.cache_clear()
    assert graphs.ordinary_range([a_fill(8)], 0) == (1 << 40, None)
    assert len(memory.allocated) == 2, "an address in a segment that grows is none of the driver's"


@pytest.mark.parametrize("lasts", [True, False])
def test_what_is_anchored_where_memory_lasts_stays_there(
    lasts: bool, memory: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the allocator may have given the memory back when a replica is made."""
    at: list[int] = []

    def put(node: int, words: int) -> int:
        at.append(ctypes.c_uint64.from_address(words).value)
        return 0

    monkeypatch.setattr(graphs, "_setters", lambda: (put, put))
    monkeypatch.setattr(graphs, "not_ours", lambda: True)
    monkeypatch.setattr(graphs.cu, "cuGraphClone", lambda graph: (SUCCESS, "clone"))
    monkeypatch.setattr(graphs.cu, "cuGraphNodeFindInClone", lambda node, clone: (SUCCESS, node))
    monkeypatch.setattr(graphs.cu, "cuGraphDestroyNode", lambda node: (SUCCESS,))
    nbytes = graphs._SMALL + (not lasts)
    whole = graphs.CudaGraph("graph", [7, 8])
    whole.cut([(0, 1), (1, 2)])
    whole.anchor([(0, a_fill(nbytes)), (1, a_fill(8))], 0)
    parts = [whole.part(0, 1), whole.part(1, 2)]
    assert at == [1 << 41 if lasts else 1 << 40] * 2
    for part in parts:
        part.anchor([(0, a_fill(nbytes))], 0)
    assert len(at) == (2 if lasts else 4)
