"""Threads that have called nothing of CUDA's runtime: no context of the device's is theirs yet."""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_helpers import compile_pgraph, explain, randn, report, same_bits
from torch import Tensor

pytestmark = pytest.mark.gpu


def _fn(x: Tensor) -> Tensor:
    return torch.softmax(x.tanh() * 2, -1).cumsum(0) + 1


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "another stream"])
def test_a_thread_that_launches_first_of_all(side: bool) -> None:
    """The driver's functions, which a launch calls, want a context; runtime functions bind one."""
    compiled = compile_pgraph(_fn, codegen="aten")
    x = randn(256, 256)
    for _ in range(4):
        compiled(x)
    expected, before = _fn(x), report().launches
    assert before, explain()
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    torch.cuda.synchronize()
    found: list[Tensor] = []

    def work() -> None:
        with torch.cuda.stream(stream):
            found.extend(compiled(x) for _ in range(3))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    torch.cuda.synchronize()
    assert report().launches == before + 3, explain()
    assert all(same_bits(y, expected) for y in found)
