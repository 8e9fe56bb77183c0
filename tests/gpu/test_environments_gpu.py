"""Processes that are set up otherwise: each trains a small net beside Inductor, and has its bits."""

from __future__ import annotations

import re

import pytest
import torch
from gpu_helpers import finish, python

pytestmark = pytest.mark.gpu

_TRAINING = """
import os, sys, torch
import gpu_helpers as h
from torch import nn

# Else sums are cut as timings say, differently in each compilation. (Inductor's own setting does not last:
# Dynamo sets this one anew after each function, and Inductor's with it.)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = False
exec(sys.argv[1])  # the state of the process


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.outer = nn.Linear(8 * 16, 64), nn.Linear(64, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.outer(nn.functional.gelu(self.inner(x)).cumsum(1))


torch.backends.cudnn.deterministic = True
torch.manual_seed(0)
nets = [Net().to(h.DEVICE) for _ in range(2)]
nets[1].load_state_dict(nets[0].state_dict())
runs = [torch.compile(nets[0], dynamic=False), h.compile_pgraph(nets[1])]
optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True) for net in nets]
inputs = [torch.randn(4, 3, 4, 4, device=h.DEVICE) for _ in range(3)]
held, losses = [], [[], []]
for step in range(12):
    for run, optimizer, mine in zip(runs, optimizers, losses, strict=True):
        held = [torch.full((4096,), float("nan"), device=h.DEVICE) for _ in range(step % 4)]  # memory moves
        x = inputs[step % 3].clone()
        if step == 10:
            torch.cuda.empty_cache()
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mine.append(loss.detach())
theirs, mine = (torch.stack(found) for found in losses)
states = [list(net.state_dict().values()) for net in nets]
if not theirs.isfinite().all():  # no assertions: there are none in optimised Python
    raise SystemExit(f"{theirs} is not finite")
if not all(h.same_bits(a, b) for a, b in zip([theirs, *states[0]], [mine, *states[1]], strict=True)):
    raise SystemExit(f"{theirs} and {mine}, or the weights{h.explain()}")
report = h.report()
print("LAUNCHES", report.launches, "CODES", sorted(h.outside_codes()), "REFUSED", report.refused)
print(h.explain())
print("RIGHT")
"""

_DETERMINISTIC = (
    "torch.use_deterministic_algorithms(True); torch.utils.deterministic.fill_uninitialized_memory = True"
)
_STATES = {
    "blocking": ("", {"CUDA_LAUNCH_BLOCKING": "1"}),
    "eager loading": ("", {"CUDA_MODULE_LOADING": "EAGER"}),
    "one connection": ("", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    "no TF32": ("", {"NVIDIA_TF32_OVERRIDE": "0"}),
    "deterministic": (_DETERMINISTIC, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    "deterministic, small workspace": (_DETERMINISTIC, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
    "no workspace of cuBLASLt's own": ("", {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}),
    "blocks not divided": ("", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:32"}),
    "rounded sizes": ("", {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"}),
    "collected": ("", {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.6"}),
    "expandable": ("", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    "a default device": ("torch.set_default_device('cuda')", {}),
    "another default dtype": ("torch.set_default_dtype(torch.bfloat16)", {}),
    "anomalies": ("torch.autograd.set_detect_anomaly(True)", {}),
    "optimised Python": ("", {"PYTHONOPTIMIZE": "1"}),
    "without helpers": ("", {"PGRAPH_NATIVE": "0"}),
}


# Dynamo looks for the bytecode of an assertion, and there is none (StopIteration in 2.11, not in 2.13).
_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
_WITHOUT_ASSERTIONS = pytest.mark.skipif(_OLD, reason="Dynamo of torch 2.11 fails in optimised Python")


@pytest.mark.parametrize(
    "state", [pytest.param(s, marks=_WITHOUT_ASSERTIONS if "optimised" in s else ()) for s in _STATES]
)
def test_training_is_inductors_and_captured(state: str) -> None:
    code, environment = _STATES[state]
    output = finish(python(_TRAINING, code, **environment))
    assert "RIGHT" in output, output
    assert "REFUSED 0" in output, output
    launches = re.search(r"LAUNCHES (\d+)", output)
    assert launches is not None
    assert int(launches[1]) >= 20, output  # forward and backward, from the second or third step on


@pytest.mark.parametrize(
    "environment",
    [{"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}],
    ids=["cudaMallocAsync", "no cache"],
)
def test_with_another_allocator_nothing_is_captured(environment: dict[str, str]) -> None:
    output = finish(python(_TRAINING, "", **environment))
    assert "RIGHT" in output, output
    assert "LAUNCHES 0 CODES ['other-allocator']" in output, output


_FORKED = """
import gc, os, torch
import gpu_helpers as h
from torch.utils.data import DataLoader, TensorDataset

run, x = h.compile_pgraph(lambda x: (x * 2).cumsum(0).sin()), h.randn(16, 16)
for _ in range(4):
    want = run(x)
child = os.fork()
if not child:
    del run
    torch._dynamo.reset()
    h.registry.forget()
    gc.collect()  # execs and graphs go, which are the parent's
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
for batch in DataLoader(TensorDataset(torch.ones(8, 16, 16)), num_workers=2):
    run(batch[0][0].to(h.DEVICE))
assert h.same_bits(run(x), want)
h.assert_launched(4)
print("RIGHT")
"""


def test_forked_processes_leave_it_alone() -> None:
    """Such as a DataLoader's: what they drop is not theirs, and the driver would answer with errors."""
    output = finish(python(_FORKED))
    assert "RIGHT" in output, output
    assert "Exception ignored" not in output, output
