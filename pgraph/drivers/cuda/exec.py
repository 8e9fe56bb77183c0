"""Execs that can be set anew and launched, and the recipes that do so.

A recipe keeps the parameters of its nodes, and the structs that the driver takes, which point to them. Slots
are rewritten there before a node is set.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver as cu

from pgraph.drivers.cuda.graph import CudaGraph
from pgraph.drivers.cuda.nodes import KernelParams, check, succeeded
from pgraph.drivers.execs import Exec, Recipe
from pgraph.errors import DriverError
from pgraph.native import libraries
from pgraph.native.structs import (
    ExecEntry,
    HeldEntry,
    LaunchCalls,
    NodeEntry,
    RecipeEntry,
    SettingEntry,
    SlotEntry,
)
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

__all__ = ["CudaExec", "CudaRecipe"]

_KERNEL, _FIXED = 0, 3
_HEAD = 36  # bytes of a kernel's struct that hold its function, dimensions and shared memory
_EXEC_MOST, _NODE_MOST = 8 << 20, 16 << 10  # see `_at_most`
_SPARE = 8  # words of parameters that another kernel in a node's place may have more
_KIND = {"kernel": _KERNEL, "memcpy": 1, "memset": 2, "empty": _FIXED}
_numbers = itertools.count(1)


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
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"]
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
        before = _outside_allocator()
        (self._exec,) = check(cu.cuGraphInstantiate(self._source.graph, 0))
        check(cu.cuGraphUpload(self._exec, stream))
        check(cu.cuStreamSynchronize(stream))
        self.nbytes = min(max(0, _outside_allocator() - before), _at_most(nodes[first:last]))
        (ctx,) = check(cu.cuCtxGetCurrent())
        self.lock = threading.Lock()  # of launches in Python; those in C have one of their own
        self._lay_out(nodes[first:last], {slot.node - first for slot in slots}, int(self._exec), int(ctx))

    def _lay_out(self, nodes: Sequence[NodeRecord], rebound: set[int], exec: int, ctx: int) -> None:
        words = array.array("Q")  # as NodeEntry has them
        for i, (handle, node) in enumerate(zip(self._source.nodes, nodes, strict=True)):
            fixed = node.kind != "kernel" and i not in rebound
            words.extend((_FIXED if fixed else _KIND[node.kind], int(handle)))
        self.nodes = (NodeEntry * len(nodes)).from_buffer_copy(words)
        self._rooms = [len(node.params) // 8 + _SPARE for node in nodes]
        self.taken = {(i, node.header[0]) for i, node in enumerate(nodes) if node.kind == "kernel"}
        self._recipes = 0
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
        if node.kind == _KERNEL:
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
        if sys.is_finalizing():
            return  # the driver frees everything itself, and may be gone already
        if getattr(self, "_exec", None) is not None:
            check(cu.cuGraphExecDestroy(self._exec))


class CudaRecipe(Recipe):
    """What a range of a recording's nodes are to be set to, in one block of memory.

    Args:
        exec: made from these nodes, or from those of a recording with the same sharing key.
        nodes: of the range.
        slots: of the range, in the order of their nodes.
        first: number of the first node.
    """

    def __init__(
        self, exec: CudaExec, nodes: Sequence[NodeRecord], slots: Sequence[Slot], first: int
    ) -> None:
        self.exec: CudaExec = exec
        n = len(nodes)
        params, structs, total = _places(nodes, ctypes.sizeof(RecipeEntry), n, len(slots))
        # Tensor maps want an alignment of 64 bytes.
        self._memory = ctypes.create_string_buffer(total + 64)
        base = -(-ctypes.addressof(self._memory) // 64) * 64
        self.nbytes = len(self._memory)
        settings, at = array.array("Q"), 0  # as SettingEntry has them
        view = memoryview(self._memory).cast("B")[base - ctypes.addressof(self._memory) :]
        for i, node in enumerate(nodes):
            view[params[i] : params[i] + len(node.params)] = node.params
            at = _end(slots, at, first + i)
            place = params[i] // 8 | len(node.params) // 8 << 32  # two numbers of 32 bits each
            settings.extend((_struct(view, node, base, params[i], structs[i]), at, place))
        packed = b"".join(
            struct.pack("=iiq", (params[s.node - first] + s.offset) // 8, s.region, s.delta) for s in slots
        )
        here = base + ctypes.sizeof(RecipeEntry)
        there = here + ctypes.sizeof(SettingEntry) * n
        ctypes.memmove(here, settings.tobytes(), ctypes.sizeof(SettingEntry) * n)
        ctypes.memmove(there, packed, len(packed))
        self._settings = (SettingEntry * n).from_address(here)
        self._slots = (SlotEntry * len(slots)).from_address(there)
        self._words = (ctypes.c_uint64 * (total // 8)).from_address(base)
        self._entry = RecipeEntry.from_address(base)
        self._entry.exec = ctypes.addressof(exec.state)
        self._entry.number = next(_numbers)
        self._entry.settings, self._entry.slots, self._entry.words = here, there, base
        self._library = libraries.load()
        if self._library is not None:
            self.entry = base
        functions = {(i, node.header[0]) for i, node in enumerate(nodes) if node.kind == "kernel"}
        self._untried = functions - exec.taken
        exec.used()

    def launch(self, bases: list[int], stream: int) -> int:
        addresses = array.array("Q", bases)
        if self._library is None:
            with self.exec.lock:
                return self._launch_in_python(addresses, stream)
        code: int = self._library.pg_launch(ctypes.addressof(self._entry), stream, addresses.buffer_info()[0])
        if code < 0:
            succeeded(-code)
        return code

    def _content(self, node: NodeEntry, setting: SettingEntry) -> bytes:
        """What the driver is told of a node."""
        words = bytes(memoryview(self._words)[setting.first : setting.first + setting.count])
        return (ctypes.string_at(setting.params, _HEAD) if node.kind == _KERNEL else b"") + words

    def _launch_in_python(self, bases: Sequence[int], stream: int) -> int:
        state, count, at = self.exec.state, 0, 0
        anew = state.held != self._entry.number
        for i, (node, setting) in enumerate(zip(self.exec.nodes, self._settings, strict=True)):
            changed = False
            for s in self._slots[at : setting.last]:
                value = (bases[s.region] + s.delta) & 0xFFFFFFFFFFFFFFFF
                if self._words[s.word] != value:
                    self._words[s.word] = value
                    changed = True
            at = setting.last
            content = self._content(node, setting) if anew or changed else b""
            if anew:
                changed = node.kind != _FIXED and not self.exec.holds(i, content)
            if changed:
                count += 1
                self.exec.set(i, setting.params, content)
        state.held = self._entry.number
        self.exec.launch(stream)
        return count

    def fits(self) -> bool:
        if not self._untried:
            return True  # what a driver refuses is a function in a node's place
        if self._library is not None:
            took = self._library.pg_fits(ctypes.addressof(self._entry)) == 0
        else:
            took = self._fits_in_python()
        if took:
            self.exec.taken |= self._untried
            self._untried = set()
        return took

    def _fits_in_python(self) -> bool:
        with self.exec.lock:
            self.exec.state.held = 0
            try:
                for i, (node, setting) in enumerate(zip(self.exec.nodes, self._settings, strict=True)):
                    if node.kind == _KERNEL:
                        self.exec.set(i, setting.params, self._content(node, setting))
            except DriverError:
                return False
        return True


def _places(
    nodes: Sequence[NodeRecord], entry: int, n: int, n_slots: int
) -> tuple[list[int], list[int], int]:
    """Where the parameters of each node begin, and the struct that the driver takes; bytes of all. What comes
    first are the entry, the settings and the slots."""
    at = entry + ctypes.sizeof(SettingEntry) * n + ctypes.sizeof(SlotEntry) * n_slots
    structs = []
    for node in nodes:
        structs.append(at)
        at += _struct_bytes(node)
    params = []
    for node in nodes:
        at = -(-at // 64) * 64 if len(node.params) >= 64 else at
        params.append(at)
        at += max(len(node.params), 8)
    return params, structs, -(-at // 8) * 8


def _struct_bytes(node: NodeRecord) -> int:
    """A kernel's struct, and the list of its parameters."""
    if node.kind != "kernel":
        return 0
    passing = node.header[-1]
    return ctypes.sizeof(KernelParams) + 8 * (max(len(passing[1]), 1) if passing[0] == "params" else 6)


# A `KernelParams` and the words behind it, packed at once: to set its fields one by one takes longer than all
# else that is done for a node.
_KERNEL_PARAMS = "=Q7I4x4Q"


def _struct(memory: memoryview, node: NodeRecord, base: int, params: int, place: int) -> int:
    """Make the struct that the setter takes; returns its address.

    Args:
        memory: it begins at the address `base`; `params` and `place` are counted from there.
    """
    params += base
    if node.kind != "kernel":
        return params
    function, grid, block, shared, ctx, passing = node.header
    behind = base + place + ctypes.sizeof(KernelParams)
    if passing[0] == "params":
        pointers = behind, 0
        table = [params + offset for offset in passing[1]]
    else:  # CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE, the end, and the size itself
        pointers = 0, behind
        table = [1, params, 2, behind + 40, 0, len(node.params)]
    form = f"{_KERNEL_PARAMS}{len(table)}Q"
    struct.pack_into(form, memory, place, function, *grid, *block, shared, *pointers, 0, ctx, *table)
    return base + place


def _end(slots: Sequence[Slot], at: int, node: int) -> int:
    while at < len(slots) and slots[at].node == node:
        at += 1
    return at
