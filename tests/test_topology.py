"""Joins of a recording that forks, against what reachability says."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgraph.template.topology import Topology, chain, forked, in_order, topology


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


@given(graphs())
def test_edges_that_others_imply_are_left_out(graph: tuple[int, list[tuple[int, int]]]) -> None:
    n, edges = graph
    longer = {(a, b): [(a, c, b) for c in range(a + 1, b)] for a, b in edges}
    later = [{a} for a in range(n)]  # what each node is waited for by, at whatever remove
    for a in reversed(range(n)):
        later[a] = {a}.union(*(later[b] for first, b in edges if first == a))
    told = [e for e in edges if not any(c in later[a] and b in later[c] for a, c, b in longer[e])]
    whole = topology(n, edges)
    assert whole.edges == tuple(told)
    assert topology(n, told) == whole
    odd = tuple((a, b, b"early") for a, b in edges[:1])
    assert topology(n, edges, odd) == (
        dataclasses.replace(whole, edges=tuple(edges), odd=odd) if odd else whole
    )


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


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 5))
def test_a_graph_is_put_together_of_its_pieces(seed: int, count: int) -> None:
    """Ops that fork and join as they like, each between two nodes that all wait for."""
    rng = random.Random(seed)
    edges: list[tuple[int, int]] = []
    pieces: list[tuple[int, int]] = []
    n, tail = 1, [0]
    for _ in range(count):
        first, before = n, tail
        for n in range(first, first + rng.randint(1, 4)):
            choice = [*before, *range(first, n)]
            edges += [(a, n) for a in rng.sample(choice, rng.randint(1, len(choice)))]
        awaited = {a for a, _ in edges}
        ends = [a for a in range(first, n + 1) if a not in awaited]
        tail = [*ends, *rng.sample(before, rng.randint(0, 1))]
        pieces.append((first, n + 1))
        n += 1
        edges += [(a, n) for a in tail]
        n, tail = n + 1, [n]
    whole = topology(n, edges)
    found = [(first, whole.piece(first, end)) for first, end in pieces]
    assert forked(n, [(first, piece) for first, piece in found if piece is not None and piece.links]) == whole
    assert [piece.n_nodes for _, piece in found if piece is not None] == [
        end - first for first, end in pieces
    ]


def test_what_goes_on_beside_the_next_node_is_no_piece() -> None:
    whole = topology(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)])
    assert whole.piece(1, 3) == Topology(2, (), (0, 2), (), ((-1, 0), (-1, 1), (0, 2), (1, 2)))
    assert whole.piece(1, 2) is None
    assert whole.piece(2, 3) is None
    late = topology(5, [(0, 1), (1, 2), (0, 2), (1, 3), (2, 4), (3, 4)])
    assert late.piece(1, 2) is None, "node 3 waits for it, and not for the node after it"


def test_a_piece_that_is_a_chain_says_what_is_odd() -> None:
    whole = dataclasses.replace(chain(5), odd=((0, 1, b"early"), (3, 4, b"early")))
    assert whole.piece(1, 3) == dataclasses.replace(chain(2), odd=((-1, 0, b"early"),))
