"""The CUDA driver: captures, arenas and execs of one device. All of pgraph's CUDA calls are in this folder.

Three decisions shape it:

Note [Raw capture]
The stream capture is begun and ended with the driver API, not through `torch.cuda.CUDAGraph`. That
class registers the default generator for the capture; a capture that fails leaves it registered and
poisons every later random op of the process ("Offset increment outside graph capture"). A raw
capture never touches the generator: an op that draws random numbers raises by itself, and the
process stays as it was.

Note [One pool per op]
Memory that ops allocate comes from a `MemPool` over the ghost allocator. As soon as one has been
used, the next op gets a fresh one, so that nothing freed earlier can be handed out again
(Note [Addresses are never reused]), and the address alone tells which op an allocation belongs to.

Note [cuBLAS's workspace]
PyTorch keeps a workspace for cuBLAS, one per handle (and so per thread) and stream. The capture stream
belongs to pgraph alone and its workspaces are dropped after each capture; so each capture allocates the
workspace as ghost memory, and it becomes a region: rebindable, and safe on any stream. A launch binds it to
the one that PyTorch keeps for the thread and the stream that it is launched from, as an uncaptured product
does. Where that cannot be asked for (it takes the helper in C++), it is a temporary of the plan; where a
recording has several (cuBLASLt keeps a small one), all but the largest are temporaries. How they are found
and dropped: `pgraph.drivers.cuda.workspaces`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from cuda.bindings import driver as cu
from torch.utils._pytree import tree_map_only

from pgraph.drivers.cuda import snapshot, triton, workspaces
from pgraph.drivers.cuda.allocator_log import allocator_trace, clear_trace, last_logged, read_trace
from pgraph.drivers.cuda.cache import empty_into_one_piece
from pgraph.drivers.cuda.counts import Counting, NodeCount, lost
from pgraph.drivers.cuda.edges import ordered_nodes
from pgraph.drivers.cuda.exec import CudaExec
from pgraph.drivers.cuda.ghost import CudaArena, GhostPools, unlimited
from pgraph.drivers.cuda.graph import CudaGraph
from pgraph.drivers.cuda.native import native_calls
from pgraph.drivers.cuda.nodes import check as _check
from pgraph.drivers.cuda.nodes import read_nodes
from pgraph.drivers.cuda.peaks import restore
from pgraph.drivers.cuda.recipe import CudaRecipe
from pgraph.drivers.execs import Exec, Recipe
from pgraph.drivers.interface import Arena, Driver, HiddenAllocation, Passed, Session
from pgraph.drivers.native_calls import NativeCalls
from pgraph.drivers.peak_stats import GhostPeaks, PeakLedger
from pgraph.errors import CaptureError, DriverError, RecountError
from pgraph.native import libraries
from pgraph.ops import op_names
from pgraph.ops.fx import op_name
from pgraph.reasons import Reason
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot, slots_of
from pgraph.template.topology import Topology

__all__ = ["CudaDriver"]

log = logging.getLogger(__name__)

_CAPTURE_LOCK = threading.RLock()


class CudaSession(Session):
    """A stream capture under way on pgraph's own stream."""

    def __init__(
        self,
        arena: CudaArena,
        stream: torch.cuda.Stream,
        pools: GhostPools,
        shared_history: bool,
        counting: Counting,
    ) -> None:
        self.arena: CudaArena = arena
        library = libraries.load()
        self._scrub = library.pg_scrub_stack if library is not None else None
        self._stream = stream
        self._pools = pools
        self._shared_history = shared_history
        self._hidden: list[HiddenAllocation] = []
        self._ended = False
        _check(
            cu.cuStreamBeginCapture(
                stream.cuda_stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            )
        )
        try:
            graph = _check(cu.cuStreamGetCaptureInfo(stream.cuda_stream))[2]
            self._nodes = NodeCount(stream.cuda_stream, int(graph), counting)
        except BaseException:
            self.close()  # a thread that goes on capturing can allocate nothing
            raise

    def node_count(self) -> int:
        return self._nodes.now()

    def checked_count(self) -> int:
        return self._nodes.checked()

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._pools.refresh()
        if self._scrub is not None:
            self._scrub()
        result = op(*args, **kwargs)
        return _host_seeds(result) if op_name(op) in op_names.HOST_SEEDS else result

    def run_view(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return op(*args, **kwargs)

    def patches(
        self, namespace: dict[str, Any], empty_strided: Callable[..., torch.Tensor]
    ) -> dict[str, Any]:
        return {"empty_strided_cuda": empty_strided} if "empty_strided_cuda" in namespace else {}

    def end(self, with_kept: bool = True) -> tuple[Any, tuple[NodeRecord, ...], Topology]:
        self._ended = True
        error, graph = cu.cuStreamEndCapture(self._stream.cuda_stream)
        if error != cu.CUresult.CUDA_SUCCESS:
            workspaces.drop(self._stream.cuda_stream, self.arena)
            _clear_last_error()
            raise lost("the driver ended the capture", int(error))
        owner = CudaGraph(graph, ())
        self._hidden = self._read_hidden()
        owner.nodes, order = ordered_nodes(graph)
        if not self._nodes.was_right(order):
            raise RecountError("nodes were counted along one path, and there are several")
        return owner, read_nodes(owner.nodes, with_kept), order

    def hidden(self) -> list[HiddenAllocation]:
        return self._hidden

    def _read_hidden(self) -> list[HiddenAllocation]:
        try:
            found = read_trace(self.arena, self._pools.latest)
        except DriverError:
            workspaces.drop(self._stream.cuda_stream, self.arena)
            raise
        if self._shared_history and len(found) < self.arena.segments:
            workspaces.drop(self._stream.cuda_stream, self.arena)
            raise CaptureError(_history_too_short(len(found), self.arena.segments))
        if all(h.freed for h in found):
            return found
        # Held by a tensor of the program (the recorder knows those) or by a library, whose
        # workspaces can be asked back.
        before: list[HiddenAllocation] = []
        if not self._shared_history:
            clear_trace()  # it was read: only what follows is of interest
            before = found
        workspaces.drop(self._stream.cuda_stream, self.arena)
        kept = {h.address for h in read_trace(self.arena, self._pools.latest, before) if not h.freed}
        return [dataclasses.replace(h, kept=h.address in kept) for h in found]

    def close(self) -> None:
        """End a capture that went wrong, and leave nothing of it behind."""
        if self._ended:
            return
        self._ended = True
        _, graph = cu.cuStreamEndCapture(self._stream.cuda_stream)
        if graph is not None and int(graph):
            cu.cuGraphDestroy(graph)
        workspaces.drop(self._stream.cuda_stream, self.arena)
        _clear_last_error()


class CudaDriver(Driver):
    """Graphs of one CUDA device."""

    name = "cuda"
    host_times = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream: Any = None
        self._ledger = PeakLedger(quantities=2)
        self._counting = Counting()

    @contextlib.contextmanager
    def capture_lock(self) -> Iterator[None]:
        with _CAPTURE_LOCK:
            before = self._peaks()
            yield
            # Not after a failure: the error's frames still hold ghosts.
            if self._peaks() != before:
                self._restore(before)

    def _restore(self, peaks: tuple[int, int]) -> None:
        try:
            with torch.cuda.device(self.device):
                if restore(self.device, *peaks):
                    self._ledger.restored()
        except Exception as e:  # the capture is good; the report tells what the peaks may have of it
            log.warning("peak statistics were not made right: %s: %s", type(e).__name__, e)

    @contextlib.contextmanager
    def arena(self, layout: int) -> Iterator[Arena]:
        with torch.cuda.device(self.device):
            arena = CudaArena(self.device, layout)
            try:
                yield arena
            finally:
                arena.close()

    @contextlib.contextmanager
    def capture(self, arena: Arena) -> Iterator[Session]:
        assert isinstance(arena, CudaArena)
        workspaces.refuse_foreign_graphs()
        stream = self._capture_stream()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(unlimited(self.device))
            stack.enter_context(self._peaks_noted())
            stack.enter_context(torch.cuda.stream(stream))
            pools = stack.enter_context(GhostPools(arena))
            shared_history = stack.enter_context(allocator_trace())
            if shared_history:
                arena.since = last_logged(arena.device.index)
            if not shared_history or arena.since >= 0:
                arena.stream = stream.cuda_stream
            session = CudaSession(arena, stream, pools, shared_history, self._counting)
            try:
                yield session
            finally:
                session.close()

    def cut(self, graph: CudaGraph, chunks: Sequence[tuple[int, int]]) -> None:
        graph.cut(chunks)

    def instantiate(
        self, graph: CudaGraph, nodes: Sequence[NodeRecord], first: int, last: int, slots: Sequence[Slot]
    ) -> Exec:
        with torch.cuda.device(self.device):
            graph.anchor(nodes, slots, self.device.index)
            mine = slots_of(slots, first, last)
            return CudaExec(graph, nodes, first, last, mine, self._capture_stream().cuda_stream)

    def recipe(
        self, exec: Exec, nodes: Sequence[NodeRecord], first: int, last: int, slots: Sequence[Slot]
    ) -> Recipe:
        assert isinstance(exec, CudaExec)
        return CudaRecipe(exec, nodes[first:last], slots_of(slots, first, last), first)

    def replica(self, recipe: Recipe) -> Recipe:
        assert isinstance(recipe, CudaRecipe)
        with torch.cuda.device(self.device), self.capture_lock():
            return recipe.replica(recipe.exec.replica(self._capture_stream().cuda_stream))

    def framework_ranges(self) -> RangeMap | None:
        # Blocks in use, not whole segments: nothing points to memory that is free.
        blocks = [
            (block["address"], block["size"], 0)
            for segment in snapshot.segments()
            if segment["device"] == self.device.index
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]
        return RangeMap(blocks)

    def workspaces(self) -> frozenset[int]:
        return workspaces.kept()

    def lends_workspace(self, nbytes: int) -> bool:
        with torch.cuda.device(self.device):  # whose handle is asked for
            return workspaces.lends(self.current_stream(), nbytes)

    def workspace(self, stream: int, nbytes: int) -> int:
        return workspaces.current(stream, nbytes)

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch._C._dynamo.guards._empty_strided_cuda(size, stride, dtype)  # type: ignore[attr-defined]  # no stub

    def on_device(self) -> contextlib.AbstractContextManager[Any] | None:
        if torch._C._cuda_getDevice() == self.device.index:
            return None
        return torch.cuda.device(self.device)

    def current_stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def is_capturing(self) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return True
        elsewhere = self.on_device()
        if elsewhere is None:
            return False
        with elsewhere:
            return torch.cuda.is_current_stream_capturing()

    def native_calls(self) -> NativeCalls | None:
        return native_calls(self.device.index)

    def kernel_names(self, namespace: Mapping[str, Any]) -> list[str]:
        return triton.kernel_names(namespace)

    def kernel_node(
        self, kernel: Any, sample: NodeRecord, arguments: Sequence[Any]
    ) -> tuple[NodeRecord, Sequence[tuple[int, int]]] | None:
        return triton.kernel_node(kernel, sample, arguments)

    def mark(self) -> Passed:
        event = torch.cuda.current_stream(self.device).record_event()
        return event.query

    def memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def in_use(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def trim(self, piece: int) -> int | None:
        if self.is_capturing() or not _CAPTURE_LOCK.acquire(blocking=False):
            return None  # another thread captures
        try:
            # It would end a capture of the program's own that another thread is making.
            if workspaces.instances(torch.cuda.CUDAGraph):
                return 0
            with torch.cuda.device(self.device):
                return empty_into_one_piece(piece)
        finally:
            _CAPTURE_LOCK.release()

    def ghost_peaks(self) -> GhostPeaks | None:
        allocated, reserved = self._ledger.excess(*self._peaks())
        return GhostPeaks(str(self.device), allocated, reserved) if allocated or reserved else None

    def _peaks(self) -> tuple[int, int]:
        numbers = torch.cuda.memory_stats_as_nested_dict(self.device)
        return tuple(numbers[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes"))

    @contextlib.contextmanager
    def _peaks_noted(self) -> Iterator[None]:
        """See Note [Ghosts in the statistics] in `pgraph.drivers.peak_stats`."""
        self._ledger.before(*self._peaks())
        try:
            yield
        finally:
            self._ledger.after(*self._peaks())

    def close(self) -> None:
        with _CAPTURE_LOCK:  # another thread may be capturing
            if self._raw_stream is not None:
                torch.cuda.synchronize(self.device)
                _check(cu.cuStreamDestroy(self._raw_stream))
                self._stream = self._raw_stream = None

    def _capture_stream(self) -> torch.cuda.Stream:
        # Not one of torch's pooled streams: the program may be using any of those.
        if self._stream is None:
            with torch.cuda.device(self.device):
                torch.cuda.current_stream()  # makes sure that the primary context is current
                self._raw_stream = _check(cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))[0]
                self._stream = torch.cuda.ExternalStream(int(self._raw_stream), device=self.device)
        return self._stream


def _host_seeds(result: Any) -> Any:
    """Attention's results as an uncaptured run gives them.

    Note [Seeds of attention]
    Attention without dropout (only that is captured) returns a seed and an offset that no op reads.
    The memory-efficient kernel's are on the host, but on the device while a capture is under way.
    Checkpointing compares what it saved with what it recomputed, and must see no difference between a
    launch and an uncaptured run. (cuDNN's and flash attention's are on the device in both, and cuDNN's
    backward insists on it.)
    """
    return tree_map_only(
        torch.Tensor,
        lambda t: torch.empty((), dtype=t.dtype) if t.dim() == 0 and t.dtype == torch.int64 else t,
        result,
    )


def _history_too_short(found: int, made: int) -> Reason:
    return Reason(
        "history-too-short",
        f"the allocator's history, which somebody has switched on, kept {found} of {made} allocations",
    )


def _clear_last_error() -> None:
    """Drop the error that a lost capture leaves in the CUDA runtime for the next checked launch."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}").cudaGetLastError()
