"""Memory plan of a launch: where every region lives, and where the capture is cut into chunks.

A captured graph is taken for a chain of nodes (where it forks, what lies between two joins counts as one:
Note [Forks and joins] in `pgraph.template.topology`). Launched as one piece, every input would die late and
every output be born early; cut into *chunks*, each its own exec, memory is allocated before a chunk and
freed after it. The planner cuts as rarely as the eager peak allows.

The algorithm, for n nodes and r regions:

1. Index births, deaths and releases by node, and sum up what is alive at each: O(n + r log r). The
   largest sum is the eager peak; the limit is that plus the slack.
2. From node 0, find the furthest end whose chunk can be packed within the limit, cut there, and go
   on from the cut. Steps to the end are doubled, then halved, and a packing is given up once it passes
   the limit, so a chunk is packed a few times over its own length: O(r log r) in all, with a small factor.
   (Up to `pgraph.template.packing.EXHAUSTIVE_NODES` nodes all ends are searched: the count is the minimum.)
   Borders that another size has are taken where they do as well (`Chain.as_before`), and execs are shared.
3. Number the blocks of the chunks' packings in the order in which eager would have needed them, and
   say after which chunk each is freed and each input released: O(n + r log r).

`tests/test_plan_cost.py` holds 20,000 nodes to two seconds, and to four where no two sizes are alike.
How regions share blocks within a chunk, and why greedy cuts are never more than the fewest of the rule
behind them: `pgraph.template.packing`.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from pgraph.errors import PlanError
from pgraph.template.lifetimes import GRANULE, Lifetime, Lives, Pairs, Rows, survives
from pgraph.template.packing import Chain
from pgraph.text import amount

__all__ = ["GRANULE", "Block", "Chunk", "Lifetime", "Plan", "make_plan", "plan_of", "survives"]


class Block(NamedTuple):
    """One allocation from the caching allocator. A tuple: there are hundreds in each plan.

    Args:
        index: position in `Plan.blocks`.
        nbytes: rounded size in bytes. Blocks of 0 bytes hold the zero-byte regions, which share
            no bytes with anything; any address does for them.
        tenants: ``(region, byte offset)`` in order of birth.
    """

    index: int  # type: ignore[assignment]  # hides a method of tuples
    nbytes: int
    tenants: Pairs


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Nodes ``[first, last)``, launched together.

    Args:
        first: first node.
        last: one past the last node.
        allocate: block indices, in the order in which eager would have first needed them.
        free: blocks to free after the launch; never one that holds an output.
        release: input regions whose reference is dropped after the launch.
        held: bytes in use while it runs: live blocks and inputs not yet released.
    """

    first: int
    last: int
    allocate: tuple[int, ...]
    free: tuple[int, ...]
    release: tuple[int, ...]
    held: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A schedule ``[allocate, launch, free]...`` and the place of every region.

    Args:
        chunks: in launch order; empty if there is neither a node nor a region.
        blocks: by index.
        eager_peak: bytes at the peak of running the nodes one by one. A region that dies at its
            birth counts at that node, and one born after the last node counts at the last.
        peak: bytes at the peak of this plan.
        inputs: bytes of the inputs when it begins, which are in both peaks.
    """

    chunks: tuple[Chunk, ...]
    blocks: Rows[Block]
    eager_peak: int
    peak: int
    inputs: int
    _where: Pairs = dataclasses.field(repr=False, compare=False)  # of each region from `_first` on
    _first: int = dataclasses.field(repr=False, compare=False)  # before it there are inputs alone

    def location(self, region: int) -> tuple[int, int]:
        """``(block index, byte offset)`` of an output or a temporary.

        Raises:
            PlanError: the region is an input, or unknown.
        """
        at = region - self._first
        block, offset = self._where[at] if 0 <= at < len(self._where) else (-1, 0)
        if block < 0:
            raise PlanError(
                f"region {region} has no block in this plan; ask for outputs and temporaries only, "
                "inputs lie in the caller's memory"
            )
        return block, offset

    @property
    def borders(self) -> tuple[int, ...]:
        """Of its chunks, from 0 to the number of nodes."""
        return tuple([chunk.first for chunk in self.chunks] + [chunk.last for chunk in self.chunks[-1:]])

    def render(self) -> str:
        """The plan as text, one line per step: ``+`` allocate, ``-`` free, ``~`` release."""
        nodes = self.chunks[-1].last if self.chunks else 0
        lines = [
            f"plan: {amount(nodes, 'node')}, {amount(len(self.chunks), 'chunk')}, "
            f"{amount(len(self.blocks), 'block')}, peak {self.peak:,} B, eager {self.eager_peak:,} B"
        ]
        for i, chunk in enumerate(self.chunks):
            lines.append(f"chunk {i}: nodes [{chunk.first}, {chunk.last}), held {chunk.held:,} B")
            for index in chunk.allocate:
                block = self.blocks[index]
                tenants = " ".join(f"r{region}@{offset:,}" for region, offset in block.tenants)
                lines.append(f"  + b{index} {block.nbytes:,} B: {tenants}")
            if chunk.free:
                lines.append("  - " + " ".join(f"b{index}" for index in chunk.free))
            if chunk.release:
                lines.append("  ~ " + " ".join(f"r{region}" for region in chunk.release))
        return "\n".join(lines) + "\n"


def make_plan(
    n_nodes: int,
    lifetimes: Sequence[Lifetime],
    *,
    slack_bytes: int = 4 << 20,
    known: Sequence[tuple[int, ...]] = (),
) -> Plan:
    """Cut a chain of nodes into few chunks whose peak stays at the eager peak, and place its memory.

    Args:
        n_nodes: length of the chain.
        lifetimes: of all regions; order breaks ties between regions born before the same node.
        slack_bytes: bytes by which the peak may pass the eager peak, so that small graphs stay whole; one
            percent of the eager peak, if that is more.
        known: borders (`Plan.borders`) of plans for these nodes at other sizes. Those are taken whose chunks
            are within the limit, and not many more (`MORE`): recordings that are cut alike may share execs.
            If there are none, the borders are put such that further sizes may take them.

    Raises:
        PlanError: lifetimes that contradict each other, or an argument out of range.
    """
    if not n_nodes >= 0:
        raise PlanError(f"n_nodes is {n_nodes}; pass a number >= 0")
    lives = Lives(n_nodes, lifetimes)
    return plan_of(lives, [lifetimes[i].nbytes for i in lives.order], slack_bytes=slack_bytes, known=known)


def plan_of(
    lives: Lives, nbytes: Sequence[int], *, slack_bytes: int, known: Sequence[tuple[int, ...]] = ()
) -> Plan:
    """The same of regions with these bytes, numbered as in `lives`."""
    if not slack_bytes >= 0:
        raise PlanError(f"slack_bytes is {slack_bytes}; pass a number >= 0")
    if lives.n_nodes == 0 and not nbytes:
        return Plan((), Rows(Block, (), (), ()), 0, 0, 0, Pairs(), 0)
    chain = Chain(lives, nbytes)
    eager = max(map(operator.add, chain.inputs, chain.alive))
    limit = eager + max(slack_bytes, eager // 100)
    return _assemble(chain, chain.as_before(chain.cut(limit), limit, known), eager)


def _assemble(chain: Chain, cuts: list[int], eager: int) -> Plan:
    """Number the blocks in the order of allocation and say where each is freed."""
    block_of = [-1] * len(chain.size)
    sizes: list[int] = []
    ends: list[int] = []
    tenants: list[list[tuple[int, int]]] = []
    chunks: list[Chunk] = []
    regions, end = chain.lives.regions, chain.end
    where: dict[int, tuple[int, int]] = {}
    for a, b in itertools.pairwise(cuts):
        packed, first = chain.packed(a, b), len(sizes)
        blocks_of = [block_of[owner] if owner >= 0 else -1 for owner in packed.owners]
        for r, lane, offset in sorted(zip(packed.regions, packed.lanes, packed.offsets, strict=True)):
            index = blocks_of[lane]
            if index < 0:
                index = blocks_of[lane] = len(sizes)
                sizes.append(packed.sizes[lane])
                ends.append(0)
                tenants.append([])
            tenants[index].append((regions[r], offset))
            where[regions[r]] = index, offset
            block_of[r] = index
            if end[r] > ends[index]:
                ends[index] = end[r]
        died = {block_of[r] for r in chain.deaths(a + 1, b + 1)}
        chunks.append(
            Chunk(
                first=a,
                last=min(b, chain.n_nodes),
                allocate=tuple(range(first, len(sizes))),
                free=tuple(sorted([index for index in died if ends[index] <= b])),
                release=tuple([regions[r] for r in chain.releases(a + 1, b + 1)]),
                held=packed.held,
            )
        )
    blocks = Rows(Block, range(len(sizes)), tuple(sizes), tuple(map(Pairs, tenants)))
    held, first = max([chunk.held for chunk in chunks]), min(where, default=0)
    places = Pairs(where.get(region, (-1, 0)) for region in range(first, max(where, default=-1) + 1))
    return Plan(tuple(chunks), blocks, eager, held, chain.inputs[0], places, first)
