"""The launch path in C does what `Launcher` does: same memory, same words, same results, same errors."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pgraph import native
from pgraph.build import Built
from pgraph.drivers.base import Exec, NativeCalls
from pgraph.errors import DriverError, LaunchError
from pgraph.launch import Launcher
from pgraph.launch_native import native_call
from pgraph.plan import Lifetime, make_plan
from pgraph.template import NodeRecord, OutputSpec, Region, Slot, Template, TensorSpec

_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_ALLOC = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p))
_FREE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
SIDE = 8  # tensors are SIDE x SIDE floats, unless a region says otherwise


class _Node(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("kind", "node", "params", "first", "last")]


class _Entry(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("calls", "exec", "ctx", "nodes")],
        ("n_nodes", ctypes.c_int64),
        *[(n, ctypes.c_void_p) for n in ("slots", "words")],
        ("busy", ctypes.c_int64),
    ]


class FakeExec(Exec):
    """The native helper's exec over callbacks; each launch is told to the device, words and all."""

    def __init__(self, device: FakeDevice, slots: list[Slot], first: int, last: int) -> None:
        self._device = device
        mine = [s for s in slots if first <= s.node < last]
        self.slots = mine
        rows = [x for i, s in enumerate(mine) for x in (i, s.region, s.delta)]
        self._slots = (ctypes.c_int64 * max(len(rows), 1))(*rows)
        self.words = (ctypes.c_uint64 * max(len(mine), 1))()
        nodes = []
        for node in range(first, last):
            at = [i for i, s in enumerate(mine) if s.node == node]
            nodes.append(_Node(0, node + 1, 1, min(at, default=0), max(at, default=-1) + 1))
        self._nodes = (_Node * max(len(nodes), 1))(*nodes)
        self._keep = (_SET(lambda e, n, p: 0), _LAUNCH(self._launched))
        setter, launch = (native.address_of(f) for f in self._keep)
        self._calls = (ctypes.c_void_p * 4)(setter, setter, setter, launch)
        parts = [ctypes.addressof(x) for x in (self._calls, self._nodes, self._slots, self.words)]
        self._entry = _Entry(parts[0], 1, 1, parts[1], len(nodes), parts[2], parts[3], 0)
        self.entry = ctypes.addressof(self._entry)

    def _launched(self, handle: Any, stream: Any) -> int:
        return self._device.launched(self.slots, list(self.words)[: len(self.slots)])

    def launch(self, bases: list[int], stream: int) -> int:
        today = (ctypes.c_uint64 * len(bases))(*bases)
        library = native.load()
        assert library is not None
        code = library.pg_launch(self.entry, stream, ctypes.addressof(today))
        if code < 0:
            raise DriverError(f"code {-code}")
        return int(code)


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
        self._keep = (_ALLOC(self._raw_alloc), _FREE(self._raw_free), _CAPTURING(self._is_capturing))
        self.launches = 0

    # -- what a `Driver` has --------------------------------------------------------------------

    def on_device(self) -> None:
        return None

    def current_stream(self) -> int:
        return 7

    def empty_strided(self, size: Any, stride: Any, dtype: Any) -> torch.Tensor:
        if self.refuse_all:
            raise torch.OutOfMemoryError("no memory left")
        tensor = torch.empty_strided(size, stride, dtype=dtype)
        self.events.append(("alloc", tensor.untyped_storage().nbytes()))
        weakref.finalize(tensor, self.events.append, ("free", tensor.untyped_storage().nbytes()))
        return tensor

    def native_calls(self) -> NativeCalls:
        alloc, free, capturing = (native.address_of(f) for f in self._keep)
        return NativeCalls(
            self.empty_strided, lambda i: 7, lambda: self.current, 0, alloc, free, capturing, _failed
        )

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


def _failed(code: int, first: bool) -> None:
    raise LaunchError(f"code {code}") if first else DriverError(f"code {code}")


@pytest.fixture(autouse=True, scope="module")
def _needed() -> None:
    if native.load_call() is None:
        pytest.skip("no C compiler or no Python headers, or PGRAPH_NATIVE=0")


def made(device: FakeDevice, case: dict[str, Any]) -> tuple[Launcher, Any]:
    """The launcher of a case, and its variant's (tensors, others)."""
    n, n_in = case["nodes"], len(case["inputs"])
    regions = [
        Region(i, "input", SIDE * SIDE * 4, 0, n + 1 if kept else death % (n + 1))
        for i, (kept, death) in enumerate(case["inputs"])
    ]
    outputs = [OutputSpec(constant=5), OutputSpec(input=0, layout=TensorSpec((4,), (2,), torch.float32, 8))]
    for kind, birth, length, rows in case["memory"]:
        birth %= n
        death = n + 1 if kind != "temp" else min(n, birth + 1 + length)
        region = Region(len(regions), "temp" if kind == "temp" else "output", rows * SIDE * 4, birth, death)
        regions.append(region)
        if kind != "temp":
            offset = 4 if kind == "view" and rows > 1 else 0
            rows_seen = rows - 1 if offset else rows
            layout = TensorSpec((rows_seen, SIDE), (SIDE, 1), torch.float32, offset)
            outputs.append(OutputSpec(region=region.index, layout=layout))
    # Every region is named wherever it lives.
    slots = [
        Slot(node, 8 * r.index, r.index, 4 * (node % 3))
        for node in range(n)
        for r in regions
        if r.birth <= node < max(r.death, r.birth + 1)
    ]
    lifetimes = [Lifetime(r.index, r.nbytes, r.birth, r.death, r.kind) for r in regions]
    plan = make_plan(n, lifetimes, slack_bytes=case["slack"])
    nodes = tuple(NodeRecord("kernel", "k", (), b"") for _ in range(n))
    template = Template(nodes, tuple(regions), tuple(slots), tuple(outputs), n_in, plan)
    execs = tuple(FakeExec(device, slots, chunk.first, chunk.last) for chunk in plan.chunks)
    launcher = Launcher(Built(template, execs, device, 0.0), range(1, n_in + 1))  # type: ignore[arg-type]
    tensors = tuple((i + 1, (SIDE, SIDE), (SIDE, 1), 3) for i in range(n_in))
    return launcher, (tensors, ((0, 42),))


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


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Nodes, inputs (kept, death), memory (kind, birth, length, rows), slack of the plan."""
    memory = st.tuples(
        st.sampled_from(["temp", "temp", "output", "view"]),
        st.integers(0, 9),
        st.integers(0, 4),
        st.integers(1, 40),
    )
    return {
        "nodes": draw(st.integers(1, 8)),
        "inputs": [(True, 0), *draw(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=4))],
        "memory": draw(st.lists(memory, max_size=6)),
        "slack": draw(st.sampled_from([0, 4096, 1 << 20])),
    }


def arguments(launcher: Launcher) -> list[Any]:
    return [42, *(torch.randn(SIDE, SIDE) for _ in launcher.positions)]


def by_path(case: dict[str, Any], native_path: bool) -> tuple[list[Any], list[Any], int]:
    """(events, results as (type, layout), rewritten) of two launches."""
    device = FakeDevice()
    launcher, facts = made(device, case)
    call = native_call(launcher, *facts)
    assert call is not None
    seen: list[Any] = []
    rewritten = 0
    for _ in range(2):
        args = arguments(launcher)
        inputs = args[1:]
        addresses = [t.data_ptr() for t in inputs]
        if native_path:
            done = call(args)
            assert done is not None
            assert args == [42] + [None] * len(inputs)
            results, count = done
            del done  # it holds the results too
        else:
            results, count = launcher(list(inputs), addresses)
        rewritten += count
        for event in device.events:
            if event[0] == "launch":  # addresses of inputs are known, the others must be somewhere
                known = {r: b - addresses[r] for r, b in event[1].items() if r < len(inputs)}
                seen.append(("launch", known, sorted(event[1])))
            else:
                seen.append(event)
        device.events.clear()
        seen += [
            (tuple(r.shape), r.stride(), r.dtype, r.storage_offset()) if isinstance(r, torch.Tensor) else r
            for r in results
        ]
        view = results[1]
        assert torch.equal(view, inputs[0].flatten()[2:10:2])
        del results, view
        device.events.clear()
    assert not device.living
    return seen, [len(launcher.steps)], rewritten


@given(case=cases())
@settings(max_examples=40)
def test_c_equals_python(case: dict[str, Any]) -> None:
    """Allocations, launches and frees in the same order with the same sizes; equal results and counts."""
    assert by_path(case, True) == by_path(case, False)


def test_the_case_has_several_chunks_and_raw_memory() -> None:
    seen, (chunks,), _ = by_path(CASE, True)
    assert chunks >= 3, seen
    assert sum(event[0] == "launch" for event in seen if isinstance(event, tuple)) == 2 * chunks


@pytest.mark.parametrize(
    "wrong", ["value", "size", "stride", "alignment", "device", "capturing", "no tensor", "short"]
)
def test_wrong_arguments_are_declined_untouched(wrong: str) -> None:
    device = FakeDevice()
    launcher, facts = made(device, CASE)
    call = native_call(launcher, *facts)
    assert call is not None
    args = arguments(launcher)
    if wrong == "value":
        args[0] = 43
    elif wrong == "size":
        args[2] = torch.randn(SIDE, SIDE + 1)
    elif wrong == "stride":
        args[2] = torch.randn(SIDE, SIDE).t()
    elif wrong == "alignment":
        raw = torch.empty(SIDE * SIDE * 4 + 8, dtype=torch.uint8)
        args[3] = torch.frombuffer(raw.numpy(), dtype=torch.uint8, offset=2, count=SIDE * SIDE * 4)
        args[3] = torch.empty(0).set_(args[3].untyped_storage(), 0, (SIDE, SIDE), (SIDE, 1))
        assert args[3].data_ptr() % 4 == 2
    elif wrong == "no tensor":
        args[1] = None
    elif wrong == "short":
        args = args[:2]
    device.current = 1 if wrong == "device" else 0
    device.capturing_status = 1 if wrong == "capturing" else 0
    before = list(args)
    assert call(args) is None
    assert all(a is b for a, b in zip(args, before, strict=True))
    assert not device.events


def test_strides_of_single_elements_do_not_matter() -> None:
    device = FakeDevice()
    launcher, (_, others) = made(device, {**CASE, "inputs": [(True, 0)]})
    call = native_call(launcher, ((1, (SIDE * SIDE, 1), (1, 99), 3),), others)
    assert call is not None
    assert call([42, torch.randn(SIDE * SIDE, 1)]) is not None


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_launch_raises_and_leaks_nothing(failing: int) -> None:
    """Before anything has run the arguments come back; later the error says that something has."""
    device = FakeDevice()
    launcher, facts = made(device, CASE)
    call = native_call(launcher, *facts)
    assert call is not None
    device.fail_launch = failing
    args = arguments(launcher)
    before = list(args)
    with pytest.raises(LaunchError if failing == 1 else DriverError, match="code 9"):
        call(args)
    if failing == 1:
        assert all(a is b for a, b in zip(args, before, strict=True))
    assert not device.living
    gc.collect()
    sizes = [e[1] for e in device.events if e[0] == "alloc"]
    assert sorted(sizes) == sorted(e[1] for e in device.events if e[0] == "free")
    device.fail_launch = None
    assert call(arguments(launcher)) is not None


def test_memory_refused_is_asked_for_as_a_tensor_and_the_frameworks_error_shows() -> None:
    device = FakeDevice()
    launcher, facts = made(device, CASE)
    call = native_call(launcher, *facts)
    assert call is not None
    device.refuse_raw = True
    assert call(arguments(launcher)) is not None
    device.refuse_all = True
    args = arguments(launcher)
    before = list(args)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        call(args)
    assert all(a is b for a, b in zip(args, before, strict=True))
    assert not device.living


def test_inputs_die_between_the_chunks() -> None:
    """The second input is released by the plan before the last launch."""
    device = FakeDevice()
    launcher, facts = made(device, CASE)
    call = native_call(launcher, *facts)
    assert call is not None
    args = arguments(launcher)
    ref = weakref.ref(args[2])
    alive: list[bool] = []
    device.at_launch = lambda: alive.append(ref() is not None)
    assert call(args) is not None
    assert (alive[0], alive[-1]) == (True, False), alive


def test_nothing_leaks_over_many_calls() -> None:
    device = FakeDevice()
    launcher, facts = made(device, CASE)
    call = native_call(launcher, *facts)
    assert call is not None
    tensors = arguments(launcher)[1:]
    counts = [sys.getrefcount(t) for t in tensors]
    refs = []
    for _ in range(300):
        args: Any = [42, *tensors]
        done = call(args)
        assert done is not None
        refs.append(weakref.ref(done[0][2]))
        wrong = [41, *tensors]
        assert call(wrong) is None
        del done, args, wrong
        device.events.clear()
    assert counts == [sys.getrefcount(t) for t in tensors]
    assert not any(ref() is not None for ref in refs)
    assert not device.living
    alive = weakref.ref(launcher.built.execs[0])
    del launcher, call
    gc.collect()
    assert alive() is None, "the program keeps its execs alive, and only as long as it lives"


def test_threads_launch_what_they_have_set() -> None:
    """One exec, several threads, different addresses: no launch mixes two threads' words."""
    device = FakeDevice()
    launcher, facts = made(device, CASE)
    call = native_call(launcher, *facts)
    assert call is not None
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(150):
                args = arguments(launcher)
                mine = args[1].data_ptr()
                keep = args[1]  # nobody else may get its address
                done = call(args)
                assert done is not None
                assert done[0][1].untyped_storage().data_ptr() == mine
                del keep
        except BaseException as e:
            problems.append(e)

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(old)
    assert not problems, problems
    launches = [e[1] for e in device.events if e[0] == "launch"]
    assert len(launches) == 4 * 150 * len(launcher.steps)


def test_without_the_module_there_is_no_native_path(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    launcher, facts = made(device, CASE)
    monkeypatch.setattr(native, "load_call", lambda: None)
    assert native_call(launcher, *facts) is None


def test_an_exec_without_an_entry_keeps_the_python_path() -> None:
    device = FakeDevice()
    launcher, facts = made(device, CASE)
    launcher.built.execs[0].entry = None
    assert native_call(launcher, *facts) is None


def test_malformed_programs_are_errors() -> None:
    module = native.load_call()
    assert isinstance(module, types.ModuleType)
    with pytest.raises(TypeError):
        module.program(1, 2, 3)
    with pytest.raises((TypeError, ValueError)):
        module.call(object(), [])
