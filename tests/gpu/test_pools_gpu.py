"""Memory pools of the program's own around calls of compiled code."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import compile_pgraph, explain, randn, report, same_bits
from torch import Tensor

pytestmark = pytest.mark.gpu


def _fn(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() @ w).softmax(-1).cumsum(0)


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_a_pool_of_the_programs_own(codegen: str) -> None:
    """The allocator prefers it to those of a capture, whose temporaries would lie in it: no launch may write
    there. Outside of it what was not captured is captured."""
    compiled = compile_pgraph(_fn, codegen=codegen)
    x, w = randn(256, 256), randn(256, 256) / 16
    plain = torch.compile(_fn) if codegen == "inductor" else _fn
    expected = plain(x, w)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        for _ in range(2):
            assert same_bits(compiled(x, w), expected), explain()
        mine = [torch.zeros(256, 256, device=x.device) for _ in range(16)]  # where temporaries were
    for _ in range(8):
        assert same_bits(compiled(x, w), expected), explain()
    torch.cuda.synchronize()
    assert not any(t.any() for t in mine)
    assert report().launches > 0, explain()
