"""Graphs made by hand, of nodes that no capture recorded.

Note [Graphs made by hand]
A computed recording has no graph. Where no exec of another size has its kernels, one is made of a graph that
is put together node by node. A node takes a function, dimensions and parameters when it is added, and launch
attributes afterwards; edges that are no plain ones come last. Then all nodes are read as those of a capture
are, and such edges: unless each is what was computed, to the last byte and attribute, the graph is thrown
away, and that size is captured.
"""

from __future__ import annotations

import array
import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any, Final

from cuda.bindings import driver as cu

from pgraph.drivers.cuda import kept
from pgraph.drivers.cuda.edges import add_odd, ordered_nodes
from pgraph.drivers.cuda.graph import LASTING, CudaGraph, anchored, ordinary_range, rebound_copies
from pgraph.drivers.cuda.nodes import check, read_nodes, succeeded
from pgraph.drivers.cuda.settings import ALIGNED, places, struct_of
from pgraph.errors import CaptureError, DriverError
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot
from pgraph.template.topology import Topology

__all__ = ["assembled"]

log = logging.getLogger(__name__)

_FUNCTIONS: Final = 4096

_fresh: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""What is kept of a kernel's node that was only just added, by function, context and way of passing. A guess,
which spares reading a graph twice: a function's handle may be another one's tomorrow."""


def assembled(
    nodes: Sequence[NodeRecord], order: Topology, slots: Sequence[Slot], device: int
) -> CudaGraph | None:
    """A graph of these nodes; None if it cannot be made, or would not be the same.

    Args:
        slots: of all nodes. Copies and fills among them are anchored (Note [Copies are anchored]).
    """
    (raw,) = check(cu.cuGraphCreate(0))
    graph = CudaGraph(raw, [])
    try:
        wanted, holder = _at_ordinary_memory(nodes, slots, device)
        graph.nodes = _added(int(raw), wanted, order)
        expected = [_fresh.get(_like(node)) for node in wanted]
        _given(graph.nodes, wanted, expected)
        found = read_nodes(graph.nodes)  # all at once: one by one takes longer than all else here
        _note(wanted, expected, found)
        if _given(graph.nodes, wanted, [node.kept for node in found]):
            found = read_nodes(graph.nodes)
    except (CaptureError, DriverError) as e:
        log.debug("no graph could be made by hand: %s", e)
        return None
    if order.odd and ordered_nodes(raw) != (graph.nodes, order):
        log.debug("the nodes of a graph made by hand wait in other ways")
        return None
    for position, (mine, theirs) in enumerate(zip(wanted, found, strict=True)):
        if mine != theirs:
            log.debug("a graph made by hand is another one at node %d: %s is %s", position, mine, theirs)
            return None
    graph.anchored, graph.lasting = True, holder is LASTING
    return graph


def _like(node: NodeRecord) -> tuple[Any, ...]:
    """Equal for kernel nodes that are alike when they are added, as far as anything is kept of them."""
    if node.kind != "kernel":
        return ()
    function, *_, ctx, passing = node.header
    return function, ctx, passing[0]


def _note(wanted: Sequence[NodeRecord], expected: Sequence[Any], found: Sequence[NodeRecord]) -> None:
    """Remember what is kept of nodes of which nothing was expected, and forget what was expected in vain."""
    if len(_fresh) > _FUNCTIONS:
        _fresh.clear()
    for mine, had, theirs in zip(wanted, expected, found, strict=True):
        if mine.kind != "kernel" or not mine.kept or not theirs.kept:
            continue
        if had is None:
            _fresh[_like(mine)] = tuple(theirs.kept)
        elif mine.kept != theirs.kept:
            _fresh.pop(_like(mine), None)


def _given(handles: Sequence[int], wanted: Sequence[NodeRecord], has: Sequence[Any]) -> bool:
    """Set the launch attributes of kernels that differ; whether there were any.

    Args:
        has: what is kept of each; None if that is not known.
    """
    some = False
    for handle, mine, theirs in zip(handles, wanted, has, strict=True):
        if mine.kind == "kernel" and mine.kept and theirs and mine.kept != theirs:
            kept.give(handle, tuple(mine.kept), tuple(theirs))
            some = True
    return some


def _at_ordinary_memory(
    nodes: Sequence[NodeRecord], slots: Sequence[Slot], device: int
) -> tuple[list[NodeRecord], Any]:
    """The nodes, with copies and fills anchored, and what holds the memory there."""
    found, copies = list(nodes), rebound_copies(nodes, slots)
    if not copies:
        return found, None
    address, holder = ordinary_range([record for _, record in copies], device)
    for position, record in copies:
        params = bytes(anchored(record, address))
        stays = kept.of_copy(params) if record.kind == "memcpy" else kept.of_fill(params)
        found[position] = NodeRecord(record.kind, record.name, record.header, params, kept=stays)
    return found, holder


def _added(graph: int, nodes: Sequence[NodeRecord], order: Topology) -> list[int]:
    """Add nodes to an empty graph, each after those that it waits for; returns their handles."""
    params, structs, total = places(nodes, 0)
    memory = ctypes.create_string_buffer(total + ALIGNED)
    base = -(-ctypes.addressof(memory) // ALIGNED) * ALIGNED
    view = memoryview(memory).cast("B")[base - ctypes.addressof(memory) :]
    awaited: list[list[int]] = [[] for _ in nodes]
    odd = {(before, after) for before, after, _ in order.odd}
    for before, after in order.edges:
        if (before, after) not in odd:
            awaited[after].append(before)
    context, adders = int(check(cu.cuCtxGetCurrent())[0]), _adders()
    handles = (ctypes.c_uint64 * max(len(nodes), 1))()
    first = ctypes.addressof(handles)
    for i, node in enumerate(nodes):
        view[params[i] : params[i] + len(node.params)] = node.params
        which, here = awaited[i], first + 8 * i
        told: list[Any] = [here, graph, None, len(which)]
        if len(which) == 1:  # as most often
            told[2] = first + 8 * which[0]
        elif which:
            waits = array.array("Q", [handles[before] for before in which])
            told[2] = waits.buffer_info()[0]
        if node.kind != "empty":
            told.append(struct_of(view, node, base, params[i], structs[i]))
        if node.kind in ("memcpy", "memset"):
            told.append(context)
        succeeded(adders[node.kind](*told))
    if order.odd:
        add_odd(graph, [(handles[before], handles[after], how) for before, after, how in order.odd])
    return handles[: len(nodes)]


@functools.cache
def _adders() -> dict[str, Any]:
    """The driver functions that add a node of each kind.

    Called by hand: NVIDIA's bindings take no list of parameters by address.
    """
    lib = ctypes.CDLL("libcuda.so.1")
    adders = {
        "empty": (lib.cuGraphAddEmptyNode, 0),
        "kernel": (lib.cuGraphAddKernelNode_v2, 1),
        "memcpy": (lib.cuGraphAddMemcpyNode, 2),
        "memset": (lib.cuGraphAddMemsetNode, 2),
    }
    for function, more in adders.values():
        pointers: list[Any] = [ctypes.c_void_p] * 3
        function.argtypes = [*pointers, ctypes.c_size_t, *[ctypes.c_void_p] * more]
    return {kind: function for kind, (function, _) in adders.items()}
