"""The random programs of `tests/test_fuzz.py` on a GPU.

PGRAPH_FUZZ_PROGRAMS=1000 python -m pytest -n 14 tests/gpu/test_fuzz_gpu.py       # as many as one likes
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from gpu_helpers import compile_pgraph
from hypothesis import HealthCheck, assume, given, seed, settings
from support_fuzz import MANY_SIZES, Input, Program, check, programs

import pgraph

SHARDS = 14
PROGRAMS = int(os.environ.get("PGRAPH_FUZZ_PROGRAMS", "56"))


def _on_gpu(fn: Any, dynamic: bool | None) -> Any:
    return compile_pgraph(fn, dynamic=dynamic, driver="cuda", codegen="aten", min_ops=1, warmup=1)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_programs(shard: int) -> None:
    launches = 0

    @seed(100 + shard)
    @settings(
        max_examples=max(1, PROGRAMS // SHARDS),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def one(program: Program) -> None:
        nonlocal launches
        torch._dynamo.reset()
        pgraph.reset()
        try:
            valid = check(program, "aten", "cuda", (_on_gpu,))
        except Exception as e:
            e.add_note(f"\nThe program, to be checked with device='cuda':\n\n{program.script('aten')}\n")
            raise
        launches += pgraph.report().launches
        assume(valid)

    one()
    assert launches, "nothing was ever launched"


def test_what_is_drawn_where_alignment_decides_is_what_pytorch_draws() -> None:
    """Eager drops elements of `x0`, which lies at an odd place, one by one; any compiled program those of a
    tensor of its own, by vectors."""
    x0 = Input(name="x0", shape=("N", 6), dtype="float32", layout="offset", shares=None)
    lines = ("x0.add_(x0)", "v1 = torch.nn.functional.dropout(x0, 0.5)", "v2 = x0.sin()")
    program = Program(inputs=(x0,), lines=lines, outputs=("x0", "v1", "v2"), backward=False, dynamic=None)
    torch._dynamo.reset()
    pgraph.reset()
    assert check(program, "aten", "cuda", (_on_gpu,))
    assert pgraph.report().launches, "what is not drawn was never launched"


def test_programs_whose_sizes_are_computed() -> None:
    """In Inductor's code, which takes long to compile."""
    computed = 0

    def on_gpu(fn: Any, dynamic: bool | None) -> Any:
        chosen = {"min_ops": 1, "step_aside": False, "inductor": {"fallback_random": True}}
        return compile_pgraph(fn, dynamic=dynamic, driver="cuda", **chosen)

    @seed(3)
    @settings(max_examples=4, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def one(program: Program) -> None:
        nonlocal computed
        assume(any("N" in given.shape for given in program.inputs))
        torch._dynamo.reset()
        pgraph.reset()
        varying = dataclasses.replace(program, dynamic=True)
        assume(check(varying, "inductor", "cuda", (on_gpu,), MANY_SIZES))
        computed += pgraph.report().computed

    one()
    assert computed, "no recording was ever computed"
