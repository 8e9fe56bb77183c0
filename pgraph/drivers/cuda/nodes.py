"""Reading the nodes of a captured graph, each as bytes.

A kernel's parameters are copied out of the node (node-owned memory must never be edited) into one
packed buffer: the parameters at the offsets that the function declares, or the whole buffer that a
library passed through ``extra`` (cuBLAS and cuDNN on Hopper, tensor-map descriptors included).
Copy and fill nodes are their parameter structs.
"""

from __future__ import annotations

import array
import ctypes
import functools
import struct
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from cuda.bindings import driver as cu

from pgraph.drivers.cuda import kept
from pgraph.errors import CaptureError, DriverError
from pgraph.native import libraries
from pgraph.native.libraries import address_of
from pgraph.native.structs import NodeReaders, ReadNode
from pgraph.reasons import Reason
from pgraph.template.recording import NodeRecord

__all__ = ["KernelParams", "check", "node_reason", "read_node", "read_nodes", "status_name", "succeeded"]

_MEMCPY_BYTES = 200  # sizeof(CUDA_MEMCPY3D_v2)
_MEMSET_BYTES = 40  # sizeof(CUDA_MEMSET_NODE_PARAMS_v1)
_KERNEL = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL.value
_HOST_MEMORY = cu.CUmemorytype.CU_MEMORYTYPE_HOST
_ARRAY_MEMORY = cu.CUmemorytype.CU_MEMORYTYPE_ARRAY


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


@functools.cache
def _readers() -> tuple[Any, Any]:
    """The driver functions that tell a node's type and a kernel's parameters.

    Called by hand: NVIDIA's bindings make a dozen Python objects of a kernel node.
    """
    lib = ctypes.CDLL("libcuda.so.1")
    type_of, kernel = lib.cuGraphNodeGetType, lib.cuGraphKernelNodeGetParams_v2
    type_of.argtypes = kernel.argtypes = [ctypes.c_void_p] * 2
    return type_of, kernel


@functools.cache
def _table() -> NodeReaders:
    """`pg_readers`: the driver functions that the native helper calls."""
    lib = ctypes.CDLL("libcuda.so.1")
    functions = (
        lib.cuGraphNodeGetType,
        lib.cuGraphKernelNodeGetParams_v2,
        lib.cuKernelGetFunction,
        lib.cuGraphKernelNodeGetAttribute,
        lib.cuFuncGetAttribute,
    )
    return NodeReaders(*map(address_of, functions))


def check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver call returned, without its status.

    Raises:
        DriverError: the status is not success.
    """
    error, *values = result
    succeeded(int(error))
    return tuple(values)


def succeeded(code: int) -> None:
    """Look at the status of a driver function called by hand.

    Raises:
        DriverError: it is not success.
    """
    if not code:
        return
    text = cu.cuGetErrorString(cu.CUresult(code))[1] if code in _statuses() else None
    raise DriverError(f"{status_name(code)}: {text.decode() if text else 'no description'}")


def status_name(code: int) -> str:
    """As in the driver's header; the number alone where the driver is newer than NVIDIA's bindings."""
    return cu.CUresult(code).name if code in _statuses() else f"CUDA error {code}"


@functools.cache
def _statuses() -> frozenset[int]:
    return frozenset(map(int, cu.CUresult))


def read_nodes(nodes: Sequence[int], with_kept: bool = True) -> tuple[NodeRecord, ...]:
    """All nodes as records.

    Args:
        nodes: handles.
        with_kept: whether `NodeRecord.kept` is wanted of kernels: it takes 18 calls of the driver for each.

    Raises:
        CaptureError: a node, whose position the error has, is of a kind that cannot be rebound.
    """
    at_once = _NodesAtOnce(nodes, with_kept) if libraries.load() is not None and nodes else None
    records = []
    for position, node in enumerate(nodes):
        try:
            if at_once is not None and at_once.is_kernel(position):
                records.append(at_once.record(position))
            else:
                records.append(read_node(node, with_kept))
        except CaptureError as e:
            e.node = position
            raise
    return tuple(records)


class _KernelFacts(NamedTuple):
    """What kernel nodes have in common of one function, launched with the same dimensions in the same way.

    Args:
        name, header, passing, structs: as a `NodeRecord` has them.
        nbytes: of the parameters, in whole words.
        layout, length: where C finds the layout of so many parameters; 0 where they are one buffer of so many
            bytes.
    """

    name: str
    header: tuple[Any, ...]
    passing: tuple[Any, ...]
    structs: tuple[tuple[int, int], ...]
    nbytes: int
    layout: int
    length: int


class _NodesAtOnce:
    """What `read_node` says of kernels, read of all nodes by a few calls of the native helper."""

    def __init__(self, nodes: Sequence[int], with_kept: bool) -> None:
        library, calls, n = libraries.load(), ctypes.addressof(_table()), len(nodes)
        assert library is not None
        handles = array.array("Q", nodes)
        read = (ReadNode * n)()
        library.pg_read_nodes(calls, handles.buffer_info()[0], n, ctypes.addressof(read))
        # (type, code, function, dimensions and shared bytes, params, extra, kernel, context, buffer, bytes)
        self._read = list(struct.iter_unpack("=2iQ7I4x6Q", bytes(read)))
        self._functions: dict[int, tuple[Any, ...]] = {}
        self._kinds: list[_KernelFacts | None] = []
        self._places = [0]  # where the parameters of each node begin, and of the last one end
        self._pack(library)
        attributes, demands, self._row = kept.wanted()
        self._rows = None
        if with_kept:
            rows = ctypes.create_string_buffer(self._row * n)
            wanted = attributes.buffer_info()[0], len(attributes) // 3, demands.buffer_info()[0], len(demands)
            library.pg_read_kept(
                calls,
                handles.buffer_info()[0],
                n,
                ctypes.addressof(read),
                *wanted,
                ctypes.addressof(rows),
                self._row,
            )
            self._rows = rows.raw

    def is_kernel(self, position: int) -> bool:
        """Whether this one is a kernel, and all that was asked for was told."""
        return self._kinds[position] is not None

    def _pack(self, library: Any) -> None:
        """Copy all parameters into one buffer."""
        entries, at, known = array.array("Q"), 0, dict[Hashable, _KernelFacts]()
        for row in self._read:
            kind = None
            if row[0] == _KERNEL and not row[1]:
                key = row[2:10], row[10] != 0, row[11] != 0, row[13], row[15]
                kind = known.get(key)
                if kind is None:
                    kind = known[key] = self._kind(*row[2:])
                if kind.nbytes:
                    entries.extend((row[10] or row[14], kind.layout, kind.length, at))
                    at += kind.nbytes
            self._kinds.append(kind)
            self._places.append(at)
        packed = ctypes.create_string_buffer(max(at, 1))
        here, count = entries.buffer_info()
        library.pg_pack_all(ctypes.addressof(packed), here, count // 4)
        self._packed = packed.raw

    def _kind(self, function: int, *rest: int) -> _KernelFacts:
        *dimensions, shared, params, extra, _, ctx, _, nbytes = rest
        if function not in self._functions:
            name, layout = _function_facts(function)
            self._functions[function] = (name, layout, *_packing(layout))
        name, layout, whole, offsets, flat = self._functions[function]
        passing: tuple[Any, ...] = ("params", offsets if params else ())
        told, length = (ctypes.addressof(flat), len(layout)) if params else (0, 0)
        if extra and not params:
            passing, whole, length = ("extra",), nbytes + -nbytes % 8, nbytes
            layout = layout or ((0, whole),)
        elif not params:
            layout, whole = (), 0
        header = (function, tuple(dimensions[:3]), tuple(dimensions[3:]), shared, ctx, passing)
        return _KernelFacts(name, header, passing, _structs(layout), whole, told, length)

    def record(self, position: int) -> NodeRecord:
        """As `read_node`, of a kernel."""
        kind = self._kinds[position]
        assert kind is not None
        stays: tuple[Any, ...] | None = None
        if self._rows is not None:
            row = self._rows[position * self._row : (position + 1) * self._row]
            stays = kept.of_row(row, kind.header[4], kind.passing[0])
        params = self._packed[self._places[position] : self._places[position + 1]]
        return NodeRecord("kernel", kind.name, kind.header, params, kind.structs, stays, kind.passing)


def read_node(node: Any, with_kept: bool = True) -> NodeRecord:
    """One node as a record.

    Args:
        with_kept: as `read_nodes`.

    Raises:
        CaptureError: the node is of a kind that cannot be rebound.
    """
    number = ctypes.c_int()
    succeeded(_readers()[0](int(node), ctypes.addressof(number)))
    if number.value == _KERNEL:
        return _read_kernel(int(node), with_kept)
    kind = cu.CUgraphNodeType(number.value)
    if kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY:
        (copy,) = check(cu.cuGraphMemcpyNodeGetParams(node))
        kinds = {copy.srcMemoryType, copy.dstMemoryType}
        if kinds & {_HOST_MEMORY, _ARRAY_MEMORY}:
            raise CaptureError(node_reason("a copy from or to host memory"))
        data = ctypes.string_at(copy.getPtr(), _MEMCPY_BYTES)
        return NodeRecord("memcpy", "memcpy", (), data, kept=kept.of_copy(data))
    if kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
        (fill,) = check(cu.cuGraphMemsetNodeGetParams(node))
        data = ctypes.string_at(fill.getPtr(), _MEMSET_BYTES)
        return NodeRecord("memset", "memset", (), data, kept=kept.of_fill(data))
    if kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY:
        return NodeRecord("empty", "empty", (), b"")
    raise CaptureError(node_reason(f"a node of type {kind.name}"))


def node_reason(what: str) -> Reason:
    """Why a node of this description keeps its partition outside."""
    return Reason("node-kind", f"the captured graph holds {what}, whose addresses no launch can rewrite")


def _read_kernel(node: int, with_kept: bool) -> NodeRecord:
    p = KernelParams()
    succeeded(_readers()[1](node, ctypes.addressof(p)))
    function = p.func or 0
    if not function and p.kern:
        function = int(check(cu.cuKernelGetFunction(cu.CUkernel(p.kern)))[0])
    name, layout = _function_facts(function)
    if p.kernel_params:
        data, offsets = _packed(p.kernel_params, layout)
        passing: tuple[Any, ...] = ("params", offsets)
    elif p.extra:
        data = _extra_buffer(p.extra)
        passing = ("extra",)
        layout = layout or ((0, len(data)),)  # the buffer is laid out as the function declares, if it does
    else:
        data, passing, layout = b"", ("params", ()), ()
    header = (function, tuple(p.grid), tuple(p.block), p.shared, p.ctx or 0, passing)
    stays = kept.of_kernel(node, function, p.ctx or 0, passing[0]) if with_kept else None
    return NodeRecord("kernel", name, header, data, _structs(layout), stays, passing)


def _function_facts(handle: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """(name, (offset, size) of each parameter in bytes) of a kernel function.

    Not remembered from one capture to the next: Inductor unloads kernels together with the code that launches
    them (from torch 2.13 on), and a kernel that is loaded later may be given the same handle.
    """
    function = cu.CUfunction(handle)
    error, name = cu.cuFuncGetName(function)
    text = name.decode() if error == cu.CUresult.CUDA_SUCCESS and name else "kernel"
    layout: list[tuple[int, int]] = []
    while True:
        error, offset, size = cu.cuFuncGetParamInfo(function, len(layout))
        if error != cu.CUresult.CUDA_SUCCESS:
            return text, tuple(layout)
        layout.append((int(offset), int(size)))


def _packed(pointers: int, layout: tuple[tuple[int, int], ...]) -> tuple[bytes, tuple[int, ...]]:
    nbytes, offsets, flat = _packing(layout)
    data = bytearray(nbytes)
    library = libraries.load()
    if library is not None and nbytes:
        here = ctypes.addressof((ctypes.c_char * nbytes).from_buffer(data))
        library.pg_pack(here, pointers, ctypes.addressof(flat), len(layout))
    else:
        table = (ctypes.c_void_p * len(layout)).from_address(pointers)
        for (offset, size), pointer in zip(layout, table, strict=True):
            data[offset : offset + size] = ctypes.string_at(pointer, size)
    return bytes(data), offsets


@functools.lru_cache(maxsize=4096)
def _structs(layout: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple((offset, offset + size) for offset, size in layout if size > 8)


@functools.lru_cache(maxsize=4096)
def _packing(layout: tuple[tuple[int, int], ...]) -> tuple[int, tuple[int, ...], Any]:
    """Bytes of all parameters in whole words; where each begins; the layout as C reads it."""
    total = max((offset + size for offset, size in layout), default=0)
    flat = (ctypes.c_uint64 * max(2 * len(layout), 1))(*(number for pair in layout for number in pair))
    return -(-total // 8) * 8, tuple(offset for offset, _ in layout), flat


def _extra_buffer(extra: int) -> bytes:
    """The buffer of a CU_LAUNCH_PARAM_BUFFER_POINTER / _SIZE list."""
    words = ctypes.cast(extra, ctypes.POINTER(ctypes.c_uint64))
    pointer = size = i = 0
    while words[i] != 0:
        if words[i] == 1:
            pointer = words[i + 1]
        elif words[i] == 2:
            size = ctypes.c_size_t.from_address(words[i + 1]).value
        i += 2
    data = ctypes.string_at(pointer, size)
    return data + bytes(-size % 8)
