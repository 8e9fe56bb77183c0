"""Who is captured, when and by whom: alignment, threads, room for one more, order of draws, the collector."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import host, launching, same
from support_rules import CUDA, Bench
from torch import Tensor
from torch._prims.rng_prims import run_and_save_rng_state

import pgraph
from pgraph.capture import build
from pgraph.capture.record import record
from pgraph.drivers.host.driver import HostDriver
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.errors import CaptureError, DriverError, MatchError
from pgraph.launch.guards import Guards, TensorGuard, alignments
from pgraph.ops.safety import refusal
from pgraph.partition.scan import scan
from pgraph.reasons import Reason
from pgraph.runtime import registry
from pgraph.runtime.keeping import PATIENCE, Keeper, Use

aten, prims = torch.ops.aten, torch.ops.prims


def scaled(x: Tensor) -> Tensor:
    return (x * 2 + 1).cumsum(0)


# -- alignment -----------------------------------------------------------------------------------


def aligned(low: int, n: int = 20) -> Tensor:
    """`n` floats whose address has exactly this alignment in bytes."""
    base = torch.randn(n + 512)
    start = next(k for k in range(512) if (address := base.data_ptr() + 4 * k) & -address == low)
    return base[start : start + n]


@pytest.mark.parametrize(
    ("lows", "usual", "want"),
    [
        ((512, 1024), 512, [512, 512]),
        ((512, 256), 512, [16, 16]),
        ((16, 64), 16, [16, 16]),
        ((64, 8), 16, [16, 8]),
        ((4, 2, 1024), 512, [4, 2, 16]),
        ((0, 0), 512, [512, 512]),
    ],
)
def test_addresses_are_captured_as_aligned_as_they_are(
    lows: tuple[int, ...], usual: int, want: list[int]
) -> None:
    """Up to a class that all of them reach; an empty tensor lies nowhere and hinders nobody."""
    addresses = [(1 << 40) + low if low else 0 for low in lows]
    assert alignments(addresses, usual) == want


@pytest.mark.parametrize("needed", [4, 8, 16, 32, 64])
def test_every_bit_below_the_alignment_counts(needed: int) -> None:
    guards = Guards((TensorGuard(0, (20,), (1,), needed - 1),))
    for low in (4, 8, 16, 32, 64):
        x = aligned(low)
        assert guards.addresses([x]) == ([x.data_ptr()] if low >= needed else None), low


def test_a_less_aligned_address_is_not_launched_with_the_more_aligned_capture() -> None:
    """It gets a capture of its own, which then serves the more aligned ones as well."""
    compiled = host(scaled)
    for low in (16, 16, 64):
        x = aligned(low)
        same(compiled(x), scaled(x))
    assert (pgraph.report().captures, pgraph.report().launches) == (1, 2)
    for low, captures, launches in ((8, 1, 2), (8, 2, 3), (16, 2, 4), (4, 2, 4), (8, 2, 5)):
        x = aligned(low)
        same(compiled(x), scaled(x))
        assert (pgraph.report().captures, pgraph.report().launches) == (captures, launches), low
    (runner,) = registry.live_capturable()
    assert sorted(v.guards.tensors[0].mask for v in runner.specializations()) == [3, 7, 15]


# -- threads -------------------------------------------------------------------------------------


@contextlib.contextmanager
def threads(n: int) -> Iterator[list[ThreadPoolExecutor]]:
    """Threads that live as long as the block does, so that each has a number of its own."""
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(n)]
        for pool in pools:
            pool.submit(int).result()
        yield pools


def test_a_thread_warms_up_before_it_captures() -> None:
    """Library handles belong to threads: what another one made does not help this one."""
    compiled = host(scaled)
    x = torch.randn(20)
    compiled(x)
    with threads(1) as (other,):
        same(other.submit(compiled, x).result(), scaled(x))
        assert (pgraph.report().captures, pgraph.report().launches) == (0, 0)
        with launching():
            same(other.submit(compiled, x).result(), scaled(x))
        assert pgraph.report().captures == 1


def test_a_new_thread_for_each_call_is_captured_in_the_end() -> None:
    compiled = host(scaled)
    x = torch.randn(20)
    compiled(x)
    captures = []
    with threads(4) as pools:
        for pool in pools:
            same(pool.submit(compiled, x).result(), scaled(x))
            captures.append(pgraph.report().captures)
    assert captures == [0, 0, 0, 1]


# -- room for one more ---------------------------------------------------------------------------


@pytest.mark.parametrize(("per_launch", "admitted"), [(3, True), (1, False), (0.25, False)])
@pytest.mark.parametrize("before", [0, 10_000])
def test_only_launches_since_a_newcomer_came_are_compared_with_it(
    before: int, per_launch: float, admitted: bool
) -> None:
    """However long the capture had been in use by then."""
    keeper, old, new = Keeper(1, 1), Use(), Use()
    for _ in range(PATIENCE):  # no short streak is enough any more
        keeper.dropped()
    launches, runs, owed = before, 0, 0.0
    keeper.used(old)
    while runs < 4 * PATIENCE:
        keeper.ran(new, launches)
        runs += 1
        owed += 1 / per_launch
        while owed >= 1:
            owed -= 1
            launches += 1
            keeper.used(old)
        if keeper.admits(new, runs, old, 1, launches):
            break
    assert (runs < 4 * PATIENCE) is admitted, runs
    assert runs > PATIENCE, "it came too early"


def test_a_size_used_more_often_of_late_takes_the_place_of_an_old_one() -> None:
    compiled = host(lambda x: (x + x.shape[0]).cumsum(0), dynamic=True, max_captures=1)

    def call(sizes: list[int]) -> None:
        for n in sizes:
            x = torch.randn(n, 3)
            same(compiled(x), (x + n).cumsum(0))

    for n in range(2, 3 + PATIENCE):  # from now on a short streak is not enough
        call([n] * (3 + PATIENCE))
    call([n] * 200)
    captures = pgraph.report().captures
    assert captures == 1 + PATIENCE
    call([90, 90, 90, n] * PATIENCE)
    assert pgraph.report().captures == captures + 1
    (runner,) = registry.live_capturable()
    assert [v.guards.tensors[0].size[0] for v in runner.specializations() if v.program is not None] == [90]


# -- order of draws ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "code"),
    [
        ("plain draw", "rng"),
        ("saved state", "rng-state"),
        ("somebody's higher-order op", "higher-order"),
        ("no draw", "dynamic-shape"),
    ],
)
def test_seeds_overtake_nothing_that_draws(before: str, code: str) -> None:
    """Else the numbers of one call would be swapped, against eager's with the same seed."""
    b = Bench()
    x = b.tensor(4)
    y = b.call(aten.cos.default, x)
    first = {
        "plain draw": lambda: b.call(aten.bernoulli.default, y),
        "saved state": lambda: b.call(run_and_save_rng_state, aten.bernoulli.default, y, like=y),
        "somebody's higher-order op": lambda: b.call(torch.ops.higher_order.cond, y, like=y),
        "no draw": lambda: b.call(aten.nonzero.default, y),
    }[before]()
    seeds = b.call(prims.inductor_seeds.default, 2, CUDA, like=b.tensor(2, dtype=torch.int64))
    b.module(b.call(aten.sin.default, y), seeds, first)
    refuse = functools.partial(refusal, device_type="cuda")
    assert [reason.code for node in (first, seeds) if (reason := refuse(node))] == [code, "rng-seeds"]
    order = [node for partition in scan(b.graph, refuse, min_ops=1) for node in partition.nodes]
    assert (order.index(seeds) < order.index(first)) is (before == "no draw"), order


# -- the collector -------------------------------------------------------------------------------


@pytest.fixture
def collecting() -> Iterator[None]:
    """The collector is on afterwards, whatever a test leaves."""
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("how", ["well", "op", "begin", "end", "ghost-kept"])
def test_the_collector_is_as_it_was_after_a_capture(how: str, before: bool, collecting: None) -> None:
    """Off while a capture goes on, and never left off by one that failed."""
    kept: list[Any] = []
    during: list[bool] = []

    def fn(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        during.append(gc.isenabled())
        if how == "ghost-kept":
            kept.append(x * 2)
        return ((x + 1).nonzero() if how == "op" else x + 1,)

    faults = HostFaults(fail_at=how) if how in ("begin", "end") else HostFaults()
    driver = HostDriver()
    fails = pytest.raises((CaptureError, DriverError)) if how != "well" else contextlib.nullcontext()
    with inject(faults), driver.capture_lock(), driver.arena(0) as arena:
        gc.enable() if before else gc.disable()
        with fails:
            record(driver, arena, fn, [torch.ones(4)], [16])
        after = gc.isenabled()
    assert after is before
    assert during == ([] if how == "begin" else [False])


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_until_a_partition_is_made(
    fails: bool, collecting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not between its two captures, nor while they are compared; and then again, whatever came of it."""
    during: list[bool] = []
    real = build.match

    def noting(*args: Any, **kwargs: Any) -> Any:
        during.append(gc.isenabled())
        if fails:
            raise MatchError(Reason("nodes-differ", "they differ"))
        return real(*args, **kwargs)

    monkeypatch.setattr(build, "match", noting)
    gc.enable()
    with pytest.raises(MatchError) if fails else contextlib.nullcontext():
        build.build(HostDriver(), lambda args: [args.pop() + 1], [torch.ones(4)], [16])
    assert gc.isenabled()
    assert during == [False]


def test_the_collector_is_back_before_another_thread_may_capture(
    collecting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that thread finds it off, and has it come back in the middle of its own capture."""
    found: list[bool] = []
    real = HostDriver.capture_lock

    @contextlib.contextmanager
    def noting(self: HostDriver) -> Iterator[None]:
        with real(self):
            found.append(gc.isenabled())
            yield
            found.append(gc.isenabled())

    monkeypatch.setattr(HostDriver, "capture_lock", noting)
    gc.enable()
    build.build(HostDriver(), lambda args: [args.pop() + 1], [torch.ones(4)], [16])
    assert found == [True, True]
