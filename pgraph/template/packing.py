"""Where regions lie inside one chunk, and where a chain of nodes is cut.

**Packing.** What lives past its chunk (an output, a temporary that spans a border) gets a block of
exactly its own size, so what a border carries over is, byte for byte, what eager would hold there:
a chunk's cost depends on its two ends only, not on earlier cuts. Inside a chunk, sizes are taken
from the largest down. Regions of one size share blocks of that size, by colouring their intervals
in order of birth. A temporary of the chunk that finds none free is tried in the idle rectangles
(`pgraph.template.idle`) of larger blocks, best fit first: an output's block before its birth, a carried
block after its tenant's death, the gaps between larger temporaries. A rectangle is cut along the
bytes, so what is left of it keeps its whole span of nodes. Only then is a block opened. So each
block has the size of one tensor that eager would have allocated, and the caching allocator sees
the sizes it sees without a graph. (All temporaries of a small chain in one block, packed freely, made three
chunks one, and gained nothing: an H200 took as long for them, and the cache could not use that block for
anything else.)

**Cutting.** Without the rectangles a chunk ``[a, b)`` would cost
``inputs(a) + sum over sizes s of s * max over nodes of (regions of size s alive)``: monotone in
both ends, equal to eager for one node, and with it the greedy furthest cut needs the fewest
chunks. A block is opened only while all blocks of its size are busy, so packing never costs more.
Hence a chunk of one node always fits, the plan's peak is never above the limit, and each cut lies
at or beyond the greedy cut of that rule: never more chunks than its optimum. Packing across sizes
cannot be monotone while borders carry exact sizes (a tensor carried in its own block cannot lend
it to a larger one), so up to `EXHAUSTIVE_NODES` nodes all cuts are searched, and the count is the
minimum. In longer graphs the step beyond the rule's cut is doubled as long as the chunk fits, then halved,
until the end is known to a thirty-second of the chunk's length.

**Cost.** One packing of r regions takes O(r log r); a cut takes a few packings of about its own
chunk, which are dropped as soon as they pass the limit.
"""

from __future__ import annotations

import array
import dataclasses
import heapq
import itertools
import operator
from collections.abc import Sequence
from typing import Any

from pgraph.native import libraries
from pgraph.template.idle import Idle
from pgraph.template.lifetimes import GRANULE, Lives

__all__ = ["EXHAUSTIVE_NODES", "MORE", "Chain", "Packed"]

EXHAUSTIVE_NODES = 32
"""Up to this many nodes all cuts are searched. A layer compiled by itself is about as long."""

MORE = 4
"""For so many chunks there may be one more, if that makes them as others are. A launch takes 5 us; to make an
exec that nobody else has takes 8 ms, and 2 MB."""

_TRIED = 16
"""Known borders that are tried: bounds what it costs where hundreds of sizes come."""

_FAR = 16
"""A chunk is looked for up to so many times the length that the rule allows: bounds what one cut costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A chunk with a place for all that is born in it. A lane is a block as one chunk sees it.

    Args:
        held: bytes in use while it runs.
        sizes: of its lanes.
        owners: the tenant each lane was carried in with, or -1 if it is new.
        regions, lanes, offsets: who lies where.
    """

    held: int
    sizes: Sequence[int]
    owners: Sequence[int]
    regions: Sequence[int]
    lanes: Sequence[int]
    offsets: Sequence[int]


class Chain:
    """Regions of certain sizes, and the search for cuts.

    Args:
        lives: when they exist; they are numbered as there.
        nbytes: of each, numbered likewise.
    """

    def __init__(self, lives: Lives, nbytes: Sequence[int]) -> None:
        self.lives, self.n_nodes = lives, lives.n_nodes
        n = self.n = lives.n
        self.start, self.end = lives.start, lives.end
        self._born, self._births = lives.born, lives.births
        self._dying, self._deaths = lives.dying, lives.deaths
        self.size = [-(-size // GRANULE) * GRANULE for size in nbytes]
        # Bytes that have come or gone, summed up region by region.
        born, died, freed = (
            list(itertools.accumulate(map(self.size.__getitem__, which), initial=0))
            for which in (lives.born, lives.dying, lives.freed)
        )
        here = [born[i] for i in lives.births[: n + 1]]  # by how many start before each node
        gone = [died[i] for i in lives.deaths[1 : n + 1]]  # by how many end up to each node
        self.inputs = [freed[-1] - freed[i] for i in lives.frees[1 : n + 1]]  # not released before node k
        self.alive = list(map(operator.sub, here[1:], gone))  # bytes of other regions alive at node k
        self.carried = list(map(operator.sub, here, gone))  # those alive on both sides of border k
        self._tables: tuple[Any, ...] | None = None  # as C reads them
        self._found: dict[int, tuple[int, Packed]] = {}  # by start: (end, packing) that fitted last
        self._fitted: dict[tuple[int, int, int], bool] = {}  # by start, end and limit
        self._sure: dict[tuple[int, int], int] = {}  # by start and limit

    def deaths(self, a: int, b: int) -> list[int]:
        """What ends at nodes ``[a, b)``, node by node, without inputs."""
        return self._dying[self._deaths[a] : self._deaths[b]]

    def releases(self, a: int, b: int) -> list[int]:
        """Inputs that end at nodes ``[a, b)``, node by node."""
        return self.lives.freed[self.lives.frees[a] : self.lives.frees[b]]

    def packed(self, a: int, b: int) -> Packed:
        """The packing of chunk ``[a, b)``; the search for cuts may have made it already."""
        end, found = self._found.get(a, (-1, None))
        return found if found is not None and end == b else self.pack(a, b, None)

    def _fits(self, a: int, b: int, limit: int) -> bool:
        """Whether chunk ``[a, b)`` can be packed within the limit; packed only where that is not known."""
        key = a, b, limit
        fits = self._fitted.get(key)
        if fits is None:
            fits = self.inputs[a] + max(self.alive[a:b], default=0) <= limit
            if fits and b > (self._sure.get((a, limit)) or self._sure_end(a, limit)):
                packed = self.pack(a, b, limit)
                fits = packed.held <= limit
                if fits:
                    self._found[a] = (b, packed)
            self._fitted[key] = fits
        return fits

    def pack(self, a: int, b: int, limit: int | None) -> Packed:
        """Place all that is born in chunk ``[a, b)``.

        Past `limit` it stops early: `held` is then above the limit, and the rest unfinished.
        """
        library = libraries.load()
        return self._pack_in_python(a, b, limit) if library is None else self._pack_in_c(library, a, b, limit)

    def _pack_in_c(self, library: Any, a: int, b: int, limit: int | None) -> Packed:
        if self._tables is None:
            arrays = [*self.lives.tables, array.array("q", self.size)]
            addresses = array.array("Q", [arrays[i].buffer_info()[0] for i in (0, 1, 6, 2, 3, 4, 5)])
            self._tables = addresses, arrays, array.array("q", bytes(8 * (3 + 5 * len(self.size))))
        addresses, _, out = self._tables
        most, held = limit if limit is not None else (1 << 63) - 1, self.inputs[a] + self.carried[a]
        held = library.pg_pack_chunk(addresses.buffer_info()[0], a, b, most, held, out.buffer_info()[0])
        if held < 0:
            return self._pack_in_python(a, b, limit)
        if held > most:
            return Packed(held, (), (), (), (), ())
        n_lanes, n_placed, at = out[:3]
        lanes, end = slice(3, 3 + 2 * n_lanes, 2), at + 3 * n_placed
        owners = out[4 : 4 + 2 * n_lanes : 2]
        return Packed(held, out[lanes], owners, out[at:end:3], out[at + 1 : end : 3], out[at + 2 : end : 3])

    def _pack_in_python(self, a: int, b: int, limit: int | None) -> Packed:
        held = self.inputs[a] + self.carried[a]
        starts, ends = self.start, self.end
        sizes_of, owners, regions, lanes, offsets = columns = [list[int]() for _ in range(5)]
        groups = self._by_size(a, b)
        sizes = sorted(groups, reverse=True)
        # Idle rectangles are for temporaries of the chunk: none is kept that is smaller than all of them.
        least = next((s for s in reversed(sizes) if s and any(ends[r] <= b for r in groups[s][1])), 1 << 62)
        idle = Idle(b - a, least)
        for size in sizes:
            carried, born = groups[size]
            lends = size >= least
            busy: list[tuple[int, int]] = []  # (node at which it falls idle, lane), a heap
            free: list[tuple[int, int]] = []
            for r in carried:  # in the order of their ends
                busy.append((ends[r], len(owners)))
                sizes_of.append(size)
                owners.append(r)
            for r in born:
                start, end = starts[r], ends[r]
                while busy and busy[0][0] <= start:
                    free.append(heapq.heappop(busy))
                place = None
                if free:
                    # The one that fell idle last: the others keep longer gaps.
                    since, lane = free.pop()
                    if lends:
                        idle.add(size, since - a, start - a, lane, 0)
                elif (place := idle.take(size, start - a, end - a) if lends and end <= b else None) is None:
                    held += size
                    if limit is not None and held > limit:
                        return Packed(held, *columns)
                    lane = len(owners)
                    sizes_of.append(size)
                    owners.append(-1)
                    if lends:
                        idle.add(size, 0, start - a, lane, 0)
                regions.append(r)
                lanes.append(lane if place is None else place[0])
                offsets.append(0 if place is None else place[1])
                if place is None and end < b:
                    heapq.heappush(busy, (end, lane))
            if size > least:  # a smaller one may come
                for since, lane in busy + free:
                    idle.add(size, since - a, b - a, lane, 0)
        return Packed(held, *columns)

    def _by_size(self, a: int, b: int) -> dict[int, tuple[list[int], list[int]]]:
        """Regions of chunk ``[a, b)``: by size, those carried in that die inside, and those born inside."""
        groups: dict[int, tuple[list[int], list[int]]] = {}
        sizes, starts = self.size, self.start
        for r in self._born[self._births[a] : self._births[b]]:
            group = groups.get(sizes[r])
            if group is None:
                groups[sizes[r]] = [], [r]
            else:
                group[1].append(r)
        for r in self.deaths(a + 1, b):
            # A carried tenant that dies inside the chunk leaves its block idle to the end.
            if starts[r] < a:
                group = groups.get(sizes[r])
                if group is None:
                    groups[sizes[r]] = [r], []
                else:
                    group[0].append(r)
        return groups

    def cut(self, limit: int) -> list[int]:
        """Borders 0 .. n of the fewest chunks within `limit`."""
        came_from = {0: -1}
        frontier = [0]
        while self.n not in came_from:
            reached = []
            for a in frontier:
                for b in self._ends(a, limit):
                    if b not in came_from:
                        came_from[b] = a
                        reached.append(b)
            frontier = reached
        cuts = [self.n]
        while cuts[-1] > 0:
            cuts.append(came_from[cuts[-1]])
        return cuts[::-1]

    def as_before(self, cuts: list[int], limit: int, known: Sequence[tuple[int, ...]]) -> list[int]:
        """The known borders whose chunks fit, if they are hardly more; or as many that others may take.

        Where none are known nothing else may ever come, and the cuts stay where they are.
        """
        if not known or tuple(cuts) in known:
            return cuts
        most = len(cuts) + (len(cuts) - 1) // MORE
        near = [b for b in known if len(cuts) <= len(b) <= most and b[-1] == self.n]
        for borders in sorted(near, key=len)[:_TRIED]:
            if all(self._fits(a, b, limit) for a, b in itertools.pairwise(borders)):
                return list(borders)
        return self._eased(cuts, limit)

    def _eased(self, cuts: list[int], limit: int) -> list[int]:
        """The same number of chunks, none of them as long as the limit allows.

        Each cut was as far from the one before as can be. Where regions are a little larger that is too far.
        So each, from the last on, is put half way to where the chunk behind it would no longer fit.
        """
        eased = list(cuts)
        for i in range(len(cuts) - 2, 0, -1):
            first, end = cuts[i], eased[i + 1]
            low = cuts[i - 1]  # there it does not fit, or is taken not to
            while first - low > 1:
                middle = (low + first) // 2
                if self._fits(middle, end, limit):
                    first = middle
                else:
                    low = middle
            border = (first + cuts[i]) // 2
            if self._fits(border, end, limit) and self._fits(cuts[i - 1], border, limit):
                eased[i] = border
        return eased

    def _ends(self, a: int, limit: int) -> list[int]:
        """Ends of chunks from `a` within the limit, the furthest first: all, or one in long chains."""
        sure = self._sure_end(a, limit)
        if sure == self.n:
            return [sure]
        small = self.n <= EXHAUSTIVE_NODES
        rule = sure - a
        # No packing can go beyond `most`. Looking to the end from everywhere would be quadratic.
        far = self.n if small or a == 0 else min(self.n, a + _FAR * rule)
        room = limit - self.inputs[a]
        most = sure
        while most < far and self.alive[most] <= room:
            most += 1
        if small:
            further = [b for b in range(most, sure, -1) if self._fits(a, b, limit)]
            return further + list(range(sure, a, -1))
        # The last chunk carries no temporary out, so it may fit where a shorter one does not.
        if most == self.n and self._fits(a, most, limit):
            return [most]
        step, beyond = rule, min(most + 1, self.n)  # `beyond` does not fit, or is taken not to
        while beyond - sure > max(1, (sure - a) // 32):
            probe = sure + step if sure + step < beyond else (sure + beyond) // 2
            if self._fits(a, probe, limit):
                sure, step = probe, 2 * step
            else:
                beyond = probe
        return [sure]

    def _sure_end(self, a: int, limit: int) -> int:
        """The furthest end within the limit if only regions of equal size shared blocks."""
        end = self._sure[a, limit] = self._scanned(a, limit)
        return end

    def _scanned(self, a: int, limit: int) -> int:
        held = self.inputs[a] + self.carried[a]
        if held > limit:
            return a + 1
        idle: dict[int, int] = {}  # blocks at rest, by size
        sizes, starts, ends, dying = self.size, self.start, self.end, self._dying
        dead = self._deaths[a + 1]
        for at in range(self._births[a], len(self._born)):
            r = self._born[at]
            size, start = sizes[r], starts[r]
            while ends[dying[dead]] <= start:
                rests = sizes[dying[dead]]
                idle[rests] = idle.get(rests, 0) + 1
                dead += 1
            if idle.get(size, 0):
                idle[size] -= 1
            else:
                held += size
                if held > limit:
                    return max(start, a + 1)
        return self.n
