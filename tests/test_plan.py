"""The memory planner: soundness against an independent replay, minimality, errors."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_plan import (
    MIB,
    Build,
    chain_of,
    eager_peak,
    layer_forward,
    model_backward,
    occupied,
    programs,
    random_program,
    replay_and_check,
    rounded,
)

from pgraph.errors import PlanError
from pgraph.native import libraries
from pgraph.template import idle
from pgraph.template.lifetimes import Lifetime, Pairs
from pgraph.template.packing import EXHAUSTIVE_NODES, MORE
from pgraph.template.plan import make_plan


def fewest_chunks(n: int, cost: Callable[[int, int], int], limit: int) -> int:
    """Over all sets of cuts."""
    best = [0] + [n + 1] * n
    for b in range(1, n + 1):
        best[b] = min((best[a] + 1 for a in range(b) if cost(a, b) <= limit), default=n + 1)
    return best[n]


def equal_sizes_costs(n: int, lives: list[Lifetime]) -> dict[tuple[int, int], int]:
    """Every chunk's cost under the rule behind the guarantee: only regions of one size share blocks."""
    inputs, others = [0] * n, [Counter[int]() for _ in range(n)]
    for life in lives:
        for k in occupied(life, n):
            if life.kind == "input":
                inputs[k] += rounded(life.nbytes)
            else:
                others[k][rounded(life.nbytes)] += 1
    costs = {}
    for a in range(n):
        most = Counter[int]()
        for b in range(a + 1, n + 1):
            most |= others[b - 1]
            costs[a, b] = inputs[a] + sum(size * count for size, count in most.items())
    return costs


@settings(max_examples=300, deadline=None)
@given(programs(), st.sampled_from([0, 512, 4096, 30_000, 1 << 22]))
@example((0, []), 0)
@example((0, [Lifetime(7, 100, 0, 1, "output"), Lifetime(8, 9, 0, 0, "temp")]), 0)
@example((2, [Lifetime(0, 512, 2, 2, "temp"), Lifetime(1, 512, 2, 3, "output")]), 0)
def test_plan_is_sound_within_the_limit_and_minimal(
    program: tuple[int, list[Lifetime]], slack_bytes: int
) -> None:
    n, lives = program
    plan = make_plan(n, lives, slack_bytes=slack_bytes)
    assert plan.peak == replay_and_check(n, lives, plan)
    assert plan.eager_peak == eager_peak(n, lives)
    limit = plan.eager_peak + max(slack_bytes, plan.eager_peak // 100)
    assert plan.peak <= limit
    if n == 0:
        assert len(plan.chunks) == bool(lives)
        return
    chain = chain_of(n, lives)
    assert len(plan.chunks) == fewest_chunks(n, lambda a, b: chain.pack(a, b, None).held, limit)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(EXHAUSTIVE_NODES + 1, 60), st.sampled_from([0.0, 0.1]))
def test_long_chains_never_need_more_chunks_than_equal_size_sharing(seed: int, n: int, ratio: float) -> None:
    rng = random.Random(seed)
    lives = random_program(rng, n, 3 * n // 2, lambda: rng.choice([512, 1000, 4096, 70_000, 65_536]), 8)
    slack = int(eager_peak(n, lives) * ratio)
    plan = make_plan(n, lives, slack_bytes=slack)
    assert plan.peak == replay_and_check(n, lives, plan)
    limit = plan.eager_peak + max(slack, plan.eager_peak // 100)
    assert plan.peak <= limit
    costs = equal_sizes_costs(n, lives)
    assert len(plan.chunks) <= fewest_chunks(n, lambda a, b: costs[a, b], limit)
    # The rule is monotone in both ends and packing stays below it: what makes greedy cuts optimal.
    chain = chain_of(n, lives)
    for (a, b), cost in costs.items():
        assert a + 1 == b or (costs[a, b - 1] <= cost and costs[a + 1, b] <= cost)
        if (a + b) % 7 == 0:
            assert chain.pack(a, b, None).held <= cost


@pytest.mark.parametrize("layers", [2, 8, 32, 200])
def test_backward_of_a_whole_model_stays_at_the_eager_peak(layers: int) -> None:
    build = model_backward(layers, 16 * MIB, 56 * MIB, 40 * MIB)
    whole = make_plan(build.n, build.lives, slack_bytes=1 << 50)
    plan = make_plan(build.n, build.lives)
    assert len(whole.chunks) == 1
    assert plan.peak <= plan.eager_peak * 1.01
    # Cutting is what saves: in one piece activations and gradients are all held at once.
    assert whole.peak > plan.eager_peak * 1.05
    assert len(plan.chunks) <= 12
    # Eager-like sizes only, so that reserved memory does not fragment.
    assert {b.nbytes for b in plan.blocks} <= {16 * MIB, 56 * MIB, 40 * MIB}


def test_one_layer_forward_is_cut_only_for_the_peak() -> None:
    build = layer_forward(8 * MIB, 28 * MIB)
    plan = make_plan(build.n, build.lives)
    assert plan.peak == plan.eager_peak == 100 * MIB
    # The output's own block, idle while the three inner tensors peak, is all that a whole launch adds.
    assert len(plan.chunks) == 2
    whole = make_plan(build.n, build.lives, slack_bytes=8 * MIB)
    assert len(whole.chunks) == 1
    assert whole.peak == 108 * MIB


def test_temporaries_live_in_an_output_block_before_its_birth() -> None:
    build = Build(4)
    build.temp(3000, 0, 2)
    build.temp(900, 0, 1)
    build.output(5000, 2)
    plan = make_plan(4, build.lives, slack_bytes=0)
    assert plan.peak == plan.eager_peak == rounded(5000)
    assert plan.blocks[0].tenants == ((0, 0), (1, rounded(3000)), (2, 0))


@settings(max_examples=200, deadline=None)
@given(programs(), st.integers(1, 9), st.sampled_from([0, 512, 4096]))
def test_borders_of_another_size_are_taken_where_they_are_as_good(
    program: tuple[int, list[Lifetime]], times: int, slack_bytes: int
) -> None:
    """They may be more, or not fit: the peak is what it may be without, and chunks are hardly more."""
    n, lives = program
    others = [life._replace(nbytes=life.nbytes * times) for life in lives]
    known = make_plan(n, others, slack_bytes=slack_bytes).borders
    alone = make_plan(n, lives, slack_bytes=slack_bytes)
    plan = make_plan(n, lives, slack_bytes=slack_bytes, known=[(0, 1, n + 1), known])
    assert plan.peak == replay_and_check(n, lives, plan)
    assert plan.peak <= plan.eager_peak + max(slack_bytes, plan.eager_peak // 100)
    assert len(plan.chunks) <= len(alone.chunks) + len(alone.chunks) // MORE


def test_sizes_of_a_backward_are_cut_alike() -> None:
    """Weights' gradients are as large as ever while the rest grows, so each would be cut by itself."""

    known: list[tuple[int, ...]] = []
    alone = set()
    for length in random.Random(0).sample(range(16, 256), 120):
        build = model_backward(8, length * MIB // 8, 3 * length * MIB // 8, 40 * MIB)
        alone.add(make_plan(build.n, build.lives).borders)
        borders = make_plan(build.n, build.lives, known=known).borders
        known = [borders, *[other for other in known if other != borders]]
    assert len(known) < len(alone) / 2


def test_small_graphs_are_one_chunk() -> None:
    build = Build(50)
    for k in range(50):
        build.temp(10_000 + 600 * k, k, k + 1)
    assert len(make_plan(50, build.lives).chunks) == 1


def test_unused_region_disturbs_nobody() -> None:
    build = Build(3)
    build.temp(1000, 0, 3)
    build.temp(1000, 1, 1)
    plan = make_plan(3, build.lives)
    assert plan.location(0) != plan.location(1)


@pytest.mark.parametrize(
    ("lives", "message"),
    [
        ([Lifetime(3, 8, 2, 1, "temp")], "region 3 has birth 2 after death 1; pass birth <= death"),
        ([Lifetime(3, -8, 0, 1, "temp")], "region 3 has nbytes -8; pass a size >= 0"),
        ([Lifetime(3, 8, -1, 1, "temp")], "region 3 has birth -1; pass a node >= 0"),
        ([Lifetime(3, 8, 0, 1, "temp")] * 2, "region 3 appears twice; give each region an id of its own"),
        ([Lifetime(3, 8, 0, 7, "temp")], "region 3 has death 7 in a chain of 5 nodes; pass at most 6"),
        ([Lifetime(3, 8, 0, 4, "output")], "region 3 is an output with birth 0 and death 4; outputs survive"),
        ([Lifetime(3, 8, 6, 6, "output")], "region 3 is an output with birth 6 and death 6"),
        ([Lifetime(3, 8, 0, 6, "temp")], r"region 3 is a temp with death 6 \(survives\); pass at most 5"),
        ([Lifetime(3, 8, 1, 6, "input")], "region 3 is an input with birth 1; .*, pass 0"),
        ([Lifetime(3, 8, 0, 5, "view")], "region 3 has kind 'view'; pass"),  # type: ignore[arg-type]
    ],
)
def test_contradictions_are_named(lives: list[Lifetime], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(5, lives)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(PlanError, match="n_nodes is -1; pass a number >= 0"):
        make_plan(-1, [])
    with pytest.raises(PlanError, match="slack_bytes is -5"):
        make_plan(1, [], slack_bytes=-5)
    with pytest.raises(PlanError, match="region 0 has no block in this plan"):
        make_plan(1, [Lifetime(0, 8, 0, 2, "input")]).location(0)


@settings(max_examples=150, deadline=None)
@given(programs(max_nodes=50, max_regions=90), st.data())
def test_chunks_are_packed_alike_in_c(program: tuple[int, list[Lifetime]], data: st.DataObject) -> None:
    n, lives = program
    if libraries.load() is None:
        pytest.skip("no C compiler")
    chain = chain_of(n, lives)
    a = data.draw(st.integers(0, chain.n - 1))
    b = data.draw(st.integers(a + 1, chain.n))
    whole = chain._pack_in_python(a, b, None)
    limit = data.draw(st.none() | st.integers(0, whole.held))
    wanted, found = chain._pack_in_python(a, b, limit), chain.pack(a, b, limit)
    if limit is not None and wanted.held > limit:
        assert found.held == wanted.held
        return
    assert dataclasses.astuple(wanted) == tuple(
        x if isinstance(x, int) else list(x) for x in dataclasses.astuple(found)
    )


def test_as_many_idle_places_are_looked_at_in_c() -> None:
    source = (pathlib.Path(libraries.__file__).parent / "rebind_plan.h").read_text()
    assert f"enum {{ SCAN = {idle._SCAN} }}" in source


NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=9), st.slices(9), st.integers(-9, 8))
def test_pairs_are_a_tuple_of_pairs(pairs: list[tuple[int, int]], some: slice, at: int) -> None:
    found = Pairs(pairs)
    assert (tuple(found), len(found), found[some]) == (tuple(pairs), len(pairs), tuple(pairs[some]))
    assert found == Pairs(pairs) == tuple(pairs)
    assert hash(found) == hash(Pairs(pairs))
    assert repr(found) == repr(tuple(pairs))
    assert found != Pairs([*pairs, (0, 0)])
    if -len(pairs) <= at < len(pairs):
        assert found[at] == pairs[at]
    else:
        with pytest.raises(IndexError):
            found[at]
