"""A stream capture under way.

Two decisions shape it:

Note [Raw capture]
The stream capture is begun and ended with the driver API, not through `torch.cuda.CUDAGraph`. That
class registers the default generator for the capture; a capture that fails leaves it registered and
poisons every later random op of the process ("Offset increment outside graph capture"). A raw
capture never touches the generator: an op that draws random numbers raises by itself, and the
process stays as it was.

Note [One pool per op]
Memory that ops allocate comes from a `MemPool` over the ghost allocator. As soon as one has been
used, the next op gets a fresh one, so that nothing freed earlier can be handed out again
(Note [Addresses are never reused]). To make one takes as long as all else that is done for an op, so it
may serve further ops while all that it gave is held (`Session.held`): there is nothing to hand out again.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Set
from typing import Any

import torch
from cuda.bindings import driver as cu
from torch.utils._pytree import tree_map_only

from pgraph.drivers.cuda import workspaces
from pgraph.drivers.cuda.allocator_log import clear_trace, read_trace, still_held
from pgraph.drivers.cuda.counts import Counting, NodeCount, lost
from pgraph.drivers.cuda.edges import ordered_nodes
from pgraph.drivers.cuda.ghost import CudaArena, GhostPools
from pgraph.drivers.cuda.graph import CudaGraph
from pgraph.drivers.cuda.nodes import check, read_nodes
from pgraph.drivers.interface import HiddenAllocation, Session
from pgraph.errors import CaptureError, DriverError, RecountError
from pgraph.native import libraries
from pgraph.ops import op_names
from pgraph.ops.fx import op_name
from pgraph.reasons import Reason
from pgraph.template.recording import NodeRecord
from pgraph.template.topology import Topology

__all__ = ["CudaSession"]


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
        check(
            cu.cuStreamBeginCapture(
                stream.cuda_stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            )
        )
        try:
            graph = check(cu.cuStreamGetCaptureInfo(stream.cuda_stream))[2]
            self._nodes = NodeCount(stream.cuda_stream, int(graph), counting)
        except BaseException:
            self.close()  # a thread that goes on capturing can allocate nothing
            raise

    def node_count(self) -> int:
        return self._nodes.now()

    def counter(self) -> tuple[int, int] | None:
        return self._nodes.counter

    def checked_count(self) -> int:
        return self._nodes.checked()

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._pools.refresh(self.held)
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

    def end(
        self, with_kept: bool = True, tracked: Set[int] = frozenset()
    ) -> tuple[Any, tuple[NodeRecord, ...], Topology]:
        self._ended = True
        error, graph = cu.cuStreamEndCapture(self._stream.cuda_stream)
        if error != cu.CUresult.CUDA_SUCCESS:
            workspaces.drop(self._stream.cuda_stream, self.arena)
            _clear_last_error()
            raise lost("the driver ended the capture", int(error))
        owner = CudaGraph(graph, ())
        self._hidden = self._read_hidden(tracked)
        owner.nodes, order = ordered_nodes(graph)
        if not self._nodes.was_right(order):
            raise RecountError("nodes were counted along one path, and there are several")
        return owner, read_nodes(owner.nodes, with_kept), order

    def hidden(self) -> list[HiddenAllocation]:
        return self._hidden

    def _read_hidden(self, tracked: Set[int] = frozenset()) -> list[HiddenAllocation]:
        self._pools.renew()  # the log comes with all that lies in the pool that is named
        try:
            found = read_trace(self.arena, self._pools.latest)
        except DriverError:
            workspaces.drop(self._stream.cuda_stream, self.arena)
            raise
        if self._shared_history and len(found) < self.arena.segments:
            workspaces.drop(self._stream.cuda_stream, self.arena)
            raise CaptureError(_history_too_short(len(found), self.arena.segments))
        held = {h.address for h in found if not h.freed} - tracked
        if not held:
            return found
        # Held by a library, whose workspaces can be asked back.
        if held <= workspaces.kept():
            workspaces.drop(self._stream.cuda_stream, self.arena)
            if held.isdisjoint(workspaces.kept()):
                return found
        before: list[HiddenAllocation] = []
        if not self._shared_history:
            clear_trace()  # it was read: only what follows is of interest
            before = found
        workspaces.drop(self._stream.cuda_stream, self.arena)
        kept = still_held(self.arena, self._pools.latest, before)
        return [h._replace(kept=True) if h.address in kept else h for h in found]

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
