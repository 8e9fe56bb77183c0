"""Graphs made by hand, and replicas of execs: nodes that are added are what a capture recorded."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, built, compile_pgraph, explain, randn, report
from torch import Tensor, nn

from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

cu = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
assemble = pytest.importorskip("pgraph.drivers.cuda.assemble", reason="needs cuda-bindings")
drivers = pytest.importorskip("pgraph.drivers.cuda.driver", reason="needs cuda-bindings")
edges = pytest.importorskip("pgraph.drivers.cuda.edges", reason="needs cuda-bindings")
graphs = pytest.importorskip("pgraph.drivers.cuda.graph", reason="needs cuda-bindings")
nodes_of = pytest.importorskip("pgraph.drivers.cuda.nodes", reason="needs cuda-bindings")
check, read_nodes, ordered_nodes = nodes_of.check, nodes_of.read_nodes, edges.ordered_nodes

pytestmark = pytest.mark.gpu


def captured() -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    """A product, a kernel, a copy and a fill, on memory that stays."""
    t = {name: randn(512, 512, dtype=torch.bfloat16) for name in ("a", "b", "product", "copy")}
    t["fill"] = torch.ones(1000, dtype=torch.uint8, device=DEVICE)
    torch.mm(t["a"], t["b"])
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.mm(t["a"], t["b"], out=t["product"])
        t["product"].relu_()
        t["copy"].copy_(t["product"])
        stream = torch.cuda.current_stream().cuda_stream
        check(cu.cuMemsetD8Async(t["fill"].data_ptr(), 7, 1000, stream))
    return graph, t


def test_nodes_are_added_as_they_were_captured() -> None:
    graph, t = captured()
    handles, order = ordered_nodes(cu.CUgraph(graph.raw_cuda_graph()))
    nodes = read_nodes(handles)
    assert {"kernel", "memcpy", "memset"} <= {node.kind for node in nodes}
    made = assemble.assembled(nodes, order, (), 0)
    assert made is not None
    assert read_nodes(made.nodes) == nodes
    want = (t["a"] @ t["b"]).relu()
    for name in ("product", "copy", "fill"):
        t[name].zero_()
    (exec,) = check(cu.cuGraphInstantiate(made.graph, 0))
    check(cu.cuGraphLaunch(exec, torch.cuda.current_stream().cuda_stream))
    torch.cuda.synchronize()
    assert torch.equal(t["product"], want)
    assert torch.equal(t["copy"], want)
    assert bool((t["fill"] == 7).all())
    check(cu.cuGraphExecDestroy(exec))


def test_edges_that_are_no_plain_ones_are_added() -> None:
    """Kernels of cuBLAS that begin before the one before them has ended: here products of one row."""
    x, wide = randn(1, 2048, dtype=torch.bfloat16), randn(2048, 8192, dtype=torch.bfloat16)
    weights = [wide, wide.t().contiguous(), wide[:, :2048].contiguous()] * 2
    graph, y = torch.cuda.CUDAGraph(keep_graph=True), x
    for weight in weights:
        torch.mm(x.new_ones(1, len(weight)), weight)
    with torch.cuda.graph(graph):
        for weight in weights:
            y = torch.mm(y, weight).mul_(0.01)
    handles, order = ordered_nodes(cu.CUgraph(graph.raw_cuda_graph()))
    if not order.odd:
        pytest.skip("no product is launched that way here")
    nodes = read_nodes(handles)
    made = assemble.assembled(nodes, order, (), 0)
    assert made is not None
    assert ordered_nodes(made.graph) == (made.nodes, order)
    graph.replay()
    want = y.clone()
    y.zero_()
    (exec,) = check(cu.cuGraphInstantiate(made.graph, 0))
    check(cu.cuGraphLaunch(exec, torch.cuda.current_stream().cuda_stream))
    torch.cuda.synchronize()
    assert torch.equal(y, want)
    check(cu.cuGraphExecDestroy(exec))


def test_copies_and_fills_with_slots_are_anchored() -> None:
    graph, _ = captured()
    handles, order = ordered_nodes(cu.CUgraph(graph.raw_cuda_graph()))
    nodes = read_nodes(handles)
    moving = [i for i, node in enumerate(nodes) if node.kind in ("memcpy", "memset")]
    offsets = {"memcpy": (48, 136), "memset": (0,)}
    slots = [Slot(i, offset, 0, 0) for i in moving for offset in offsets[nodes[i].kind]]
    made = assemble.assembled(nodes, order, slots, 0)
    assert made is not None
    assert made.anchored
    for i, (mine, theirs) in enumerate(zip(read_nodes(made.nodes), nodes, strict=True)):
        assert (mine == theirs) == (i not in moving)


def test_a_graph_that_reads_back_as_another_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = captured()
    handles, order = ordered_nodes(cu.CUgraph(graph.raw_cuda_graph()))
    nodes = read_nodes(handles)
    at = next(i for i, node in enumerate(nodes) if node.kind == "kernel")

    def read(handles: Sequence[int]) -> Sequence[NodeRecord]:
        found = list(read_nodes(handles))
        function, grid, *others = found[at].header
        header = (function, (grid[0] + 1, *grid[1:]), *others)
        found[at] = NodeRecord("kernel", found[at].name, header, found[at].params, found[at].structs)
        return found

    monkeypatch.setattr(assemble, "read_nodes", read)
    assert assemble.assembled(nodes, order, (), 0) is None


class Copying(nn.Module):
    """A product, and a copy that ATen makes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).clone().relu().clone()


@pytest.mark.parametrize(("rows", "small"), [(64, True), (1024, False)])
def test_replicas_look_for_memory_where_copies_are_large(
    rows: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 and 1,024 KB. To be told of all the allocator's memory takes longer than a replica."""
    real, looks = graphs.snapshot.segments, []

    def segments() -> Any:
        looks.append(1)
        return real()

    monkeypatch.setattr(drivers.CudaDriver, "mark", lambda _: lambda: True)  # others may keep the device busy
    blocks = [Copying().to(DEVICE) for _ in range(4)]
    compiled = [compile_pgraph(block, codegen="aten", dynamic=False) for block in blocks]
    x = randn(rows, 256)
    with torch.no_grad():
        want = x
        for block in blocks:
            want = block(want)
        for step in range(80):
            if step == 3:
                monkeypatch.setattr(graphs, "snapshot", SimpleNamespace(segments=segments))
            got = x
            for part in compiled:
                got = part(got)
    torch.testing.assert_close(got, want, rtol=5e-3, atol=5e-4)
    assert max(1 + len(recipe._others) for b in built() for recipe in b.recipes) >= 4, explain()
    assert bool(looks) != small, explain()


def test_replicas_when_what_copies_were_anchored_at_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator may have given it back long since: replicas need another place."""
    real, anchors = graphs.ordinary_range, []

    def gone_soon(copies: Any, device: int) -> tuple[int, Any]:
        address = int(check(cu.cuMemAlloc(1 << 22))[0])
        anchors.append(address)
        return address, None

    monkeypatch.setattr(graphs, "ordinary_range", gone_soon)
    monkeypatch.setattr(drivers.CudaDriver, "mark", lambda _: lambda: True)  # others may keep the device busy
    blocks = [Copying().to(DEVICE) for _ in range(4)]
    compiled = [compile_pgraph(block, codegen="aten", dynamic=False) for block in blocks]

    def run(parts: Sequence[Any], x: Tensor) -> Tensor:
        with torch.no_grad():
            for part in parts:
                x = part(x)
        return x

    x = randn(64, 256)
    want = run(blocks, x)
    for _ in range(3):
        run(compiled, x)
    assert anchors, explain()
    for address in anchors:
        check(cu.cuMemFree(address))
    monkeypatch.setattr(graphs, "ordinary_range", real)
    for _ in range(80):
        got = run(compiled, x)
    torch.testing.assert_close(got, want, rtol=5e-3, atol=5e-4)
    execs = [1 + len(recipe._others) for b in built() for recipe in b.recipes]
    assert max(execs) >= 4, explain()
    assert report().captures == 1
