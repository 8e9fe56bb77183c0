"""Hazards of words and of state, each shown with its cure and, to prove that the check can fail, without."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import host, launching, same, shows, with_and_without
from torch import Tensor, nn

import pgraph
from pgraph.capture import build, record
from pgraph.compiler import compile_graph
from pgraph.drivers.host import driver as host_driver
from pgraph.drivers.host import execs as host_execs
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.errors import MatchError
from pgraph.reasons import Reason
from pgraph.template import match
from pgraph.template.plain_regions import in_python

FRAMEWORK = (0x7EEE_0000_0000, 1 << 20)


@torch.library.custom_op("pgraph_words::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Somebody else's op."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def fn(x: Tensor, y: Tensor) -> Tensor:
    b = (x @ y) + 1
    c = b * y
    del b
    return c.cumsum(0)


def custom(x: Tensor, y: Tensor) -> Tensor:
    return twice(x @ y).cumsum(0)


def run(faults: HostFaults, calls: int = 4, fn: Callable[[Tensor, Tensor], Tensor] = fn) -> None:
    """Right results, whatever becomes of the capture."""
    compiled = host(fn, min_ops=9)  # too few ops to split
    with inject(faults):
        for _ in range(calls):
            x, y = torch.randn(4, 4), torch.randn(4, 4)
            same(compiled(x, y), fn(x, y), rtol=1e-5, atol=1e-5)


def refused(code: str) -> None:
    (partition,) = pgraph.report().capturable
    assert partition.reason is not None
    assert partition.reason.code == code
    assert partition.launches == 0


@with_and_without
def test_padding_garbage_is_ignored(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that differ by chance cost nothing: refusing them would refuse most real kernels."""
    if not cured:
        real = match._Matcher._moving

        def strict(self: Any, *args: Any) -> Any:
            slot = real(self, *args)
            if slot is None:
                raise MatchError(Reason("ambiguous-word", "differs", "none"))
            return slot

        monkeypatch.setattr(match._Matcher, "_moving", strict)

    def check() -> None:
        with launching(3):
            run(HostFaults(garbage=5))

    shows(check, cured)


@with_and_without
def test_stale_words_get_no_address(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that names a region already dead is no slot."""
    if not cured:
        monkeypatch.setattr(match, "_dead", lambda allocation, node: False)

    def check() -> None:
        with launching(3):
            run(HostFaults(stale=True, scratch=frozenset({"mm"})))
        (specialization,) = pgraph.runtime.registry.live_capturable()[0].specializations()
        template = specialization.built.template
        for slot in template.slots:
            region = template.regions[slot.region]
            assert region.birth <= slot.node < region.death

    shows(check, cured)


@with_and_without
def test_pointer_looking_constants(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is never rewritten because it looks like an address: both captures must agree."""
    if not cured:
        # What a single capture would do: anything that looks like a pointer is one.
        real = match._Matcher.word

        def guess(self: Any, index: int, offset: int, va: int, vb: int) -> Any:
            found = real(self, index, offset, va, vb)
            is_kernel = self._a.nodes[index].kind == "kernel"
            return match.Slot(index, offset, 0, 0) if found is None and is_kernel else found

        monkeypatch.setattr(match._Matcher, "word", guess)
        monkeypatch.setattr(match, "suspects", lambda a, b, spans: in_python(a, b, [(0, 1 << 64)]))
        monkeypatch.setattr(host_execs, "run", lambda node, params: None)

    def check() -> None:
        with launching(1):
            run(HostFaults(pointer_constant=0x7FFF_DEAD_BEE0), calls=3)
        (specialization,) = pgraph.runtime.registry.live_capturable()[0].specializations()
        (exec_,) = specialization.built.execs
        tails = {
            bytes(p[-8:]) for n, p in zip(exec_._nodes, exec_._params, strict=True) if n.kind == "kernel"
        }
        assert tails == {(0x7FFF_DEAD_BEE0).to_bytes(8, "little")}

    shows(check, cured)


@with_and_without
def test_pointers_to_memory_that_is_no_argument(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same address in both captures, but the framework's: it may be somebody else's tomorrow."""
    if not cured:
        monkeypatch.setattr(match._Matcher, "_constant", lambda self, value, where: None)

    def check() -> None:
        run(HostFaults(pointer_constant=FRAMEWORK[0] + 64, framework=(FRAMEWORK,)))
        refused("hidden-pointer")

    shows(check, cured)


@with_and_without
def test_moving_words_in_framework_memory(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom op may have buffers of its own, used in turn: ambiguous, never padding."""
    if not cured:
        monkeypatch.setattr(host_driver.HostDriver, "framework_ranges", lambda self: None)

    def check() -> None:
        words = (FRAMEWORK[0] + 64, FRAMEWORK[0] + 4096)
        run(HostFaults(moving_words=words, framework=(FRAMEWORK,)), fn=custom)
        refused("ambiguous-word")

    shows(check, cured)


def test_moving_words_of_pytorchs_own_ops_are_padding() -> None:
    """Half of an old address looks like device memory where much of it is in use."""
    with launching(3):
        run(HostFaults(moving_words=(FRAMEWORK[0] + 0x170, FRAMEWORK[0] + 0x184), framework=(FRAMEWORK,)))


def test_moving_words_elsewhere_are_padding() -> None:
    """The same words, where the framework holds nothing."""
    with launching(3):
        run(HostFaults(moving_words=(FRAMEWORK[0] + 64, FRAMEWORK[0] + 4096)))


def test_every_misbehaviour_at_once() -> None:
    """Garbage, tables, scratch and a constant do not hide one another."""
    faults = HostFaults(
        garbage=2, stale=True, pointer_constant=12345, tables=frozenset({"mul"}), scratch=frozenset({"mm"})
    )
    with launching(3):
        run(faults)


@with_and_without
def test_hazard_12_nothing_runs_during_a_capture(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards write into donated buffers: an argument changes once per call, captured or not."""
    if not cured:
        monkeypatch.setattr(record.Recorder, "alias", lambda self, tensor, alignment: tensor)
        monkeypatch.setattr(
            host_driver.HostSession, "run_op", lambda self, op, args, kwargs: op(*args, **kwargs)
        )

    def mutating(x: Tensor, y: Tensor) -> Tensor:
        y.add_(x)
        return y * 2

    compiled = host(mutating)

    def check() -> None:
        for _ in range(3):
            x, y = torch.ones(4), torch.zeros(4)
            compiled(x, y)
            same(y, torch.ones(4))

    shows(check, cured)


@with_and_without
def test_hazard_14_random_numbers_differ_from_launch_to_launch(
    cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws stay outside; recorded, each launch would repeat the captured offset."""
    if not cured:
        safe = functools.partial(compile_graph.refusal, rng_is_safe=True)
        monkeypatch.setattr(compile_graph, "refusal", safe)
        monkeypatch.setattr(host_driver, "refuse_random", lambda op, args, kwargs: None)
        real, seeds = host_driver.OpCall.__call__, itertools.repeat(11)

        def frozen(self: Any, leaves: list[Any]) -> None:
            with torch.random.fork_rng(enabled=torch.Tag.nondeterministic_seeded in self.op.tags):
                torch.manual_seed(next(seeds))
                real(self, leaves)

        monkeypatch.setattr(host_driver.OpCall, "__call__", frozen)

    compiled = host(lambda x: nn.functional.dropout(x * 2, 0.5).cumsum(0))
    for _ in range(2):
        compiled(torch.ones(64))

    def check() -> None:
        with launching(2):
            a, b = compiled(torch.ones(64)), compiled(torch.ones(64))
        assert not torch.equal(a, b)

    shows(check, cured)


@with_and_without
def test_two_captures_on_one_layout_prove_nothing(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gaps of two arenas differ, so that a pointer far past its range is not its neighbour's."""
    if not cured:
        real = host_driver.HostArena.__init__
        monkeypatch.setattr(host_driver.HostArena, "__init__", lambda self, layout: real(self, 0))

    recordings = []
    real_match = build.match
    monkeypatch.setattr(build, "match", lambda a, b, **k: recordings.append((a, b)) or real_match(a, b, **k))
    run(HostFaults())
    ((a, b),) = recordings

    def gaps(r: Any) -> list[int]:
        return [y.address - x.address for x, y in itertools.pairwise(r.allocations)]

    def check() -> None:
        assert all(x != y for x, y in zip(gaps(a), gaps(b), strict=True))

    shows(check, cured)
