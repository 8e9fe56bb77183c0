"""One refused op costs one op: pgraph splits the graph around it by itself."""

from __future__ import annotations

import gc
import json
import logging
import pathlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import TIGHT, copies, host, launching, same, train
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import pgraph
from pgraph.compiler import compile_graph, resplit
from pgraph.compiler.strides import as_before, keep_strides
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.errors import FullCaptureError
from pgraph.partition.extract import extract
from pgraph.partition.scan import scan
from pgraph.reasons import Reason
from pgraph.runtime import registry

MEMORY = ((0x5000_0000_0000, 1 << 20),)
HIDDEN = 0x5000_0000_0040  # in MEMORY


def refusing(*ops: str) -> HostFaults:
    """These cannot be recorded."""
    return HostFaults(refused=frozenset(ops))


def hiding(*ops: str) -> HostFaults:
    """The kernels of these hold a pointer that is no argument."""
    return HostFaults(padded=frozenset(ops), pointer_constant=HIDDEN, framework=MEMORY)


def moving(*ops: str) -> HostFaults:
    """A word of these points into the framework's memory, elsewhere in each capture."""
    return HostFaults(padded=frozenset(ops), moving_words=(HIDDEN, HIDDEN + 64), framework=MEMORY)


def around(x: Tensor) -> Tensor:
    x = (x * 2).sin() + 1
    x = x.cumsum(0)
    return (x + 1).exp() * 0.5


@torch.library.custom_op("pgraph_resplit::tenfold", mutates_args=())
def tenfold(x: Tensor) -> Tensor:
    """Nobody has said that it cannot be captured."""
    return x * 10


@tenfold.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


tenfold.register_autograd(lambda ctx, grad: tenfold(grad), setup_context=lambda ctx, inputs, output: None)


def run(compiled: Any, fn: Callable[..., Any], make: Callable[[], Tensor], calls: int = 5) -> None:
    """Calls on new inputs, each compared with eager."""
    for _ in range(calls):
        x = make()
        same(compiled(x), fn(*copies([x])))


def states() -> list[tuple[str, str]]:
    """(name without kind and number, state) of all parts."""
    return [(p.name.partition(", ")[2], p.state) for p in pgraph.report().partitions]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("faults", [refusing, hiding, moving])
def test_the_rest_is_captured(faults: Callable[..., HostFaults], caplog: pytest.LogCaptureFixture) -> None:
    """An op in the middle; what it costs is said, and everything else is launched."""

    def fn(x: Tensor) -> Tensor:
        x = (x * 2).sin() + 1
        x = tenfold(x)
        return (x + 1).exp() * 0.5

    compiled = host(fn)
    with inject(faults("tenfold")), caplog.at_level("WARNING", "pgraph"):
        run(compiled, fn, lambda: torch.randn(6, 3))
        with launching(4):
            run(compiled, fn, lambda: torch.randn(6, 3), 2)
    assert states() == [
        ("partition 0", "captured"),
        ("partition 1", "uncaptured"),
        ("partition 2", "captured"),
    ]
    report = pgraph.report()
    assert (report.splits, report.refused) == (1, 0)
    assert report.split_s > 0
    assert [p.splits for p in report.partitions] == [1, 0, 0]
    assert [p.facts.device_ops for p in report.partitions] == [3, 1, 3]
    ((name, (reason,)),) = report.outside
    assert name.endswith("partition 1")
    assert reason.where is not None
    assert reason.where.startswith(__file__)
    assert "pgraph split the graph around it by itself" in reason.sentence
    assert ", 1 split in " in report.summary()
    as_data = json.loads(json.dumps(report.to_dict()))
    assert (as_data["splits"], as_data["partitions"][0]["splits"], as_data["partitions"][1]["splits"]) == (
        1,
        1,
        0,
    )
    assert as_data["split_s"] == as_data["partitions"][0]["split_s"] > 0
    (warning,) = told(caplog)
    assert "was split in" in warning
    assert "pgraph_resplit::tenfold" in warning


@pytest.mark.parametrize("faults", [refusing, hiding, moving])
def test_forward_and_backward(faults: Callable[..., HostFaults]) -> None:
    """Each graph is split for itself; gradients are eager's."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(tenfold(self.a(x).sin()).tanh())

    model = Model()
    compiled = host(model)
    with inject(faults("tenfold")):
        for _ in range(6):
            x = torch.randn(3, 8)
            same(train(model, compiled, x), train(model, model, x))
    report = pgraph.report()
    assert (report.splits, report.refused) == (2, 0)
    assert [p.facts.graph.kind for p in report.partitions] == ["forward"] * 3 + ["backward"] * 3
    assert [p.state for p in report.partitions] == ["captured", "uncaptured", "captured"] * 2


def test_a_part_of_a_split_graph() -> None:
    """Names tell which part was split."""

    def fn(x: Tensor) -> Tensor:
        return around(around(x).tan()).cos()

    compiled = host(fn)
    pgraph.mark_unsafe("aten::tan", "is said to be so", "none")
    try:
        with inject(hiding("cumsum")):
            run(compiled, fn, lambda: torch.randn(6, 3))
    finally:
        pgraph.unmark_unsafe("aten::tan")
    assert [name for name, _ in states()] == [
        f"partition {n}" for n in ("0.0", "0.1", "0.2", "1", "2.0", "2.1", "2.2")
    ]
    report = pgraph.report()
    assert report.splits == 2
    (graph,) = {p.facts.graph for p in report.partitions}
    assert sum(step.ops for step in graph.op_runs) == sum(p.facts.device_ops for p in report.partitions)
    codes = [step.reason.code if step.reason else None for step in graph.op_runs]
    assert codes.count("hidden-pointer") == 2


def test_explain_tells(capsys: pytest.CaptureFixture[str]) -> None:
    """Reason, line and cost, and what would be won without the op."""
    with inject(refusing("cumsum")):
        found = pgraph.explain(around, driver="host", codegen="aten", min_ops=1)(torch.randn(6, 3))
    assert found.device_ops == (6, 7)
    assert [p.state for p in found.partitions] == ["captured", "uncaptured", "captured"]
    (change,) = found.changes
    assert (change.ops, change.graphs, change.reason.code) == (1, 2, "capture-failed")
    text = found.render(times=False)
    assert "split by pgraph itself 1 time\n" in text
    assert "x = x.cumsum(0)" in text
    assert "split by pgraph itself 1 time, in " in str(found)
    assert found.to_dict()["partitions"][0]["splits"] == 1
    found.to_html()


def test_three_times_at_most(caplog: pytest.LogCaptureFixture) -> None:
    """What is left then runs uncaptured, and its reason says that there were three splits."""
    ops = ("sin", "cumsum", "tanh", "exp", "cos")

    def fn(x: Tensor) -> Tensor:
        for op in ops:
            x = torch.cumsum(x, 0) if op == "cumsum" else getattr(torch, op)(x)
            x = (x * 2 + 1) * x + 3
        return x

    compiled = host(fn)
    with inject(refusing(*ops)), caplog.at_level("WARNING", "pgraph"):
        run(compiled, fn, lambda: torch.rand(6, 3), 9)
    report = pgraph.report()
    assert (report.splits, report.refused) == (3, 1)
    (reason,) = [p.reason for p in report.partitions if p.reason]
    assert "pgraph has split the graph 3 times already" in reason.sentence
    assert "aten::exp" in reason.sentence
    assert sum(p.state == "captured" for p in report.partitions) == 2
    assert sum("was split" in text for text in told(caplog)) == 3
    assert sum("runs uncaptured" in text for text in told(caplog)) == 1


def test_what_looks_alike_goes_at_once() -> None:
    """The same op with the same shapes, wherever it stands; with other shapes it is found the next time."""

    def fn(x: Tensor, weights: list[Tensor]) -> Tensor:
        for w in weights:
            x = ((x @ w).sin() + 1) * 2
        return x

    compiled = host(fn)
    square, wide = torch.randn(4, 4), (torch.randn(4, 6), torch.randn(6, 5), torch.randn(5, 4))
    with inject(hiding("mm")):
        for _ in range(6):
            x = torch.randn(3, 4)
            same(compiled(x, [square, square, square]), fn(x, [square, square, square]))
        assert pgraph.report().splits == 1
        assert sum(p.state == "captured" for p in pgraph.report().partitions) == 3
        weights = [square, *wide, square]
        for _ in range(6):
            x = torch.randn(3, 4)
            same(compiled(x, weights), fn(x, weights))
    later = [p for p in pgraph.report().partitions if p.facts.graph.number > 0][-10:]
    assert sum(p.splits for p in later) == 2
    assert not [p for p in later if p.reason]


def test_hard_mode_raises_as_before() -> None:
    """Before anything has run, and no second compilation."""
    compiled = host(around, require_full_capture=True)
    with inject(refusing("cumsum")):
        x = torch.randn(6, 3)
        compiled(x)
        for _ in range(2):
            with pytest.raises(FullCaptureError, match=r"aten::cumsum"):
                compiled(x)
    assert pgraph.report().splits == 0


def test_nothing_is_won() -> None:
    """Too little is left around the op: the partition runs uncaptured, its reason as it was."""
    compiled = host(around, min_ops=5)
    with inject(refusing("cumsum")):
        run(compiled, around, lambda: torch.randn(6, 3))
    (partition,) = pgraph.report().partitions
    assert (partition.state, partition.splits) == ("refused", 0)
    assert "split" not in partition.reason.sentence


def test_refused_pieces_give_way_to_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    """A split that did not help is taken back, and the reason says so."""
    compiled = host(around)
    with caplog.at_level("WARNING", "pgraph"):
        with inject(refusing("cumsum")):
            run(compiled, around, lambda: torch.randn(6, 3), 2)
        assert len(pgraph.report().partitions) == 3
        with inject(HostFaults(fail_at="begin", fail_as="lost")):
            run(compiled, around, lambda: torch.randn(6, 3), 4)
    (partition,) = pgraph.report().partitions
    assert (partition.state, partition.splits, partition.facts.device_ops) == ("refused", 1, 7)
    assert "no part of it could be captured" in partition.reason.sentence
    assert [(step.ops, step.reason) for step in partition.facts.graph.op_runs] == [(7, None)]
    assert told(caplog)[-1].endswith(str(partition.reason))
    run(compiled, around, lambda: torch.randn(6, 3), 3)
    assert pgraph.report().partitions[0].uncaptured_runs == partition.uncaptured_runs + 3


def test_a_split_that_fails_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that runs already goes on."""
    compiled = host(around)
    run(compiled, around, lambda: torch.randn(6, 3), 1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("injected: no compiler today")

    monkeypatch.setattr(resplit, "extract", fails)
    with inject(refusing("cumsum")):
        run(compiled, around, lambda: torch.randn(6, 3), 4)
    (partition,) = pgraph.report().partitions
    assert partition.state == "refused"
    assert "to split the graph around it failed: AssertionError: injected" in partition.reason.sentence


def sources() -> list[weakref.ref[Any]]:
    return [weakref.ref(p.admission.piece._splitter) for p in registry.live_capturable() if p.admission.piece]


@pytest.mark.parametrize("op", [None, "cumsum"])
def test_the_source_goes_when_all_is_decided(op: str | None) -> None:
    """A graph and its example inputs are held for as long as they may be needed."""
    compiled = host(around)
    run(compiled, around, lambda: torch.randn(6, 3), 1)
    (source,) = sources()
    gc.collect()
    gc.disable()
    try:
        with inject(refusing(op) if op else HostFaults()):
            run(compiled, around, lambda: torch.randn(6, 3), 1)
            if op:
                assert source() is not None
                assert len(pgraph.report().partitions) == 3, "the old parts are gone"
                run(compiled, around, lambda: torch.randn(6, 3), 1)
        assert source() is None
        assert not sources()
    finally:
        gc.enable()


def test_a_captured_size_rules_a_split_out() -> None:
    """Dynamic sizes: one is captured, then another is refused, which runs uncaptured."""
    compiled = host(around, dynamic=True)
    run(compiled, around, lambda: torch.randn(6, 3))
    with inject(refusing("cumsum")):
        run(compiled, around, lambda: torch.randn(7, 3))
    (partition,) = pgraph.report().partitions
    assert (partition.captures, partition.splits) == (1, 0)
    assert partition.reason is not None


def test_dynamic_sizes() -> None:
    """The pieces serve every size."""
    compiled = host(around, dynamic=True)
    with inject(refusing("cumsum")):
        for n in (6, 6, 6, 7, 7, 7, 9, 6, 7):
            run(compiled, around, lambda n=n: torch.randn(n, 3), 1)
    assert [state for _, state in states()] == ["captured", "uncaptured", "captured"]
    assert [p.captures for p in pgraph.report().capturable] == [2, 2]


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(dynamic: bool, inductor_cache: pathlib.Path) -> None:
    """Fused code is compiled again in pieces; a product that Inductor calls by another name is found."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x.sin() * 2).relu()
            x = torch.cumsum(tenfold(x), 1).tanh() * 2
            return self.b(x).exp()

    model = Model()
    compiled = host(model, "inductor", dynamic=dynamic)
    with inject(hiding("tenfold")):
        for _ in range(5):
            x = torch.rand(3, 8) / 20
            same(train(model, compiled, x), train(model, model, x), **TIGHT)
        with launching(4):
            x = torch.rand(3, 8) / 20
            same(train(model, compiled, x), train(model, model, x), **TIGHT)
    report = pgraph.report()
    assert (report.splits, report.refused) == (2, 0)
    assert sum(p.state == "captured" for p in report.partitions) == 4


def test_threads_split_once() -> None:
    """Threads that meet the refusal together: one splits, the others go on."""
    compiled = host(around)
    run(compiled, around, lambda: torch.randn(6, 3), 1)
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            with inject(refusing("cumsum")):
                barrier.wait()
                run(compiled, around, lambda: torch.randn(6, 3), 20)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert pgraph.report().splits == 1
    with launching(2):
        run(compiled, around, lambda: torch.randn(6, 3), 2)


def test_a_refused_partition_does_not_search_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one of which a size is refused, at that size: running uncaptured costs the plain code."""
    for dynamic in (False, True):
        compiled = host(around, dynamic=dynamic)
        with inject(HostFaults(fail_at="begin", fail_as="lost")):
            run(compiled, around, lambda: torch.randn(6, 3), 3)
        (runner,) = registry.live_capturable()[-1:]
        plain = runner.stats.uncaptured_runs
        with monkeypatch.context() as patch:
            patch.setattr(runner.admission, "choose", lambda *args, **kwargs: pytest.fail("it searched"))
            run(compiled, around, lambda: torch.randn(6, 3), 3)
        assert runner.stats.uncaptured_runs == plain + 3
        pgraph.reset()
        run(compiled, around, lambda: torch.randn(6, 3), 1)
        with launching(1):
            run(compiled, around, lambda: torch.randn(6, 3), 1)


def test_strides_are_those_of_the_whole() -> None:
    """A result that a piece lays out otherwise is copied into the strides that its readers expect."""
    x = torch.randn(4, 6)

    def mine(args: list[Any]) -> tuple[Any, ...]:
        return (args.pop() + 1, 3)

    (result, number) = keep_strides(mine, (), (), {0: (1, 4)})([x])
    assert (result.stride(), number) == ((1, 4), 3)
    same(result, x + 1)


class Told:
    """Code that tells the strides of its results, as Inductor's does."""

    def __init__(self, *strides: tuple[str, ...]) -> None:
        self.output_strides = list(strides)


def test_which_results_are_copied() -> None:
    """Those whose strides differ or are not told; where a copy would not do, there is no split."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x + 1
        return y, y.cumsum(0) * 2, y.t()

    gm = make_fx(fn, tracing_mode="fake")(torch.randn(4, 6))
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    cumsum = next(node for node in nodes if node.target is torch.ops.aten.cumsum.default)
    partitions = scan(
        gm.graph, lambda node: Reason("marked", "no", "no") if node is cumsum else None, min_ops=1
    )
    split = extract(gm, partitions)
    pieces = [
        Told(*[tuple(map(str, n.meta["val"].stride())) for n in call.module.graph.output_node().args[0]])
        for call in split.calls
    ]

    def code(args: list[Any]) -> Any:
        return [args[0], args[0] * 2, args[0].t()]

    whole = Told(("6", "1"), ("6", "1"), ("1", "6"))
    assert as_before(code, split, whole, pieces) is code
    x = torch.randn(4, 6)
    changed = Told(("6", "1"), ("1", "4"), ("1", "6"))
    same(as_before(code, split, changed, pieces)([x]), (x, x * 2, x.t()))
    got = as_before(code, split, changed, pieces)([x])
    assert [t.stride() for t in got] == [(6, 1), (1, 4), (1, 6)]
    assert as_before(code, split, object(), pieces) is code, "else the trace's are promised"
    for strides in ((("6", "1"), ("s0", "1"), ("1", "6")), (("6", "1"), ("6", "1"), ("4", "1"))):
        with pytest.raises(Exception, match=r"result \d might have other strides"):
            as_before(code, split, Told(*strides), pieces)


def test_sizes_that_nobody_checks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that assumes more of the sizes than the guards promise: its code is not used."""
    compiled = host(around, dynamic=True)
    run(compiled, around, lambda: torch.randn(6, 3), 1)
    compile_partition = compile_graph.compat.boxed_module

    def assuming(module: Any) -> Any:
        values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        assert next(v for v in values if isinstance(v, Tensor)).size(0) > 5
        return compile_partition(module)

    with monkeypatch.context() as patch, inject(refusing("cumsum")):
        patch.setattr(compile_graph.compat, "boxed_module", assuming)
        run(compiled, around, lambda: torch.randn(6, 3), 4)
    run(compiled, around, lambda: torch.randn(3, 3), 1)
    (partition,) = pgraph.report().partitions
    assert "right for some sizes only" in partition.reason.sentence
