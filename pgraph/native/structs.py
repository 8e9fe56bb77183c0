"""The C structs of `rebind.c` that Python fills. Their sizes are checked when the library is loaded."""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = [
    "ArenaState",
    "ExecEntry",
    "HeldEntry",
    "LaunchCalls",
    "NodeEntry",
    "NodeReaders",
    "PackingEntry",
    "PathEntry",
    "ReadNode",
    "RecipeEntry",
    "SettingEntry",
    "SlotEntry",
    "TurnsEntry",
    "check_sizes",
]


class LaunchCalls(ctypes.Structure):
    """`pg_calls`: addresses of the driver's functions that a launch calls."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("kernel", "copy", "fill", "launch")]


class NodeEntry(ctypes.Structure):
    """`pg_node`: one node of an exec."""

    _fields_ = [("kind", ctypes.c_int64), ("node", ctypes.c_void_p)]


class ExecEntry(ctypes.Structure):
    """`pg_exec`: what recipes set and launch."""

    _fields_ = [
        ("calls", ctypes.c_void_p),
        ("exec", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("nodes", ctypes.c_void_p),
        ("n_nodes", ctypes.c_int64),
        ("held", ctypes.c_int64),
        ("busy", ctypes.c_int64),
        ("contents", ctypes.c_void_p),
    ]


class SettingEntry(ctypes.Structure):
    """`pg_setting`: what a recipe sets one node to, and which slots are its own."""

    _fields_ = [
        ("params", ctypes.c_int32),
        ("last", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("count", ctypes.c_int32),
    ]


class HeldEntry(ctypes.Structure):
    """`pg_held`: what a node was set to last; its parameters follow."""

    _fields_ = [("words", ctypes.c_int64), ("room", ctypes.c_int64), ("head", ctypes.c_char * 40)]


class SlotEntry(ctypes.Structure):
    """`pg_slot`: a word that is rewritten."""

    _fields_ = [("word", ctypes.c_int32), ("region", ctypes.c_int32), ("delta", ctypes.c_int64)]


class RecipeEntry(ctypes.Structure):
    """`pg_recipe`: what `pg_launch` takes."""

    _fields_ = [
        ("exec", ctypes.c_void_p),
        ("number", ctypes.c_int64),
        ("settings", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
    ]


class TurnsEntry(ctypes.Structure):
    """`pg_turns`: recipes of which each launch takes one."""

    _fields_ = [
        ("recipes", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("latest", ctypes.c_int64),
        ("n_slots", ctypes.c_int64),
        ("kept", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("room", ctypes.c_int64),
    ]


class ArenaState(ctypes.Structure):
    """`pg_arena`: the allocator of ghost memory."""

    _fields_ = [
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("mapped", ctypes.c_uint64),
        ("chunk", ctypes.c_uint64),
        ("handle", ctypes.c_uint64),
        ("guard", ctypes.c_uint64),
        ("unit", ctypes.c_uint64),
        ("further", ctypes.c_uint64),
        ("ahead", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("error", ctypes.c_int64),
        ("map", ctypes.c_void_p),
        ("access", ctypes.c_void_p),
        ("desc", ctypes.c_void_p),
    ]


class NodeReaders(ctypes.Structure):
    """`pg_readers`: addresses of the driver's functions that tell what nodes are."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("type", "kernel", "function", "attribute", "demand")]


class ReadNode(ctypes.Structure):
    """`pg_read`: a node's type, a kernel's parameters, and the buffer of ``extra``."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("function", ctypes.c_void_p),
        ("dimensions", ctypes.c_uint32 * 7),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("buffer", ctypes.c_void_p),
        ("nbytes", ctypes.c_uint64),
    ]


class PackingEntry(ctypes.Structure):
    """`pg_packing`: parameters, and where they go."""

    _fields_ = [
        ("origin", ctypes.c_void_p),
        ("layout", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("at", ctypes.c_uint64),
    ]


class PathEntry(ctypes.Structure):
    """`pg_path`: what a capture has recorded so far."""

    _fields_ = [
        ("info", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("behind", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    ]


_IN_ORDER: Final = (
    LaunchCalls,
    NodeEntry,
    ExecEntry,
    SettingEntry,
    SlotEntry,
    RecipeEntry,
    ArenaState,
    NodeReaders,
    ReadNode,
    PackingEntry,
    PathEntry,
    HeldEntry,
    TurnsEntry,
)


def check_sizes(library: ctypes.CDLL) -> None:
    """Compare with what the C compiler made of them.

    Raises:
        OSError: a struct has another size in C.
    """
    library.pg_struct_size.restype = ctypes.c_int64
    library.pg_struct_size.argtypes = [ctypes.c_int64]
    for which, struct in enumerate(_IN_ORDER):
        there = library.pg_struct_size(which)
        if there != ctypes.sizeof(struct):
            raise OSError(f"{struct.__name__} has {ctypes.sizeof(struct)} bytes in Python and {there} in C")
