"""Which nodes of a recording wait for which, and where all of them have met.

Pure logic: positions and edges in, positions out; no torch, no CUDA.

Note [Forks and joins]
Work on several streams is recorded as a graph in which some nodes wait for several others, or several for
one. Nodes are numbered so that each comes after those that it waits for. A *join* is a position p at which
every node below p has ended before any node at or above p begins, in whatever order a launch runs them. In
a chain each position is one.

Elsewhere the numbers say nothing of time: of two nodes between the same joins, either may run first, or
both at once. So whatever is said of time is said of joins only: a region is born at the last join before
the op that made it, and dies at the first join after it was dropped (`Topology.before`, `Topology.after`);
chunks begin and end at joins. Two regions then share memory, or a left-over word counts as dead, only where
the nodes of the one have certainly ended before those of the other begin.

At a join the count of nodes that the recorder has noted is the position, whatever order the driver lists
nodes in. Suppose that the first p nodes of some valid order P all precede the others, and that the program
had recorded p nodes S at a boundary. If P were not S, some x in S would lie outside P and wait for some y
in P that was recorded after the boundary; but a node waits for nodes only that were there when it was
recorded.

A library that has streams of its own leaves its last node of a call at the end of such a stream. Its next
call, a thousand nodes later, waits for it once more, though everything does by then. So how a call is
recorded by itself and how among others differ in edges that others imply. These are left out wherever orders
are told. An odd edge implies nothing, and a graph with some is left as it is.
"""

from __future__ import annotations

import dataclasses
import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

__all__ = ["Topology", "chain", "forked", "in_order", "topology"]


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """The order of `n_nodes` nodes.

    Args:
        n_nodes: how many there are.
        edges: (before, after) positions, before < after, sorted; of nodes that wait for one another directly.
            Without odd ones there is none that others imply.
        joins: positions at which all paths meet, ascending; 0 and `n_nodes` are among them.
        odd: (before, after, how) of edges that are no plain ones: the after need not wait for all of the
            before's work; sorted.
        links: where these are a piece of a graph that forks: (before, after) of nodes that wait for what
            comes before the piece (-1), and of those that what comes after it (`n_nodes`) waits for; sorted.
    """

    n_nodes: int
    edges: tuple[tuple[int, int], ...]
    joins: tuple[int, ...]
    odd: tuple[tuple[int, int, bytes], ...] = ()
    links: tuple[tuple[int, int], ...] = ()

    def before(self, position: int) -> int:
        """The last join at or before a position."""
        return self.joins[bisect_right(self.joins, position) - 1]

    def after(self, position: int) -> int:
        """The first join at or after a position."""
        return self.joins[bisect_left(self.joins, position)]

    def index(self, join: int) -> int:
        """How many joins come before this one."""
        return bisect_left(self.joins, join)

    @property
    def is_chain(self) -> bool:
        """Whether there is one order only."""
        return len(self.joins) == self.n_nodes + 1

    def piece(self, first: int, end: int) -> Topology | None:
        """Of the nodes [first, end), between two nodes that are joins by themselves: all before `first` have
        ended with the node before it, and none from `end` on begins ahead of that node. None where these
        nodes and others run side by side.
        """
        if not {first - 1, first, end, end + 1}.issubset(self.joins):
            return None
        n = end - first
        near = [(a - first, b - first) for a, b in self.edges if first - 1 <= a and b <= end]
        odd = tuple((a - first, b - first, how) for a, b, how in self.odd if first <= b < end)
        inner = tuple((a, b) for a, b in near if a >= 0 and b < n)
        links = tuple((a, b) for a, b in near if a < 0 or b == n)
        plain = chain(n)
        if (inner, links) == (plain.edges, ((-1, 0), (n - 1, n))):
            return dataclasses.replace(plain, odd=odd)
        joins = tuple(join - first for join in self.joins if first <= join <= end)
        return Topology(n, inner, joins, odd, links)


def chain(n_nodes: int) -> Topology:
    """Nodes that run one after the other."""
    return Topology(n_nodes, tuple(pairwise(range(n_nodes))), tuple(range(n_nodes + 1)))


def forked(n_nodes: int, pieces: Iterable[tuple[int, Topology]]) -> Topology:
    """A chain but for these pieces, each with the number of its first node; ascending."""
    edges: list[tuple[int, int]] = []
    joins, tail, at = [0], list[int](), 0  # `tail`: what the next node waits for
    for first, piece in (*pieces, (n_nodes, chain(0))):
        for node in range(at, first):
            edges += [(before, node) for before in tail]
            joins.append(node + 1)
            tail = [node]
        last: list[int] = []
        for a, b in (*piece.edges, *piece.links):
            befores = tail if a < 0 else [first + a]
            if b < piece.n_nodes:
                edges += [(before, first + b) for before in befores]
            else:
                last += befores
        joins += [first + join for join in piece.joins[1:]]
        tail, at = sorted(last), first + piece.n_nodes
    return Topology(n_nodes, tuple(sorted(edges)), tuple(dict.fromkeys(joins)))


def in_order(n_nodes: int, edges: Iterable[tuple[int, int]]) -> list[int] | None:
    """The nodes such that each comes after those that it waits for; of several possible orders the one
    nearest to the given numbers. None if they wait for one another in a circle.
    """
    waiting = [0] * n_nodes
    followers: list[list[int]] = [[] for _ in range(n_nodes)]
    for first, second in edges:
        followers[first].append(second)
        waiting[second] += 1
    ready = [node for node in range(n_nodes) if not waiting[node]]
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for follower in followers[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, follower)
    return order if len(order) == n_nodes else None


def topology(
    n_nodes: int, edges: Iterable[tuple[int, int]], odd: tuple[tuple[int, int, bytes], ...] = ()
) -> Topology:
    """The joins of a graph whose nodes are numbered in a valid order.

    A position p is a join if every node below p that no other node below p waits for has an edge to every
    node from p on that waits for none of those: a path from the one to the other has no node in between.

    Cost: O(nodes + edges * log(edges)).

    Raises:
        ValueError: an edge leads to a node that does not come later.
    """
    found = tuple(sorted(set(edges)))
    first_follower = [n_nodes] * n_nodes
    last_awaited = [-1] * n_nodes
    for a, b in found:
        if not 0 <= a < b < n_nodes:
            raise ValueError(f"edge ({a}, {b}) among {n_nodes} nodes. Fix: number nodes in a valid order")
        first_follower[a] = min(first_follower[a], b)
        last_awaited[b] = max(last_awaited[b], a)
    # Node a is an end of [0, p) while a < p <= first_follower[a]; b a beginning of [p, n) while
    # last_awaited[b] < p <= b; an edge leads from an end to a beginning while both hold.
    ends = _counts(n_nodes, ((a + 1, first_follower[a]) for a in range(n_nodes)))
    beginnings = _counts(n_nodes, ((last_awaited[b] + 1, b) for b in range(n_nodes)))
    direct = _counts(n_nodes, ((max(a, last_awaited[b]) + 1, min(b, first_follower[a])) for a, b in found))
    inner = (p for p in range(1, n_nodes) if direct[p] == ends[p] * beginnings[p])
    joins = tuple(dict.fromkeys((0, *inner, n_nodes)))
    if not odd and len(found) >= len(joins) - 1:  # a chain has fewer
        found = _telling(found, joins, first_follower, last_awaited)
    return Topology(n_nodes, found, joins, odd)


def _telling(
    edges: Sequence[tuple[int, int]],
    joins: Sequence[int],
    first_follower: Sequence[int],
    last_awaited: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """The edges that say something: no other path leads from the one node to the other.

    Where there is a join between two nodes, a third one on either side of it is enough for another path.
    """
    found = []
    implied: dict[int, int] = {}  # for each node since the last join: those that it waits for, as bits
    start = 0
    for a, b in sorted(edges, key=lambda edge: (edge[1], -edge[0])):
        at = bisect_right(joins, b) - 1
        if joins[at] != start:
            start, implied = joins[at], {}
        if a >= start:
            told = bool(implied.get(b, 0) >> (a - start) & 1)
            implied[b] = implied.get(b, 0) | implied.get(a, 0) | 1 << (a - start)
        else:
            told = first_follower[a] < start or last_awaited[b] >= joins[bisect_right(joins, a)]
        if not told:
            found.append((a, b))
    return tuple(sorted(found))


def _counts(n_nodes: int, spans: Iterable[tuple[int, int]]) -> Sequence[int]:
    """For each position 0 .. n_nodes, how many of the spans [first, last] hold it; empty ones hold none."""
    counts = [0] * (n_nodes + 2)
    for first, last in spans:
        if first <= last:
            counts[first] += 1
            counts[last + 1] -= 1
    for p in range(1, n_nodes + 2):
        counts[p] += counts[p - 1]
    return counts
