"""What the driver is told of nodes: their parameters, and the structs that point to them, in one block."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Final

from pgraph.drivers.cuda.nodes import KernelParams
from pgraph.template.recording import NodeRecord

__all__ = ["ALIGNED", "places", "pointed_to", "struct_of"]

ALIGNED: Final = 64
"""Bytes. Tensor maps want it, of the block as of parameters within it."""

# A `KernelParams` and the words behind it, packed at once: to set its fields one by one takes longer than all
# else that is done for a node.
_KERNEL_PARAMS: Final = "=Q7I4x4Q"


def places(nodes: Sequence[NodeRecord], head: int) -> tuple[list[int], list[int], int]:
    """Where in the block the parameters of each node begin, and its struct; bytes of all.

    Args:
        head: bytes that come first.
    """
    at = head
    structs = []
    for node in nodes:
        structs.append(at)
        at += _struct_bytes(node)
    params = []
    for node in nodes:
        at = -(-at // ALIGNED) * ALIGNED if len(node.params) >= ALIGNED else at
        params.append(at)
        at += max(len(node.params), 8)
    return params, structs, -(-at // 8) * 8


def _struct_bytes(node: NodeRecord) -> int:
    """A kernel's struct, and the list of its parameters."""
    if node.kind != "kernel":
        return 0
    words = max(pointed_to(node), 1) if node.header[-1][0] == "params" else 6
    return ctypes.sizeof(KernelParams) + 8 * words


def pointed_to(node: NodeRecord) -> int:
    """Parameters that a kernel's struct points to one by one."""
    return len(node.header[-1][1]) if node.kind == "kernel" and node.header[-1][0] == "params" else 0


def struct_of(memory: memoryview, node: NodeRecord, base: int, params: int, place: int) -> int:
    """Make the struct that the driver takes; returns its address. A copy's or a fill's are its parameters.

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
