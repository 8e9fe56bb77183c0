"""Library calls of sizes that are computed: recorded by themselves, and believed where that is proof."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from support import same
from support_sizes import WARM, W, call, compiled, computer, made, tables, turned
from torch import Tensor, nn

import pgraph
from pgraph.compute import sites
from pgraph.compute.computer import Computer
from pgraph.compute.sites import Sites
from pgraph.drivers.host.driver import HostDriver, HostGraph, HostSession
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.errors import MatchError
from pgraph.reasons import Reason
from pgraph.runtime import registry
from pgraph.template.recording import Recording
from pgraph.template.topology import topology

pytestmark = pytest.mark.usefixtures("no_lessons")


@pytest.fixture
def products_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuBLAS launches kernels on an H200: a product need not wait for the end of the kernel before it."""
    end = HostSession.end

    def told(self: HostSession, *given: Any) -> Any:
        _, nodes, order = end(self, *given)
        pairs = [(a, b) for a, b in order.edges if nodes[a].kind == "kernel" and "mm" in nodes[b].name]
        order = dataclasses.replace(order, odd=tuple((a, b, b"\1\0\1") for a, b in pairs))
        return HostGraph(order), nodes, order

    monkeypatch.setattr(HostSession, "end", told)


@pytest.mark.usefixtures("products_begin_early")
def test_products_that_do_not_wait_for_the_kernel_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture shows it, and so does a product that is recorded by itself."""
    recorded, computed = Computer.recording, []
    monkeypatch.setattr(
        Computer, "recording", lambda self, *given: computed.append(recorded(self, *given)) or computed[-1]
    )
    model = compiled()
    call(model, (*WARM, 17, 2, 30))
    assert computer().reason is None
    assert made() == (6, 3)
    products = {tuple(sorted(b for _, b, _ in found[0].order.odd)) for found in computed if found}
    assert len(products) == 1
    assert len(products.pop()) >= 3, "each product but one that comes first"


@pytest.fixture(params=["streams of the call", "streams that go on"])
def products_fork(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As cuDNN records some calls: a product runs beside another node, and both are waited for at its end.
    Where its stream goes on, it also waits for the product before it."""
    real = HostSession._record

    def record(self: Any, op: Any, args: Any, kwargs: Any, fresh: Any, positions: Any) -> None:
        before, product = self._tail, op.overloadpacket.__name__ == "mm"
        if product and request.param == "streams that go on":
            self._tail = tuple(dict.fromkeys((*before, *getattr(self, "latest", ()))))
        real(self, op, args, kwargs, fresh, positions)
        if product:
            self.latest, self._tail = self._tail, before
            read = args[0]
            self._add("memcpy", "beside", (), [read.data_ptr(), read.data_ptr(), read.nbytes])
            self._tail += self.latest

    monkeypatch.setattr(HostSession, "_record", record)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.usefixtures("products_fork")
def test_products_that_run_on_several_streams(
    early: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A computed recording forks where captures do."""
    if early:
        request.getfixturevalue("products_begin_early")
    recorded, orders = Computer.recording, set()

    def recording(self: Computer, *given: Any) -> Any:
        if found := recorded(self, *given):
            orders.add(found[0].order)
        return found

    monkeypatch.setattr(Computer, "recording", recording)
    model = compiled()
    call(model, (*WARM, 17, 2, 30, 17))
    assert computer().reason is None
    assert made() == (6, 3)
    (order,) = orders
    assert len(order.edges) > order.n_nodes - 1
    assert order == dataclasses.replace(topology(order.n_nodes, order.edges), odd=order.odd)
    assert bool(order.odd) is early


@pytest.fixture
def of_our_own(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(fills, calls) of each capture of library calls."""
    real, found = sites._capture, list[tuple[int, int]]()

    def capture(*args: Any, **given: Any) -> Any:
        made = real(*args, **given)
        found.append((sum("fill" in node.name for node in made.recording.nodes), len(made.calls)))
        return made

    monkeypatch.setattr(sites, "_capture", capture)
    return found


def test_calls_are_recorded_without_kernels_of_our_own_between(of_our_own: list[tuple[int, int]]) -> None:
    call(compiled(), (*WARM, 17, 2, 30))
    assert made() == (6, 3)
    assert max(calls for _, calls in of_our_own) >= 3
    assert {fills for fills, _ in of_our_own} == {2}


@pytest.mark.usefixtures("products_fork")
def test_where_calls_fork_there_is_one_between_any_two(of_our_own: list[tuple[int, int]]) -> None:
    """From the first capture on that showed it."""
    call(compiled(), (*WARM, 17, 2, 30))
    assert made() == (6, 3)
    first, *others = of_our_own
    assert first[0] == 2 < first[1]
    assert all(fills == calls + 1 for fills, calls in others)


@pytest.mark.parametrize("alone", [True, False])
def test_only_calls_that_were_not_proved_are_recorded_twice(
    alone: bool, of_our_own: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long lengths one product runs another kernel. If it cannot be told by itself, all are recorded."""
    real, matched = HostSession._record, Sites._matched

    def record(self: Any, op: Any, args: Any, kwargs: Any, fresh: Any, positions: Any) -> None:
        real(self, op, args, kwargs, fresh, positions)
        if op.overloadpacket.__name__ == "mm" and args[0].size(1) > 10:
            self._nodes[-1] = self._nodes[-1]._replace(name="mm_of_long_ones")

    def refused(self: Sites, first: Any, *others: Any) -> Any:
        if len(first.nodes) == 1:
            raise MatchError(Reason("ambiguous-word", "so it is"))
        return matched(self, first, *others)

    monkeypatch.setattr(HostSession, "_record", record)
    if not alone:
        monkeypatch.setattr(Sites, "_matched", refused)
    model = compiled()
    call(model, WARM)
    of_our_own.clear()
    call(model, (17, 2, 30))
    assert made() == (6, 3)
    captured = [calls for _, calls in of_our_own]
    whole = captured[0]
    assert whole > 1
    assert captured == [whole, 1, *([] if alone else [whole]), whole, whole], "30 runs what 17 did"


def test_calls_of_one_size_are_not_kept(of_our_own: list[tuple[int, int]]) -> None:
    """What several sizes have in common is: a product whose sizes are always eight."""

    def kept() -> int:
        gc.collect()
        return sum(type(one) is Recording for one in gc.get_objects())

    model = compiled()
    call(model, (*WARM, 17, 18))
    before = kept()
    of_our_own.clear()
    call(model, range(19, 29))
    assert made() == (15, 12)
    assert [calls for _, calls in of_our_own] == [of_our_own[0][1]] * 10, "each has its own, and no others"
    assert kept() == before
    (partition,) = registry.live_capturable()
    partition.reset()
    call(model, (20, 19, 20, 19))


@pytest.mark.parametrize("checking", [False, True])
def test_as_long_as_captures_are_compared_all_calls_are_recorded_twice(
    checking: bool, of_our_own: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else padding that was the same in two captures is a difference in the third."""
    real = HostSession._record

    def record(self: Any, op: Any, args: Any, kwargs: Any, fresh: Any, positions: Any) -> None:
        real(self, op, args, kwargs, fresh, positions)
        if op.overloadpacket.__name__ == "mm" and args[0].size(1) in (5, 9, 17):
            self._nodes[-1] = self._nodes[-1]._replace(name=f"mm_of_{args[0].size(1)}")

    monkeypatch.setattr(HostSession, "_record", record)
    call(compiled(compute_sizes="check" if checking else "on"), (*WARM, 17, 17))
    # At 5, where the product with `w` alone is new, too; at 3, which is compared then; at 9 and 17.
    assert [calls for _, calls in of_our_own] == [4, 4, 3, 3, 3, 3, 3 if checking else 1]


def test_padding_that_was_the_same_in_two_captures_is_looked_at_again() -> None:
    """A kernel's parameters hold what lay on the stack: 7 in captures of the code, 5 where products were
    recorded by themselves, and 6 the next time."""
    values = (7, 7, 7, 5, 5, 6, 6, *[7] * 40)
    with inject(HostFaults(moving_words=values, padded=frozenset({"mm"}))):
        call(compiled(), (*WARM, 17))
    assert computer().reason is None
    assert made() == (4, 1)


@pytest.mark.usefixtures("products_fork", "products_begin_early")
def test_what_begins_early_after_a_fork_is_captured() -> None:
    """That was never seen: each product is recorded after a single kernel."""

    def products(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w) @ w).sin() + x.shape[0]

    model = compiled(products)
    call(model, (*WARM, 17, 17), products)
    assert made() == (4, 0)
    assert "a copy, a fill or a fork" in (computer().reason or "")


FAULTS = {
    "an attribute that updates ignore": HostFaults(clusters={"mm": 10}),
    "scratch above the result": HostFaults(scratch=frozenset({"mm"})),
    "stale addresses in padding": HostFaults(scratch=frozenset({"mm"}), garbage=1, stale=True),
    "pointers to a table": HostFaults(tables=frozenset({"mm"})),
    "an operand that is not there": HostFaults(beyond={"mm": 4096}),
    "pointers far off": HostFaults(origin={"mm": 4096}),
    "several streams": HostFaults(aside=frozenset({"mm"})),
    "memory used again": HostFaults(reuse=True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_libraries_do_no_size_is_wrong(fault: str) -> None:
    with inject(FAULTS[fault]):
        call(compiled(), (*WARM, 17, 17, 2, 12, 12, 30, 30, 3, 17))


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_library_that_records_another_node_at_some_sizes(
    monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    """As a product does that is split: the kernels after it have other positions, and no exec serves all.
    Further ones are made of graphs that are put together by hand, or captured where that cannot be.
    """
    if not by_hand:
        monkeypatch.setattr(HostDriver, "graph", lambda *_: None)
    real = HostSession._record

    def record(self: Any, op: Any, args: Any, kwargs: Any, fresh: Any, positions: Any) -> None:
        real(self, op, args, kwargs, fresh, positions)
        if op.overloadpacket.__name__ == "mm" and args[0].size(0) > 10:
            out = kwargs["out"]
            self._add("memcpy", "split", (), [out.data_ptr(), out.data_ptr(), out.nbytes])

    monkeypatch.setattr(HostSession, "_record", record)
    model = compiled()
    call(model, (*WARM, 17, 17, 2, 12, 12, 30, 30, 3))
    assert computer().reason is None
    assert pgraph.report().computed == 3 + by_hand, (
        "2, 12 and 30; at 17 there was no exec with another node yet"
    )
    because = "the last was not because no exec of another size has its kernels"
    assert (because in str(pgraph.report())) is not by_hand


def test_a_call_is_recorded_again_under_other_settings() -> None:
    """A library that chooses by a setting which is flipped between calls."""
    real = HostSession._record

    def record(self: Any, op: Any, args: Any, kwargs: Any, fresh: Any, positions: Any) -> None:
        if op.overloadpacket.__name__ == "mm" and torch.backends.cudnn.benchmark:
            self._add("memset", "chosen", (), [kwargs["out"].data_ptr(), 0, kwargs["out"].nbytes])
        real(self, op, args, kwargs, fresh, positions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostSession, "_record", record)
        model = compiled()
        call(model, (*WARM, 17))
        assert made() == (4, 1)
        try:
            torch.backends.cudnn.benchmark = True
            call(model, (6, 6, 7, 7))
        finally:
            torch.backends.cudnn.benchmark = False
        call(model, (18, 6, 7))
    assert computer().reason is None


def test_many_calls_each_of_the_one_before() -> None:
    """As in a network of convolutions: what one returns is changed in place, and given to the next."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv1d(2 + i, 3 + i, 3, padding=1), nn.ReLU()) for i in range(20)]
    network = nn.Sequential(*layers).double().eval()
    model = compiled(network)
    with torch.no_grad():
        for n in (*WARM, 17, 6):
            x = torch.randn(n, 2, 4, dtype=W.dtype)
            same(model(x), network(x), rtol=1e-6, atol=1e-8)
    assert (made(), computer().reason) == ((5, 2), None)


def test_a_call_that_is_given_one_tensor_twice() -> None:
    """It is no call of two tensors of the same sizes."""

    def squares(x: Tensor, w: Tensor) -> Tensor:
        y = torch.relu(x.t() @ x)  # 8 x 8, as w is
        return (y @ y) + (y @ w) + (w @ w) + x.shape[0]

    model = compiled(squares)
    call(model, (*WARM, 17, 2, 17), squares)
    assert made() == (5, 2)
    assert computer().reason is None


_library = torch.library.Library("pgraph_computed", "FRAGMENT")


_library.define("with_length(Tensor x) -> (Tensor, SymInt, Tensor)")


_library.impl("with_length", lambda x: (x * 2, x.shape[0], x + 1), "CompositeExplicitAutograd")


def test_numbers_that_a_library_returns() -> None:
    """cuDNN's attention tells how long its inputs were."""

    def fn(x: Tensor, w: Tensor) -> Any:
        doubled, length, more = torch.ops.pgraph_computed.with_length(x @ w)
        return doubled + length, more, length

    model = compiled(fn)
    for n in (*WARM, 17, 6, 17, 6):
        x = torch.randn(n, 8, dtype=W.dtype)
        results, expected = model(x, W), fn(x, W)
        same(results[:2], expected[:2], rtol=1e-4, atol=1e-5)
        assert results[2] == n
    assert (made(), computer().reason) == ((5, 2), None)


def test_a_custom_op_is_recorded_at_no_size_before_it_ran() -> None:
    """It may keep what it makes at its first call with a size, here a table. In a capture that has no memory,
    and whoever calls the op later would read it."""
    tables.clear()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (turned(torch.relu(x @ w)) @ w).sin()  # type: ignore[no-any-return]

    model = compiled(fn)
    for n in WARM:
        model(torch.randn(n, 8, dtype=W.dtype), W)
    assert made() == (3, 0)
    for n, computed in ((17, 0), (30, 0), (17, 1), (30, 2), (17, 2)):
        model(torch.randn(n, 8, dtype=W.dtype), W)
        assert made() == (3 + computed, computed)
    assert set(tables) == {3, 5, 9, 17, 30}
    call(model, (3, 17, 30), fn)


_library.define("halve(Tensor(a!) x) -> ()")


def _halve(x: Tensor) -> None:
    x.mul_(0.5)


_library.impl("halve", _halve, "CPU")


_library.impl("halve", lambda x: None, "Meta")


def test_a_library_that_returns_nothing() -> None:
    """It writes into what it is given, as those do that keep keys and values."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        torch.ops.pgraph_computed.halve(y)
        torch.ops.pgraph_computed.halve(y[1:])
        return y @ w

    model = compiled(fn)
    call(model, (*WARM, 17, 6, 17, 6), fn)
    assert (made(), computer().reason) == ((5, 2), None)
