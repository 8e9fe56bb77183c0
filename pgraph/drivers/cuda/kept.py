"""What an exec keeps of a node, whatever is set later: launch attributes, and most of a copy or a fill.

`cuGraphExecKernelNodeSetParams` takes another function, other dimensions and parameters. It says nothing of
launch attributes, which stay as they were when the exec was instantiated. Copies and fills take other
addresses; a copy in one dimension another length, too, and a fill another value. Other changes of a fill
"may be rejected", says the driver's documentation, so they count as kept here.

Attributes do stay: where a kernel of cuBLAS's that wants clusters is set in a node that was made without
them, the setter agrees, and the launch stops with an illegal instruction (H200, driver 580).
"""

from __future__ import annotations

import array
import ctypes
import functools
import struct
from typing import Any, Final

__all__ = ["give", "of_copy", "of_fill", "of_kernel", "of_row", "wanted"]

# Those that a launch depends on, with their bytes; as in the driver's header (CUlaunchAttributeID).
_ATTRIBUTES: Final = {
    1: 28,  # access policy window
    2: 4,  # cooperative
    4: 12,  # cluster dimension
    5: 4,  # cluster scheduling policy
    8: 4,  # priority
    9: 2,  # map of memory synchronization domains
    10: 4,  # memory synchronization domain
    13: 4,  # updatable from the device
}
# Hints and permissions: whatever they are, the results are the same. What a driver or a device does not know
# it does not read either: an H200's (580) refuses 11, the preferred cluster dimension, for every node.
_HINTS: Final = {11: 12, 14: 4, 16: 4, 17: 4, 18: 4}
_VALUE_BYTES: Final = 64  # sizeof(CUlaunchAttributeValue)

# Of a function, that say how it has to be launched: whether clusters are a must, their dimensions, and how
# they are scheduled (CUfunction_attribute). Not remembered: its handle may be another one's tomorrow.
_DEMANDS: Final = (10, 11, 12, 13, 15)

_DIMENSIONS, _LENGTH, _PITCHES = slice(23, 25), 22, (9, 10, 20, 21)  # words of CUDA_MEMCPY3D


@functools.cache
def _functions() -> tuple[Any, Any, Any]:
    lib = ctypes.CDLL("libcuda.so.1")
    attribute, demand = lib.cuGraphKernelNodeGetAttribute, lib.cuFuncGetAttribute
    setter = lib.cuGraphKernelNodeSetAttribute
    for function in (attribute, demand, setter):
        function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return attribute, demand, setter


def of_kernel(node: int, function: int, ctx: int, passing: str) -> tuple[Any, ...] | None:
    """Of a kernel node; None if something cannot be read.

    Args:
        node, function, ctx: handles.
        passing: how its parameters are passed. Whether a node takes the other way later is not documented.
    """
    demands = _demands(function)
    if demands is None:
        return None
    read, value = _functions()[0], ctypes.create_string_buffer(_VALUE_BYTES)
    found: list[bytes | None] = []
    for attribute, nbytes in (*_ATTRIBUTES.items(), *_HINTS.items()):
        ctypes.memset(value, 0, _VALUE_BYTES)
        known = read(node, attribute, value) == 0
        if not known and attribute in _ATTRIBUTES:
            return None
        found.append(value.raw[:nbytes] if known else None)
    return ctx, passing, demands, tuple(found)


def give(node: int, wanted: tuple[Any, ...], has: tuple[Any, ...]) -> None:
    """Set the attributes of a kernel node that differ; whatever the driver says: they are to be read again.

    Args:
        wanted, has: as `of_kernel` reads them.
    """
    setter = _functions()[2]
    for attribute, value in _differing(wanted[-1], has[-1]):
        setter(node, attribute, value)


@functools.lru_cache(maxsize=256)
def _differing(wanted: tuple[bytes | None, ...], has: tuple[bytes | None, ...]) -> list[tuple[int, Any]]:
    """Attributes to set, with their values as the driver takes them. Most kernels have the same."""
    return [
        (attribute, ctypes.create_string_buffer(mine, _VALUE_BYTES))
        for attribute, mine, theirs in zip((*_ATTRIBUTES, *_HINTS), wanted, has, strict=True)
        if mine is not None and mine != theirs
    ]


def _demands(function: int) -> tuple[int, ...] | None:
    read, value, found = _functions()[1], ctypes.c_int(), []
    for attribute in _DEMANDS:
        if read(ctypes.addressof(value), attribute, function) != 0:
            return None
        found.append(value.value)
    return tuple(found)


@functools.cache
def wanted() -> tuple[array.array[int], array.array[int], int]:
    """What `pg_read_kept` is to read: (attribute, bytes, whether it is needed) of each, the demands, and the
    bytes of a row that it writes."""
    attributes = array.array("i")
    for table in (_ATTRIBUTES, _HINTS):
        for attribute, nbytes in table.items():
            attributes.extend((attribute, nbytes, table is _ATTRIBUTES))
    row = 1 + 4 * len(_DEMANDS) + len(attributes) // 3 + sum(attributes[1::3])
    return attributes, array.array("i", _DEMANDS), row


@functools.lru_cache(maxsize=4096)
def of_row(row: bytes, ctx: int, passing: str) -> tuple[Any, ...] | None:
    """As `of_kernel`, of a row that `pg_read_kept` wrote. Most kernels have the same."""
    if not row[0]:
        return None
    attributes, demands, _ = wanted()
    at = 1 + 4 * len(demands)
    found: list[bytes | None] = []
    for nbytes in attributes[1::3]:
        found.append(row[at + 1 : at + 1 + nbytes] if row[at] else None)
        at += 1 + nbytes
    return ctx, passing, struct.unpack_from(f"={len(demands)}i", row, 1), tuple(found)


def of_copy(params: bytes) -> bytes:
    """Of a copy node: its struct; in one dimension with zeros for the length and for the pitches, which then
    mean nothing."""
    words = list(struct.unpack("=25Q", params))
    if all(n <= 1 for n in words[_DIMENSIONS]) and words[_LENGTH]:
        for i in (_LENGTH, *_PITCHES):
            words[i] = 0
    return struct.pack("=25Q", *words)


def of_fill(params: bytes) -> bytes:
    """Of a fill node: its struct, with zeros for the value."""
    return params[:16] + bytes(4) + params[20:]
