"""Every step of pgraph's way fails, with and without memory: results, generator, streams, allocator, autograd
and the next calls are as if pgraph were not there, and the report says why.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
from gpu_faults import Fault, inject
from gpu_helpers import (
    DEVICE,
    assert_launched,
    compile_pgraph,
    explain,
    partitions,
    randn,
    random_ops,
    report,
    same_bits,
)
from torch import Tensor, nn

import pgraph

pytestmark = pytest.mark.gpu

# (step, kind, code of the reason; None: this call runs uncaptured, the next is launched)
CASES = [
    *(
        (step, kind, "device-failed")
        for step in ("arena", "match", "instantiate")
        for kind in ("memory", "device")
    ),
    *(
        (f"{which} begin", kind, "device-failed")
        for which in ("first", "second")
        for kind in ("memory", "device")
    ),
    *(
        (f"{which} {step}", "memory", "device-failed")
        for which in ("first", "second")
        for step in ("op", "end")
    ),
    *((f"{which} op", "device", "capture-failed") for which in ("first", "second")),
    *((f"{which} end", "device", "capture-lost") for which in ("first", "second")),
    ("plan", "memory", "device-failed"),
    ("plan", "device", "internal-error"),
    *((step, kind, "launch-failed") for step in ("rebind", "launch") for kind in ("memory", "device")),
    ("allocate", "memory", None),
]
TWICE = [case for case in CASES if case[2] == "device-failed" and case[1] == "memory"]


def _model() -> nn.Module:
    torch.manual_seed(1)
    # No biases: their gradients are sums, and the padding of ATen's sums may hold old addresses.
    first, last = nn.Linear(64, 128, bias=False), nn.Linear(128, 32, bias=False)
    return nn.Sequential(first, nn.Tanh(), last).to(DEVICE)


def _step(call: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of one training step."""
    module.zero_grad(set_to_none=True)
    given = x.clone().requires_grad_()
    out = call(given)
    out.square().sum().backward()
    assert given.grad is not None
    return [out.detach(), given.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def _agree(compiled: Any, module: nn.Module, twin: nn.Module, times: int) -> None:
    for i in range(times):
        x = randn(16, 64)
        for k, (got, want) in enumerate(zip(_step(compiled, module, x), _step(twin, twin, x), strict=True)):
            torch.testing.assert_close(
                got, want, msg=lambda m, i=i, k=k: f"step {i}, tensor {k}: {m}{explain()}"
            )


def _settle() -> int:
    """Reserved bytes with all caches empty; what the device holds is other processes' too."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _healthy(numbers: list[Tensor]) -> None:
    """Streams, generator, autograd and the program's own captures."""
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    for i, (got, want) in enumerate(zip(random_ops(), numbers, strict=True)):
        assert same_bits(got, want), f"random op {i} of 100 differs{explain()}"
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.ones(100, device=DEVICE).sum().item() == 100
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    pools = {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()}
    assert pools <= {(0, 0)}, f"pools left behind: {pools}"


@pytest.mark.parametrize(("step", "kind", "code"), CASES, ids=[f"{s}-{k}" for s, k, _ in CASES])
def test_a_step_that_always_fails(
    step: str, kind: Any, code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    module = _model()
    twin = copy.deepcopy(module)
    _agree(twin, twin, copy.deepcopy(twin), 2)
    module.zero_grad(set_to_none=True)
    twin.zero_grad(set_to_none=True)
    numbers = random_ops()
    compiled = compile_pgraph(module, codegen="aten")
    torch.manual_seed(5)
    state, cpu_state = torch.cuda.get_rng_state(), torch.get_rng_state()
    reserved = _settle()
    x = randn(16, 64)
    after_one = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    with inject(step, Fault(kind)) as fault, caplog.at_level("WARNING", "pgraph"):
        _step(compiled, module, x)
        assert torch.equal(torch.cuda.get_rng_state(), state), "a call moved the generator"
        _agree(compiled, module, twin, 5)
    assert fault.hits >= 2, f"the step was not reached in forward and backward{explain()}"
    assert torch.equal(torch.get_rng_state(), cpu_state), "the CPU's generator moved"
    assert not torch.equal(after_one, state)
    counters = report().capturable
    assert [p.launches for p in counters] == [0, 0], explain()
    told = [r.getMessage() for r in caplog.records if r.name.startswith("pgraph")]
    if code is None:
        assert [p.reason for p in counters] == [None, None], explain()
        assert any("no memory for a launch" in text for text in told), told
    else:
        assert {p.reason.code for p in counters if p.reason} == {code}, explain()
        assert all(p.reason is not None and p.reason.fix for p in counters)
        assert str(report()).count(f"[{code}]") == 2, explain()
        assert any(code in text for text in told), told
    _healthy(numbers)
    # Without the failure it is captured, after a reset if it was refused.
    pgraph.reset()
    _agree(compiled, module, twin, 4)
    assert_launched(3)
    _healthy(numbers)
    # All memory comes back.
    torch._dynamo.reset()
    pgraph.reset()
    module.zero_grad(set_to_none=True)
    twin.zero_grad(set_to_none=True)
    del x, counters, compiled
    now = _settle()
    assert now <= reserved + (2 << 20), f"{now - reserved} more bytes are reserved{explain()}"


@pytest.mark.parametrize(("step", "kind", "code"), TWICE, ids=[s for s, _, _ in TWICE])
def test_no_memory_for_a_while(step: str, kind: Any, code: str) -> None:
    """Tried again at later calls without a reset; nothing is told that passes."""
    module = _model()
    twin = copy.deepcopy(module)
    compiled = compile_pgraph(module, codegen="aten")
    with inject(step, Fault(kind, left=1)) as fault:
        _agree(compiled, module, twin, 6)
    assert fault.hits == 1
    assert_launched(3)


def test_a_warm_up_without_memory_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes out, as without pgraph; the next calls warm up, capture and launch."""
    module = _model()
    twin = copy.deepcopy(module)
    compiled = compile_pgraph(module, codegen="aten")
    _agree(compiled, module, twin, 1)
    pgraph.reset()
    for partition in partitions():
        monkeypatch.setattr(partition, "_plain", _no_memory)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            compiled(randn(16, 64, grad=True))
    monkeypatch.undo()
    _agree(compiled, module, twin, 4)
    assert_launched(3)


def _no_memory(args: list[Any]) -> Any:
    args.clear()
    raise torch.OutOfMemoryError("injected")


def test_a_device_that_is_really_full() -> None:
    """The same error as eager's where eager has too little, and work as before when there is room again."""

    def fn(x: Tensor) -> Tensor:
        return ((x * 2).sin() + 1).cumsum(0)

    compiled = compile_pgraph(fn, codegen="aten")
    x = randn(4096, 4096)  # 64 MiB
    for _ in range(3):
        assert same_bits(compiled(x), fn(x))
    _settle()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / total)
    filler = []
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:  # also what earlier tests left free between blocks that are still in use
                filler.append(torch.empty(4 << 20, dtype=torch.uint8, device=DEVICE))
        for call in (fn, compiled):
            with pytest.raises(torch.OutOfMemoryError):
                call(x)
    finally:
        filler.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    before = report().launches
    for _ in range(2):
        assert same_bits(compiled(x), fn(x))
    assert report().launches == before + 2, explain()
