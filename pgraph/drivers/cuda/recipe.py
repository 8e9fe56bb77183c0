"""Recipes: what execs are set to, in one block of memory each.

A recipe keeps the parameters of its nodes, and the structs that the driver takes, which point to them. Slots
are rewritten there before a node is set.
"""

from __future__ import annotations

import array
import copy
import ctypes
import itertools
import mmap
from collections.abc import Sequence
from typing import Any

from pgraph.drivers.cuda.exec import FIXED, KERNEL, CudaExec
from pgraph.drivers.cuda.nodes import succeeded
from pgraph.drivers.cuda.settings import ALIGNED, layout_of
from pgraph.drivers.execs import Recipe
from pgraph.errors import DriverError
from pgraph.native import libraries
from pgraph.native.structs import NodeEntry, RecipeEntry, SettingEntry, SlotEntry, TurnsEntry
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

__all__ = ["CudaRecipe"]

_HEAD = 36  # bytes of a kernel's struct that hold its function, dimensions and shared memory
_numbers = itertools.count(1)


class CudaRecipe(Recipe):
    """What a range of a recording's nodes are to be set to, in one block of memory.

    Args:
        exec: made from these nodes, or from those of a recording with the same sharing key.
        nodes: of the range.
        slots: of the range, in the order of their nodes.
        first: number of the first node.
    """

    _entries: tuple[TurnsEntry, Any, Any] | None = None  # what C reads of turns

    def __init__(
        self, exec: CudaExec, nodes: Sequence[NodeRecord], slots: Sequence[Slot], first: int
    ) -> None:
        self.exec: CudaExec = exec
        layout = exec.layout
        if layout is None or not layout.serves(nodes, slots):
            layout = exec.layout = layout_of(nodes, slots, first)
        self._layout, self._counts = layout, (len(nodes), len(slots))
        self._rows, more = layout.rows_of(slots)
        self._memory = ctypes.create_string_buffer(layout.nbytes + ALIGNED)
        address = ctypes.addressof(self._memory)
        base = -(-address // ALIGNED) * ALIGNED
        self.nbytes = len(self._memory) + more
        layout.write(memoryview(self._memory).cast("B")[base - address :], base, nodes)
        self._library = libraries.load()
        self._lie_at(base)
        functions = [(i, node.header[0]) for i, node in enumerate(nodes) if node.kind == "kernel"]
        self._untried = set() if exec.taken.issuperset(functions) else set(functions) - exec.taken
        exec.used()

    def _lie_at(self, base: int) -> None:
        layout, state = self._layout, ctypes.addressof(self.exec.state)
        rows = layout.settings.address, self._rows.address
        self._entry = RecipeEntry(state, next(_numbers), *rows, base, None)
        ctypes.memmove(base, ctypes.addressof(self._entry), ctypes.sizeof(RecipeEntry))
        self._entry = RecipeEntry.from_address(base)
        self.entry = base if self._library is not None else None

    # What C reads, as Python reads it; few launches do.

    @property
    def _settings(self) -> Any:
        return (SettingEntry * self._counts[0]).from_address(self._entry.settings)

    @property
    def _slots(self) -> Any:
        return (SlotEntry * self._counts[1]).from_address(self._entry.slots)

    @property
    def _words(self) -> Any:
        return (ctypes.c_uint64 * (self._layout.nbytes // 8)).from_address(self._entry.words)

    def replica(self, exec: CudaExec) -> CudaRecipe:
        """See `Driver.replica`. A launch that writes here meanwhile does no harm: the replica's first
        launch writes all of its own.

        Args:
            exec: a replica of this one's.
        """
        made = copy.copy(self)
        made.exec, made._turns, made._others, made._entries = exec, None, (), None
        made._itself = True
        made._memory = ctypes.create_string_buffer(len(self._memory))
        made.nbytes = len(made._memory)
        address, old = ctypes.addressof(made._memory), ctypes.addressof(self._entry)
        base = -(-address // ALIGNED) * ALIGNED
        ctypes.memmove(base, old, self._layout.nbytes)
        self._layout.moved(memoryview(made._memory).cast("B")[base - address :], base - old)
        made._lie_at(base)
        exec.used()
        return made

    def watch(self, launches: int) -> None:
        if self._library is None:
            super().watch(launches)
        else:
            self._served_by((self,), launches)

    def watched(self) -> list[bytes]:
        if self._library is None or self._entries is None:
            return super().watched()
        entry, _, kept = self._entries
        self._library.pg_take_turns(ctypes.addressof(self._entry), None)
        self._entries, row = None, 8 * entry.n_slots
        return [bytes(memoryview(kept).cast("B")[i * row : (i + 1) * row]) for i in range(entry.rows)]

    def take_turns(self, others: Sequence[Recipe], itself: bool = True) -> None:
        super().take_turns(others, itself)
        if self._library is not None:
            self._served_by(self._in_turn, 0)

    def _served_by(self, recipes: Sequence[Recipe], room: int) -> None:
        """Have C choose among these, and keep the addresses of so many launches."""
        assert self._library is not None
        entries = (ctypes.c_void_p * len(recipes))(*[recipe.entry for recipe in recipes])
        kept = _unfilled(room * self._counts[1])
        turns = TurnsEntry(
            recipes=ctypes.addressof(entries),
            n=len(recipes),
            n_slots=self._counts[1],
            kept=ctypes.addressof(kept),
            room=room,
        )
        self._library.pg_take_turns(ctypes.addressof(self._entry), ctypes.addressof(turns))
        self._entries = turns, entries, kept  # not before: what another launch may be using was there

    def today(self, bases: Sequence[int]) -> list[int]:
        return [(bases[s.region] + s.delta) & 0xFFFFFFFFFFFFFFFF for s in self._slots]

    def misses(self, today: Sequence[int]) -> int | None:
        if self.exec.state.held != self._entry.number:
            return None
        words = self._words
        return sum(words[s.word] != word for s, word in zip(self._slots, today, strict=True))

    def launch(self, bases: list[int], stream: int) -> int:
        addresses = array.array("Q", bases)
        if self._library is None:
            with self.exec.lock:
                turn = self._turn(addresses)
                assert isinstance(turn, CudaRecipe)
                return turn._launch_in_python(addresses, stream)
        code: int = self._library.pg_launch(ctypes.addressof(self._entry), stream, addresses.buffer_info()[0])
        if code < 0:
            succeeded(-code)
        return code

    def _params_of(self, setting: SettingEntry) -> int:
        """Address of the struct that the driver takes of a node."""
        return int(self._entry.words) + 8 * int(setting.params)

    def _content(self, node: NodeEntry, setting: SettingEntry) -> bytes:
        """What the driver is told of a node."""
        words = bytes(memoryview(self._words)[setting.first : setting.first + setting.count])
        return (ctypes.string_at(self._params_of(setting), _HEAD) if node.kind == KERNEL else b"") + words

    def _launch_in_python(self, bases: Sequence[int], stream: int) -> int:
        state, count, at, slots, words = self.exec.state, 0, 0, self._slots, self._words
        anew = state.held != self._entry.number
        for i, (node, setting) in enumerate(zip(self.exec.nodes, self._settings, strict=True)):
            changed = False
            for s in slots[at : setting.last]:
                value = (bases[s.region] + s.delta) & 0xFFFFFFFFFFFFFFFF
                if words[s.word] != value:
                    words[s.word] = value
                    changed = True
            at = setting.last
            content = self._content(node, setting) if anew or changed else b""
            if anew:
                changed = node.kind != FIXED and not self.exec.holds(i, content)
            if changed:
                count += 1
                self.exec.set(i, self._params_of(setting), content)
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
                    if node.kind == KERNEL:
                        self.exec.set(i, self._params_of(setting), self._content(node, setting))
            except DriverError:
                return False
        return True


def _unfilled(count: int) -> Any:
    """So many words. ctypes would fill them: 4 MB and 2 ms for 512 launches that may come."""
    words = ctypes.c_uint64 * count
    return words.from_buffer(mmap.mmap(-1, ctypes.sizeof(words))) if count else words()
