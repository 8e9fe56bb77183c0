"""Finds cuBLAS's workspaces for launches, and gives back those of a capture, but no others.

Note [Others' workspaces]
PyTorch keeps cuBLAS's workspaces, one per handle and stream, and its Python interface can only drop those of
all streams at once (CUDA graph trees do so). That harms the program twice. Its other streams take new ones at
their next product, wherever the allocator's cache has room: often inside a block of gigabytes, which can then
no longer be used as a whole. And a CUDA graph that the program captured may hold the address of an old one.
So a small helper drops those of the capture only. It needs compilers for C and C++; without it, as with
``PGRAPH_NATIVE=0``, all are dropped, and while a graph of the program's own is alive, nothing is captured.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any, NoReturn

import torch

from pgraph.drivers.cuda import snapshot
from pgraph.drivers.interface import Arena
from pgraph.errors import CaptureError
from pgraph.native import libraries
from pgraph.reasons import Reason

__all__ = [
    "address_of_current",
    "current",
    "drop",
    "instances",
    "kept",
    "lends",
    "no_memory",
    "refuse_foreign_graphs",
]


def drop(stream: int, arena: Arena) -> None:
    """Free the workspaces that products on this stream took, or all of them if that cannot be told.

    Those in the arena are among them, whatever their stream: an op may use streams of its own, and a later
    product on such a stream would use an address that has no memory any more.
    """
    library = libraries.load_workspaces()
    if library is None:
        torch._C._cuda_clearCublasWorkspaces()
    else:
        library.pg_drop_workspaces(stream, arena.low, arena.high)


_seen: dict[int, int] = {}  # bytes that a workspace of each device was seen to have


def lends(stream: int, nbytes: int) -> bool:
    """Whether PyTorch keeps a workspace of so many bytes for this thread and its current stream.

    Those of a device are all of one size, or PyTorch tells (`has` in ``native/workspaces.cpp``). So the
    allocator, which takes long in a large program, is asked once.
    """
    library = libraries.load_workspaces()
    address = library.pg_current_workspace(stream, nbytes) if library is not None else 0
    device = torch._C._cuda_getDevice() if address else -1
    if address and _seen.get(device, 0) < nbytes:
        blocks = (block for segment in snapshot.segments() for block in segment["blocks"])
        _seen[device] = max((b["size"] for b in blocks if b["address"] == address), default=0)
    return bool(address) and _seen[device] >= nbytes


def current(stream: int, nbytes: int) -> int:
    """Address of that workspace; it is made if there is none.

    Raises:
        torch.OutOfMemoryError: there is no memory for it.
    """
    library = libraries.load_workspaces()
    address = library.pg_current_workspace(stream, nbytes) if library is not None else 0
    if not address:
        no_memory(nbytes)
    return int(address)


def address_of_current() -> int | None:
    """Of the C function behind `current`, which returns 0 where that raises."""
    library = libraries.load_workspaces()
    return libraries.address_of(library.pg_current_workspace) if library is not None else None


def no_memory(nbytes: int) -> NoReturn:
    """Say that there is no workspace.

    Raises:
        torch.OutOfMemoryError: always.
    """
    raise torch.OutOfMemoryError(f"no memory for cuBLAS's workspace of {nbytes} bytes")


def kept() -> frozenset[int]:
    """First bytes of the workspaces that are in use now, whatever their device and stream."""
    library = libraries.load_workspaces()
    count, found = 64, (ctypes.c_uint64 * 0)()
    while library is not None and count > len(found):
        found = (ctypes.c_uint64 * count)()
        count = library.pg_workspaces(found, len(found))
    return frozenset(found[: min(count, len(found))])


def refuse_foreign_graphs() -> None:
    """Refuse to capture where that would drop workspaces which the program's CUDA graphs use.

    That is so where the helper is missing. Graphs of CUDA graph trees do not count.

    Raises:
        CaptureError: the program holds CUDA graphs that it captured by itself.
    """
    if libraries.load_workspaces() is not None:
        return
    node = getattr(sys.modules.get("torch._inductor.cudagraph_trees"), "CUDAGraphNode", None)
    graphs = instances(torch.cuda.CUDAGraph)
    of_trees = {id(getattr(n, "graph", None)) for n in instances(node)} if graphs and node else set()
    foreign = sum(id(graph) not in of_trees for graph in graphs)
    if foreign:
        raise CaptureError(
            Reason(
                "foreign-graphs",
                f"the program holds {foreign} CUDA graphs of its own, "
                "whose cuBLAS workspaces a capture would free",
            )
        )


def instances(cls: type) -> list[Any]:
    """All living objects of a class and of its subclasses.

    By the set of their types: a large program holds a million objects, and this is asked at each capture.
    (isinstance() would also ask weak proxies, whose objects may be gone.)
    """
    kinds: set[type] = {cls}
    fresh: list[type] = [cls]
    while fresh:
        below: list[type] = []
        for known in fresh:
            below += type.__subclasses__(known)
        fresh = [kind for kind in below if kind not in kinds]
        kinds.update(fresh)
    return [thing for thing in gc.get_objects() if type(thing) in kinds]
