"""The nodes of a captured graph in a valid order, and how they wait for one another."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from pgraph.drivers.cuda.nodes import succeeded
from pgraph.template.topology import Topology, chain, in_order, topology

__all__ = ["add_odd", "ordered_nodes"]

_DATA_BYTES: Final = 8  # sizeof(CUgraphEdgeData): from_port, to_port, type, and five that are reserved


@functools.cache
def _functions() -> tuple[Any, Any, Any]:
    """The driver functions that tell a graph's nodes and edges, without the edges' data where it is older.

    Called by hand: NVIDIA's bindings make Python objects of each node and each edge's data.
    """
    lib = ctypes.CDLL("libcuda.so.1")
    nodes, edges, plain = lib.cuGraphGetNodes, getattr(lib, "cuGraphGetEdges_v2", None), lib.cuGraphGetEdges
    nodes.argtypes, plain.argtypes = [ctypes.c_void_p] * 3, [ctypes.c_void_p] * 4
    if edges is not None:
        edges.argtypes = [ctypes.c_void_p] * 5
    return nodes, edges, plain


def ordered_nodes(graph: Any) -> tuple[list[int], Topology]:
    """Handles of the graph's nodes, each after those that it waits for, and how they wait for one another."""
    nodes = _nodes(int(graph))
    n = len(nodes)
    befores, afters, data = _edges(int(graph))
    if len(befores) == n - 1 and not any(data):
        # Nearly always: a chain, told in its order.
        next_one = dict(zip(befores, afters, strict=True))
        if all(next_one.get(a) == b for a, b in pairwise(nodes)):
            return nodes, chain(n)
    place = {node: position for position, node in enumerate(nodes)}
    edges = [(place[a], place[b]) for a, b in zip(befores, afters, strict=True)]
    order = in_order(n, edges)
    assert order is not None, "a CUDA graph has no circles"
    place = {position: i for i, position in enumerate(order)}
    edges = [(place[a], place[b]) for a, b in edges]
    how = [bytes(data[i : i + 3]) for i in range(0, len(data), _DATA_BYTES)]
    odd = tuple(sorted((*edge, kind) for edge, kind in zip(edges, how, strict=True) if any(kind)))
    return [nodes[position] for position in order], topology(n, edges, odd)


def add_odd(graph: int, edges: Sequence[tuple[int, int, bytes]]) -> None:
    """Add edges that are no plain ones to a graph.

    Args:
        edges: handles of the node before and the node after, and what `Topology` tells of the edge.

    Raises:
        DriverError: the driver does not.
    """
    n = len(edges)
    befores = (ctypes.c_uint64 * n)(*(before for before, _, _ in edges))
    afters = (ctypes.c_uint64 * n)(*(after for _, after, _ in edges))
    data = ctypes.create_string_buffer(b"".join(how.ljust(_DATA_BYTES, bytes(1)) for *_, how in edges))
    add = ctypes.CDLL("libcuda.so.1").cuGraphAddDependencies_v2  # who tells such edges has it
    add.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_size_t]
    succeeded(add(graph, befores, afters, data, n))


def _nodes(graph: int) -> list[int]:
    get, count = _functions()[0], ctypes.c_size_t()
    succeeded(get(graph, None, ctypes.addressof(count)))
    nodes = (ctypes.c_uint64 * count.value)()
    if count.value:
        succeeded(get(graph, ctypes.addressof(nodes), ctypes.addressof(count)))
    return nodes[: count.value]


def _edges(graph: int) -> tuple[Sequence[int], Sequence[int], bytes]:
    """Handles of the nodes that edges lead from, and to, and the data of each edge.

    A driver that tells no data fails where an edge is no plain one.
    """
    _, get, plain = _functions()
    count = ctypes.c_size_t()
    here = ctypes.addressof(count)
    succeeded(get(graph, None, None, None, here) if get is not None else plain(graph, None, None, here))
    if not count.value:
        return (), (), b""
    befores, afters = (ctypes.c_uint64 * count.value)(), (ctypes.c_uint64 * count.value)()
    data = (ctypes.c_char * (count.value * _DATA_BYTES))()
    ends = ctypes.addressof(befores), ctypes.addressof(afters)
    if get is not None:
        succeeded(get(graph, *ends, ctypes.addressof(data), here))
    else:
        succeeded(plain(graph, *ends, here))
    return befores[:], afters[:], data.raw
