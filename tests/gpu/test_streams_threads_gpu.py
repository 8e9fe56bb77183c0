"""Streams, threads, other people's captures, profilers, and the end of the process."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
from gpu_helpers import (
    DEVICE,
    assert_launched,
    assert_same,
    compile_pgraph,
    explain,
    finish,
    forget_older,
    partitions,
    python,
    randn,
    report,
    same_bits,
)
from torch import Tensor, nn

import pgraph
from pgraph.drivers.cuda import workspaces
from pgraph.native import libraries

pytestmark = pytest.mark.gpu


def _fn(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax((x @ w).tanh() * 2, -1).cumsum(0)


def test_calls_on_a_side_stream() -> None:
    compiled = compile_pgraph(_fn, codegen="aten")
    side = torch.cuda.Stream()
    for i in range(8):
        x, w = randn(512, 512), randn(512, 512)
        expected = _fn(x, w)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # whoever does not wait reads too early
            y = compiled(x * 1, w * 1)
        torch.cuda.current_stream().wait_stream(side)
        assert same_bits(y, expected), f"call {i}{explain()}"
        y.record_stream(torch.cuda.current_stream())
    assert_launched(6)


def test_one_function_on_two_streams_in_turn() -> None:
    """An exec is rewritten while its last launch may still run on the other stream."""
    compiled = compile_pgraph(_fn, codegen="aten")
    for _ in range(3):
        compiled(randn(256, 256), randn(256, 256))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 2]):
            torch.manual_seed(i)
            x, w = randn(256, 256), randn(256, 256)
            results.append((compiled(x, w), _fn(x, w)))
    torch.cuda.synchronize()
    wrong = [i for i, (got, want) in enumerate(results) if not same_bits(got, want)]
    assert not wrong, f"wrong calls: {wrong}{explain()}"
    assert_launched(60)


def test_two_threads_train_side_by_side() -> None:
    """Each on a stream and a model of its own, with one compiled code; captures happen meanwhile."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(DEVICE)
    plain = [copy.deepcopy(model) for _ in range(2)]
    failures: list[str] = []
    barrier = threading.Barrier(2, timeout=120)

    def train(k: int, run: nn.Module, mine: nn.Module) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                generator = torch.Generator(DEVICE).manual_seed(k)
                for i in range(30):
                    barrier.wait()
                    x = torch.randn(32, 64, device=DEVICE, generator=generator)
                    results = []
                    for f, m in ((run, mine), (plain[k], plain[k]), (plain[k], plain[k])):
                        m.zero_grad(set_to_none=True)
                        y = f(x)
                        y.square().sum().backward()
                        results.append([y.detach(), *(p.grad for p in m.parameters())])
                    assert_same(f"thread {k} step {i}", results[0], results[1], results[2])
                torch.cuda.current_stream().synchronize()
        except BaseException as e:
            failures.append(f"thread {k}: {type(e).__name__}: {e}")
            barrier.abort()

    models = [copy.deepcopy(model) for _ in range(2)]
    runs = [compile_pgraph(m, codegen="aten") for m in models]
    torch.cuda.synchronize()
    for m, run in zip(models, runs, strict=True):  # Dynamo itself compiles in one thread at a time
        run(randn(32, 64)).sum().backward()
        m.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=train, args=(k, runs[k], models[k]), daemon=True) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(180)
    assert not any(t.is_alive() for t in threads), f"a thread hangs{explain()}"
    assert not failures, "\n".join(failures)
    assert_launched(20)


def test_called_inside_another_capture() -> None:
    """The user's own graph records the plain code, and replays it rightly."""
    compiled = compile_pgraph(_fn, codegen="aten")
    x, w = randn(128, 128), randn(128, 128)
    for _ in range(3):
        compiled(x, w)
    before = report().launches
    assert before >= 2, explain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x, w)
    assert report().launches == before, f"a launch inside the user's capture{explain()}"
    for i in range(3):
        x.copy_(randn(128, 128))
        graph.replay()
        assert same_bits(y, _fn(x, w)), f"replay {i}{explain()}"
        assert same_bits(compiled(x, w), _fn(x, w)), f"call {i}{explain()}"
    assert report().launches == before + 3, explain()


@pytest.mark.parametrize("helper", [True, False])
def test_users_own_graph_survives_a_capture(helper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture here must not free what a graph captured earlier writes to (cuBLAS's workspace):
    where that can only be freed with all others, nothing is captured while such a graph is alive."""
    if not helper:
        monkeypatch.setattr(libraries, "load_workspaces", lambda: None)
    elif libraries.load_workspaces() is None:
        pytest.skip("no C++ compiler")
    a, b = randn(64, 65536, dtype=torch.bfloat16), randn(65536, 64, dtype=torch.bfloat16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = a @ b  # takes the workspace of this stream
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = a @ b
    compiled = compile_pgraph(_fn, codegen="aten")
    for _ in range(3):
        x, w = randn(64, 64), randn(64, 64)
        assert same_bits(compiled(x, w), _fn(x, w))
    assert ("foreign-graphs" in str(pgraph.report())) is not helper
    assert (report().launches > 0) is helper, explain()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        sizes = [1 << k for k in range(20, 27)] * 2  # one of these takes the place of what was freed
        mine = [torch.zeros(n, dtype=torch.uint8, device=DEVICE) for n in sizes]
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(y, expected)
    touched = [t.numel() for t in mine if t.any()]
    assert not touched, f"the user's graph wrote into tensors of {touched} bytes: its workspace was freed"
    del graph
    pgraph.reset()
    for _ in range(3):
        compiled(randn(64, 64), randn(64, 64))
    assert_launched(2)


def test_under_the_profiler() -> None:
    """Captured before, and captured while the profiler listens."""
    early, late = (
        compile_pgraph(_fn, codegen="aten"),
        compile_pgraph(lambda x, w: _fn(x, w) + 1, codegen="aten"),
    )
    for _ in range(3):
        early(randn(64, 64), randn(64, 64))
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds):
        for i in range(4):
            x, w = randn(64, 64), randn(64, 64)
            assert same_bits(early(x, w), _fn(x, w)), f"call {i}{explain()}"
            assert same_bits(late(x, w), _fn(x, w) + 1), f"call {i}{explain()}"
        torch.cuda.synchronize()
    assert_launched(3)


def test_the_profiler_shows_what_was_launched() -> None:
    """Kernels lie under a range that names step, part and module, in the forward and in the backward."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(DEVICE)
    compiled = compile_pgraph(model, codegen="aten")
    for _ in range(3):
        compiled(randn(32, 64)).sum().backward()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        compiled(randn(32, 64)).sum().backward()
        torch.cuda.synchronize()
    cpu = torch.autograd.DeviceType.CPU  # the profiler repeats ranges on the device's time line
    ranges = [e for e in profiler.events() if e.name.startswith("pgraph::") and e.device_type == cpu]
    named = {e.name.split()[0] + " " + e.name.split()[1] for e in ranges}
    assert named == {"pgraph::launch forward", "pgraph::launch backward"}, f"{named}{explain()}"
    assert all(e.name.endswith(": Sequential") for e in ranges), [e.name for e in ranges]
    for e in profiler.events():
        if "GraphLaunch" not in e.name:  # not every build of the profiler follows the driver API
            continue
        span = e.time_range
        around = [r for r in ranges if r.time_range.start <= span.start and span.end <= r.time_range.end]
        assert around, f"a graph launch lies outside every range{explain()}"


_SMALL = """
import hashlib, torch
import gpu_helpers as h
import pgraph
from pgraph.native import libraries
torch.manual_seed(0)
def fn(x, w):
    y = torch.relu(x @ w)
    return torch.cat((y, x.clone())).sort(1).values, torch.zeros(9, device=x.device) + y.sum()
compiled = h.compile_pgraph(fn, codegen="aten")
digest, shaker = hashlib.sha256(), h.Shaker()
for i in range(10):
    results = compiled(h.randn(64, 64), h.randn(64, 64))
    for r in results:
        digest.update(h.as_bytes(r).cpu().numpy().tobytes())
    shaker.shake()
h.assert_launched(9)
print("NATIVE", libraries.load() is not None)
print("DIGEST", digest.hexdigest(), pgraph.report().launches, pgraph.report().nodes)
"""


def test_native_helper_and_python_agree_and_the_process_ends() -> None:
    """Same numbers from both launch paths; both processes end by themselves with status 0."""
    processes = [python(_SMALL, PGRAPH_NATIVE=flag) for flag in ("1", "0")]
    outputs = [finish(p) for p in processes]
    digests = [[line for line in o.splitlines() if line.startswith("DIGEST")] for o in outputs]
    assert digests[0], outputs[0]
    assert digests[0] == digests[1], "\n".join(outputs)
    assert "NATIVE False" in outputs[1], outputs[1]


_RECORDED = """
import torch
import gpu_helpers as h
import pgraph
table = h.randn(1 << 20)
other = h.randn(1 << 20)
@torch.library.custom_op("pgraph_gpu_recorded::read", mutates_args=())
def read(x: torch.Tensor) -> torch.Tensor:
    table.record_stream(torch.cuda.current_stream())
    other.record_stream(torch.cuda.current_stream())
    return x + table[: x.numel()]
@read.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
compiled = h.compile_pgraph(lambda x: read(x * 2) + 1, codegen="aten")
for _ in range(3):
    compiled(h.randn(64))
print("LAUNCHES", pgraph.report().launches)
pgraph.reset()
del table
torch.cuda.synchronize()
torch.cuda.empty_cache()
print("FREED")
"""


def test_the_stream_of_captures_outlives_whatever_was_recorded_on_it() -> None:
    """One tensor is freed after a reset, the other at the exit of the process: both ask the stream."""
    assert "FREED" in finish(python(_RECORDED))


@pytest.mark.skipif(libraries.load_call() is None, reason="no C compiler, or no Python headers")
def test_launches_run_in_c_and_allocate_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path in C serves forward and backward, and costs no more memory than the one in Python."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.softmax(x @ w, -1).tanh()
        return x

    def peaks() -> tuple[int, int]:
        compiled = compile_pgraph(fn)
        served: list[bool] = []

        def watched(call: Any) -> Any:
            def run(args: Any) -> Any:
                done = call(args)
                served.append(done is not None)
                return done

            return run

        for i in range(8):
            x, w = randn(256, 256, grad=True), randn(256, 256, grad=True)
            if i == 4:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # else it is trimmed in the midst of it
                torch.cuda.reset_peak_memory_stats()
                for captured in (partition._cache.captured for partition in partitions()):
                    assert (captured.native is None) is disabled, explain()
                    if captured.native is not None:
                        captured.launch = watched(captured.launch)
            compiled(x, w).sum().backward()
            del x, w
        assert served == [True] * (0 if disabled else 8), f"{served}{explain()}"
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    disabled = False
    in_c = peaks()
    assert_launched(5)
    torch._dynamo.reset()
    pgraph.reset()
    forget_older()
    disabled = True
    monkeypatch.setattr(libraries, "load_call", lambda: None)
    assert in_c == peaks()


@pytest.mark.skipif(libraries.load_call() is None, reason="no C compiler, or no Python headers")
def test_running_out_of_memory_in_a_launch_is_torchs_error_and_passes() -> None:
    """A launch that cannot have its temporaries raises OutOfMemoryError; the next one works."""
    compiled = compile_pgraph(
        lambda x: (torch.cat((x, x, x, x)).sin() @ x[: x.shape[1]]).sum(0), codegen="aten"
    )
    x = randn(4096, 1024)
    for _ in range(3):
        expected = compiled(x)
    assert_launched(2)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
        # Segments that hold something stay in the cache, and there may be room beside it.
        taken = []
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE))
        with pytest.raises(torch.OutOfMemoryError):
            compiled(x)
        del taken
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert same_bits(compiled(x), expected)
    assert_launched(3)


def _workspaces() -> set[int]:
    """Addresses of blocks in use that are as large as a workspace."""
    segments = torch.cuda.memory_snapshot(include_traces=False)
    blocks = [block for segment in segments for block in segment["blocks"]]
    return {b["address"] for b in blocks if b["state"] == "active_allocated" and b["size"] == 32 << 20}


def test_others_keep_their_workspaces() -> None:
    """Those of this thread's stream and of autograd's thread: taken anew, they would pin other blocks."""
    if libraries.load_workspaces() is None:
        pytest.skip("no C++ compiler")
    x, w = randn(256, 256, grad=True), randn(256, 256)
    (x @ w).sum().backward()
    before = _workspaces()
    assert before, "the products took no workspace of 32 MB"
    compiled = compile_pgraph(_fn, codegen="aten")
    for _ in range(3):
        compiled(x, w).sum().backward()
    assert_launched(2)
    assert _workspaces() == before
    assert before <= workspaces.kept()


def _product_elsewhere(x: Tensor, *, joined: bool = True, fails: bool = False) -> Tensor:
    """A product on a stream that nobody has used, one after the other or side by side."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    beside = None if joined else x @ x
    with torch.cuda.stream(side):
        y = x @ x
    if fails and torch.cuda.is_current_stream_capturing():
        raise ValueError("after the product")
    here.wait_stream(side)
    return y if beside is None else y + beside


BODIES = {
    "in_turn": _product_elsewhere,
    "side_by_side": lambda x: _product_elsewhere(x, joined=False),
    "fails": lambda x: _product_elsewhere(x, fails=True),
}


@pytest.mark.parametrize("name", list(BODIES))
def test_a_product_on_a_stream_of_the_ops_own(name: str) -> None:
    """cuBLAS takes a workspace there, too: a ghost that PyTorch must not remember."""

    def body(x: Tensor) -> Tensor:
        return BODIES[name](x)

    op = torch.library.custom_op(f"pgraph_gpu::elsewhere_{name}", body, mutates_args=())
    op.register_fake(torch.empty_like)
    compiled = compile_pgraph(lambda x: op((x + 1).sin()).cos(), codegen="aten")
    for _ in range(4):
        x = randn(128, 128)
        assert same_bits(compiled(x), body((x + 1).sin()).cos()), explain()
    a, b = randn(64, 65536, dtype=torch.bfloat16), randn(65536, 64, dtype=torch.bfloat16)
    expected = a @ b
    for _ in range(64):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = a @ b
        torch.cuda.current_stream().wait_stream(side)
        assert same_bits(y, expected)
    torch.cuda.synchronize()
