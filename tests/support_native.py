"""A driver, an allocator and a device for the launch path in C: callbacks that note what happens."""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from pgraph.capture.build import Built
from pgraph.drivers.execs import Exec, ExecSet, Recipe
from pgraph.drivers.native_calls import NativeCalls
from pgraph.errors import DriverError
from pgraph.launch.guards import Guards, TensorGuard, ValueGuard
from pgraph.launch.interpreter import Launched, launch_first
from pgraph.launch.lookup import numbered
from pgraph.launch.native import native_launch, native_program
from pgraph.launch.program import Program, program_of
from pgraph.native import libraries
from pgraph.native.structs import ExecEntry, NodeEntry, RecipeEntry, SettingEntry, SlotEntry
from pgraph.template.lifetimes import Lifetime, Rows
from pgraph.template.plan import make_plan
from pgraph.template.recording import OutputSpec, TensorSpec
from pgraph.template.template import Region, Slot, Template, node_facts

_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_ALLOC = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p))
_FREE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_WORKSPACE = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
_CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
_numbers = itertools.count(1)
SIDE = 8  # tensors are SIDE x SIDE floats, unless a region says otherwise


class FakeExec(Exec):
    """The native helper's exec over callbacks; each launch is told to the device, with the slots' words."""

    def __init__(self, device: FakeDevice, first: int, last: int) -> None:
        self._device = device
        nodes = [NodeEntry(0, node + 1) for node in range(first, last)]
        self._nodes = (NodeEntry * max(len(nodes), 1))(*nodes)
        self._keep = (_SET(self._set), _LAUNCH(self._launched))
        setter, launch = (libraries.address_of(f) for f in self._keep)
        self._calls = (ctypes.c_void_p * 4)(setter, setter, setter, launch)
        tables = [ctypes.addressof(x) for x in (self._calls, self._nodes)]
        self.state = ExecEntry(tables[0], 1, 1, tables[1], len(nodes))
        self.recipes: weakref.WeakValueDictionary[int, FakeRecipe] = weakref.WeakValueDictionary()
        self.set_to: FakeRecipe | None = None

    def _set(self, handle: Any, node: int, params: int) -> int:
        self.set_to = self.recipes[params]
        return 0

    def _launched(self, handle: Any, stream: Any) -> int:
        recipe = self.set_to if self.set_to is not None else next(iter(self.recipes.values()))
        return self._device.launched(recipe.slots, list(recipe.words)[: len(recipe.slots)])


class FakeRecipe(Recipe):
    """What has an exec of stand-ins launch."""

    def __init__(self, exec: FakeExec, slots: list[Slot], first: int, last: int) -> None:
        self.exec: FakeExec = exec
        mine = [s for s in slots if first <= s.node < last]
        self.slots = mine
        self._slots = (SlotEntry * max(len(mine), 1))(*((i, s.region, s.delta) for i, s in enumerate(mine)))
        self.words = (ctypes.c_uint64 * max(len(mine), 1))()
        number = next(_numbers)
        settings = [SettingEntry(0, sum(s.node <= node for s in mine)) for node in range(first, last)]
        self._settings = (SettingEntry * max(len(settings), 1))(*settings)
        tables = [ctypes.addressof(x) for x in (exec.state, self._settings, self._slots, self.words)]
        self._entry = RecipeEntry(tables[0], number, *tables[1:])
        self.entry = ctypes.addressof(self._entry)
        exec.recipes[ctypes.addressof(self.words)] = self

    def launch(self, bases: list[int], stream: int) -> int:
        today = (ctypes.c_uint64 * len(bases))(*bases)
        library = libraries.load()
        assert library is not None
        code = library.pg_launch(self.entry, stream, ctypes.addressof(today))
        if code < 0:
            raise DriverError(f"code {-code}")
        return int(code)

    def fits(self) -> bool:
        return True

    def today(self, bases: Any) -> list[int]:
        return [(bases[s.region] + s.delta) % (1 << 64) for s in self.slots]

    def misses(self, today: Any) -> int | None:
        known = self.exec.state.held == self._entry.number
        return sum(map(operator.ne, self.words, today)) if known else None


class FakeDevice:
    """Stands in for driver, allocator and device: notes what happens, and fails when told to."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.living: dict[int, Any] = {}
        self.fail_launch: int | None = None
        self.refuse_raw = self.refuse_all = False
        self.capturing_status, self.current = 0, 0
        self.at_launch: Callable[[], None] = lambda: None
        self._keep = (
            _ALLOC(self._raw_alloc),
            _FREE(self._raw_free),
            _CAPTURING(self._is_capturing),
            _WORKSPACE(self._workspace),
        )
        self.launches = 0
        self.made_on: int | None = None
        self.lent = 0x7000_0000  # address of the workspace; it moves at each launch. 0: there is none

    # -- what a `Driver` has --------------------------------------------------------------------

    def on_device(self) -> None:
        return None

    def current_stream(self) -> int:
        return 7

    def is_capturing(self) -> bool:
        return bool(self.capturing_status)

    def empty_strided(self, size: Any, stride: Any, dtype: Any) -> torch.Tensor:
        if self.refuse_all:
            raise torch.OutOfMemoryError("no memory left")
        tensor = torch.empty_strided(size, stride, dtype=dtype)
        self.events.append(("alloc", tensor.untyped_storage().nbytes()))
        weakref.finalize(tensor, self.events.append, ("free", tensor.untyped_storage().nbytes()))
        return tensor

    def native_calls(self) -> NativeCalls:
        alloc, free, capturing, workspace = (libraries.address_of(f) for f in self._keep)
        return NativeCalls(
            empty=self.empty_strided,
            current_stream=lambda i: 7,
            current_device=lambda: self.current,
            index=0,
            raw_alloc=alloc,
            raw_free=free,
            capturing=capturing,
            failed=failed,
            workspace=workspace,
            no_workspace=no_workspace,
            made_on=self.made_on,
        )

    def workspace(self, stream: int, nbytes: int) -> int:
        return self._workspace(stream, nbytes) or no_workspace(nbytes)

    # -- what C calls ---------------------------------------------------------------------------

    def _raw_alloc(self, nbytes: int, result: Any) -> int:
        if self.refuse_raw:
            return 1
        memory = ctypes.create_string_buffer(nbytes + 16)
        address = -(-ctypes.addressof(memory) // 16) * 16
        self.living[address] = (memory, nbytes)
        result[0] = address
        self.events.append(("alloc", nbytes))
        return 0

    def _raw_free(self, address: int) -> int:
        self.events.append(("free", self.living.pop(address)[1]))
        return 0

    def _workspace(self, stream: Any, nbytes: int) -> int:
        assert stream == 7
        self.events.append(("workspace", nbytes))
        self.lent += 4096 if self.lent else 0
        return self.lent

    def _is_capturing(self, stream: Any, status: Any) -> int:
        assert stream == 7
        status[0] = self.capturing_status
        return 0

    def launched(self, slots: list[Slot], words: list[int]) -> int:
        self.launches += 1
        self.at_launch()
        bases: dict[int, set[int]] = {}
        for slot, word in zip(slots, words, strict=True):
            bases.setdefault(slot.region, set()).add(word - slot.delta)
        assert all(len(b) == 1 for b in bases.values()), "one base per region in one launch"
        self.events.append(("launch", {r: b.pop() for r, b in bases.items()}))
        return 9 if self.launches == self.fail_launch else 0


def failed(code: int) -> None:
    raise DriverError(f"code {code}")


def no_workspace(nbytes: int) -> NoReturn:
    raise torch.OutOfMemoryError(f"no workspace of {nbytes} bytes")


def made(device: FakeDevice, case: dict[str, Any], *, side: int = SIDE, **guards: Any) -> Program:
    """The program of a case, whose inputs are `side` x `side`; `guards`: further ones."""
    n, n_in = case["nodes"], len(case["inputs"])
    regions = [
        Region(i, "input", SIDE * SIDE * 4, 0, n + 1 if kept else death % (n + 1))
        for i, (kept, death) in enumerate(case["inputs"])
    ]
    outputs = [
        OutputSpec(constant=5),
        OutputSpec(input=0, layout=TensorSpec((4,), (2,), torch.float32, 8)),
        OutputSpec(input=0),
    ]
    for kind, birth, length, rows in case["memory"]:
        birth %= n
        death = n + 1 if kind != "temp" else min(n, birth + 1 + length)
        region = Region(len(regions), "temp" if kind == "temp" else "output", rows * SIDE * 4, birth, death)
        regions.append(region)
        if kind != "temp":
            offset = 4 if kind == "view" and rows > 1 else 0
            rows_seen = rows - 1 if offset else rows
            layout = TensorSpec((rows_seen, SIDE), (SIDE, 1), torch.float32, offset)
            if kind == "halves":
                layout = TensorSpec((rows, 2 * SIDE), (2 * SIDE, 1), torch.bfloat16, 0)
            outputs.append(OutputSpec(region=region.index, layout=layout))
            if kind == "same":
                outputs.append(outputs[-1]._replace(same=len(outputs) - 1))
            if kind == "part":
                part = layout._replace(size=(rows_seen, 1), offset=offset + 8)
                outputs.append(OutputSpec(region=region.index, layout=part, view_of=len(outputs) - 1))
    if case.get("workspace"):
        regions.append(Region(len(regions), "workspace", case["workspace"], 0, n))
    # Every region is named wherever it lives.
    slots = [
        Slot(node, 8 * r.index, r.index, 4 * (node % 3))
        for node in range(n)
        for r in regions
        if r.birth <= node < max(r.death, r.birth + 1)
    ]
    lifetimes = [
        Lifetime(r.index, r.nbytes, r.birth, r.death, r.kind) for r in regions if r.kind != "workspace"
    ]
    plan = make_plan(n, lifetimes, slack_bytes=case["slack"])
    nodes = tuple(node_facts("kernel", "k", 0) for _ in range(n))
    rows = Rows(Region, *zip(*regions, strict=True))
    template = Template(nodes, rows, tuple(slots), tuple(outputs), n_in, plan)
    borders = [(chunk.first, chunk.last) for chunk in plan.chunks]
    shared = ExecSet(tuple(FakeExec(device, *ends) for ends in borders), template)
    recipes = tuple(FakeRecipe(e, slots, *ends) for e, ends in zip(shared.execs, borders, strict=True))
    tensors = tuple(TensorGuard(i + 1, (side, side), (side, 1), 3) for i in range(n_in))
    built = Built(template, recipes, shared, device, 0.0)  # type: ignore[arg-type]
    sharing = {i: 7 * i % 17 for i in range(3, len(outputs))} if case.get("saved") else {}
    guarded = Guards(tensors, (ValueGuard(0, 42),), **guards)
    return program_of(built, guarded, sharing, 8 << 20, case.get("lasting", ()))


CASE = {
    "nodes": 6,
    "inputs": [(True, 0), (False, 2), (False, 6)],
    "memory": [
        ("temp", 0, 2, 9),
        ("output", 1, 0, 4),
        ("view", 2, 0, 5),
        ("temp", 3, 1, 20),
        ("output", 5, 0, 2),
    ],
    "slack": 0,
}


def arguments(program: Program, side: int = SIDE) -> list[Any]:
    return [42, *(torch.randn(side, side) for _ in program.guards.tensors)]


def in_c(*programs: Program) -> Callable[[list[Any]], Launched | None]:
    lookup = numbered(program.guards for program in programs)
    call = native_launch([native_program(program) for program in programs], lookup)
    assert call is not None
    return call


def in_python(*programs: Program) -> Callable[[list[Any]], Launched | None]:
    return functools.partial(launch_first, programs, numbered(program.guards for program in programs))


BOTH = pytest.mark.parametrize("path", [in_c, in_python])
