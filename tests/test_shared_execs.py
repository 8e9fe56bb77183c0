"""One exec serves all sizes of a partition that it can: Note [Shared execs]."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support import MLP, host, same, shows, train, with_and_without
from torch import Tensor

import pgraph
from pgraph.capture import build
from pgraph.drivers.execs import Shelf
from pgraph.drivers.host import execs as host_execs
from pgraph.drivers.host.driver import HostDriver, HostSession
from pgraph.drivers.host.execs import HostExec, HostRecipe
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.runtime import registry
from pgraph.runtime.specialization import Specialization

N = 5


def fn(x: Tensor) -> Tensor:
    return ((x * 2).cumsum(0) + x.shape[0]).clone().sin()


def filled(x: Tensor) -> Tensor:
    return torch.zeros_like(x).add_(x.cumsum(0))


def calls_of(compiled: Any, wanted: Callable[[Tensor], Tensor] = fn) -> Callable[[Iterable[int]], None]:
    """Calls with these sizes, each compared with eager."""

    def call(sizes: Iterable[int]) -> None:
        for n in sizes:
            x = torch.randn(n, 3)
            same(compiled(x), wanted(x))

    return call


def captured() -> list[Specialization]:
    (partition,) = registry.live_capturable()
    return [s for s in partition.specializations() if s.program is not None]


def execs() -> set[Any]:
    return {e for s in captured() if s.built is not None for e in s.built.execs}


def twice(sizes: Iterable[int]) -> list[int]:
    return [n for n in sizes for _ in range(2)]


def test_sizes_in_turn_share_an_exec() -> None:
    call = calls_of(host(fn, dynamic=True))
    call(twice(range(4, 4 + N)))
    order = random.Random(0).sample(range(4, 4 + N), N) * 2
    before = pgraph.report().launches
    call(order)
    report = pgraph.report()
    assert report.launches == before + len(order)
    assert (report.captures, len(captured()), len(execs())) == (N, N, 1)
    (exec,) = execs()
    assert report.exec_bytes == exec.nbytes
    assert report.recipe_bytes == sum(s.nbytes for s in captured()) > 0


def test_a_launch_sets_what_another_size_left() -> None:
    """All nodes at a change of sizes, then those whose addresses changed."""
    compiled = host(fn, dynamic=True)
    calls_of(compiled)(twice((4, 6)))
    nodes = len(captured()[0].built.template.nodes)
    sizes = {n: torch.randn(n, 3) for n in (4, 6)}
    kept: list[Tensor] = []

    def set_by(n: int) -> int:
        before = pgraph.report().rewritten_nodes
        kept.append(compiled(sizes[n]))
        same(kept[-1], fn(sizes[n]))
        return pgraph.report().rewritten_nodes - before

    assert [set_by(n) for n in (4, 6, 4)] == [nodes] * 3
    assert set_by(4) <= nodes


@with_and_without
def test_what_the_exec_holds_is_asked(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that a launch would do what another size did."""
    compiled = host(fn, dynamic=True)
    if not cured:
        monkeypatch.setattr(host_execs, "_numbers", iter([7] * 100))
    # Each size has the same addresses at each launch: all that differs is whose nodes the exec has. And none
    # of this memory is freed: without the cure, another size's nodes write to it.
    memory = functools.cache(functools.partial(torch.empty_strided, device="cpu"))
    monkeypatch.setattr(
        HostDriver, "empty_strided", lambda self, size, stride, dtype: memory(size, stride, dtype=dtype)
    )
    calls_of(compiled)(twice((4, 6)))
    x, y = torch.randn(4, 3), torch.randn(6, 3)

    def check() -> None:
        for _ in range(3):
            for given in (x, y):
                got, want = compiled(given), fn(given)
                assert torch.equal(got, want)

    shows(check, cured)


@with_and_without
def test_launch_attributes_that_differ(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update ignores them in silence: such sizes must not share."""
    if not cured:
        monkeypatch.setattr(build, "sharing_key", lambda nodes, order, slots, chunks: len(nodes))

    def check() -> None:
        with inject(HostFaults(clusters={"cumsum": 6})):
            compiled = host(fn, dynamic=True)
            for n in (*twice((4, 5, 7, 8)), 4, 7, 5, 8):
                x = torch.randn(n, 3)
                assert torch.equal(compiled(x), fn(x)), n
        assert (len(captured()), len(execs())) == (4, 2)

    shows(check, cured)


def test_attributes_that_cannot_be_read_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_execs.HostRecipe, "fits", lambda self: pytest.fail("was tried"))
    monkeypatch.setattr("pgraph.drivers.host.driver.HostSession._kept", lambda *args: None)
    call = calls_of(host(fn, dynamic=True))
    call(twice((4, 6, 8)))
    call((4, 6, 8))
    assert (len(captured()), len(execs())) == (3, 3)


@with_and_without
def test_fills_of_another_length(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may refuse them. Shared all the same, a launch would fail, and the size run uncaptured."""
    if not cured:
        monkeypatch.setattr(build, "sharing_key", lambda nodes, order, slots, chunks: len(nodes))

    def check() -> None:
        call = calls_of(host(filled, dynamic=True), filled)
        call((*twice((4, 6)), 4, 6, 4))
        assert {n.kind for n in captured()[0].built.template.nodes} >= {"memset"}
        assert (len(captured()), len(execs()), pgraph.report().refused) == (2, 2, 0)

    shows(check, cured)


def test_what_a_driver_does_not_take_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so when the recipe is made: the size has an exec of its own, and no launch fails."""
    call = calls_of(host(fn, dynamic=True))
    call(twice((4,)))
    with inject(HostFaults(fail_at="set_params", fail_count=1)) as faults:
        call((6, 6) if faults.fail_count else ())
    assert faults.fail_count == 0
    call((4, 6, 4, 6))
    assert (len(captured()), len(execs()), pgraph.report().refused) == (2, 2, 0)
    call(twice((8,)))
    assert (len(captured()), len(execs())) == (3, 2), "the newest exec serves those that come after"


def test_plans_that_cut_elsewhere_do_not_share() -> None:
    """A chunk is an exec of its own."""

    def deep(x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.cat([x, x]).sin().view(2, -1).sum(0).view(-1, 3)
        return x

    compiled = host(deep, dynamic=True, memory_slack_mb=1)
    call = calls_of(compiled, deep)
    call((*twice((4, 5, 200_000)), 4, 200_000, 5))
    chunks = {len(s.built.template.plan.chunks) for s in captured()}
    assert len(chunks) == 2, "nothing was cut, so nothing was shown"
    assert len({s.built.shared for s in captured()}) == 2


def test_a_plan_is_told_where_others_were_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `test_sizes_of_a_backward_are_cut_alike` for what comes of it."""
    told, plan_of = [], build.plan_of

    def planned(*args: Any, known: Any, **options: Any) -> Any:
        told.append(list(known))
        return plan_of(*args, known=known, **options)

    monkeypatch.setattr(build, "plan_of", planned)
    call = calls_of(host(fn, dynamic=True))
    call(twice((4, 5)))
    first, _ = (s.built.template.plan.borders for s in captured())
    assert told == [[], [first]]


@pytest.mark.parametrize("at", ["set_params", "launch"])
def test_a_failure_while_sizes_change(at: Any) -> None:
    """The size whose launch failed runs uncaptured; the others' launches set everything again."""
    compiled = host(fn, dynamic=True)
    call = calls_of(compiled)
    call(twice((4, 5, 6)))
    nodes = len(captured()[0].built.template.nodes)
    call((4, 5))
    with inject(HostFaults(fail_at=at, fail_count=1)) as faults:
        call((6,))
    assert faults.fail_count == 0
    (exec,) = execs()
    assert exec.held == 0 or at == "launch"
    before = pgraph.report().rewritten_nodes
    call((5,))
    assert pgraph.report().rewritten_nodes == before + nodes
    call((4, 5, 6, 4, 5, 6))
    assert (pgraph.report().refused, len(captured()), len(execs())) == (1, 2, 1)


@pytest.mark.parametrize("after", range(1, 6))
def test_a_failure_in_the_middle_of_a_change(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some nodes are the new size's already, the others the old one's."""
    call = calls_of(host(fn, dynamic=True))
    call(twice((4, 6)))
    call((4,))
    real, left = HostExec.set, [after]

    def set_node(self: HostExec, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise host_execs.DriverError("injected")
        real(self, *args)

    monkeypatch.setattr(HostExec, "set", set_node)
    call((6, 4, 4, 6, 4))


def test_the_exec_goes_with_its_last_recipe() -> None:
    compiled = host(fn, dynamic=True, max_captures=2)
    call = calls_of(compiled)
    call(twice((4, 6)))
    (exec,) = map(weakref.ref, execs())
    recipes = [weakref.ref(r) for s in captured() for r in s.built.recipes]
    call(twice((8,)))
    assert [r() is None for r in recipes] == [True, False], "the least recently used one went"
    assert exec() in execs(), "the others live on it"
    assert pgraph.report().exec_bytes == exec().nbytes
    assert pgraph.report().recipe_bytes == sum(s.nbytes for s in captured())
    pgraph.reset()
    assert exec() is None
    assert (pgraph.report().exec_bytes, pgraph.report().recipe_bytes) == (0, 0)
    call(twice((4, 6)))
    assert len(execs()) == 1


def test_a_launch_under_way_keeps_what_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset by another call in the middle of a launch: the exec stays until that is over."""
    compiled = host(fn, dynamic=True)
    call = calls_of(compiled)
    call(twice((4, 6)))
    real, seen = HostRecipe.launch, []

    def launch(self: HostRecipe, bases: list[int], stream: int) -> int:
        pgraph.reset()
        gc.collect()
        seen.append(self.exec.held)
        return real(self, bases, stream)

    with monkeypatch.context() as patch:
        patch.setattr(HostRecipe, "launch", launch)
        call((4,))
    assert seen
    call((4, 6, *twice((4, 6))))


def test_threads_with_sizes_of_their_own() -> None:
    """One exec, four threads: each call's result is its own."""
    compiled = host(fn, dynamic=True)
    calls_of(compiled)(twice(range(4, 8)))
    assert len(execs()) == 1

    def work(n: int) -> int:
        for i in range(40):
            x = torch.full((n, 3), float(i))
            same(compiled(x), fn(x))
        return n

    before = pgraph.report().launches
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4, 8))) == [4, 5, 6, 7]
    assert pgraph.report().launches > before


def test_training_shares_forward_and_backward() -> None:
    model = MLP()
    compiled = host(model, dynamic=True)
    for n in (*twice((3, 5, 7)), 3, 7, 5, 3):
        x = torch.randn(n, 8)
        same(train(model, compiled, x), train(model, model, x), rtol=1e-5, atol=1e-5)
    for partition in registry.live_capturable():
        held = [s.built for s in partition.specializations() if s.built is not None]
        assert (len(held), len({built.shared for built in held})) == (3, 1)


def test_what_execs_keep_is_asked_of_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one that they are made from, and only where somebody may share them: a device takes long."""
    asked: list[bool] = []
    real = HostSession.end

    def end(self: HostSession, with_kept: bool, *tracked: Any) -> Any:
        asked.append(with_kept)
        return real(self, with_kept, *tracked)

    monkeypatch.setattr(HostSession, "end", end)
    x = torch.randn(4)
    for shelf, expected in ((None, [False, False]), (Shelf(), [True, False])):
        asked.clear()
        built = build.build(HostDriver(), lambda args: [args.pop() + 1], [x], [16], shelf=shelf)
        assert asked == expected
        assert shelf is None or list(shelf.execs.values()) == [built.shared]
