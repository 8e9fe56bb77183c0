"""Joins of a recording that forks, against what reachability says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgraph.template.topology import Topology, chain, in_order, topology


def brute_joins(n: int, edges: list[tuple[int, int]]) -> tuple[int, ...]:
    """Positions before which every node reaches every later one."""
    reaches = [[a == b for b in range(n)] for a in range(n)]
    for a in reversed(range(n)):
        for first, second in edges:
            if first == a:
                reaches[a] = [x or y for x, y in zip(reaches[a], reaches[second], strict=True)]
    met = (p for p in range(n + 1) if all(reaches[a][b] for a in range(p) for b in range(p, n)))
    return tuple(met)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Chains, and graphs of few and of many edges."""
    n = draw(st.integers(0, 9))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    kept = draw(st.sets(st.sampled_from(pairs)) if pairs else st.just(set()))
    if draw(st.booleans()):
        kept |= {(a, a + 1) for a in range(n - 1) if draw(st.integers(0, 3))}
    return n, sorted(kept)


@given(graphs())
def test_joins_are_where_all_paths_meet(graph: tuple[int, list[tuple[int, int]]]) -> None:
    n, edges = graph
    assert topology(n, edges).joins == brute_joins(n, edges)


@given(graphs(), st.randoms(use_true_random=False))
def test_any_order_of_the_driver_is_put_right(
    graph: tuple[int, list[tuple[int, int]]], chance: random.Random
) -> None:
    """Shuffled numbers: the order found is valid, and its joins are at the same counts of nodes."""
    n, edges = graph
    names = list(range(n))
    chance.shuffle(names)
    order = in_order(n, [(names[a], names[b]) for a, b in edges])
    assert order is not None
    place = {name: position for position, name in enumerate(order)}
    moved = [(place[names[a]], place[names[b]]) for a, b in edges]
    assert all(a < b for a, b in moved)
    assert topology(n, moved).joins == brute_joins(n, edges)


def test_a_chain_has_joins_everywhere() -> None:
    assert topology(4, [(0, 1), (1, 2), (2, 3)]) == chain(4)
    assert chain(4).is_chain
    assert chain(0) == topology(0, []) == Topology(0, (), (0,))
    assert chain(1) == topology(1, [])


def test_a_fork_joins_at_its_ends_only() -> None:
    """0 -> {1 -> 2, 3} -> 4"""
    forked = topology(5, [(0, 1), (1, 2), (0, 3), (2, 4), (3, 4)])
    assert forked.joins == (0, 1, 4, 5)
    assert not forked.is_chain
    assert [forked.before(p) for p in range(6)] == [0, 1, 1, 1, 4, 5]
    assert [forked.after(p) for p in range(6)] == [0, 1, 4, 4, 4, 5]
    assert [forked.index(join) for join in forked.joins] == [0, 1, 2, 3]


def test_an_edge_too_many_changes_nothing() -> None:
    """Waiting for somebody who was waited for already."""
    assert topology(3, [(0, 1), (1, 2), (0, 2)]).joins == chain(3).joins


def test_circles_and_wrong_numbers_are_told() -> None:
    assert in_order(2, [(0, 1), (1, 0)]) is None
    with pytest.raises(ValueError, match=r"edge \(1, 0\) among 2 nodes"):
        topology(2, [(1, 0)])
