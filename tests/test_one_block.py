"""Temporaries of a small chain in one block: Note [One block] in `pgraph.template.one_block`."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import host, same
from support_plan import MIB, Build, replay_and_check
from torch import Tensor

import pgraph
from pgraph.template import one_block
from pgraph.template.lifetimes import GRANULE
from pgraph.template.plan import Plan, make_plan

LIVES = st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(1, 12))


def alive(lives: list[tuple[int, int, int]]) -> int:
    """The most bytes that are there at once."""
    return max((sum(z for z, s, e in lives if s <= k < e) for k in range(40)), default=0)


@given(st.lists(LIVES, max_size=40), st.integers(0, 1200))
def test_none_lies_where_another_is(drawn: list[tuple[int, int, int]], limit: int) -> None:
    lives = [(GRANULE * size, start, start + length) for size, start, length in drawn]
    columns = [[life[k] for life in lives] for k in range(3)]
    found = one_block.offsets(*columns, GRANULE * limit)
    if found is None:
        assert sum(columns[0]) > GRANULE * limit
        return
    offsets, total = found
    ends = [at + size for at, (size, _, _) in zip(offsets, lives, strict=True)]
    assert alive(lives) <= total <= GRANULE * limit
    assert total == max(ends, default=0)
    for i, (_, start, end) in enumerate(lives):
        assert offsets[i] >= 0
        assert offsets[i] % GRANULE == 0
        for k, (_, since, until) in enumerate(lives[:i]):
            if start < until and since < end:
                assert ends[k] <= offsets[i] or ends[i] <= offsets[k]


def transformer(layers: int, hidden: int, inner: int) -> Build:
    """Blocks of a transformer without a backward: a residual stream, attention, a gated product."""
    per = 13
    build = Build(layers * per)
    build.input(MIB)
    build.temp(hidden, 0, 2)
    for layer in range(layers):
        at = layer * per
        if layer:
            build.temp(hidden, at, at + 2)
        for j in range(3):
            build.temp(hidden, at + 1 + j, at + 5)
        build.temp(hidden, at + 4, at + 6)
        build.temp(hidden, at + 5, min(at + per + 6, build.n))
        build.temp(hidden, at + 6, at + 8)
        build.temp(inner, at + 7, at + 10)
        build.temp(inner, at + 8, at + 10)
        build.temp(inner, at + 9, at + 11)
        build.temp(hidden, at + 10, at + 12)
    build.output(MIB // 2, build.n - 1)
    return build


def planned(build: Build, slack: int, monkeypatch: pytest.MonkeyPatch | None = None) -> Plan:
    """Checked; with blocks of tensors' sizes only, where they are patched."""
    if monkeypatch is not None:
        monkeypatch.setattr(one_block, "MOST_BYTES", 0)
    plan = make_plan(build.n, build.lives, slack_bytes=slack)
    assert plan.peak == replay_and_check(build.n, build.lives, plan)
    assert plan.peak <= plan.eager_peak + max(slack, plan.eager_peak // 100)
    return plan


def test_a_transformer_comes_in_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes no more than it would without a graph. Where that is much, blocks are as they would be."""
    small, large = transformer(6, 4 * MIB, 11 * MIB), transformer(6, 12 * MIB, 33 * MIB)
    plan = planned(small, MIB)
    assert len(plan.chunks) == 1
    assert [len(block.tenants) > 1 for block in plan.blocks] == [True, False], "the result has its own"
    assert plan.peak == plan.eager_peak + MIB // 2, "and is there from the first node on"
    much = planned(large, MIB)
    assert len(planned(small, MIB, monkeypatch).chunks) > 3
    assert planned(large, MIB, monkeypatch) == much


def test_what_fits_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of tensors' sizes, as long as one chunk is within the limit."""
    build = transformer(6, 4 * MIB, 11 * MIB)
    plan = planned(build, 64 * MIB)
    assert len(plan.chunks) == 1
    assert planned(build, 64 * MIB, monkeypatch) == plan


def test_inputs_that_are_dropped_on_the_way_need_their_chunks() -> None:
    """As in a backward: in one chunk they would be there to the end."""
    build = transformer(6, MIB, 3 * MIB)
    for k in range(1, build.n):
        build.input(4 * MIB, k)
    plan = planned(build, 0)
    assert len(plan.chunks) > 1


def test_it_takes_no_time() -> None:
    """To plan one more size; a chain of many temporaries is left alone."""
    rng = random.Random(0)

    def seconds(count: int) -> tuple[float, bool]:
        starts = [rng.randrange(400) for _ in range(count)]
        sizes = [GRANULE * rng.randrange(1, 99) for _ in starts]
        ends = [start + rng.randrange(1, 20) for start in starts]
        began = time.perf_counter()
        found = one_block.offsets(sizes, starts, ends, 1 << 30)
        return time.perf_counter() - began, found is not None

    assert seconds(257) == (pytest.approx(0.0, abs=0.01), False)
    took, done = seconds(256)
    assert done
    assert took < 0.2


class Blocks(torch.nn.Module):
    """Products of two widths, whose temporaries are of two sizes."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(16))
        self.up = torch.nn.ModuleList(torch.nn.Linear(16, 44) for _ in range(layers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(44, 16) for _ in range(layers))
        self.mix = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.first  # what a program gives is small, as tokens are
        for up, down, mix in zip(self.up, self.down, self.mix, strict=True):
            y = mix(x)
            x = x + mix(y).sin() * y
            h = up(x)
            x = x + down(torch.nn.functional.silu(h) * up(y))
        return x.mean(-1)


def test_numbers_are_right_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks = Blocks(), []
    for most in (0, 64 << 20):
        monkeypatch.setattr(one_block, "MOST_BYTES", most)
        torch._dynamo.reset()
        compiled = host(model, memory_slack_mb=2)
        with torch.no_grad():
            for seed in range(5):
                x = torch.randn(40_000, 1, generator=torch.Generator().manual_seed(seed))
                same(compiled(x.clone()), model(x), rtol=1e-4, atol=1e-5)
        assert pgraph.report().launches >= 3
        chunks.append(pgraph.report().partitions[-1].chunks)
    assert chunks[0] > chunks[1] == 1
