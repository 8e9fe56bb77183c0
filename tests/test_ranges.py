"""What a profiler shows of pgraph: a range per uncaptured run, capture and launch, named after the module."""

from __future__ import annotations

import re
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from support import MLP, host, same, train
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pgraph.ops.safety import mark_unsafe, unmark_unsafe
from pgraph.runtime import profiler as ranges


class Net(nn.Module):
    """Two equal layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])
        self.head = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.head(layer(x))
        return x


class Cut(nn.Module):
    """A layer, an op that stays outside, and another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(self.first(x)).repeat(1, 2))


def seen(profiler: Any) -> Counter[str]:
    """The ranges of pgraph's, without the numbers of graph and part."""
    names = [e.name for e in profiler.events() if e.name.startswith("pgraph::")]
    return Counter(re.sub(r"(forward|backward|inference|partition) \d+", r"\1", name) for name in names)


def run(call: Any, times: int) -> Any:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(times):
            call()
    return profiler


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_each_step_has_a_range(codegen: str, inductor_cache: object) -> None:
    """Forward and backward: one uncaptured run, one capture, two launches."""
    model = MLP()
    compiled = host(model, codegen)
    profiler = run(lambda: train(model, compiled, torch.randn(3, 8)), 3)
    assert seen(profiler) == {
        "pgraph::uncaptured forward: MLP": 1,
        "pgraph::capture forward: MLP": 1,
        "pgraph::launch forward: MLP": 2,
        "pgraph::uncaptured backward: MLP": 1,
        "pgraph::capture backward: MLP": 1,
        "pgraph::launch backward: MLP": 2,
    }


def test_ops_lie_inside_the_range() -> None:
    """What the launch runs is attributed to it."""
    compiled = host(MLP())
    for _ in range(2):
        compiled(torch.randn(3, 8))
    profiler = run(lambda: compiled(torch.randn(3, 8)), 1)
    (launch,) = [e for e in profiler.events() if e.name.startswith("pgraph::launch")]
    assert "aten::addmm" in {child.name for child in launch.cpu_children}


def test_parts_are_named_after_their_module() -> None:
    mark_unsafe("aten::sin", "is marked by a test", "unmark it")
    try:
        compiled = host(Cut())
        profiler = run(lambda: compiled(torch.randn(3, 8)), 2)
    finally:
        unmark_unsafe("aten::sin")
    found = seen(profiler)
    assert found["pgraph::launch forward, partition: MLP first"] == 1
    # The marked op belongs to the whole, and the last part begins with an op that does.
    assert found["pgraph::uncaptured forward, partition: Cut"] == 2 + 1
    assert found["pgraph::launch forward, partition: Cut"] == 1


def test_a_whole_model_is_named_by_its_class_and_a_function_by_its_name() -> None:
    def doubled(x: Tensor) -> Tensor:
        return (x * 2).cumsum(0)

    net, function = host(Net()), host(doubled)
    profiler = run(lambda: (net(torch.randn(3, 8)), function(torch.randn(3))), 1)
    assert set(seen(profiler)) == {"pgraph::uncaptured forward: Net", "pgraph::uncaptured inference: doubled"}


def test_a_layer_in_a_function_has_its_path() -> None:
    net = Net()
    compiled = host(lambda x: net.layers[1](x))
    profiler = run(lambda: compiled(torch.randn(3, 8)), 1)
    assert set(seen(profiler)) == {"pgraph::uncaptured forward: MLP layers.1"}


def test_nothing_is_opened_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(ranges, "record_function", lambda name: opened.append(name))
    model = MLP()
    compiled = host(model)
    for _ in range(4):
        train(model, compiled, torch.randn(3, 8))
    assert opened == []


def test_results_and_counts_are_the_same_under_a_profiler() -> None:
    model = MLP()
    compiled = host(model)
    with profile(activities=[ProfilerActivity.CPU]):
        for _ in range(3):
            x = torch.randn(3, 8)
            same(train(model, compiled, x), train(model, model, x))


def test_ranges_in_other_threads() -> None:
    """A thread that the profiler does not follow runs all the same."""
    compiled, results = host(MLP()), []
    for _ in range(2):
        compiled(torch.randn(3, 8))
    x = torch.randn(3, 8)
    with profile(activities=[ProfilerActivity.CPU]):
        thread = threading.Thread(target=lambda: results.append(compiled(x)))
        thread.start()
        thread.join()
    same(results[0], compiled(x))
