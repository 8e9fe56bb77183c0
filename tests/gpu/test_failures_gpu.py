"""A capture that fails leaves the process as it found it (hazard 8): generator, streams, pools, autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from gpu_helpers import (
    DEVICE,
    assert_launched,
    check,
    compile_pgraph,
    explain,
    finish,
    partitions,
    pools,
    python,
    randn,
    random_ops,
    same_bits,
)
from torch import Tensor

import pgraph

pytestmark = pytest.mark.gpu


def _waits(x: Tensor) -> Tensor:
    torch.cuda.synchronize()
    return x * 2


def _reads(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() < 1e30 else x * 3


def _draws(x: Tensor) -> Tensor:
    return x * 2 + torch.rand_like(x) * 0


def _raises(x: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("not while capturing")
    return x * 2


def _other_stream(x: Tensor) -> Tensor:
    """Work on a stream that the capture does not know, and an event between the two."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().wait_stream(side)
    return y


BODIES = {"waits": _waits, "reads": _reads, "draws": _draws, "raises": _raises, "other_stream": _other_stream}
OPS = {}
for _name, _body in BODIES.items():
    OPS[_name] = torch.library.custom_op(f"pgraph_gpu::{_name}", _body, mutates_args=())
    OPS[_name].register_fake(torch.empty_like)


def _fail(name: str) -> None:
    """Compile a function whose capture fails, and see that it runs uncaptured and rightly."""

    def fn(x: Tensor) -> Tensor:
        return OPS[name]((x + 1).sin()).cos()

    compiled = compile_pgraph(fn, codegen="aten")
    for _ in range(4):
        x = randn(64, 64)
        torch.testing.assert_close(compiled(x), ((x + 1).sin() * 2).cos(), msg=lambda m: m + explain())
    (partition,) = partitions()
    assert partition.stats.reason is not None, f"{name}: the capture was meant to fail{explain()}"
    assert partition.stats.uncaptured_runs == 4, explain()


@pytest.mark.parametrize("name", list(BODIES))
def test_failed_capture_leaves_the_process_healthy(name: str) -> None:
    expected, before = random_ops(), pools()
    stream = torch.cuda.current_stream()
    _fail(name)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    for i, (got, want) in enumerate(zip(random_ops(), expected, strict=True)):
        assert same_bits(got, want), f"random op {i} differs after a failed capture{explain()}"
    # Allocator, autograd and another user's capture.
    x = randn(300, 300, grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device=DEVICE)
    with torch.cuda.graph(graph):
        out += torch.rand(8, device=DEVICE)
    graph.replay()
    torch.cuda.synchronize()
    assert out.min().item() > 0
    graph.reset()
    torch.cuda.empty_cache()
    assert pools() <= before | {(0, 0)}


def test_later_captures_work_after_failed_ones() -> None:
    for name in BODIES:
        torch._dynamo.reset()
        compiled = compile_pgraph(lambda x, op=OPS[name]: op((x + 1).sin()).cos(), codegen="aten")
        for _ in range(3):
            compiled(randn(64, 64))
        del compiled
    import gpu_helpers

    gpu_helpers.forget_older()
    check(
        lambda x, w: F.softmax(x @ w, -1),
        lambda: (randn(64, 64, grad=True), randn(64, 64, grad=True)),
        grad=True,
        label="after failures",
    )
    assert_launched(4)


_CONTROL = """
import torch
graph = torch.cuda.CUDAGraph()
x = torch.ones(10, device="cuda")
stream = torch.cuda.Stream()
try:
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            x.sum().item()
        finally:
            graph.capture_end()
except Exception as e:
    print("failed as it should:", str(e).splitlines()[0])
try:
    torch.rand(10, device="cuda")
    print("HEALTHY")
except Exception as e:
    print("POISONED", str(e).splitlines()[0])
import os; os._exit(0)
"""


def test_control_torch_graph_after_a_failed_capture(record_property: Callable[[str, object], None]) -> None:
    """What the same failure does to a process that captures through `torch.cuda.CUDAGraph`.

    Either answer passes: it documents why pgraph captures without that class.
    """
    output = finish(python(_CONTROL))
    assert "failed as it should" in output, output
    assert "POISONED" in output or "HEALTHY" in output, output
    record_property("torch.cuda.CUDAGraph", output.splitlines()[-1])


@pytest.mark.parametrize("entries", [1, 3])
def test_a_history_that_forgets_is_no_witness(entries: int) -> None:
    """The allocator's log tells which memory ops use besides their results, if it is whole."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.sort((x @ w) * 2, dim=1).values.cumsum(0)

    torch.cuda.memory._record_memory_history("all", context=None, max_entries=entries)
    try:
        compiled = compile_pgraph(fn, codegen="aten")
        for _ in range(4):
            x, w = randn(300, 128), randn(128, 128)
            assert same_bits(compiled(x, w), fn(x, w)), explain()
        (partition,) = partitions()
        assert partition.stats.reason is not None, explain()
        assert partition.stats.reason.code == "history-too-short", explain()
    finally:
        torch.cuda.memory._record_memory_history(None)
    pgraph.reset()
    for _ in range(4):
        x, w = randn(300, 128), randn(128, 128)
        assert same_bits(compiled(x, w), fn(x, w)), explain()
    assert_launched(2)
