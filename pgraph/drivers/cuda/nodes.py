"""Reading a captured graph: its nodes in a valid order, each as bytes.

A kernel's parameters are copied out of the node (node-owned memory must never be edited) into one
packed buffer: the parameters at the offsets that the function declares, or the whole buffer that a
library passed through ``extra`` (cuBLAS and cuDNN on Hopper, tensor-map descriptors included).
Copy and fill nodes are their parameter structs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu

from pgraph.drivers.cuda import kept
from pgraph.errors import CaptureError, DriverError
from pgraph.native import libraries
from pgraph.reasons import Reason
from pgraph.template.recording import NodeRecord
from pgraph.template.topology import Topology, chain, in_order, topology

__all__ = ["KernelParams", "check", "node_reason", "ordered_nodes", "read_node", "read_nodes"]

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


def check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver call returned, without its status.

    Raises:
        DriverError: the status is not success.
    """
    error, *values = result
    if error != cu.CUresult.CUDA_SUCCESS:
        _, text = cu.cuGetErrorString(error)
        raise DriverError(f"{error.name}: {text.decode() if text else 'no description'}")
    return tuple(values)


def _succeeded(code: int) -> None:
    if code:
        check((cu.CUresult(code),))


def ordered_nodes(graph: Any) -> tuple[list[Any], Topology]:
    """The graph's nodes, each after those that it waits for, and how they wait for one another."""
    count = check(cu.cuGraphGetNodes(graph, 0))[1]
    if count == 0:
        return [], chain(0)
    nodes = check(cu.cuGraphGetNodes(graph, count))[0][:count]
    n_edges = check(cu.cuGraphGetEdges(graph, 0))[-1]
    found = check(cu.cuGraphGetEdges(graph, n_edges)) if n_edges else ((), ())
    place = {int(node): position for position, node in enumerate(nodes)}
    edges = [(place[int(s)], place[int(t)]) for s, t in zip(*(f[:n_edges] for f in found[:2]), strict=True)]
    order = in_order(count, edges)
    assert order is not None, "a CUDA graph has no circles"
    place = {position: i for i, position in enumerate(order)}
    edges = [(place[s], place[t]) for s, t in edges]
    # Drivers' bindings of CUDA 12 say nothing of an edge, and fail where it is no plain one.
    how = [_how(data) for data in found[2][:n_edges]] if len(found) > 3 else [b""] * n_edges
    odd = tuple(sorted((*edge, kind) for edge, kind in zip(edges, how, strict=True) if any(kind)))
    return [nodes[position] for position in order], dataclasses.replace(topology(count, edges), odd=odd)


def _how(data: Any) -> bytes:
    """What an edge's data say; zeros for a plain one."""
    return bytes((int(data.from_port), int(data.to_port), int(data.type)))


def read_nodes(nodes: Sequence[Any]) -> tuple[NodeRecord, ...]:
    """All nodes as records.

    Raises:
        CaptureError: a node, whose position the error has, is of a kind that cannot be rebound.
    """
    records = []
    for position, node in enumerate(nodes):
        try:
            records.append(read_node(node))
        except CaptureError as e:
            e.node = position
            raise
    return tuple(records)


def read_node(node: Any) -> NodeRecord:
    """One node as a record.

    Raises:
        CaptureError: the node is of a kind that cannot be rebound.
    """
    number = ctypes.c_int()
    _succeeded(_readers()[0](int(node), ctypes.addressof(number)))
    if number.value == _KERNEL:
        return _read_kernel(int(node))
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


def _read_kernel(node: int) -> NodeRecord:
    p = KernelParams()
    _succeeded(_readers()[1](node, ctypes.addressof(p)))
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
    stays = kept.of_kernel(node, function, p.ctx or 0, passing[0])
    return NodeRecord("kernel", name, header, data, _structs(layout), stays)


@functools.lru_cache(maxsize=4096)
def _function_facts(handle: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """(name, (offset, size) of each parameter in bytes) of a kernel function."""
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
