"""Execs that can be set anew and launched."""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver as cu

from pgraph.drivers.cuda import snapshot
from pgraph.drivers.cuda.graph import CudaGraph, not_ours, rebound_copies
from pgraph.drivers.cuda.nodes import check, succeeded
from pgraph.drivers.cuda.settings import RecipeLayout
from pgraph.drivers.execs import Exec
from pgraph.native import libraries
from pgraph.native.structs import (
    ExecEntry,
    HeldEntry,
    LaunchCalls,
    NodeEntry,
)
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

__all__ = ["FIXED", "KERNEL", "CudaExec"]

KERNEL, FIXED = 0, 3
_EXEC_MOST, _NODE_MOST = 8 << 20, 16 << 10  # see `_at_most`
_SPARE = 8  # words of parameters that another kernel in a node's place may have more
_KIND = {"kernel": KERNEL, "memcpy": 1, "memset": 2, "empty": FIXED}


@functools.cache
def _calls() -> Any:
    """The driver functions called by hand, and `pg_calls`: the table of them."""
    lib = ctypes.CDLL("libcuda.so.1")
    functions = [
        lib.cuGraphExecKernelNodeSetParams_v2,
        lib.cuGraphExecMemcpyNodeSetParams,
        lib.cuGraphExecMemsetNodeSetParams,
        lib.cuGraphLaunch,
    ]
    kernel, copy, fill, launch = functions
    kernel.argtypes = [ctypes.c_void_p] * 3
    copy.argtypes = fill.argtypes = [ctypes.c_void_p] * 4
    launch.argtypes = [ctypes.c_void_p] * 2
    table = LaunchCalls(*[ctypes.cast(f, ctypes.c_void_p).value for f in functions])
    return functions, table


def _outside_allocator() -> int:
    """Bytes in use on the current device, less those that PyTorch's allocator holds.

    Two readings tell what the driver took in between, whatever other threads allocated meanwhile through
    PyTorch. What other processes do on the device remains in it; nothing tells a process's own share. So
    `_at_most` bounds what is believed.
    """
    free, total = check(cu.cuMemGetInfo())
    reserved = snapshot.numbers(torch._C._cuda_getDevice())["reserved_bytes"]["all"]["current"]
    return int(total - free - reserved)


def _at_most(nodes: Sequence[NodeRecord]) -> int:
    """Bytes that no exec of these nodes exceeds; another process may have taken more in that moment.

    Several times what was seen on an H200: 75 KB and 3.4 KB a node, in pieces of up to 2 MB.
    """
    return _EXEC_MOST + sum(_NODE_MOST + 2 * len(node.params) for node in nodes)


class CudaExec(Exec):
    """An instantiated range of a captured graph.

    Note [Uploaded before the first change]
    A kernel node whose parameters are set before its exec is on the device runs 0.1 to 0.3 us longer at
    every later launch (measured on an H200, driver 580); one that is set afterwards runs as if it had
    never been touched. So each exec is uploaded at once, with the addresses of the capture.

    Args:
        graph: the captured graph.
        nodes: all its nodes.
        first, last: of the range.
        slots: of the range. A copy or a fill without any is never set.
        stream: on which the exec is uploaded; it is waited for.

    Attributes:
        taken: (node, function) of each kernel that the driver took in a node's place.
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
        self._source = graph.part(first, last)
        self._copies = [(i - first, record) for i, record in rebound_copies(nodes, slots)]
        self._most = _at_most(nodes[first:last])
        self._make(stream)
        (ctx,) = check(cu.cuCtxGetCurrent())
        self._lay_out(nodes[first:last], {slot.node - first for slot in slots}, int(self._exec), int(ctx))

    def _make(self, stream: int) -> None:
        before = _outside_allocator()
        (self._exec,) = check(cu.cuGraphInstantiate(self._source.graph, 0))
        check(cu.cuGraphUpload(self._exec, stream))
        check(cu.cuStreamSynchronize(stream))
        self.nbytes = min(max(0, _outside_allocator() - before), self._most)

    def replica(self, stream: int, device: int) -> CudaExec:
        """Another one, made from the same nodes."""
        made = CudaExec.__new__(CudaExec)
        made._source, made._copies, made._most = self._source, self._copies, self._most
        made._source.anchor(made._copies, device)
        made._make(stream)
        made._begin(self.nodes, self._rooms, set(self.taken), int(made._exec), int(self.state.ctx))
        return made

    def _lay_out(self, nodes: Sequence[NodeRecord], rebound: set[int], exec: int, ctx: int) -> None:
        words = array.array("Q")  # as NodeEntry has them
        for i, (handle, node) in enumerate(zip(self._source.nodes, nodes, strict=True)):
            fixed = node.kind != "kernel" and i not in rebound
            words.extend((FIXED if fixed else _KIND[node.kind], int(handle)))
        rooms = [len(node.params) // 8 + _SPARE for node in nodes]
        taken = {(i, node.header[0]) for i, node in enumerate(nodes) if node.kind == "kernel"}
        self._begin((NodeEntry * len(nodes)).from_buffer_copy(words), rooms, taken, exec, ctx)

    def _begin(self, nodes: Any, rooms: list[int], taken: set[tuple[int, int]], exec: int, ctx: int) -> None:
        self.lock = threading.Lock()  # of launches in Python; those in C have one of their own
        self.nodes, self._rooms, self.taken = nodes, rooms, taken
        self._recipes = 0
        self.layout: RecipeLayout | None = None  # of the latest recipe
        self._contents: list[bytes | None] = []  # as `pg_held`, where launches go through Python
        self.state = ExecEntry(
            calls=ctypes.addressof(_calls()[1]),
            exec=exec,
            ctx=ctx,
            nodes=ctypes.addressof(self.nodes),
            n_nodes=len(self.nodes),
        )

    def used(self) -> None:
        """A recipe was made for it. From the second one on, what each node was set to is remembered."""
        self._recipes += 1
        if self._recipes != 2:
            return
        self._contents = [None] * len(self.nodes)
        if libraries.load() is None:
            return
        entries = (ctypes.c_void_p * max(len(self.nodes), 1))()
        starts = list(
            itertools.accumulate((ctypes.sizeof(HeldEntry) + 8 * n for n in self._rooms), initial=0)
        )
        self._held = ctypes.create_string_buffer(starts[-1] + 8)
        base = -(-ctypes.addressof(self._held) // 8) * 8
        for i, (start, room) in enumerate(zip(starts, self._rooms, strict=False)):
            entry = HeldEntry.from_address(base + start)
            entry.words, entry.room = -1, room
            entries[i] = base + start
        self._entries = entries
        self.state.contents = ctypes.addressof(entries)  # last: another thread may be launching

    def holds(self, position: int, content: bytes) -> bool:
        """Whether a node was set to this last; only for launches in Python."""
        return bool(self._contents) and self._contents[position] == content

    def set(self, position: int, params: int, content: bytes) -> None:
        """Have a node take these parameters; only for launches in Python.

        Args:
            params: address of the struct that the setter takes.
            content: what the struct says.

        Raises:
            DriverError: it does not.
        """
        kernel, copy, fill, _ = _calls()[0]
        node = self.nodes[position]
        if node.kind == KERNEL:
            code = kernel(self.state.exec, node.node, params)
        else:
            code = (copy if node.kind == 1 else fill)(self.state.exec, node.node, params, self.state.ctx)
        if code:
            self.state.held = 0
            self._contents = [None] * len(self._contents)
            succeeded(code)
        if self._contents:
            self._contents[position] = content

    def launch(self, stream: int) -> None:
        """Launch what the nodes were set to.

        Raises:
            DriverError: it was refused.
        """
        succeeded(_calls()[0][3](self.state.exec, stream))

    def __del__(self) -> None:
        if getattr(self, "_exec", None) is not None and not not_ours():
            check(cu.cuGraphExecDestroy(self._exec))
