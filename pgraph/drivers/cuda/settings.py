"""What the driver is told of nodes: their parameters, and the structs that point to them, in one block; and
what recipes share: where that lies in their blocks, and slots."""

from __future__ import annotations

import array
import ctypes
import struct
import sys
import weakref
from collections.abc import Hashable, Sequence
from typing import Final

from pgraph.drivers.cuda.nodes import KernelParams
from pgraph.native.structs import RecipeEntry
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

__all__ = ["ALIGNED", "EntryRows", "RecipeLayout", "layout_of", "places", "struct_of"]

ALIGNED: Final = 64
"""Bytes. Tensor maps want it, of the block as of parameters within it."""

_MAP: Final = 128  # bytes of a tensor map: shorter parameters have none

# A `KernelParams` and the words behind it, packed at once: to set its fields one by one takes longer than all
# else that is done for a node.
_KERNEL_PARAMS: Final = "=Q7I4x4Q"
_HEAD: Final = struct.Struct("=Q7I")  # what comes before its pointers
_SLOT: Final = struct.Struct("=iiq")  # `SlotEntry`
_SETTING: Final = struct.Struct("=4i")  # `SettingEntry`
_CONTEXT: Final = KernelParams.ctx.offset


class EntryRows:
    """Structs that C reads and nobody changes: a `SlotEntry` per slot, or a `SettingEntry` per node.

    Attributes:
        packed: all of them.
        address: where the first one lies, for as long as this lives.
    """

    __slots__ = ("__weakref__", "address", "packed")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.address = ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p).value or 0


class RecipeLayout:
    """Where all that recipes keep lies in their blocks: of an exec's sizes that have parameters as long, and
    slots in the same nodes.

    Hardly anything but the parameters differs from one to the next, and the address of the block, to which
    the same words point. So what the words are at address 0 is kept, as one number: the address is added to
    all of those words at once.

    Args:
        nodes: of the exec's range.
        slots: of the range, in the order of their nodes.
        first: number of the first node.

    Attributes:
        nbytes: of a block.
        settings: the `SettingEntry` of each node.
    """

    def __init__(self, nodes: Sequence[NodeRecord], slots: Sequence[Slot], first: int) -> None:
        self._first = first
        self._like = _told(nodes, slots)
        head = ctypes.sizeof(RecipeEntry)
        self._params, self._structs, self.nbytes = places(nodes, head)
        self.settings = EntryRows(self._settings(nodes, slots))
        self._begin = self._structs[-1] + _struct_bytes(nodes[-1]) if nodes else head  # of the parameters
        form, at = "=", self._begin
        for node, place in zip(nodes, self._params, strict=True):
            form += f"{place - at}x{len(node.params)}s"
            at = place + len(node.params)
        self._contents = struct.Struct(form)
        # Slots of the latest, and their rows; set at once, for threads.
        nothing = EntryRows(bytes(_SLOT.size * len(slots)))
        self._latest: tuple[Sequence[Slot] | None, EntryRows] = None, nothing
        self._rows = weakref.WeakValueDictionary[bytes, EntryRows]()
        self._headers = [node.header for node in nodes]
        # What comes before the parameters, at address 0, and what the address is added to.
        image, ones = self._image(nodes)
        self._words, self._ones = (int.from_bytes(words, sys.byteorder) for words in (image, ones))

    def serves(self, nodes: Sequence[NodeRecord], slots: Sequence[Slot]) -> bool:
        """Whether blocks for these are laid out like this."""
        if slots == self._latest[0]:
            return _told_of(nodes) == self._like[0]
        return _told(nodes, slots) == self._like

    def write(self, block: memoryview, base: int, nodes: Sequence[NodeRecord]) -> None:
        """Fill a block at this address, all but its `RecipeEntry`."""
        words = self._words + base * self._ones
        block[: self._begin] = words.to_bytes(self._begin, sys.byteorder)
        put_head = _HEAD.pack_into
        for node, header, place in zip(nodes, self._headers, self._structs, strict=True):
            if node.header != header and node.kind == "kernel":
                function, grid, dims, shared, ctx, _ = node.header
                put_head(block, place, function, *grid, *dims, shared)
                if ctx != header[4]:
                    struct.pack_into("=Q", block, place + _CONTEXT, ctx)
        self._contents.pack_into(block, self._begin, *[node.params for node in nodes])

    def moved(self, block: memoryview, by: int) -> None:
        """Have a block that was copied from `by` bytes before it point to itself."""
        words = int.from_bytes(block[: self._begin], sys.byteorder) + by * self._ones
        block[: self._begin] = words.to_bytes(self._begin, sys.byteorder)

    def rows_of(self, slots: Sequence[Slot]) -> tuple[EntryRows, int]:
        """The `SlotEntry` of each, and how many bytes they take that no other recipe's take. Most sizes have
        the same ones.
        """
        latest, rows = self._latest
        if slots == latest:
            return rows, 0
        packed = self._packed(slots, latest, rows.packed)
        new = EntryRows(packed)
        rows = self._rows.setdefault(packed, new)
        self._latest = slots, rows
        return rows, len(packed) if rows is new else 0

    def _packed(self, slots: Sequence[Slot], latest: Sequence[Slot] | None, packed: bytes) -> bytes:
        """What the latest had likewise is as it was."""
        words_of, first, rows = self._params, self._first, bytearray(packed)
        for i, (slot, old) in enumerate(zip(slots, latest or (None,) * len(slots), strict=True)):
            if slot is not old and slot != old:
                node, offset, region, delta = slot
                _SLOT.pack_into(rows, i * _SLOT.size, (words_of[node - first] + offset) // 8, region, delta)
        return bytes(rows)

    def _settings(self, nodes: Sequence[NodeRecord], slots: Sequence[Slot]) -> bytes:
        rows, end = bytearray(), 0
        for i, (node, params, place) in enumerate(zip(nodes, self._params, self._structs, strict=True)):
            while end < len(slots) and slots[end].node == self._first + i:
                end += 1
            struct_at = place if node.kind == "kernel" else params
            rows += _SETTING.pack(struct_at // 8, end, params // 8, len(node.params) // 8)
        return bytes(rows)

    def _image(self, nodes: Sequence[NodeRecord]) -> tuple[bytearray, bytearray]:
        """What comes before the parameters in a block at address 0; and a 1 in each word that holds an
        address within the block.
        """
        image, ones = bytearray(self._begin), bytearray(self._begin)
        view, marks = memoryview(image), memoryview(ones).cast("Q")
        for node, params, place in zip(nodes, self._params, self._structs, strict=True):
            if node.kind == "kernel":
                struct_of(view, node, 0, params, place)
                _mark(marks, node, place // 8)
        return image, ones


_layouts = weakref.WeakValueDictionary[Hashable, RecipeLayout]()
"""By what is asked of them. An exec that is made anew, of nodes like those of another, needs no new one."""


def layout_of(nodes: Sequence[NodeRecord], slots: Sequence[Slot], first: int) -> RecipeLayout:
    """The layout of recipes for these nodes: see `RecipeLayout`."""
    key = _told(nodes, slots), first
    found = _layouts.get(key)
    if found is None:
        found = _layouts[key] = RecipeLayout(nodes, slots, first)
    return found


def _told(nodes: Sequence[NodeRecord], slots: Sequence[Slot]) -> tuple[Hashable, Hashable]:
    return _told_of(nodes), tuple([slot.node for slot in slots])


def _told_of(nodes: Sequence[NodeRecord]) -> tuple[Hashable, Hashable]:
    passing = [node.header[-1] if node.kind == "kernel" else None for node in nodes]
    return tuple([len(node.params) for node in nodes]), tuple(passing)


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
        at = -(-at // ALIGNED) * ALIGNED if len(node.params) >= _MAP else at
        params.append(at)
        at += max(len(node.params), 8)
    return params, structs, -(-at // 8) * 8


def _struct_bytes(node: NodeRecord) -> int:
    """A kernel's struct, and the list of its parameters."""
    if node.kind != "kernel":
        return 0
    words = max(_pointed_to(node), 1) if node.header[-1][0] == "params" else 6
    return ctypes.sizeof(KernelParams) + 8 * words


def _pointed_to(node: NodeRecord) -> int:
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


def _mark(marks: memoryview, node: NodeRecord, place: int) -> None:
    """Put a 1 where `struct_of` has a kernel's words point into the block.

    Args:
        marks: of words.
        place: of the word where the struct begins.
    """
    behind = place + ctypes.sizeof(KernelParams) // 8
    if node.header[-1][0] == "params":
        count = _pointed_to(node)
        marks[place + KernelParams.kernel_params.offset // 8] = 1
        marks[behind : behind + count] = array.array("Q", (1,)) * count
    else:
        for word in (place + KernelParams.extra.offset // 8, behind + 1, behind + 3):
            marks[word] = 1
