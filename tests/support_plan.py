"""Shared by the planner's tests: programs as lifetimes, and a replay that checks every rule of a plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from pgraph.template.lifetimes import GRANULE, Lifetime, Lives, survives
from pgraph.template.packing import Chain
from pgraph.template.plan import Plan

MIB = 1 << 20


class Build:
    """Lifetimes written as a program: ids are handed out in order."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.lives: list[Lifetime] = []

    def _add(self, nbytes: int, birth: int, death: int, kind: str) -> None:
        self.lives.append(Lifetime(len(self.lives), nbytes, birth, death, kind))  # type: ignore[arg-type]

    def input(self, nbytes: int, death: int | None = None) -> None:
        self._add(nbytes, 0, survives(self.n) if death is None else death, "input")

    def output(self, nbytes: int, birth: int) -> None:
        self._add(nbytes, birth, survives(self.n), "output")

    def temp(self, nbytes: int, birth: int, death: int) -> None:
        self._add(nbytes, birth, death, "temp")


def rounded(nbytes: int) -> int:
    return (nbytes + GRANULE - 1) // GRANULE * GRANULE


def occupied(life: Lifetime, n: int) -> range:
    """Nodes at which the region must be intact; never empty, so that unused regions are checked too."""
    start = min(life.birth, max(n - 1, 0))
    return range(start, max(min(life.death, max(n, 1)), start + 1))


def eager_peak(n: int, lives: list[Lifetime]) -> int:
    at = Counter[int]()
    for life in lives:
        for k in occupied(life, n):
            at[k] += rounded(life.nbytes)
    return max(at.values(), default=0)


def replay_and_check(n: int, lives: list[Lifetime], plan: Plan) -> int:
    """Replay the schedule step by step, check every rule, and return the peak in bytes."""
    by_id = {life.region: life for life in lives}
    placed = {r: (block.index, offset) for block in plan.blocks for r, offset in block.tenants}
    assert set(placed) == {life.region for life in lives if life.kind != "input"}
    assert sum(len(block.tenants) for block in plan.blocks) == len(placed)
    for r, where in placed.items():
        assert plan.location(r) == where
        block = plan.blocks[where[0]]
        assert where[1] % GRANULE == 0
        assert where[1] + rounded(by_id[r].nbytes) <= block.nbytes

    # Sizes are those of tensors, and an output owns its block from birth on.
    for i, block in enumerate(plan.blocks):
        assert block.index == i
        tenants = [by_id[r] for r, _ in block.tenants]
        assert [min(t.birth, max(n - 1, 0)) for t in tenants] == sorted(
            min(t.birth, max(n - 1, 0)) for t in tenants
        )
        assert block.nbytes in {rounded(t.nbytes) for t in tenants}
        for life in tenants:
            if life.kind == "output":
                assert placed[life.region][1] == 0
                assert block.nbytes == rounded(life.nbytes)
                for other in tenants:
                    assert other is life or occupied(other, n).stop <= occupied(life, n).start
        for j, (r, at) in enumerate(block.tenants):
            for q, to in block.tenants[j + 1 :]:
                x, y = occupied(by_id[r], n), occupied(by_id[q], n)
                if x.start < y.stop and y.start < x.stop:
                    assert at + rounded(by_id[r].nbytes) <= to or to + rounded(by_id[q].nbytes) <= at

    live: set[int] = set()
    ever: set[int] = set()
    inputs = {life.region for life in lives if life.kind == "input"}
    peak = node = 0
    for chunk in plan.chunks:
        assert chunk.first == node
        assert chunk.last > chunk.first or n == 0
        assert list(chunk.allocate) == list(range(len(ever), len(ever) + len(chunk.allocate)))
        assert not ever & set(chunk.allocate)
        live |= set(chunk.allocate)
        ever |= set(chunk.allocate)
        held = sum(plan.blocks[b].nbytes for b in live) + sum(rounded(by_id[r].nbytes) for r in inputs)
        assert held == chunk.held
        peak = max(peak, held)
        for k in range(chunk.first, max(chunk.last, chunk.first + 1)):
            for life in lives:
                if k in occupied(life, n):
                    alive = life.region in inputs if life.kind == "input" else placed[life.region][0] in live
                    assert alive, (life, k)
        assert set(chunk.free) <= live
        assert set(chunk.release) <= inputs
        live -= set(chunk.free)
        inputs -= set(chunk.release)
        node = chunk.last
        # Nothing is kept past its use: what a border carries is what eager holds there.
        after = {life.region for life in lives if life.death > node and life.birth < max(node, 1)}
        if node < n:
            assert inputs == {r for r in after if by_id[r].kind == "input" and by_id[r].death > node}
            kept = {r for r in after if by_id[r].kind != "input"}
            kept |= {r for r in placed if occupied(by_id[r], n).start < node < occupied(by_id[r], n).stop}
            assert live == {placed[r][0] for r in kept}
            assert sum(plan.blocks[b].nbytes for b in live) == sum(rounded(by_id[r].nbytes) for r in kept)
    assert node == n
    assert live == {placed[life.region][0] for life in lives if life.kind == "output"}
    assert inputs == {life.region for life in lives if life.kind == "input" and life.death == survives(n)}
    return peak


@st.composite
def programs(draw: st.DrawFn, max_nodes: int = 14, max_regions: int = 24) -> tuple[int, list[Lifetime]]:
    n = draw(st.integers(0, max_nodes))
    build = Build(n)
    sizes = st.one_of(st.sampled_from([0, 1, 512, 1024, 4096]), st.integers(0, 20_000))
    for _ in range(draw(st.integers(0, max_regions))):
        kind, nbytes = draw(st.sampled_from(["input", "output", "temp", "temp", "temp"])), draw(sizes)
        if kind == "input":
            build.input(nbytes, draw(st.integers(0, n + 1)))
        elif kind == "output":
            build.output(nbytes, draw(st.integers(0, n)))
        else:
            birth = draw(st.integers(0, n))
            build.temp(nbytes, birth, draw(st.integers(birth, min(n, birth + 5))))
    return n, build.lives


def random_program(
    rng: random.Random, n: int, regions: int, size: Callable[[], int], span: int
) -> list[Lifetime]:
    build = Build(n)
    for _ in range(regions):
        birth, draw = rng.randrange(n), rng.random()
        if draw < 0.1:
            build.input(size(), rng.randrange(n + 2))
        elif draw < 0.2:
            build.output(size(), birth)
        else:
            build.temp(size(), birth, min(n, birth + rng.randrange(span)))
    return build.lives


def model_backward(layers: int, hidden: int, inner: int, weight: int) -> Build:
    """Per layer 12 nodes: saved activations die, temporaries come and go, gradients are born."""
    per = 12
    build = Build(layers * per)
    for layer in range(layers):
        base = layer * per
        build.input(7 * weight)
        for j in range(8):
            build.input(hidden, base + per - j)
        for j in range(4):
            build.input(inner, base + 4 + j)
        for j in range(3):
            build.temp(inner, base + 1 + j, base + 3 + j)
        for j in range(5):
            build.temp(hidden, base + 4 + j, base + 7 + j)
        build.temp(hidden, base + 9, min(base + per + 2, build.n))
        for j in range(7):
            build.output(weight, base + 3 + j)
    return build


def layer_forward(hidden: int, inner: int) -> Build:
    """norm, q, k, v, attention, project, add, norm, gate, up, silu * up, down, add (inference)."""
    build = Build(13)
    build.input(hidden)
    build.temp(hidden, 0, 4)
    for j in range(3):
        build.temp(hidden, 1 + j, 5)
    build.temp(hidden, 4, 6)
    build.temp(hidden, 5, 7)
    build.temp(hidden, 6, 13)
    build.temp(hidden, 7, 10)
    build.temp(inner, 8, 11)
    build.temp(inner, 9, 11)
    build.temp(inner, 10, 12)
    build.temp(hidden, 11, 13)
    build.output(hidden, 12)
    return build


def chain_of(n: int, lifetimes: Sequence[Lifetime]) -> Chain:
    """Where cuts are searched for."""
    lives = Lives(n, lifetimes)
    return Chain(lives, [lifetimes[i].nbytes for i in lives.order])
