"""How fast a launched graph runs on the device, against the same graph prepared in other ways."""

from __future__ import annotations

import statistics

import pytest
import torch
from gpu_helpers import assert_launched, built, compile_pgraph, explain, randn

# They need cuda-bindings, which a CPU build of torch does not bring.
cu = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
execs = pytest.importorskip("pgraph.drivers.cuda.exec", reason="needs cuda-bindings")
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
    assert isinstance(recipe, execs.CudaRecipe)
    exec = recipe.exec
    (early,) = check(cu.cuGraphInstantiate(exec._source.graph, 0))
    for node, setting in zip(exec.nodes, recipe._settings, strict=True):
        assert execs._calls()[0][0](int(early), node.node, setting.params) == 0
    stream = torch.cuda.current_stream().cuda_stream
    times: dict[str, list[float]] = {"ours": [], "early": []}
    for _ in range(9):
        times["ours"].append(_ms(exec._exec, stream))
        times["early"].append(_ms(early, stream))
    check(cu.cuGraphExecDestroy(early))
    ours, slow = (statistics.median(times[name][2:]) for name in ("ours", "early"))
    assert ours < 0.98 * slow, f"10 launches: {ours:.3f} ms, set before the upload {slow:.3f} ms{explain()}"
