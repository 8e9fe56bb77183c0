"""The CUDA driver: captures, arenas and execs of one device. All of pgraph's CUDA calls are in this folder.

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
import logging
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from cuda.bindings import driver as cu

from pgraph.drivers.cuda import snapshot, triton, workspaces
from pgraph.drivers.cuda.allocator_log import allocator_trace, last_logged
from pgraph.drivers.cuda.assemble import assembled
from pgraph.drivers.cuda.cache import empty_into_one_piece
from pgraph.drivers.cuda.counts import Counting
from pgraph.drivers.cuda.exec import CudaExec
from pgraph.drivers.cuda.ghost import CudaArena, GhostPools, unlimited
from pgraph.drivers.cuda.graph import CudaGraph, rebound_copies
from pgraph.drivers.cuda.native import native_calls
from pgraph.drivers.cuda.nodes import check as _check
from pgraph.drivers.cuda.peaks import restore
from pgraph.drivers.cuda.recipe import CudaRecipe
from pgraph.drivers.cuda.session import CudaSession
from pgraph.drivers.execs import Exec, Recipe
from pgraph.drivers.interface import Arena, Driver, Passed, Session
from pgraph.drivers.native_calls import NativeCalls
from pgraph.drivers.peak_stats import GhostPeaks, PeakLedger
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot, slots_of
from pgraph.template.topology import Topology

__all__ = ["CudaDriver"]

log = logging.getLogger(__name__)

_CAPTURE_LOCK = threading.RLock()


def _let_go(error: BaseException | None, handled: BaseException | None) -> None:
    """Clear the variables of functions that an error, and those behind it, have left: they hold ghosts.

    Args:
        handled: the program's own, which was there before.
    """
    left, seen = [error], {id(None), id(handled)}
    while left:
        error = left.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            left += [error.__cause__, error.__context__]


class CudaDriver(Driver):
    """Graphs of one CUDA device."""

    name = "cuda"
    host_times = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream | None = None
        self._ledger = PeakLedger(quantities=2)
        self._peaks_kept = False  # whoever holds the lock first makes them right, once
        self._counting = Counting()

    @contextlib.contextmanager
    def capture_lock(self) -> Iterator[None]:
        with _CAPTURE_LOCK:
            if self._peaks_kept:
                yield
                return
            before, self._peaks_kept, handled = self._peaks(), True, sys.exc_info()[1]
            try:
                yield
            except Exception as e:
                # Else the next capture would take what ghosts added for the program's own.
                _let_go(e, handled)
                self._restore(before)
                raise
            else:
                self._restore(before)
            finally:
                self._peaks_kept = False

    def _restore(self, peaks: tuple[int, int]) -> None:
        """Have peaks that were raised since be these again."""
        try:
            if self._peaks() == peaks:
                return
            with torch.cuda.device(self.device):
                if restore(self.device, *peaks):
                    self._ledger.restored()
                else:
                    log.debug("peak statistics cannot be made %s B again", peaks)
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
            if not graph.anchored:
                graph.anchor(rebound_copies(nodes, slots), self.device.index)
                graph.anchored = True
            mine = slots_of(slots, first, last)
            return CudaExec(graph, nodes, first, last, mine, self._capture_stream().cuda_stream)

    def graph(self, nodes: Sequence[NodeRecord], order: Topology, slots: Sequence[Slot]) -> CudaGraph | None:
        with torch.cuda.device(self.device):
            return assembled(nodes, order, slots, self.device.index)

    def recipe(
        self, exec: Exec, nodes: Sequence[NodeRecord], first: int, last: int, slots: Sequence[Slot]
    ) -> Recipe:
        assert isinstance(exec, CudaExec)
        return CudaRecipe(exec, nodes[first:last], slots_of(slots, first, last), first)

    def replica(self, recipe: Recipe) -> Recipe:
        assert isinstance(recipe, CudaRecipe)
        with torch.cuda.device(self.device), self.capture_lock():
            made = recipe.exec.replica(self._capture_stream().cuda_stream, self.device.index)
            return recipe.replica(made)

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
        numbers = snapshot.numbers(self.device.index)
        return tuple(numbers[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes"))

    @contextlib.contextmanager
    def _peaks_noted(self) -> Iterator[None]:
        """See Note [Ghosts in the statistics] in `pgraph.drivers.peak_stats`."""
        self._ledger.before(*self._peaks())
        try:
            yield
        finally:
            self._ledger.after(*self._peaks())

    def _capture_stream(self) -> torch.cuda.Stream:
        # Not one of torch's pooled streams: the program may be using any of those. And never destroyed: an op
        # may have recorded it on a tensor, and the allocator asks it when that is freed, maybe at the exit of
        # the process, where an error ends it by SIGABRT.
        if self._stream is None:
            with torch.cuda.device(self.device):
                torch.cuda.current_stream()  # makes sure that the primary context is current
                (raw,) = _check(cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
                self._stream = torch.cuda.ExternalStream(int(raw), device=self.device)
        return self._stream
