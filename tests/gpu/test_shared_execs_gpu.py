"""One exec for many sizes: what a driver takes, and that launches of all sizes are right and fast."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_helpers import (
    DEVICE,
    assert_launched,
    assert_same,
    built,
    compile_pgraph,
    explain,
    randn,
    report,
    same_bits,
)
from torch import Tensor, nn

from pgraph.capture import build
from pgraph.drivers import choice
from pgraph.drivers.execs import Shelf
from pgraph.launch.guards import guards_of
from pgraph.launch.interpreter import launch_first
from pgraph.launch.lookup import numbered
from pgraph.launch.program import program_of

# They need cuda-bindings, which a CPU build of torch does not bring.
cu = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
cuda_nodes = pytest.importorskip("pgraph.drivers.cuda.nodes", reason="needs cuda-bindings")
check = cuda_nodes.check

pytestmark = pytest.mark.gpu

SIZES = (8, 24, 40, 96, 130, 257, 512)
WIDE = 512


class Block(nn.Module):
    """Products, whose kernels change with the size, and what Inductor makes of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("codegen", ["inductor", "aten"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_launches_of_all_sizes_are_right(codegen: str, dtype: torch.dtype) -> None:
    """Random turns of seven sizes at new addresses, as the same code computes them without a graph."""
    model = nn.Sequential(*(Block() for _ in range(3))).to(DEVICE, dtype)
    plain = torch.compile(model, dynamic=True) if codegen == "inductor" else model
    compiled = compile_pgraph(model, dynamic=True, codegen=codegen)
    order = random.Random(0).choices(SIZES, k=60)
    kept: list[Tensor] = []
    with torch.no_grad():
        for n in [*(n for n in SIZES for _ in range(2)), *order]:
            x = randn(n, WIDE, dtype=dtype)
            got = compiled(x)
            assert_same(f"{n} rows", [got], [plain(x)], [plain(x)])
            kept = [*kept[-3:], got]
    assert_launched(len(order))
    assert len({b.shared for b in built()}) < len(built()), f"no size shares another's exec{explain()}"


def test_what_an_exec_keeps_can_be_read() -> None:
    """Launch attributes of Triton's, cuBLAS's and PyTorch's kernels; otherwise nothing would be shared."""
    model = nn.Sequential(*(Block() for _ in range(2))).to(DEVICE, torch.bfloat16)
    compiled = compile_pgraph(model, dynamic=True)
    with torch.no_grad():
        for _ in range(2):
            compiled(randn(64, WIDE, dtype=torch.bfloat16))
    records = [cuda_nodes.read_node(node) for b in built() for e in b.execs for node in e._source.nodes]
    assert records, explain()
    assert [r.name for r in records if r.kept is None] == []


def _kernel(x: Tensor) -> Tensor:
    return x * 3


def _another_kernel(x: Tensor) -> Tensor:
    return torch.tanh(x)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


Forced = Callable[..., Any]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Forced:
    """Captures functions on the first one's exec, whatever their nodes are; None where it refuses them."""
    monkeypatch.setattr(build, "sharing_key", lambda nodes, order, slots, chunks: len(nodes))
    driver, shelf = choice._get(DEVICE), Shelf()
    first: list[Any] = []

    def capture(fn: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        def code(args: list[Any]) -> tuple[Tensor, ...]:
            y = args.pop()
            with torch.no_grad():
                return (fn(y),)

        code([x])
        made = build.build(driver, code, [x], [16], shelf=shelf)
        first.append(made)
        return made if made.shared is first[0].shared else None

    return capture


def _run(made: Any, x: Tensor) -> Tensor:
    guards = guards_of([x], DEVICE, 256, {})
    assert guards is not None
    program = program_of(made, guards)
    launched = launch_first([program], numbered([guards]), [x])
    assert launched is not None
    result: Tensor = launched[0][0]
    return result


@pytest.mark.parametrize("second", [_another_kernel, _softmax])
def test_a_kernel_takes_another_function_and_other_dimensions(forced: Forced, second: Any) -> None:
    """As documented: function, grid, block, shared memory and parameters, back and forth."""
    one, other = forced(_kernel, randn(64, 32)), forced(second, randn(300, 700))
    assert other is not None, "the driver refused another function"
    for _ in range(3):
        x, y = randn(64, 32), randn(300, 700)
        assert same_bits(_run(one, x), _kernel(x))
        assert same_bits(_run(other, y), second(y))


def test_a_copy_takes_another_length(forced: Forced) -> None:
    """Also a longer one than the exec was made with."""
    one, other = forced(Tensor.clone, randn(16)), forced(Tensor.clone, randn(1 << 22))
    assert other is not None
    for _ in range(3):
        for made, n in ((one, 16), (other, 1 << 22)):
            x = randn(n)
            assert same_bits(_run(made, x), x)


@pytest.mark.parametrize("wide", [8, 1 << 10, 1 << 20, 1 << 28])
def test_a_fill_of_another_width_is_refused_or_right(wide: int) -> None:
    """ "May be rejected", says the documentation, so such sizes do not share. If all pass, they could."""
    target = torch.ones(1 << 28, dtype=torch.uint8, device=DEVICE)
    (graph,) = check(cu.cuGraphCreate(0))
    fill = cu.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = target.data_ptr(), 0, 1, 4096, 1
    (ctx,) = check(cu.cuCtxGetCurrent())
    (node,) = check(cu.cuGraphAddMemsetNode(graph, None, 0, fill, ctx))
    (exec,) = check(cu.cuGraphInstantiate(graph, 0))
    fill.width = wide
    (code,) = cu.cuGraphExecMemsetNodeSetParams(exec, node, fill, ctx)
    if code == cu.CUresult.CUDA_SUCCESS:
        check(cu.cuGraphLaunch(exec, torch.cuda.current_stream().cuda_stream))
        assert int((target == 0).sum()) == wide
    check(cu.cuGraphExecDestroy(exec))
    check(cu.cuGraphDestroy(graph))


@pytest.mark.parametrize("codegen", ["inductor", "aten"])
def test_layers_that_share_code_get_an_exec_each(codegen: str) -> None:
    """Six blocks compiled one by one: in the end launches set less than half of their nodes (small tensors
    wander about in the allocator's memory), and the numbers are right.
    """
    torch.manual_seed(0)
    blocks = [Block().to(DEVICE) for _ in range(6)]
    compiled = [compile_pgraph(block, codegen=codegen) for block in blocks]
    parameters = [p for block in blocks for p in block.parameters()]

    def step(run: list[Any], x: Tensor) -> list[Tensor]:
        for block in run:
            x = block(x)
        return [x.detach(), *torch.autograd.grad(x.square().mean(), parameters)]

    inputs = [randn(64, WIDE, grad=True) for _ in range(3)]
    want = [step(blocks, x) for x in inputs]
    for count in range(80):
        got = step(compiled, inputs[count % 3])
        if count % 8 < 3:
            torch.testing.assert_close(got, want[count % 3], rtol=5e-3, atol=5e-4)
    before = report()
    rewritten, launches = before.rewritten_nodes, before.launches
    for count in range(12):
        step(compiled, inputs[count % 3])
    after = report()
    launches = after.launches - launches
    assert launches == 12 * 12, explain()
    assert after.captures == 2
    assert after.rewritten_nodes - rewritten <= 4 * launches, explain()
    execs = [1 + len(recipe._others) for b in built() for recipe in b.recipes]
    assert max(execs) >= 6, explain()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # what other processes take in that moment counts as well
        assert after.exec_bytes <= 32 << 20
    for count in range(3):
        torch.testing.assert_close(step(compiled, inputs[count]), want[count], rtol=5e-3, atol=5e-4)
