"""Results that outlive the next launch are allocated first (Note [Results first])."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from support_allocator import Memory
from support_native import FakeDevice, made
from torch import Tensor, nn

import pgraph
from pgraph.launch.program import Program
from pgraph.runtime import registry


def moving_share(program: Program, lasting: int, launches: int = 16) -> float:
    """The share of allocations whose address is not that of last time, if a result is kept until the next one
    is there. Of the result's own nobody expects it."""
    memory, kept, found = Memory(), list[int](), list[dict[int, int]]()
    own = program.results[lasting].index
    for _ in range(launches):
        living, seen = dict[int, int](), dict[int, int]()
        for chunk in program.chunks:
            for allocation in chunk.allocate:
                nbytes = math.prod(allocation.size) * allocation.dtype.itemsize
                seen[allocation.block] = living[allocation.block] = memory.take(nbytes)
            for block in chunk.free:
                memory.give(living.pop(block))
        for address in kept:
            memory.give(address)
        kept = [living.pop(own)]
        for address in living.values():
            memory.give(address)
        found.append(seen)
    moved = [found[-1][block] != found[-2][block] for block in found[-1] if block != own]
    return sum(moved) / len(moved)


def test_what_is_allocated_after_a_lasting_result_stays_where_it_was() -> None:
    chance, shares = random.Random(0), list[tuple[float, float]]()
    for _ in range(40):
        memory = [
            (chance.choice(["temp", "output", "output"]), place, 2, int(2 ** chance.uniform(4, 18)))
            for place in range(30)
        ]
        memory.append(("output", 30, 0, int(2 ** chance.uniform(4, 18))))
        case = {"nodes": 32, "inputs": [(True, 0)], "memory": memory, "slack": 1 << 30}
        plain = made(FakeDevice(), case)
        last = len(plain.results) - 1
        ordered = made(FakeDevice(), {**case, "lasting": (last,)})
        assert ordered.chunks[0].allocate[0].block == ordered.results[last].index
        if plain.chunks[0].allocate[0].block == plain.results[last].index:
            continue  # its block serves as scratch before
        shares.append((moving_share(plain, last), moving_share(ordered, last)))
    assert len(shares) > 20
    before, after = (statistics.mean(share) for share in zip(*shares, strict=True))
    assert before > 0.2, "what the order is for"
    assert after < 0.1 * before


class Keeps(nn.Module):
    """Saves and returns; what it returns is the last that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.gelu(self.first(x))
        return y.sum(1), self.second(y)


@pytest.mark.parametrize("training", [True, False])
def test_of_a_forward_it_is_what_the_program_gets(training: bool) -> None:
    compiled = torch.compile(Keeps(), backend="pgraph", options={"driver": "host", "step_aside": False})
    with torch.set_grad_enabled(training):
        for _ in range(4):
            first, second = compiled(torch.randn(8, 16))
            if training:
                (first.sum() + second.sum()).backward()
    assert pgraph.report().launches > 0
    (forward,) = (p for p in registry.live_capturable() if p.stats.facts.graph.kind != "backward")
    (program,) = forward._cache.captured.programs
    assert forward.admission.code.lasting == {0, 1}
    blocks = [allocation.block for allocation in program.chunks[0].allocate]
    assert set(blocks[:2]) == {program.results[0].index, program.results[1].index}
    assert len(blocks) > 2
