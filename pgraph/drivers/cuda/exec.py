"""Graphs that can be cut and launched: setting node parameters again, and freeing it all.

An exec keeps parameter buffers of its own, and structs that point into them; rebinding writes words
there and hands the structs to the driver.
"""

from __future__ import annotations

import array
import ctypes
import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver as cu

from pgraph.drivers.cuda import snapshot
from pgraph.drivers.cuda.nodes import KernelParams, check, node_reason
from pgraph.drivers.interface import Exec
from pgraph.errors import CaptureError
from pgraph.native import libraries
from pgraph.native.structs import ExecEntry, LaunchCalls, NodeEntry, SlotEntry
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

__all__ = ["CudaExec", "CudaGraph"]

_COPY_FROM, _COPY_TO, _FILL_TO = 6, 17, 0  # words: srcDevice and dstDevice, dst
_KIND = {"kernel": 0, "memcpy": 1, "memset": 2, "empty": 3}


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


def _ordinary_range(nbytes: int, device: int) -> tuple[int, Any]:
    """(address, owner or None) of a range that the framework's allocator holds. Nothing is done there."""
    segments = [
        s for s in snapshot.segments() if s["device"] == device and tuple(s["segment_pool_id"]) == (0, 0)
    ]
    largest = max(segments, key=lambda s: s["total_size"], default=None)
    if largest is not None and largest["total_size"] >= nbytes:
        return largest["address"], None
    owner = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
    return owner.data_ptr(), owner


@functools.cache
def _calls() -> Any:
    """The driver functions called by hand, and `pg_calls`: the table of those that a launch needs."""
    lib = ctypes.CDLL("libcuda.so.1")
    functions = [
        lib.cuGraphExecKernelNodeSetParams_v2,
        lib.cuGraphExecMemcpyNodeSetParams,
        lib.cuGraphExecMemsetNodeSetParams,
        lib.cuGraphLaunch,
        lib.cuGraphMemcpyNodeSetParams,
        lib.cuGraphMemsetNodeSetParams,
    ]
    kernel, copy, fill, launch, anchor_copy, anchor_fill = functions
    kernel.argtypes = [ctypes.c_void_p] * 3
    copy.argtypes = fill.argtypes = [ctypes.c_void_p] * 4
    launch.argtypes = anchor_copy.argtypes = anchor_fill.argtypes = [ctypes.c_void_p] * 2
    table = LaunchCalls(*[ctypes.cast(f, ctypes.c_void_p).value for f in functions[:4]])
    return functions, table


class CudaGraph:
    """A graph and its nodes, each after those that it waits for; freed with its last reference.

    An exec needs its graph: setting a node's parameters names the node in the graph that the exec
    was made from.
    """

    def __init__(self, graph: Any, nodes: Sequence[Any]) -> None:
        self.graph = graph
        self.nodes = nodes
        self._anchored = False
        self._chunks: tuple[tuple[int, int], ...] = ()
        self._parts: dict[tuple[int, int], CudaGraph] = {}

    def anchor(self, nodes: Sequence[NodeRecord], slots: Sequence[Slot], device: int) -> None:
        """Point copy and fill nodes with slots at ordinary memory, before anything is instantiated.

        Note [Copies are anchored]
        An exec's copy and fill nodes take new addresses only from the context that the old ones had
        when it was instantiated, and ghost memory (like all memory mapped by hand) belongs to none:
        every later change fails with CUDA_ERROR_INVALID_VALUE. So they are given an ordinary range
        first, large enough for what they move. It is never used: all slots are written before a launch.
        A node without slots (an op's own scratch, from outside the framework) stays as it was captured.

        Raises:
            CaptureError: the driver does not take it.
        """
        if self._anchored:
            return
        self._anchored = True
        moving = [(self.nodes[i], nodes[i]) for i in _rebound_copies(nodes, slots)]
        if not moving:
            return
        need = max(_moved_bytes(record) for _, record in moving)
        address, _holder = _ordinary_range(need, device)
        for node, record in moving:
            words = (ctypes.c_uint64 * (len(record.params) // 8)).from_buffer_copy(record.params)
            if record.kind == "memcpy":
                words[_COPY_FROM] = words[_COPY_TO] = address
                code = _calls()[0][4](int(node), ctypes.addressof(words))
            else:
                words[_FILL_TO] = address
                code = _calls()[0][5](int(node), ctypes.addressof(words))
            if code:
                what = f"a {record.kind} node of {_moved_bytes(record)} bytes ({cu.CUresult(code).name})"
                raise CaptureError(node_reason(what))

    def cut(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Be told of which ranges of nodes there will be a part: all nodes, in order."""
        self._chunks = tuple(chunks)

    def part(self, first: int, last: int) -> CudaGraph:
        """A copy with the nodes [first, last) and the edges between them only; itself, if those are all."""
        if (first, last) == (0, len(self.nodes)):
            return self
        if self._chunks:
            chunks, self._chunks = self._chunks, ()
            self._parts = dict(zip(chunks, _divided(self, chunks), strict=True))
        found = self._parts.pop((first, last), None)
        return found if found is not None else self._copy(first, last)

    def _copy(self, first: int, last: int) -> CudaGraph:
        (clone,) = check(cu.cuGraphClone(self.graph))
        copy = CudaGraph(clone, [])
        twins = [check(cu.cuGraphNodeFindInClone(node, clone))[0] for node in self.nodes]
        for twin in (*twins[:first], *twins[last:]):
            check(cu.cuGraphDestroyNode(twin))
        copy.nodes = twins[first:last]
        return copy

    def __del__(self) -> None:
        if not sys.is_finalizing():
            check(cu.cuGraphDestroy(self.graph))


def _divided(graph: CudaGraph, chunks: Sequence[tuple[int, int]]) -> list[CudaGraph]:
    """A part for each of these ranges, which are all nodes of the graph.

    By halves: a graph can only be copied as a whole, so to copy it for each part would take the nodes times
    the parts.
    """
    if len(chunks) == 1:
        return [graph]
    half, begin = len(chunks) // 2, chunks[0][0]
    border = chunks[half][0] - begin
    left, right = graph._copy(0, border), graph._copy(border, len(graph.nodes))
    return [*_divided(left, chunks[:half]), *_divided(right, chunks[half:])]


def _rebound_copies(nodes: Sequence[NodeRecord], slots: Sequence[Slot]) -> list[int]:
    """Positions of the copy and fill nodes that are given addresses at a launch."""
    return sorted({slot.node for slot in slots if nodes[slot.node].kind != "kernel"})


def _outside_allocator() -> int:
    """Bytes in use on the current device, less those that PyTorch's allocator holds.

    Two readings tell what the driver took in between, whatever other threads allocated meanwhile through
    PyTorch. What other processes do on the device remains in it; nothing tells a process's own share.
    """
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"]
    return int(total - free - reserved)


class CudaExec(Exec):
    """An instantiated range of a captured graph, with its own parameter memory.

    Note [Uploaded before the first change]
    A kernel node whose parameters are set before its exec is on the device runs 0.1 to 0.3 us longer at
    every later launch (measured on an H200, driver 580); one that is set afterwards runs as if it had
    never been touched. So each exec is uploaded at once, with the addresses of the capture.

    Args:
        graph: the captured graph.
        nodes: all its nodes.
        first, last: of the range.
        slots: of the range.
        stream: on which the exec is uploaded; it is waited for.
    """

    def __init__(
        self,
        graph: CudaGraph,
        nodes: Sequence[NodeRecord],
        first: int,
        last: int,
        slots: Sequence[Slot],
        stream: int,
    ) -> None:
        self._lock = threading.Lock()
        self._source = graph.part(first, last)
        handles = self._source.nodes
        before = _outside_allocator()
        (self._exec,) = check(cu.cuGraphInstantiate(self._source.graph, 0))
        check(cu.cuGraphUpload(self._exec, stream))
        check(cu.cuStreamSynchronize(stream))
        self.nbytes = max(0, _outside_allocator() - before)
        (self._ctx,) = check(cu.cuCtxGetCurrent())
        self._layout(handles, nodes[first:last], slots, first)
        library = libraries.load()
        self._native = library.pg_launch if library is not None else None
        self._struct_entry = ExecEntry(
            calls=ctypes.addressof(_calls()[1]),
            exec=int(self._exec),
            ctx=int(self._ctx),
            nodes=ctypes.addressof(self._entries),
            n_nodes=len(self._entries),
            slots=ctypes.addressof(self._slots),
            words=ctypes.addressof(self._words),
        )
        self._entry = ctypes.addressof(self._struct_entry)
        if library is not None:
            self.entry = self._entry

    def _layout(
        self, handles: Sequence[Any], nodes: Sequence[NodeRecord], slots: Sequence[Slot], first: int
    ) -> None:
        starts, total = [], 0
        for node in nodes:
            starts.append(total)
            total += -(-max(len(node.params), 8) // 64) * 64  # tensor maps want 64-byte alignment
        self._memory = ctypes.create_string_buffer(total + 64)
        base = -(-ctypes.addressof(self._memory) // 64) * 64
        self._words = (ctypes.c_uint64 * (total // 8)).from_address(base)
        self._keep: list[Any] = []
        words = array.array("q")  # as SlotEntry has them
        for s in slots:
            words.extend(((starts[s.node - first] + s.offset) // 8, s.region, s.delta))
        self._slots = (SlotEntry * len(slots)).from_buffer_copy(words)
        entries = array.array("Q")  # as NodeEntry has them
        at = 0
        for i, (handle, node, start) in enumerate(zip(handles, nodes, starts, strict=True)):
            ctypes.memmove(base + start, node.params, len(node.params))
            end = _end(slots, at, first + i)
            entries.extend((_KIND[node.kind], int(handle), self._struct(node, base + start), at, end))
            at = end
        self._entries = (NodeEntry * len(nodes)).from_buffer_copy(entries)

    def _struct(self, node: NodeRecord, address: int) -> int:
        if node.kind != "kernel":
            return address
        function, grid, block, shared, ctx, passing = node.header
        struct = KernelParams(func=function, grid=grid, block=block, shared=shared, ctx=ctx)
        if passing[0] == "params":
            table = (ctypes.c_void_p * max(len(passing[1]), 1))(*[address + o for o in passing[1]])
            struct.kernel_params = ctypes.addressof(table)
            self._keep += [table]
        else:
            size = ctypes.c_size_t(len(node.params))
            extra = (ctypes.c_uint64 * 5)(1, address, 2, ctypes.addressof(size), 0)
            struct.extra = ctypes.addressof(extra)
            self._keep += [size, extra]
        self._keep.append(struct)
        return ctypes.addressof(struct)

    def launch(self, bases: list[int], stream: int) -> int:
        addresses = array.array("Q", bases)
        if self._native is None:
            with self._lock:
                return self._launch_in_python(addresses, stream)
        code = self._native(self._entry, stream, addresses.buffer_info()[0])
        if code < 0:
            check((cu.CUresult(-code),))
        return code

    def _launch_in_python(self, bases: Sequence[int], stream: int) -> int:
        kernel, copy, fill, launch = _calls()[0][:4]
        handle, ctx, rewritten, code = int(self._exec), int(self._ctx), 0, 0
        for entry in self._entries:
            changed = False
            for s in self._slots[entry.first : entry.last]:
                value = (bases[s.region] + s.delta) & 0xFFFFFFFFFFFFFFFF
                if self._words[s.word] != value:
                    self._words[s.word] = value
                    changed = True
            if changed:
                rewritten += 1
                if entry.kind == 0:
                    code = kernel(handle, entry.node, entry.params)
                else:
                    code = (copy if entry.kind == 1 else fill)(handle, entry.node, entry.params, ctx)
                if code:
                    for s in self._slots[entry.first : entry.last]:
                        self._words[s.word] = 0xFFFFFFFFFFFFFFFF  # unset: to be set at the next launch
                    check((cu.CUresult(code),))
        check((cu.CUresult(launch(handle, stream)),))
        return rewritten

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # the driver frees everything itself, and may be gone already
        if getattr(self, "_exec", None) is not None:
            check(cu.cuGraphExecDestroy(self._exec))


def _end(slots: Sequence[Slot], at: int, node: int) -> int:
    while at < len(slots) and slots[at].node == node:
        at += 1
    return at
