"""Random programs on the host driver: views, in-place writes, aliases, cuts, random draws, sizes, gradients.

PGRAPH_FUZZ_PROGRAMS=2000 python -m pytest tests/test_fuzz.py       # as many as one likes
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest
import support_fuzz
import torch
from hypothesis import HealthCheck, assume, given, seed, settings
from support_fuzz import EXPECTED_SIZES, MANY_SIZES, SIZES, Input, Program, check, programs

import pgraph
from pgraph.drivers.host.driver import HostDriver
from pgraph.runtime.statistics import PartitionStats

SHARDS = 8
PROGRAMS = int(os.environ.get("PGRAPH_FUZZ_PROGRAMS", "144"))
COMPILED = int(os.environ.get("PGRAPH_FUZZ_COMPILED", "4"))  # of them also with Inductor's code


def try_program(program: Program, codegen: str, sizes: Sequence[int] = SIZES) -> None:
    torch._dynamo.reset()
    pgraph.reset()
    try:
        valid = check(program, codegen, sizes=sizes)
    except Exception as e:
        e.add_note(f"\nThe program as a script, to be run in tests/:\n\n{program.script(codegen)}\n")
        raise
    assume(valid)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_programs(shard: int) -> None:
    @seed(shard)
    @settings(max_examples=max(1, PROGRAMS // SHARDS), database=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def one(program: Program) -> None:
        try_program(program, "aten")

    one()


def test_programs_in_inductors_code(inductor_cache: object) -> None:
    @seed(0)
    @settings(max_examples=COMPILED, database=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def one(program: Program) -> None:
        try_program(program, "inductor")

    one()


def with_sizes(number: int, sizes: Sequence[int]) -> list[PartitionStats]:
    """Try programs whose sizes vary; what became of their partitions."""
    found: list[PartitionStats] = []

    @seed(number)
    @settings(max_examples=COMPILED, database=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def one(program: Program) -> None:
        assume(any("N" in given.shape for given in program.inputs))
        try_program(dataclasses.replace(program, dynamic=True), "inductor", sizes)
        found.extend(pgraph.report().partitions)

    one()
    return found


@pytest.mark.usefixtures("inductor_cache")
def test_programs_whose_sizes_are_computed() -> None:
    assert any(partition.computed for partition in with_sizes(3, MANY_SIZES))


@pytest.mark.usefixtures("inductor_cache")
def test_programs_whose_sizes_are_computed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: from the third size on those between are launched at their first call."""
    monkeypatch.setattr(HostDriver, "host_times", True)
    monkeypatch.setattr("pgraph.runtime.cache.MOST_NODES", 0)
    assert any(partition.ahead for partition in with_sizes(4, EXPECTED_SIZES))


def drawing() -> Program:
    given = Input(name="x0", shape=("N", 6), dtype="float32", layout="plain", shares=None)
    lines = ("v1 = torch.nn.functional.dropout(x0, 0.5)",)
    return Program(inputs=(given,), lines=lines, outputs=("v1",), backward=False, dynamic=None)


def test_what_is_drawn_must_be_what_eager_or_pytorch_alone_draws() -> None:
    def wrong(fn: Any, dynamic: bool | None) -> Any:
        return lambda x: (fn(x)[0] * 1.001,)

    assert check(drawing())
    with pytest.raises(AssertionError, match="call 0, tensor 0"):
        check(drawing(), compiled=(wrong,))


def test_every_call_is_compared_where_eager_draws_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where eager draws other numbers: each call is compared with what PyTorch compiles."""
    program, real, made = drawing(), support_fuzz.run, []
    eager = program.function()

    def run(program: Program, fn: Any, *args: Any) -> Any:
        found = real(program, fn, *args)
        return [found[0] + 1.0, *found[1:]] if fn is eager else found

    def wrong_at_last(fn: Any, dynamic: bool | None) -> Any:
        right, calls = torch.compile(fn, backend="aot_eager"), itertools.count(1)
        made.append(calls)
        return lambda x: (right(x)[0] * (1.001 if next(calls) == len(SIZES) else 1.0),)

    monkeypatch.setattr(support_fuzz, "run", run)
    monkeypatch.setattr(Program, "function", lambda self: eager)
    assert check(program)
    with pytest.raises(AssertionError, match=f"call {len(SIZES) - 1}, tensor 0"):
        check(program, compiled=(wrong_at_last,))
    assert len(made) == 2
