"""Captured graphs: cut into parts, and made ready to be instantiated."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from cuda.bindings import driver as cu

from pgraph.drivers.cuda import snapshot
from pgraph.drivers.cuda.nodes import check, node_reason, status_name
from pgraph.errors import CaptureError, DriverError
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

__all__ = ["LASTING", "CudaGraph", "anchored", "not_ours", "ordinary_range", "rebound_copies"]

log = logging.getLogger(__name__)

_COPY_FROM, _COPY_TO, _FILL_TO = 6, 17, 0  # words: srcDevice and dstDevice, dst
_SMALL: Final = 256 << 10  # bytes
_RELAXED: Final = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

LASTING: Final = object()
"""Holds memory that is never freed."""


def _moved_bytes(record: NodeRecord) -> int:
    """Bytes from the first to the last that a copy or fill node touches at either end."""
    words = (ctypes.c_uint64 * (len(record.params) // 8)).from_buffer_copy(record.params)
    if record.kind == "memcpy":
        width, height, depth = words[22:25]
        pitch = max(words[9], words[20], width)
        rows = max(words[10], words[21], height)
        return pitch * rows * depth
    pitch, size_of, width, height = words[1], words[2] >> 32, words[3], words[4]
    return max(pitch * height, width * height * size_of)


def ordinary_range(copies: Sequence[NodeRecord], device: int) -> tuple[int, Any]:
    """(address, owner or None) of a range of ordinary memory, as large as the largest of these copies and
    fills. Nothing is done there.

    A small one is kept for all (its owner is `LASTING`), a larger one is the framework's allocator's: to be
    told of all segments takes longer, the more a program has.
    """
    nbytes = max(map(_moved_bytes, copies))
    if nbytes <= _SMALL and (address := _small_range(device)) is not None:
        return address, LASTING
    segments = [
        s for s in snapshot.segments() if s["device"] == device and tuple(s["segment_pool_id"]) == (0, 0)
    ]
    largest = max(segments, key=lambda s: s["total_size"], default=None)
    if largest is not None and largest["total_size"] >= nbytes:
        return largest["address"], None
    owner = torch.UntypedStorage(nbytes, device=torch.device("cuda", device))  # which nobody fills
    return owner.data_ptr(), owner


@functools.cache
def _small_range(device: int) -> int | None:
    """The address of `_SMALL` bytes on a device, which is current; None if there is no memory, or if the
    framework's own belongs to no context.

    It is the driver's: it counts in none of the framework's figures, and lies in no pool that the program
    may have chosen. Segments that grow (``expandable_segments``) are mapped by hand, as ghosts are: what is
    anchored at the driver's memory would take no address in them.
    """
    if any(s.get("is_expandable", False) for s in snapshot.segments()):
        return None
    mode = check(cu.cuThreadExchangeStreamCaptureMode(_RELAXED))[0]  # another thread's capture goes on
    try:
        return int(check(cu.cuMemAlloc(_SMALL))[0])
    except DriverError as e:
        log.info("no memory to anchor copies at on device %d: %s", device, e)
        return None
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(mode))


def not_ours() -> bool:
    """Whether what is dropped is not to be freed: at the exit of the process, when the driver frees all by
    itself, and may be gone already; and in a forked process (a DataLoader's), where it is the parent's.
    """
    return sys.is_finalizing() or torch.cuda._is_in_bad_fork()


@functools.cache
def _setters() -> tuple[Any, Any]:
    """The driver functions that set a copy and a fill of a graph."""
    lib = ctypes.CDLL("libcuda.so.1")
    copy, fill = lib.cuGraphMemcpyNodeSetParams, lib.cuGraphMemsetNodeSetParams
    copy.argtypes = fill.argtypes = [ctypes.c_void_p] * 2
    return copy, fill


class CudaGraph:
    """A graph and its nodes, each after those that it waits for; freed with its last reference.

    An exec needs its graph: setting a node's parameters names the node in the graph that the exec
    was made from.

    Attributes:
        anchored: its copies and fills are (Note [Copies are anchored]); what is cut from it, too.
        lasting: and where they are, memory is never freed.
    """

    def __init__(self, graph: Any, nodes: Sequence[Any]) -> None:
        self.graph = graph
        self.nodes = nodes
        self.anchored = self.lasting = False
        self._chunks: tuple[tuple[int, int], ...] = ()
        self._parts: dict[tuple[int, int], CudaGraph] = {}

    def anchor(self, copies: Sequence[tuple[int, NodeRecord]], device: int) -> None:
        """Point copy and fill nodes with slots at ordinary memory, before anything is instantiated.

        Note [Copies are anchored]
        An exec's copy and fill nodes take new addresses only from the context that the old ones had
        when it was instantiated, and ghost memory (like all memory mapped by hand) belongs to none:
        every later change fails with CUDA_ERROR_INVALID_VALUE. So they are given an ordinary range
        first, large enough for what they move. It is never used: all slots are written before a launch.
        A node without slots (an op's own scratch, from outside the framework) stays as it was captured.
        The range may be freed once execs are made: where others are made later, another one is needed,
        unless it lasts.

        Args:
            copies: of the nodes (number, record); see `rebound_copies`.

        Raises:
            CaptureError: the driver does not take it.
        """
        if not copies or self.lasting:
            return
        address, holder = ordinary_range([record for _, record in copies], device)
        for position, record in copies:
            words = anchored(record, address)
            setter = _setters()[0 if record.kind == "memcpy" else 1]
            code = setter(int(self.nodes[position]), ctypes.addressof(words))
            if code:
                what = f"a {record.kind} node of {_moved_bytes(record)} bytes ({status_name(code)})"
                raise CaptureError(node_reason(what))
        self.lasting = holder is LASTING

    def cut(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Be told of which ranges of nodes there will be a part: all nodes, in order, each range once. The
        graph itself becomes one of the parts.
        """
        self._chunks = tuple(chunks)

    def part(self, first: int, last: int) -> CudaGraph:
        """A graph with the nodes [first, last) and the edges between them only; itself, if those are all."""
        if self._chunks:
            chunks, self._chunks = self._chunks, ()
            self._parts = dict(zip(chunks, _divided(self, chunks), strict=True))
        found = self._parts.pop((first, last), None)
        if found is not None:
            return found
        return self if (first, last) == (0, len(self.nodes)) else self._copy(first, last)

    def _copy(self, first: int, last: int) -> CudaGraph:
        (clone,) = check(cu.cuGraphClone(self.graph))
        copy = CudaGraph(clone, [check(cu.cuGraphNodeFindInClone(node, clone))[0] for node in self.nodes])
        copy.lasting = self.lasting
        copy._keep(first, last)
        return copy

    def _keep(self, first: int, last: int) -> None:
        """Destroy all other nodes."""
        for node in (*self.nodes[:first], *self.nodes[last:]):
            check(cu.cuGraphDestroyNode(node))
        self.nodes = self.nodes[first:last]

    def __del__(self) -> None:
        if not not_ours():
            check(cu.cuGraphDestroy(self.graph))


def _divided(graph: CudaGraph, chunks: Sequence[tuple[int, int]]) -> list[CudaGraph]:
    """A part for each of these ranges, which are all nodes of the graph; it becomes one of them.

    By halves: a graph can only be copied as a whole, so to copy it for each part would take the nodes times
    the parts.
    """
    if len(chunks) == 1:
        return [graph]
    half = len(chunks) // 2
    border, end = chunks[half][0] - chunks[0][0], len(graph.nodes)
    left = graph._copy(0, border)
    graph._keep(border, end)
    return [*_divided(left, chunks[:half]), *_divided(graph, chunks[half:])]


def rebound_copies(nodes: Sequence[NodeRecord], slots: Sequence[Slot]) -> list[tuple[int, NodeRecord]]:
    """The copy and fill nodes that are given addresses at a launch, and their positions."""
    found = {slot.node for slot in slots if nodes[slot.node].kind != "kernel"}
    return [(position, nodes[position]) for position in sorted(found)]


def anchored(record: NodeRecord, address: int) -> Any:
    """The parameters of a copy or a fill, with this address."""
    words = (ctypes.c_uint64 * (len(record.params) // 8)).from_buffer_copy(record.params)
    for word in (_COPY_FROM, _COPY_TO) if record.kind == "memcpy" else (_FILL_TO,):
        words[word] = address
    return words
