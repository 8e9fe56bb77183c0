"""Traps that a prototype fell into on a real GPU; each check is shown to fail without its cure.

A control never launches a graph that could write out of bounds: it looks at recordings and templates.
Other hazards: aliasing and alignment in `test_inputs_gpu`, random numbers in `test_models`, a table of
pointers on the device (grouped products) in `test_ops_gpu`, failed captures in `test_failures_gpu`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_helpers import (
    DEVICE,
    Shaker,
    assert_launched,
    assert_same,
    built,
    check,
    compile_pgraph,
    explain,
    finish,
    index,
    partitions,
    python,
    randn,
    same_bits,
    templates,
)
from llama import Llama, LlamaConfig
from torch import Tensor

from pgraph.capture import record
from pgraph.drivers import choice
from pgraph.native import ghosts, libraries
from pgraph.runtime import admission
from pgraph.template import match

# They need cuda-bindings, which a CPU build of torch does not bring.
cu = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
cuda_session = pytest.importorskip("pgraph.drivers.cuda.session", reason="needs cuda-bindings")
cuda_ghost = pytest.importorskip("pgraph.drivers.cuda.ghost", reason="needs cuda-bindings")
cuda_nodes = pytest.importorskip("pgraph.drivers.cuda.nodes", reason="needs cuda-bindings")

pytestmark = pytest.mark.gpu


def test_whole_llama_equals_inductor_over_many_steps() -> None:
    """Hazard 1, as it was met: attention's scratch, four layers, forward and backward in one piece."""
    config = LlamaConfig(dim=256, layers=4, heads=4, kv_heads=2)
    torch.manual_seed(3)
    models = [Llama(config).to_training(DEVICE) for _ in range(3)]
    for m in models[1:]:
        m.load_state_dict(models[0].state_dict())
    runs = [torch.compile(m, dynamic=False) for m in models[:2]] + [compile_pgraph(models[2])]
    shaker = Shaker()
    for i in range(12):
        tokens, targets = index(2, 128, high=256), index(2, 128, high=256)
        results = []
        for run, m in zip(runs, models, strict=True):
            m.zero_grad(set_to_none=True)
            loss = run(tokens, targets)
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in m.parameters())])
        assert same_bits(results[2][0], results[0][0]), f"loss of step {i}{explain()}"
        assert_same(f"step {i}", results[2], results[0], results[1], exact=False)
        shaker.shake()
    assert_launched(10)


def _overlaps(recording: Any) -> list[tuple[Any, Any]]:
    order = sorted(recording.allocations, key=lambda a: a.address)
    return [(a, b) for a, b in itertools.pairwise(order) if b.address < a.address + a.nbytes]


def _record(fn: Callable[[list[Any]], Any], inputs: list[Tensor]) -> Any:
    driver = choice._get(DEVICE)
    fn(list(inputs))
    with driver.capture_lock(), driver.arena(0) as arena:
        return record.record(driver, arena, fn, inputs, [256] * len(inputs))


def _scratch_then_smaller(args: list[Any]) -> list[Tensor]:
    (x,) = args
    args.clear()
    large = x * 2
    total = large.sum(1)
    del large
    small = total[: len(total) // 2] + 1  # fits into the block that just became free
    return [small, small * 2]


def _asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no C++ compiler: storages are asked, and their memory is not held."""
    monkeypatch.setattr(ghosts, "calls", lambda: ghosts.in_python)


@pytest.mark.parametrize("watch", ["tells", "asks"])
def test_addresses_are_never_reused_inside_a_capture(watch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard 1, the cause: no two allocations of a recording overlap."""
    if watch == "asks":
        _asking(monkeypatch)
    assert not _overlaps(_record(_scratch_then_smaller, [randn(512, 512)]))
    assert not _overlaps(_record(_many_kinds, [randn(512, 512)]))


def test_addresses_would_be_reused_without_a_pool_per_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    _asking(monkeypatch)
    monkeypatch.setattr(cuda_ghost.GhostPools, "refresh", lambda self, held: None)
    monkeypatch.setattr(record, "_merge", lambda ranges, n: (list(ranges), list(range(len(ranges)))))
    assert _overlaps(_record(_scratch_then_smaller, [randn(512, 512)])), "the check above cannot fail"


def _many_kinds(args: list[Any]) -> list[Tensor]:
    """Scratch (sorts, scans, products), views, several results, ops in place; small, large, dead, alive."""
    (x,) = args
    args.clear()
    kept = []
    for i in range(6):
        values, order = x.sort(dim=i % 2)
        y = (values @ x.t()).cumsum(i % 2).mul_(0.01)
        del values
        kept.append(y[i : i + 2].sum())
        x = torch.where(order[: len(y)] > 7, y, x) + y.view(-1)[:512].repeat(512, 1)
        del y, order
        kept.append(torch.nn.functional.gelu(x.half()).float().topk(3).values)
    return [x, *kept]


def test_recordings_are_alike_whoever_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages that tell when they go, and those that are asked: the same ranges, with the same lifetimes."""

    def told(recording: Any) -> Any:
        ranges = [(a.nbytes, a.birth, a.death, a.library) for a in recording.allocations]
        return len(recording.nodes), ranges, recording.steps, recording.builtin, recording.outputs

    for fn in (_scratch_then_smaller, _many_kinds):
        x = randn(512, 512)
        mine = told(_record(fn, [x]))
        with monkeypatch.context() as m:
            _asking(m)
            assert told(_record(fn, [x])) == mine


@pytest.mark.parametrize("held", [True, False])
def test_ops_without_scratch_share_a_pool(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they return is held, so nothing of it can be handed out again (Note [One pool per op])."""
    if not held:
        _asking(monkeypatch)

    def chain(args: list[Any]) -> list[Tensor]:
        x = args.pop()
        for _ in range(20):
            x = (x + 1).relu()
        return [x]

    inputs = [randn(64, 64)]
    _record(chain, inputs)
    before = cuda_ghost._made
    recording = _record(chain, inputs)
    assert not _overlaps(recording)
    assert len(recording.nodes) == 40
    assert (cuda_ghost._made - before <= 3) is held


def _product_nodes() -> list[tuple[Any, int]]:
    """(template, number) of the nodes whose parameters are passed in one buffer."""
    return [
        (b.template, chunk.first + i)
        for b in built()
        for e, chunk in zip(b.execs, b.template.plan.chunks, strict=True)
        for i, node in enumerate(e._source.nodes)
        if cuda_nodes.read_node(node).header[-1:] == (("extra",),)
    ]


def _multiply() -> None:
    compiled = compile_pgraph(lambda a, b: (a @ b) * 2, codegen="aten")
    for _ in range(3):
        compiled(randn(1024, 1024, dtype=torch.bfloat16), randn(1024, 1024, dtype=torch.bfloat16))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="Hopper's cuBLAS"
)
def test_cublas_parameters_passed_in_one_buffer_are_rebound() -> None:
    """Hazard 5: parameters behind `extra`, tensor maps included, hold slots for both factors."""
    _multiply()
    assert_launched(2)
    found = _product_nodes()
    assert found, f"no node takes its parameters through `extra`: {[str(t.render()) for t in templates()]}"
    for template, i in found:
        regions = {s.region for s in template.slots if s.node == i}
        assert {0, 1} <= regions, f"node {i} names regions {regions} only:\n{template.render()}"
        assert len(regions) >= 3, f"node {i} names no result:\n{template.render()}"


def _slots_of_a_product() -> tuple[Any, ...]:
    """Capture and match one bf16 product; nothing is launched."""
    driver = choice._get(DEVICE)
    inputs = [randn(1024, 1024, dtype=torch.bfloat16) for _ in range(2)]

    def fn(args: list[Any]) -> list[Tensor]:
        a, b = args
        args.clear()
        return [a @ b]

    fn(list(inputs))
    recordings = []
    with driver.capture_lock(), driver.arena(0) as first, driver.arena(1) as second:
        for arena in (first, second):
            recordings.append(record.record(driver, arena, fn, inputs, [256] * 2))
        return match.match(*recordings, framework=driver.framework_ranges(), constants=match.RangeMap([]))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="Hopper's cuBLAS"
)
@pytest.mark.parametrize("cured", [True, False])
def test_a_product_has_no_slots_unless_the_buffer_is_read(
    cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard 5, and its control: whoever reads `kernelParams` alone finds no pointer of a product."""
    if not cured:
        monkeypatch.setattr(cuda_nodes, "_extra_buffer", lambda extra: b"")
        monkeypatch.setattr(cuda_nodes._NodesAtOnce, "is_kernel", lambda self, position: False)
    regions = {slot.region for slot in _slots_of_a_product()}
    assert ({0, 1, 2} <= regions) is cured, f"slots name the regions {regions}"


def test_parameters_owned_by_the_nodes_stay_as_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard 6: launches write into buffers of their own."""
    recorded: list[Any] = []
    read = cuda_session.read_nodes

    def noting(nodes: Any, with_kept: bool) -> Any:
        recorded.append(read(nodes, with_kept))
        return recorded[-1]

    monkeypatch.setattr(cuda_session, "read_nodes", noting)
    compiled = compile_pgraph(lambda x, w: (torch.cat((x @ w, x.clone())) * 2).sum(0), codegen="aten")
    chains: list[Any] = []
    seen: list[list[bytes]] = []
    for i in range(6):
        compiled(randn(128, 128), randn(128, 128))
        if i == 1:
            chains = [e._source.nodes for b in built() for e in b.execs]
        if chains:
            seen.append([cuda_nodes.read_node(node).params for chain in chains for node in chain])
    assert_launched(5)
    assert all(now == seen[0] for now in seen[1:]), "a launch edited the graph's own nodes"
    for now, node in zip(seen[0], recorded[0], strict=True):  # of two captures the first is instantiated
        # Copies are anchored elsewhere on purpose; a kernel is as it was captured.
        assert node.kind != "kernel" or now == node.params, node.name


def test_copy_and_fill_nodes_are_rebound() -> None:
    """Hazard 7. (Fills: torch 2.11 fills by kernels here; the host driver's tests have fill nodes.)"""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        z = torch.zeros(300, 70, device=x.device)
        return x.clone(), z.index_add(0, torch.arange(100, device=x.device), x), z

    check(fn, lambda: (randn(100, 70),), label="copy and fill")
    (template,) = templates()
    moved = {template.nodes[s.node].kind for s in template.slots}
    assert {"kernel", "memcpy"} <= moved, template.render()


SCRATCH_BYTES = 1 << 16
_scratch: list[int] = []  # an address that the framework knows nothing of


@torch.library.custom_op("pgraph_gpu::fills_its_own", mutates_args=())
def fills_its_own(x: Tensor) -> Tensor:
    (code,) = cu.cuMemsetD8Async(_scratch[0], 7, SCRATCH_BYTES, torch.cuda.current_stream().cuda_stream)
    assert code == cu.CUresult.CUDA_SUCCESS
    return x + 1


@fills_its_own.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_fill_of_memory_from_elsewhere_stays_where_it_is() -> None:
    """Hazard 7, other side: a node that no launch changes must not be left pointing at somebody's memory."""
    torch.zeros(1, device=DEVICE)  # a context
    code, scratch = cu.cuMemAlloc(SCRATCH_BYTES)
    assert code == cu.CUresult.CUDA_SUCCESS
    _scratch[:] = [int(scratch)]
    # The largest segment that there is, so that the anchor would lie at its start.
    large = torch.full((1 << 30,), 3, dtype=torch.uint8, device=DEVICE)
    compiled = compile_pgraph(lambda x: fills_its_own((x + 1).sin()).cos(), codegen="aten")
    host = (ctypes.c_uint8 * SCRATCH_BYTES)()
    for i in range(4):
        cu.cuMemsetD8(_scratch[0], i, SCRATCH_BYTES)
        x = randn(64, 64)
        torch.testing.assert_close(compiled(x), ((x + 1).sin() + 1).cos())
        torch.cuda.synchronize()
        cu.cuMemcpyDtoH(host, _scratch[0], SCRATCH_BYTES)
        assert set(host) == {7}, f"call {i}{explain()}"
        assert bool((large == 3).all()), f"call {i}{explain()}"
    assert_launched(2)
    assert "memset" in {node.kind for t in templates() for node in t.nodes}, explain()
    cu.cuMemFree(scratch)


STASH: list[Tensor] = []


@torch.library.custom_op("pgraph_gpu::leaves", mutates_args=())
def leaves(x: Tensor) -> Tensor:
    kept = torch.empty_like(x)
    kept.copy_(x * 2)
    STASH.append(kept)
    return x + 1


@torch.library.custom_op("pgraph_gpu::takes", mutates_args=())
def takes(x: Tensor) -> Tensor:
    return x * STASH.pop()


for _op in (leaves, takes):
    _op.register_fake(torch.empty_like)


def test_what_one_custom_op_leaves_to_another_is_refused() -> None:
    """It is freed within the capture, so that nobody keeps it; a launch would read where it was."""
    # Too small to be split around what is refused.
    compiled = compile_pgraph(lambda x: takes(leaves((x + 1).sin())).cos(), codegen="aten", min_ops=9)
    for _ in range(4):
        x = randn(64, 64)
        y = (x + 1).sin()
        torch.testing.assert_close(compiled(x), ((y + 1) * (y * 2)).cos())
    torch.cuda.synchronize()
    (partition,) = partitions()
    assert partition.stats.reason is not None, explain()
    assert partition.stats.reason.code == "ambiguous-word", explain()
    assert not STASH


_TWO_RECORDINGS = """
import os, sys, torch
from pgraph.capture.record import record
from pgraph.drivers import choice
from pgraph.native import ghosts, libraries
if sys.argv[1:] == ["uncured"]:
    from pgraph.drivers.cuda import workspaces
    workspaces.drop = lambda stream, arena: None
driver = choice._get(torch.device("cuda", 0))
inputs = [torch.randn(64, 65536, device="cuda").bfloat16(), torch.randn(65536, 64, device="cuda").bfloat16()]
def fn(args):
    a, b = args
    args.clear()
    return [a @ b]
fn(list(inputs))
sizes = []
for layout in (0, 1):
    try:
        with driver.capture_lock(), driver.arena(layout) as arena:
            found = record(driver, arena, fn, inputs, [256, 256])
        sizes.append(sorted(a.nbytes for a in found.allocations))
    except Exception as error:
        sizes.append(str(error))
print("same" if sizes[0] == sizes[1] and not isinstance(sizes[0], str) else f"different: {sizes}", flush=True)
os._exit(0)  # without the cure, a library still holds memory that is no memory
"""


@pytest.mark.parametrize("cured", [True, False])
def test_both_captures_allocate_the_workspace(cured: bool) -> None:
    """Hazard 11, and its control: unless workspaces are dropped, only one capture allocates cuBLAS's."""
    said = finish(python(_TWO_RECORDINGS, *([] if cured else ["uncured"])))
    assert said.splitlines()[-1].startswith("same" if cured else "different"), said


def test_first_product_of_a_fresh_thread() -> None:
    """Hazard 11: neither cuBLAS's handle nor its workspace exists in this thread before."""
    compiled = compile_pgraph(lambda a, b: (a @ b) + 1, codegen="aten")
    wrong: list[str] = []

    def work() -> None:
        for i in range(4):
            a, b = randn(64, 65536, dtype=torch.bfloat16), randn(65536, 64, dtype=torch.bfloat16)
            if not same_bits(compiled(a, b), (a @ b) + 1):
                wrong.append(f"call {i}")
        torch.cuda.synchronize()

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not wrong, f"{wrong}{explain()}"
    assert_launched(4)


def test_split_products_on_two_streams_at_once() -> None:
    """Hazard 11: each launch uses the workspace of its stream, so that two may run side by side."""
    first = compile_pgraph(lambda a, b: (a @ b) * 1, codegen="aten")
    second = compile_pgraph(lambda a, b: (a @ b) * 2, codegen="aten")
    a, b = randn(64, 65536, dtype=torch.bfloat16), randn(65536, 64, dtype=torch.bfloat16)
    c, d = randn(64, 65536, dtype=torch.bfloat16), randn(65536, 64, dtype=torch.bfloat16)
    for _ in range(3):
        one, two = first(a, b), second(c, d)
    assert_launched(2)
    assert same_bits(one, a @ b), explain()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    bad = torch.zeros(2, device=DEVICE, dtype=torch.int64)
    for _ in range(200):
        with torch.cuda.stream(streams[0]):
            bad[0] += (first(a, b) != one).sum()
        with torch.cuda.stream(streams[1]):
            bad[1] += (second(c, d) != two).sum()
    torch.cuda.synchronize()
    assert bad.tolist() == [0, 0], f"wrong elements per stream: {bad.tolist()}{explain()}"


def test_split_products_of_two_threads_on_one_stream() -> None:
    """Hazard 11: each thread has a workspace of its own, captured or not."""
    compiled = compile_pgraph(lambda a, b: (a @ b) * 1, codegen="aten")
    a, b = randn(64, 65536, dtype=torch.bfloat16), randn(65536, 64, dtype=torch.bfloat16)
    for _ in range(3):
        want = compiled(a, b)
    assert_launched(2)
    bad = torch.zeros(2, device=DEVICE, dtype=torch.int64)

    def launches() -> None:
        for _ in range(300):
            bad[0] += (compiled(a, b) != want).sum()

    def products() -> None:
        for _ in range(300):
            bad[1] += ((a @ b) != want).sum()

    threads = [threading.Thread(target=work) for work in (launches, products)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert bad.tolist() == [0, 0], f"wrong elements: {bad.tolist()}{explain()}"


def test_the_workspace_that_is_kept_is_the_one_that_launches_use() -> None:
    """And after somebody dropped it, a new one is made, as by an uncaptured product."""
    if libraries.load_workspaces() is None:
        pytest.skip("no C++ compiler")
    compiled = compile_pgraph(lambda a, b: (a @ b) * 1, codegen="aten")
    a, b = randn(64, 65536, dtype=torch.bfloat16), randn(65536, 64, dtype=torch.bfloat16)
    for _ in range(3):
        want = compiled(a, b)
    assert_launched(2)
    (template,) = (x.template for x in built())
    (lent,) = (r for r in template.regions if r.kind == "workspace")
    assert lent.nbytes == 32 << 20
    assert template.plan.peak < lent.nbytes
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    assert same_bits(compiled(a, b), want)
    assert torch.cuda.memory_allocated() - before >= lent.nbytes
    assert same_bits(a @ b, want)
    torch.cuda.synchronize()


def test_of_two_libraries_workspaces_the_larger_is_lent() -> None:
    """A product with a bias is cuBLASLt's, which keeps a small workspace of its own; others are cuBLAS's."""
    if libraries.load_workspaces() is None:
        pytest.skip("no C++ compiler")

    def products(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, w) @ w

    compiled = compile_pgraph(products, codegen="aten", min_ops=1)
    w, bias = randn(512, 512, dtype=torch.bfloat16), randn(512, dtype=torch.bfloat16)
    for _ in range(6):
        x = randn(1024, 512, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x, w, bias), products(x, w, bias), rtol=2e-2, atol=8.0)
        del x
    assert_launched(4)
    (template,) = (b.template for b in built())
    assert [r.nbytes for r in template.regions if r.kind == "workspace"] == [32 << 20], explain()
    assert template.plan.peak < 32 << 20, template.plan.render()


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_nothing_runs_while_a_capture_is_made(codegen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard 12: a backward, which may write into what was saved, leaves its arguments as they were.

    Inputs of the forward are written to as well, so that a run in place of a capture would show.
    """
    seen: list[str] = []

    def watched(driver: Any, fn: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
        tensors = [t for t in inputs if isinstance(t, Tensor) and t.is_cuda]
        before = [t.clone() for t in tensors]
        made = real(driver, fn, inputs, *rest, **kwargs)
        torch.cuda.synchronize()
        seen.extend("same" if same_bits(x, y) else "changed" for x, y in zip(tensors, before, strict=True))
        return made

    real = admission.build
    monkeypatch.setattr(admission, "build", watched)

    def fn(x: Tensor, w: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return torch.softmax((x @ w).tanh() * 2, -1).square()

    compiled = compile_pgraph(fn, codegen=codegen)
    count = torch.zeros(4, device=DEVICE)
    for _ in range(4):
        x, w = randn(64, 64, grad=True), randn(64, 64, grad=True)
        compiled(x, w, count).sum().backward()
    assert_launched(3)
    assert len(partitions()) == 2, explain()
    assert len(seen) >= 5, f"only {len(seen)} inputs were watched{explain()}"
    assert "changed" not in seen, f"a capture wrote to its inputs: {seen}{explain()}"
    assert count.tolist() == [4.0] * 4, f"a capture counted{explain()}"
