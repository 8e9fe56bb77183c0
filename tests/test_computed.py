"""Recordings of new sizes that are computed: right for every size, and not believed before they were seen."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Block, same
from support_sizes import WARM, W, call, compiled, computer, made, runs, work
from torch import Tensor

import pgraph
from pgraph import compat
from pgraph.compute import compare
from pgraph.compute import computer as computers
from pgraph.compute.computer import Computer
from pgraph.compute.errors import LaunchedOtherwiseError, NotComputableError
from pgraph.compute.script import LaunchKernel
from pgraph.drivers.host import nodes as host_nodes
from pgraph.drivers.host.driver import HostDriver, HostSession
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.drivers.operands import Operand
from pgraph.runtime import registry
from pgraph.runtime.economy import Economy
from pgraph.template.recording import NodeRecord

pytestmark = pytest.mark.usefixtures("no_lessons")


def test_new_sizes_are_launched_at_once() -> None:
    model = compiled()
    call(model, WARM)
    assert made() == (3, 0)
    before = pgraph.report()
    call(model, (17, 2, 30, 17, 2, 30, 64, 3))
    after = pgraph.report()
    assert made() == (7, 4)
    assert after.launches == before.launches + 8
    assert runs(after) == runs(before)
    assert after.refused == 0
    assert "3 captures and 4 computed in " in str(after)


def test_nobody_is_warned_of_sizes_that_will_be_computed(caplog: pytest.LogCaptureFixture) -> None:
    """Only where each is captured: there captures pile up."""
    with caplog.at_level(logging.INFO, logger="pgraph"):
        call(compiled(), (*WARM, 17, 6))
        again = [r for r in caplog.records if "captured again" in r.getMessage()]
        assert [r.levelno for r in again] == [logging.INFO] * 2
        caplog.clear()
        call(compiled(compute_sizes="off"), (*WARM, 17))
    again = [r for r in caplog.records if "captured again" in r.getMessage()]
    assert [r.levelno for r in again][:2] == [logging.WARNING, logging.INFO]


def test_kernels_that_are_tuned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What captures showed of them holds no longer: sizes are captured until it is known again."""
    real, wrong = HostDriver.kernel_node, [False]

    def node(self: HostDriver, *given: Any) -> Any:
        return None if wrong[0] else real(self, *given)

    monkeypatch.setattr(HostDriver, "kernel_node", node)
    model = compiled()
    call(model, (*WARM, 17))
    assert made() == (4, 1)
    wrong[0] = True
    call(model, (30,))
    wrong[0] = False
    assert computer().learning
    assert made() == (4, 1)
    call(model, (30, 40, 40, 2, 2))
    assert made() == (7, 1)
    call(model, (64, 17, 3))
    assert (made(), computer().reason) == ((8, 2), None)


def test_what_the_first_capture_does_not_tell_another_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen once on an H200, among twenty processes: nothing was computed for good. It is tried once more."""
    real, asked = HostDriver.kernel_node, [0]

    def node(self: HostDriver, *given: Any) -> Any:
        asked[0] += 1
        return None if asked[0] <= wrong else real(self, *given)

    monkeypatch.setattr(HostDriver, "kernel_node", node)
    wrong = 1
    model = compiled()
    call(model, (*WARM, 17, 17, 30, 30, 40, 64))
    assert computer().reason is None
    assert made()[1] >= 1
    torch._dynamo.reset()
    asked[0], wrong = 0, 2
    call(compiled(), (*WARM, 17, 17, 30, 30, 40, 64))
    assert computer().reason is not None
    assert "is launched in a way that cannot be computed" in computer().reason


def test_kernels_that_are_tuned_anew_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are sizes without a grid, too: it is learned anew a few times only."""
    monkeypatch.setattr(computers, "_AGAIN", 1)
    real, none = HostDriver.kernel_node, [1, 30]

    def node(self: HostDriver, kernel: Any, sample: Any, arguments: Any) -> Any:
        rows = [a.size[0] for a in arguments if isinstance(a, Operand) and a.size]
        return None if not set(none).isdisjoint(rows) else real(self, kernel, sample, arguments)

    monkeypatch.setattr(HostDriver, "kernel_node", node)
    model = compiled()
    call(model, (*WARM, 30, 40, 40, 41, 41, 42, 42, 30, 43))
    assert made()[1] == 1
    assert not computer().learning


def test_a_kernel_that_awaits_tuning_is_run_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run measures it, which no capture survives. But one that is never run is not waited for for ever.
    Nor is a size computed before: how it will be launched is not known."""
    awaits = [True]
    monkeypatch.setattr(compat, "awaits_tuning", lambda _: awaits[0])
    model = compiled()
    call(model, (3, 3, 3))
    assert made() == (0, 0)
    awaits[0] = False
    call(model, (3,))
    assert made() == (1, 0)
    awaits[0] = True
    call(model, (5, 5, 5, 5))
    assert made() == (1, 0)
    call(model, (5,))
    assert made() == (2, 0), "put off three times"
    awaits[0] = False
    call(model, (9, 9, 17))
    assert made() == (4, 1)
    awaits[0] = True
    call(model, (30,))
    assert made() == (4, 1)
    awaits[0] = False
    call(model, (30, 40))
    assert made() == (6, 3)


def test_off_and_check_capture_all() -> None:
    for choice in ("off", "check"):
        torch._dynamo.reset()
        model = compiled(compute_sizes=choice)
        call(model, (*WARM, 17, 17, 2, 2))
        assert made() == (5, 0)


def test_check_reports_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = compiled(compute_sizes="check")
    call(model, WARM)
    real = host_nodes.kernel_node

    def wrong(*args: Any) -> Any:
        node, words = real(*args)
        return node._replace(params=node.params[:-8] + bytes(8)), words

    monkeypatch.setattr("pgraph.drivers.host.driver.kernel_node", wrong)
    with caplog.at_level(logging.ERROR):
        call(model, (17, 17))
    assert "a computed recording is not the captured one: node" in caplog.text
    assert "byte" in (computer().reason or "")


def test_the_economy_is_told_of_sizes_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[bool, bool]] = []
    real = Economy.captured

    def captured(economy: Economy, seconds: float, computed: bool = False, first: bool = False) -> None:
        told.append((computed, first))
        real(economy, seconds, computed, first)

    monkeypatch.setattr(Economy, "captured", captured)
    call(compiled(), (*WARM, 17, 12))
    assert told == [(False, False)] * 3 + [(True, True)] * 2


@pytest.mark.parametrize("kind", ["forward", "training"])
def test_a_transformer(kind: str) -> None:
    torch.manual_seed(0)
    model = Block()
    wide = model(torch.randn(1, 3, 32)).shape[-1]
    run, plain = compiled(model), torch.compile(model, dynamic=True)
    for length in (*WARM, 17, 6, 31, 17, 12):
        results = []
        for fn in (run, plain):
            model.zero_grad()
            x = torch.linspace(-1, 1, 2 * length * wide).view(2, length, wide).requires_grad_()
            y = fn(x)
            if kind == "training":
                y.square().sum().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        same(*results)
    report = pgraph.report()
    assert report.refused == 0
    assert report.computed >= (8 if kind == "training" else 4)


@settings(max_examples=6)
@given(st.lists(st.integers(2, 40), min_size=8, max_size=16))
def test_any_order_of_sizes(sizes: list[int]) -> None:
    torch._dynamo.reset()
    call(compiled(), [*sizes[:6], *sizes])


@contextlib.contextmanager
def recorded_otherwise(at: int, change: Callable[[NodeRecord], NodeRecord]) -> Iterator[None]:
    """Captures record kernels otherwise where the first size of the first argument is `at`."""
    real = HostSession._add

    def add(self: Any, kind: Any, name: str, header: Any, words: list[int]) -> None:
        real(self, kind, name, header, words)
        if kind == "kernel" and at in words[1:3]:
            self._nodes[-1] = change(self._nodes[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostSession, "_add", add)
        yield


def test_one_byte_ends_it() -> None:
    """An equal program records one word otherwise: nothing is computed for any size."""
    model = compiled()
    with recorded_otherwise(5, lambda n: n._replace(params=n.params + bytes(8))):
        call(model, WARM[:4])
    call(model, (*WARM[4:], 17, 17))
    assert made() == (4, 0)
    assert "a computed recording is not the captured one" in (computer().reason or "")


def test_lengths_that_are_rounded_by_way_of_a_fraction() -> None:
    """As attention of some kinds does for its statistics."""

    def fn(x: Tensor, w: Tensor) -> Any:
        return x @ w, w.sum().expand(math.ceil(x.shape[0] / 4) * 4) + 1

    model = compiled(fn)
    call(model, (*WARM, 17, 6, 17, 6), fn)
    assert (made(), computer().reason) == ((5, 2), None)


def test_lengths_that_are_a_share_or_a_root() -> None:
    """As those of images that are scaled by a fraction."""

    def fn(x: Tensor, w: Tensor) -> Any:
        n = x.shape[0]
        return x[: int(n * 0.7)] @ w, w.sum().expand(int(math.sqrt(n)) + 2) + 1

    model = compiled(fn)
    call(model, (*WARM, 17, 6, 17, 6), fn)
    assert (made(), computer().reason) == ((5, 2), None)


def test_sizes_that_no_number_tells() -> None:
    """After a graph break, one size may be two symbols, and the code reads the second one from an input."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        torch._dynamo.graph_break()
        return (y @ w).softmax(-1)

    model = compiled(fn)
    for n in (*WARM, 17, 6, 17, 6):
        x = torch.randn(n, 8, dtype=W.dtype, requires_grad=True)
        mine, theirs = (f(x, W) for f in (model, fn))
        same(mine, theirs, rtol=1e-4, atol=1e-5)
        same(*(torch.autograd.grad(y.square().sum(), x) for y in (mine, theirs)), rtol=1e-4, atol=1e-5)
    assert all(p._cache.shelf.computer.reason is None for p in registry.live_capturable())
    assert made() == (20, 8)


def test_what_misaligned_inputs_need_is_captured() -> None:
    """Inductor's code copies them: nothing is computed of them, and nothing learnt."""
    model = compiled()

    def call_from(offset: int, sizes: Iterable[int]) -> None:
        for n in sizes:
            x = torch.randn(n * 8 + offset, dtype=W.dtype)[offset:].view(n, 8)
            same(model(x, W), work(x, W), rtol=1e-4, atol=1e-5)

    call_from(1, (*WARM, 17, 17))
    assert made() == (4, 0)
    assert computer().reason is None
    call_from(2, (6, 6, 7, 7, 8, 8, 10, 11))
    assert made() == (9, 2), "three were compared, 10 and 11 computed"
    call_from(1, (12, 12))
    assert made() == (10, 2)


def test_a_number_that_never_varied_is_not_trusted() -> None:
    def two(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w) * x.shape[1] + x.sum()

    model = compiled(two)
    sizes = [(n, 4) for n in WARM] + [(12, 4), (12, 7), (12, 7), (13, 7), (13, 7)]
    for n, k in sizes:
        x, w = torch.randn(n, k, dtype=W.dtype), torch.randn(k, k, dtype=W.dtype)
        same(model(x, w), two(x, w), rtol=1e-4, atol=1e-5)
    report = pgraph.report()
    assert report.computed == 2, "(12, 4) and (13, 7); at (12, 7) the 7 had never been compared"


def test_failures_of_computing_are_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    call(model, WARM)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(computers, "evaluate", broken)
    call(model, (17, 17, 2, 2))
    assert made() == (5, 0)
    assert computer().reason == "ZeroDivisionError: unforeseen"
    assert pgraph.report().refused == 0


def test_a_lack_of_memory_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is captured, and the next one computed again."""
    model = compiled()
    call(model, WARM)

    def short(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("not now")

    real = computers.evaluate
    monkeypatch.setattr(computers, "evaluate", short)
    call(model, (17, 17))
    assert (made(), computer().reason) == ((4, 0), None)
    last = "of those that were not computed the last was not because OutOfMemoryError: not now"
    assert last in str(pgraph.report().partitions[0].sizes)
    monkeypatch.setattr(computers, "evaluate", real)
    call(model, (18,))
    assert made() == (5, 1)


def test_sizes_that_go_another_way_are_captured_until_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    call(model, WARM)

    def refused(*_: Any, **__: Any) -> None:
        raise NotComputableError("not this one")

    real, last = computers.evaluate, 4 + computers._PATIENCE // 2
    for count in range(1, last + 1):  # each is tried at its first call, and before its capture
        assert computer().reason is None
        monkeypatch.setattr(computers, "evaluate", real if count == 4 else refused)
        call(model, (10 + count, 10 + count))
    assert computer().reason == "not this one"
    assert pgraph.report().computed == 1


def test_other_threads_capture_first() -> None:
    """Library handles belong to threads."""
    import threading

    model = compiled()
    call(model, WARM)
    thread = threading.Thread(target=call, args=(model, (17, 17)))
    thread.start()
    thread.join()
    assert made() == (4, 0)


def test_one_capture_is_compared_with_nothing() -> None:
    """It may stay the only one. What is kept of it holds no memory of the program's."""
    model = compiled()
    x = torch.randn(3, 8, dtype=W.dtype)
    for _ in range(2):
        model(x, W)
    found = computer()
    assert found._script is None
    assert found._first is not None
    assert {t.device.type for t in found._first.inputs if isinstance(t, Tensor)} == {"meta"}
    assert found._first.recording.graph is None
    alive = weakref.ref(x)
    del x
    assert alive() is None
    call(model, (5, 5))
    assert (found._compared, found._first) == (2, None)


def test_a_first_capture_with_other_settings_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library calls are recorded with the settings of today."""
    model = compiled()
    call(model, WARM[:2])
    monkeypatch.setattr("pgraph.compat.library_settings", lambda: "others")
    call(model, WARM[2:4])
    assert (computer()._compared, computer()._first) == (1, None)


def test_a_first_capture_that_differs_ends_it() -> None:
    """As any other one does."""
    model = compiled()
    with recorded_otherwise(3, lambda n: n._replace(params=n.params + bytes(8))):
        call(model, WARM[:2])
    call(model, (*WARM[2:], 17, 17))
    assert "a computed recording is not the captured one" in (computer().reason or "")


def test_launch_attributes_of_generated_kernels_are_those_of_their_size() -> None:
    """Whoever launches a kernel decides on them: an update would ignore another one."""
    codes, words = host_nodes.encode([torch.ones(4, 2), 7])
    header = (host_nodes.KernelCall(work), codes)
    sample = NodeRecord("kernel", "fused", header, host_nodes.packed(words), kept=(1,))
    with inject(HostFaults(clusters={"fused": 10})):
        for rows in (4, 12):
            operand = Operand(1 << 20, (rows, 2), (2, 1), torch.float32, 3)
            found = host_nodes.kernel_node(work, sample, (operand, rows))
            assert found is not None
            node, addresses = found
            assert (node.kept, addresses) == ((2 if rows == 12 else 1,), [(0, 0)])
            assert node.params == host_nodes.packed([1 << 20, rows, 2, 2, 1, 3, rows])
    assert host_nodes.kernel_node(call, sample, (operand, 4)) is None, "another kernel"
    assert host_nodes.kernel_node(work, sample, (operand,)) is None
    assert host_nodes.kernel_node(work, sample, (operand, 4.0)) is None
    double = operand._replace(dtype=torch.float64)
    assert host_nodes.kernel_node(work, sample, (double, 4)) is None


def deep(x: Tensor, w: Tensor) -> Tensor:
    """Layers that are alike."""
    for _ in range(5):
        y = torch.relu(x @ w) * 0.5
        x = (y @ w).softmax(-1) + (y.t() @ x).sum()
    return x


def test_launches_with_equal_samples_share_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the recording is that in which each has its own."""
    model = compiled(deep)
    call(model, WARM, deep)
    found = computer()
    launches = [event for event in found._script.events if isinstance(event, LaunchKernel)]
    assert len(set(found._alike.values())) < len(found._alike) == len(launches)
    taken: list[tuple[Any, ...]] = []
    real = Computer.recording

    def recording(self: Computer, inputs: list[Any], alignments: Any) -> Any:
        taken.append((list(inputs), alignments))
        return real(self, inputs, alignments)

    monkeypatch.setattr(Computer, "recording", recording)
    call(model, (17, 2, 8), deep)
    assert len(taken) == 3
    asked = 0

    def node(*launch: Any) -> Any:
        nonlocal asked
        asked += 1
        return found._node(*launch)

    for sizes in taken:
        asked = 0
        shared, slots = found._evaluated(found._script, *sizes, node)
        assert 0 < asked < len(launches)
        asked = 0
        alone, others = found._evaluated(found._script, *sizes, node, alone=True)
        assert asked == len(launches)
        assert slots == others
        assert shared.allocations == alone.allocations
        assert compare.difference(shared, slots, alone, others) is None


def test_a_kernel_that_another_was_captured_for_is_told() -> None:
    """It tells one that is launched otherwise from a capture that recorded more or fewer nodes before it."""

    class Driver:
        def kernel_node(self, *_: Any) -> None: ...

    found, event = Computer(Driver(), work), LaunchKernel(0, "kernel", None, ())  # type: ignore[arg-type]
    told = []
    for name in ("kernel", "other"):
        found._samples[0] = NodeRecord("kernel", name, ("function",), b"")
        with pytest.raises(LaunchedOtherwiseError) as caught:
            found._node(0, event, [])
        told.append(str(caught.value))
    assert told[1] == f"{told[0]}, or other was captured in its place"


def test_a_launch_with_another_sample_has_its_own_node() -> None:
    """Of a sample only what the driver takes of it counts: not the grid, and no bytes that it sets."""

    class Driver:
        def kernel_node(self, kernel: Any, sample: NodeRecord, arguments: Any) -> Any:
            header, params = (sample.header[0], arguments[0]), bytes(8) + sample.params[8:]
            return sample._replace(header=header, params=params), []

    usual = NodeRecord("kernel", "kernel", ("function", 1), b"address0nothing1")
    samples = [
        usual,
        usual._replace(header=("function", 2), params=b"address1nothing1"),
        usual._replace(params=b"address0nothing2"),
        usual._replace(kept=("an attribute",)),
        usual._replace(header=("another function", 1)),
        usual._replace(params=b"address2nothing2"),
        *[usual._replace(structs=((0, i),)) for i in (1, 2, 2)],
        usual,
    ]
    found = Computer(Driver(), work)  # type: ignore[arg-type]
    found._samples = dict(enumerate(samples))
    for number in range(len(samples)):
        event = LaunchKernel(number, "kernel", None, ())
        made, _ = found._node(0, event, [3])
        found._alike[number] = found._first_like(event, [3], made)
    # After four that differ no other one is kept to be compared with.
    assert list(found._alike.values()) == [0, 0, 2, 3, 4, 2, 6, 7, 8, 0]
