"""What planning costs: seconds for a long graph, and how the work grows with it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from support_plan import MIB, Build, model_backward, random_program

from pgraph.template.lifetimes import Lifetime
from pgraph.template.packing import Chain, Packed
from pgraph.template.plan import Plan, make_plan

SIZES = (512, MIB, 4 * MIB, 7 * MIB, 16 * MIB, 56 * MIB)


def long_program(kind: str, nodes: int) -> tuple[int, list[Lifetime]]:
    """About `nodes` nodes: a deep model's backward, or temporaries at random."""
    rng = random.Random(0)
    if kind == "layers":
        build = model_backward(nodes // 12, 16 * MIB, 56 * MIB, 40 * MIB)
        return build.n, build.lives
    if kind == "few sizes":
        return nodes, random_program(rng, nodes, 3 * nodes // 2, lambda: rng.choice(SIZES), 40)
    return nodes, random_program(rng, nodes, 3 * nodes // 2, lambda: int(2 ** rng.uniform(9, 26)), 40)


def timed(nodes: int, lives: Sequence[Lifetime]) -> tuple[float, Plan]:
    """Seconds of this process: the better of two, as others may share its core's caches."""
    best = float("inf")
    for _ in range(2):
        begin = time.process_time()
        plan = make_plan(nodes, lives)
        best = min(best, time.process_time() - begin)
    return best, plan


@pytest.mark.parametrize("kind", ["layers", "few sizes"])
def test_20000_nodes_take_less_than_two_seconds(kind: str) -> None:
    took, plan = timed(*long_program(kind, 20_000))
    assert took < 2.0  # 0.4 s and 0.8 s on one core of 2020
    assert plan.peak <= plan.eager_peak * 1.01


def test_20000_nodes_of_all_sizes_take_not_much_longer() -> None:
    """No two regions are equal in size, which no model does: every region is fitted into idle rectangles.

    1.5 to 1.9 s on one core of 2020; twice that is allowed where others share the core.
    """
    took, plan = timed(*long_program("all sizes", 20_000))
    assert took < 4.0
    assert plan.peak <= plan.eager_peak * 1.01


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of one number: the nodes looked at, over all packings and scans."""
    done = [0]
    pack, scan = Chain.pack, Chain._sure_end

    def counted_pack(self: Chain, a: int, b: int, limit: int | None) -> Packed:
        done[0] += b - a
        return pack(self, a, b, limit)

    def counted_scan(self: Chain, a: int, limit: int) -> int:
        end = scan(self, a, limit)
        done[0] += end - a
        return end

    monkeypatch.setattr(Chain, "pack", counted_pack)
    monkeypatch.setattr(Chain, "_sure_end", counted_scan)
    return done


@pytest.mark.parametrize("kind", ["layers", "few sizes", "all sizes"])
def test_the_work_grows_with_the_nodes(kind: str, work: list[int]) -> None:
    """Nodes looked at for each node of the graph: no more in a longer graph."""
    per_node = []
    for nodes in (5_000, 10_000, 20_000):
        work[0] = 0
        n, lives = long_program(kind, nodes)
        make_plan(n, lives)
        per_node.append(work[0] / n)
    assert per_node[0] >= 1
    assert max(per_node) <= 1.5 * per_node[0], per_node
    assert max(per_node) < 12, per_node


def test_borders_of_hundreds_of_sizes_take_little_longer(work: list[int]) -> None:
    """None of them fits, and most only do not at their ends."""
    n, lives = long_program("layers", 5_000)
    borders = make_plan(n, lives).borders
    alone, work[0] = work[0], 0
    known = [(*borders[:-2], borders[-3] + 1 + k, n) for k in range(300)]
    plan = make_plan(n, lives, known=known)
    assert plan.borders not in known
    assert work[0] <= 20 * alone, work[0] / alone


def test_the_seconds_grow_with_the_nodes() -> None:
    seconds = [timed(*long_program("layers", nodes))[0] for nodes in (5_000, 10_000, 20_000)]
    assert seconds[2] < 4 * 2 * seconds[0] + 0.2, seconds


def test_many_short_chunks_take_linear_time() -> None:
    build = Build(20_000)
    for k in range(10_000):
        part = 1 + 4001 * k % 10_000  # far from the one before: no two pairs fit into one chunk
        build.temp(512 * (20_000 - part), 2 * k, 2 * k + 2)
        build.temp(512 * part, 2 * k, 2 * k + 2)
    begin = time.process_time()
    plan = make_plan(20_000, build.lives, slack_bytes=0)
    assert time.process_time() - begin < 4.0
    assert len(plan.chunks) > 5000
    assert plan.peak == plan.eager_peak
