"""Hazards of capturing memory, each shown with its cure and, to prove that the check can fail, without."""

from __future__ import annotations

import dataclasses
import struct
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import host, launching, same, shows, with_and_without
from torch import Tensor

from pgraph.capture import build, record
from pgraph.drivers.host import driver as host_driver
from pgraph.drivers.host import execs as host_execs
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.drivers.interface import HiddenAllocation
from pgraph.launch import interpreter
from pgraph.launch.guards import Guards
from pgraph.launch.program import Program
from pgraph.runtime import registry
from pgraph.template import match
from pgraph.template.lifetimes import Rows
from pgraph.template.template import Region, Slot, Template

N = 16
SIZE = 4 * N * N  # bytes of a matrix: more than the planner's granule, so that overflow is overflow


@pytest.fixture(autouse=True)
def no_ghost_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that would read or write a ghost, and crash, fails the check instead."""
    ranges: list[tuple[int, int]] = []
    make, run = host_driver.HostArena.__init__, host_execs.run

    def noting(self: Any, layout: int) -> None:
        make(self, layout)
        ranges.append((self.low, self.high))

    def guarded(node: Any, params: bytes) -> None:
        for (word,) in struct.iter_unpack("=Q", params):
            assert not any(low <= word < high for low, high in ranges), f"{node.name} would touch a ghost"
        run(node, params)

    monkeypatch.setattr(host_driver.HostArena, "__init__", noting)
    monkeypatch.setattr(host_execs, "run", guarded)


def matrices(n: int = 2) -> list[Tensor]:
    return [torch.randn(N, N) for _ in range(n)]


def products(x: Tensor, y: Tensor) -> Tensor:
    a = x * 2
    b = a @ y
    c = b + 1
    del a, b
    return (c @ y).cumsum(0)


def right(fn: Callable[..., Tensor], faults: HostFaults, compiled: Any = None) -> Template:
    """Launched under these faults, `fn` computes what eager does; returns the template."""
    compiled = compiled or host(fn)
    with inject(faults):
        for _ in range(2):
            compiled(*matrices())
        with launching(3):
            for _ in range(3):
                given = matrices()
                same(compiled(*given), fn(*given), rtol=1e-5, atol=1e-5)
    return templates()[-1]


def all_built() -> list[build.Built]:
    """Everything captured so far."""
    return [v.built for p in registry.live_capturable() for v in p.specializations() if v.built]


def templates() -> list[Template]:
    return [built.template for built in all_built()]


class Canaries:
    """Allocates with room behind each tensor, and sees who wrote there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.buffers: list[tuple[Tensor, int]] = []
        patch.setattr(host_driver.HostDriver, "empty_strided", self.empty)

    def empty(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        n = host_driver.extent(size, stride)
        buffer = torch.full((n + 2 * SIZE,), 7, dtype=dtype)
        self.buffers.append((buffer, n))
        return buffer.as_strided(size, stride)

    def check(self) -> None:
        assert self.buffers
        assert all(bool((buffer[n:] == 7).all()) for buffer, n in self.buffers)


def identity(ranges: list[Any], n_inputs: int) -> tuple[list[Any], list[int]]:
    return ranges, list(range(len(ranges)))


@with_and_without
def test_hazard_1_scratch_larger_than_the_result_in_its_place(
    cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region must be as large as the scratch, or the scratch is written past its end."""
    canaries = Canaries(monkeypatch)
    if not cured:
        monkeypatch.setattr(record.Recorder, "add_hidden", lambda self: None)

    def check() -> None:
        right(products, HostFaults(scratch=frozenset({"mm"})))
        canaries.check()

    shows(check, cured)


def test_hazard_1_result_inside_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that overlap anywhere are one region, not only those that begin together."""

    def inside(self: Any, op: Any, like: Tensor) -> Tensor:
        nbytes = like.numel() * like.element_size()
        address = self.arena.take(3 * nbytes)
        self._hidden.append(HiddenAllocation(address, 3 * nbytes, freed=True))
        self._add("memset", "scratch", (), [address, 0xA5, 3 * nbytes])
        return self.arena.tensor(address + nbytes, like.size(), like.stride(), like.dtype)

    monkeypatch.setattr(host_driver.HostSession, "_result", inside)

    template = right(products, HostFaults())
    scratch = [s.region for s in template.slots if template.nodes[s.node].name == "scratch"]
    assert scratch
    assert all(template.regions[r].nbytes == 3 * SIZE for r in scratch)
    assert template.outputs[0].region in scratch


@with_and_without
def test_hazard_1_address_of_a_dead_temporary_taken_by_an_output(
    cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that reuses addresses after all: both tenants become one region, not the first one's."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        small = (x * 2).sum(0)
        return small + y[0]

    def first(self: Any, word: Any, va: int, vb: int, regions: Any) -> Slot:
        delta = va - self._a.allocations[regions[0]].address
        return Slot(word.node, word.offset, regions[0], delta)

    Canaries(monkeypatch)
    if not cured:
        monkeypatch.setattr(record, "_merge", identity)
        monkeypatch.setattr(match._Matcher, "_following", first)
    shows(lambda: right(fn, HostFaults(reuse=True)) and None, cured)


@with_and_without
def test_hazard_2_hidden_pointers(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operand named only in a table must not lose its memory to a workspace born before the read."""

    def kernel(self: Any, name: str, call: Any, codes: Any, words: list[int]) -> None:
        if name != "mm":
            self._add("kernel", name, (call, codes), words)
            return
        table, workspace = self.arena.take(8 * len(words)), self.arena.take(SIZE)
        self._hidden += [
            HiddenAllocation(table, 8 * len(words), True),
            HiddenAllocation(workspace, SIZE, True),
        ]
        self._add("kernel", "prepare", (host_driver.TABLE, len(words)), [table, *words])
        self._add("memset", "workspace", (), [workspace, 0xA5, SIZE])
        self._add("kernel", name, (call, codes, "table"), [table])

    def by_last_visible_use(
        driver: Any, a: Any, b: Any, slots: Any, kept: Any, shared: Any, slack: int, shelf: Any
    ) -> Template:
        template = honest(driver, a, b, slots, kept, shared, slack, shelf)
        seen: dict[int, list[int]] = {}
        for s in template.slots:
            seen.setdefault(s.region, []).append(s.node)
        regions = tuple(
            r._replace(birth=min(seen[r.index]), death=max(seen[r.index]) + 1)
            if r.kind == "temp" and r.index in seen
            else r
            for r in template.regions
        )
        rows = Rows(Region, *zip(*regions, strict=True))
        plan = build._plan(a.order, rows, template.slots, shared, slack, shelf)
        return dataclasses.replace(template, regions=rows, plan=plan)

    honest = build._template
    monkeypatch.setattr(host_driver.HostSession, "_kernel", kernel)
    if not cured:
        monkeypatch.setattr(build, "_template", by_last_visible_use)
    shows(lambda: right(products, HostFaults()) and None, cured)


def test_hazard_2_tables_in_general() -> None:
    """The table itself lives from the node that writes it past its reader, which names nothing else."""
    template = right(products, HostFaults(tables=frozenset({"mm", "add"})))
    (recipe,) = all_built()[-1].recipes
    readers = [i for i, n in enumerate(recipe._nodes) if n.header[-1:] == ("table",)]
    assert readers
    for i in readers:
        (slot,) = [s for s in template.slots if s.node == i]
        table = template.regions[slot.region]
        assert table.birth <= i - 1 < i < table.death


@with_and_without
def test_hazard_6_the_template_is_never_edited(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch writes into parameters of its own."""
    compiled = host(products)
    for _ in range(2):
        compiled(*matrices())
    (exec_,) = all_built()[-1].execs
    before = [n.params for n in exec_._made_from]
    if not cured:
        real = host_execs.run

        def through(node: Any, params: bytes) -> None:
            edited = [n._replace(params=bytes(params)) if n is node else n for n in exec_._made_from]
            exec_._made_from = tuple(edited)
            real(node, params)

        monkeypatch.setattr(host_execs, "run", through)

    def check() -> None:
        with launching(2):
            compiled(*matrices())
            compiled(*matrices())
        assert [n.params for n in exec_._made_from] == before

    shows(check, cured)


@with_and_without
def test_hazard_7_copies_and_fills_are_rebound(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like kernels, memcpy and memset nodes hold addresses."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), torch.zeros(N, N).index_add_(0, torch.arange(N), y)

    if not cured:
        real_match = build.match
        monkeypatch.setattr(
            build,
            "match",
            lambda a, b, **k: tuple(s for s in real_match(a, b, **k) if a.nodes[s.node].kind == "kernel"),
        )

    def check() -> None:
        template = right(fn, HostFaults())
        assert {n.kind for n in template.nodes} == {"kernel", "memcpy", "memset"}

    shows(check, cured)


@with_and_without
def test_hazard_9_inputs_in_one_storage_at_capture(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input is a region of its own, whatever it shared when it was captured."""
    Canaries(monkeypatch)
    real = record.Recorder.alias
    # By capture: not by the id of its recorder, which the second capture's may have again.
    captures: weakref.WeakKeyDictionary[Any, dict[int, tuple[int, int]]] = weakref.WeakKeyDictionary()

    def by_storage(self: Any, tensor: Tensor, alignment: int) -> Tensor:
        shared, key = captures.setdefault(self, {}), tensor.untyped_storage().data_ptr()
        if key not in shared:
            ghost = real(self, tensor, alignment)
            shared[key] = (ghost.data_ptr(), tensor.data_ptr())
            return ghost
        address = shared[key][0] + tensor.data_ptr() - shared[key][1]
        ghost = self._session.arena.tensor(address, tensor.size(), tensor.stride(), tensor.dtype)
        self._watch(ghost, ghost.untyped_storage(), address, tensor.numel() * tensor.element_size(), birth=0)
        return ghost

    if not cured:
        monkeypatch.setattr(record.Recorder, "alias", by_storage)

    compiled = host(products, min_ops=9)  # too small to be split around what is refused
    for _ in range(2):
        compiled(*torch.randn(2, N, N).unbind())

    def check() -> None:
        with launching(1):
            # Both inside a larger buffer, so that a wrong address still is somebody's memory.
            given = [torch.randn(3, N, N)[1] for _ in range(2)]
            same(compiled(*given), products(*given))

    shows(check, cured)


@with_and_without
def test_hazard_10_a_less_aligned_address(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never meets a template that was captured with better aligned ones."""
    if not cured:
        careless = lambda self, args: [args[g.position].data_ptr() for g in self.tensors]  # noqa: E731
        monkeypatch.setattr(Guards, "addresses", careless)
    compiled = host(products)
    for _ in range(2):
        compiled(*matrices())
    launched: list[int] = []
    real = interpreter._launch

    def watch(program: Program, driver: Any, args: list[Any], addresses: list[int], index: int) -> Any:
        tensors = program.guards.tensors
        assert addresses == [args[guard.position].data_ptr() for guard in tensors]
        launched.extend(a & guard.mask for a, guard in zip(addresses, tensors, strict=True))
        return real(program, driver, args, addresses, index)

    monkeypatch.setattr(interpreter, "_launch", watch)

    def check() -> None:
        with launching(1):
            for _ in range(3):
                x, y = (torch.randn(N * N + 1)[1:].view(N, N) for _ in range(2))
                same(compiled(x, y), products(x, y))
        assert launched
        assert not any(launched)

    shows(check, cured)
