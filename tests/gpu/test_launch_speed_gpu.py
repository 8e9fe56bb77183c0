"""How fast a launched graph runs on the device, against the same graph prepared in other ways; what other
sizes cost. Run alone on the GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, assert_launched, built, compile_pgraph, explain, randn
from test_computed_gpu import NEW, WARM, WIDE, Layers, step
from torch import Tensor

from pgraph.runtime import admission

# They need cuda-bindings, which a CPU build of torch does not bring.
cu = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
execs = pytest.importorskip("pgraph.drivers.cuda.exec", reason="needs cuda-bindings")
recipes = pytest.importorskip("pgraph.drivers.cuda.recipe", reason="needs cuda-bindings")
check = pytest.importorskip("pgraph.drivers.cuda.nodes", reason="needs cuda-bindings").check


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(200):
        x = torch.sin(x)
    return x


def _ms(exec: int, stream: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)
    begin.record()
    for _ in range(10):
        check(cu.cuGraphLaunch(exec, stream))
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def test_nodes_are_set_after_the_upload() -> None:
    """Note [Uploaded before the first change]: an exec whose nodes were set before is slower for good."""
    compiled = compile_pgraph(_chain, codegen="aten")
    keep = [randn(256, 256) for _ in range(4)]
    for x in keep:
        compiled(x)
    assert_launched(2)
    (recipe,) = (r for b in built() for r in b.recipes)
    assert isinstance(recipe, recipes.CudaRecipe)
    exec = recipe.exec
    (early,) = check(cu.cuGraphInstantiate(exec._source.graph, 0))
    for node, setting in zip(exec.nodes, recipe._settings, strict=True):
        assert execs._calls()[0][0](int(early), node.node, recipe._params_of(setting)) == 0
    stream = torch.cuda.current_stream().cuda_stream
    times: dict[str, list[float]] = {"ours": [], "early": []}
    for _ in range(9):
        times["ours"].append(_ms(exec._exec, stream))
        times["early"].append(_ms(early, stream))
    check(cu.cuGraphExecDestroy(early))
    ours, slow = (statistics.median(times[name][2:]) for name in ("ours", "early"))
    assert ours < 0.98 * slow, f"10 launches: {ours:.3f} ms, set before the upload {slow:.3f} ms{explain()}"


def test_a_change_of_sizes_costs_little_and_leaves_the_graph_fast() -> None:
    """Each node that takes other dimensions costs the host 1.5 us. Launched alone, kernels of 1.7 us take
    0.1 us more in the shared exec than in one of the size's own."""
    compiled = compile_pgraph(_chain, dynamic=True, codegen="aten")
    inputs = {n: randn(n, 64) for n in (256, 300)}
    for x in (*inputs.values(), *inputs.values()):
        compiled(x)
        compiled(x)
    assert_launched(2)
    recipes = [r for b in built() for r in b.recipes]
    assert len({r.exec for r in recipes}) == 1
    nodes = len(recipes[0].exec.nodes)

    def host_us(order: list[Tensor]) -> float:
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for x in order:
                compiled(x)
            times.append((time.perf_counter() - began) / len(order) * 1e6)
        return statistics.median(times)

    one, two = inputs.values()
    same, turns = host_us([one, one]), host_us([one, two])
    assert turns - same < 3.0 * nodes, f"{turns:.0f} us in turns, {same:.0f} us of one size"

    own = compile_pgraph(lambda x: _chain(x), dynamic=False, codegen="aten")
    for _ in range(3):
        own(two)

    def device_ms(fn: Any) -> float:
        times = []
        for _ in range(9):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(10_000_000)  # longer than the host takes for the launches
            begin.record()
            for _ in range(10):
                fn(two)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times[2:])

    compiled(one)
    shared, alone = device_ms(compiled), device_ms(own)
    assert shared < 1.1 * alone, f"10 launches: {shared:.3f} ms shared, {alone:.3f} ms alone{explain()}"


def test_what_a_new_size_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a capture: seconds per node of both, the median. In float32: cuDNN's attention, which takes
    none, plans each size for tens of ms, in the uncaptured run before a capture or while one is computed."""
    spent: dict[bool, list[float]] = {False: [], True: []}
    real: Callable[..., Any] = admission.build

    def timed(*args: Any, **kwargs: Any) -> Any:
        built = real(*args, **kwargs)
        if built is not None:
            spent[built.computed].append(1e6 * built.seconds / len(built.template.nodes))
        return built

    monkeypatch.setattr(admission, "build", timed)
    model = Layers().to(DEVICE)
    compiled = compile_pgraph(model, dynamic=True, step_aside=False)
    for n in (*WARM, *NEW, *range(200, 240)):
        step(compiled, randn(n, WIDE), train=True)
    assert spent[True], explain()
    captured, computed = (statistics.median(spent[which]) for which in (False, True))
    assert computed < captured, f"us per node: captured {captured:.1f}, computed {computed:.1f}"
