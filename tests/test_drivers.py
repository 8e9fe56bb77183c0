"""Which driver serves which tensors, and what is said where there is none."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import same
from torch._subclasses import FakeTensorMode

import pgraph
from pgraph.capture.patches import patched
from pgraph.drivers import choice
from pgraph.drivers.host.arena import HostArena
from pgraph.drivers.host.driver import HostDriver
from pgraph.errors import DriverError

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def fn(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).cumsum(0)


@pytest.fixture
def unnoticed() -> Iterator[None]:
    before, choice._noticed = choice._noticed, False
    yield
    choice._noticed = before


@pytest.mark.usefixtures("unnoticed")
def test_cpu_tensors_run_plainly_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    """auto: nothing to capture, results as ever, one line that names the way to try it."""
    with caplog.at_level("WARNING", "pgraph"):
        for f in (fn, lambda x: x + 1):
            compiled = torch.compile(f, backend="pgraph", options={"codegen": "aten"})
            for _ in range(3):
                x = torch.randn(4)
                same(compiled(x), f(x))
    (notice,) = [r.getMessage() for r in caplog.records if r.name.startswith("pgraph")]
    assert "'driver': 'host'" in notice
    assert pgraph.report().capturable == ()


@no_cuda
def test_cuda_without_cuda_is_an_error_that_names_the_fix() -> None:
    compiled = torch.compile(fn, backend="pgraph", options={"driver": "cuda", "codegen": "aten"})
    with pytest.raises(Exception, match="use driver='host'") as caught:
        compiled(torch.randn(4))
    chain, error = [], caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__cause__ or getattr(error, "inner_exception", None)
    assert DriverError in chain


def graph_on(*devices: str) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    nodes = []
    for i, device in enumerate(devices):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = torch.empty(2, device="meta") if device == "meta" else torch.empty(2)
        nodes.append(node)
    graph.output(tuple(nodes))
    return torch.fx.GraphModule({}, graph)


def test_one_driver_per_device() -> None:
    first = choice.choose("host", graph_on("cpu"))
    assert isinstance(first, HostDriver)
    assert choice.choose("host", graph_on("cpu", "cpu")) is first


def test_a_graph_without_tensors_counts_as_the_cpus() -> None:
    assert isinstance(choice.choose("host", graph_on()), HostDriver)


def test_the_host_driver_leaves_other_devices_alone() -> None:
    assert choice.choose("host", graph_on("meta")) is None


def test_the_device_that_is_not_captured_is_named() -> None:
    """No driver=host where that is given already, or would not help."""
    for options in ({"driver": "host"}, {}):
        compiled = torch.compile(fn, backend="pgraph", options={"codegen": "aten", **options})
        compiled(torch.randn(4, device="meta"))
        (reason,) = pgraph.report().partitions[-1].reasons
        assert reason.code == "no-device"
        assert "on the device meta" in reason.sentence
        assert "host" not in reason.fix
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "environment", "said"),
    [
        ("cudaMallocAsync", {}, "leave backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF"),
        ("pluggable", {}, "leave torch.cuda.memory.change_current_allocator out"),
        ("native", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ],
)
def test_nothing_is_captured_with_another_allocator(
    backend: str, environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op would be refused by itself, after a capture that was lost."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, device="cuda:0")
    graph.output(x)
    gm = torch.fx.GraphModule({}, graph)
    monkeypatch.setattr(choice, "_get", lambda device: device)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    assert str(choice.choose("auto", gm)) == "cuda:0"
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for wanted in ("auto", "cuda"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert choice.choose(wanted, gm) is None
        reason = choice.why_none(wanted, gm)
        assert (reason.code, reason.fix.startswith(said)) == ("other-allocator", True), reason
    assert choice.why_none("host", gm).code == "no-device"


def test_the_host_arena_ends() -> None:
    """Its addresses are its own, never twice the same, and run out with an error."""
    arena = HostArena(0)
    try:
        taken = [arena.take(1000, phase) for phase in (0, 16, 0)]
        assert [a % 256 for a in taken] == [0, 16, 0]
        assert all(b - a >= 1000 + arena.guard for a, b in itertools.pairwise(taken))
        assert all(arena.holds(a) for a in taken)
        assert not arena.holds(arena.high)
        with pytest.raises(DriverError, match="do not fit"):
            arena.take(1 << 43)
        assert arena.take(8) > taken[-1]
    finally:
        arena.close()


def test_living_objects_of_a_class_are_found() -> None:
    """What keeps a capture from freeing another graph's workspace: subclasses count, dead objects do not."""
    pytest.importorskip("cuda.bindings.driver")
    from pgraph.drivers.cuda.workspaces import instances

    class Base:
        pass

    class Derived(Base):
        pass

    class Further(Derived):
        pass

    held = [Base(), Derived(), Further()]
    assert {id(thing) for thing in instances(Base)} == {id(thing) for thing in held}
    assert instances(Further) == held[2:]
    del held[0]
    assert len(instances(Base)) == 2


def test_replacements_are_for_the_thread_that_captures() -> None:
    """Another one, in the middle of the same code, goes on as before (Note [Other threads run on])."""
    namespace: dict[str, Any] = {"empty": lambda size: f"real {size}", "other": 1}
    real = namespace["empty"]
    with patched(namespace, {"empty": lambda size: f"ghost {size}"}):
        during = namespace["empty"]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(during, 3).result() == "real 3"
        assert during(3) == "ghost 3"
    assert namespace == {"empty": real, "other": 1}


def test_a_driver_that_lends_no_workspace_says_so() -> None:
    driver = HostDriver()
    assert not driver.lends_workspace(1)
    with pytest.raises(DriverError, match="driver host lends no workspace"):
        driver.workspace(0, 1)
