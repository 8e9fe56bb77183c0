"""One refused op costs one op: a partition whose capture is refused is split once more, around that op.

Note [Automatic splits]
The safety rules know many ops that no graph can hold, but not all. The others are found when a partition is
captured; by then its code is compiled and runs. So for each partition a copy of its ATen graph is kept until
its first capture is made or refused. If the refusal names an op (`pgraph.capture.culprit`), the copy is cut
around that op and all ops like it. The pieces are compiled as the partitions of a graph are, and run in the
partition's place: uncaptured first, then captured. If a piece is refused, the whole partition is cut again,
around the ops found before as well. A graph is split three times at most, and a partition only before any
part of it is captured.

The results of the pieces have the strides that the partition's code gave them, because the code that takes
them was compiled for those. Where none of the pieces can be captured, the partition runs its own code again:
it has fewer calls, and Inductor fused more of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Node

from pgraph import compat
from pgraph.capture.culprit import nodes_of
from pgraph.compiler.assemble import Assembly, SplitSource, assemble
from pgraph.compiler.borders import bring_up_to_date
from pgraph.compiler.context import Context, Declined
from pgraph.compiler.strides import as_before
from pgraph.ops.fx import is_structural, op_name, op_of, user_line
from pgraph.partition.extract import extract
from pgraph.partition.facts import OpRun, respliced, split_facts
from pgraph.partition.scan import Partition, scan
from pgraph.reasons import Dispatch, Reason
from pgraph.runtime import registry, trace
from pgraph.runtime.partition_runner import PartitionRunner
from pgraph.text import amount

__all__ = ["SPLITS", "Piece", "Splitter"]

log = logging.getLogger(__name__)

SPLITS = 3
"""Automatic splits of one ATen graph, at most: each compiles part of the graph once more."""


class Piece:
    """The partition itself, or what runs in its place since it was split, and the way back to its source.

    Args:
        splitter: of the partition.
        nodes: of the source's graph that it consists of.
    """

    def __init__(self, splitter: Splitter, nodes: Sequence[Node]) -> None:
        self._splitter = splitter
        self.nodes = tuple(nodes)

    def captured(self) -> None:
        """The piece was captured; its part of the source is not needed any more."""
        self._splitter.settled(self, None)

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Whether the piece may be split now. It may not while another thread splits the same graph."""
        lock = self._splitter.account.lock
        mine = lock.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                lock.release()

    def refused(self, reason: Reason, culprit: Dispatch | None) -> Reason | None:
        """Its capture was refused: split, if that helps. Call it in its turn and without locks.

        Returns:
            None if other code runs in its place now; else why it runs uncaptured from now on.
        """
        return self._splitter.refused(self, reason, culprit)


class Splitter:
    """Splits one partition, several times if needed. The pieces that are not captured yet keep it alive.

    Args:
        owner: the partition as it was compiled first.
        source: to compile it from once more.
        context: of its graph.
    """

    def __init__(self, owner: PartitionRunner, source: SplitSource, context: Context) -> None:
        self.account = context.account
        self._context = context
        self._owner = weakref.ref(owner)
        self._source = source
        self._body = tuple(node for node in source.graph.graph.nodes if not is_structural(node))
        self._refused: dict[Node, Reason] = {}
        self._runners: list[weakref.ref[Any]] = []
        self._open: set[Piece] = set()
        self._some = False  # whether one of the pieces is captured
        self._splits, self._seconds = 0, 0.0
        self._watch([(owner, self._body)])

    def settled(self, piece: Piece, reason: Reason | None) -> bool:
        """A piece is captured (no reason), or runs uncaptured for good.

        Returns:
            Whether the partition is back in place of its pieces.
        """
        owner = self._owner()
        if piece not in self._open or owner is None:
            return False  # of an earlier split
        self._open.discard(piece)
        self._some = self._some or reason is None
        if self._open or not self._splits:
            return False
        if reason is None or self._some:
            owner.retire()
            return False
        self._undo(owner, reason)
        return True

    def refused(self, piece: Piece, reason: Reason, culprit: Dispatch | None) -> Reason | None:
        """See `Piece.refused`."""
        owner = self._owner()
        if piece not in self._open or owner is None:
            return reason
        told: Reason | None = reason
        try:
            refused = self._around(piece, reason, culprit) if culprit is not None else {}
            if refused:
                self._divide(owner, refused)
                log.warning(
                    "%s was split in %.1f s to keep %s outside: %s",
                    owner.name,
                    self._seconds,
                    culprit.op if culprit is not None else "",
                    reason,
                )
                return None
        except Declined as e:
            told = _more(reason, str(e))
        except Exception as e:
            log.debug("the split failed", exc_info=True)
            told = _more(reason, f"to split the graph around it failed: {_first_line(e)}")
        return None if self.settled(piece, told) else told

    def _watch(self, pieces: Sequence[tuple[PartitionRunner, Sequence[Node]]]) -> None:
        self._some = False
        self._open = set()
        for runner, nodes in pieces:
            piece = Piece(self, nodes)
            runner.admission.piece = piece
            self._open.add(piece)

    # -- one split -----------------------------------------------------------------------------

    def _around(self, piece: Piece, reason: Reason, culprit: Dispatch) -> dict[Node, Reason]:
        """The nodes that stay outside from now on, and why; empty if no node of the piece could be captured.

        An op that was refused in this graph before, with another shape, stays outside wherever it occurs.
        """
        alike = nodes_of(culprit, piece.nodes)
        names = {op_name(op_of(node)) for node in alike}
        choices = [[*alike, *nodes_of(culprit, self._body)], alike[culprit.nth : culprit.nth + 1]]
        if culprit.op in self.account.found:
            choices.insert(0, [node for node in self._body if op_name(op_of(node)) in names])
        for chosen in choices if alike else ():
            refused = {**self._refused, **{node: _kept_outside(reason, node) for node in chosen}}
            if self._leaves_some(piece, refused):
                if self.account.splits >= SPLITS:
                    raise Declined(f"pgraph has split the graph {amount(SPLITS, 'time')} already")
                self.account.splits += 1
                self.account.found.add(culprit.op)
                return refused
        return {}

    def _leaves_some(self, piece: Piece, refused: dict[Node, Reason]) -> bool:
        """Whether something of the piece may still be captured when these nodes stay outside."""
        safe = (partition.nodes for partition in self._scan(refused) if partition.safe)
        return any(not set(nodes).isdisjoint(piece.nodes) for nodes in safe)

    def _scan(self, refused: dict[Node, Reason]) -> list[Partition]:
        return scan(self._source.graph.graph, refused.get, min_ops=self._context.options.min_ops)

    def _divide(self, owner: PartitionRunner, refused: dict[Node, Reason]) -> None:
        """Compile the pieces and have them run in the partition's place.

        Raises:
            Declined: the pieces cannot do what the partition does.
        """
        start = time.perf_counter()
        made, nodes = self._assemble(owner, refused)
        for old in (owner, *(ref() for ref in self._runners)):
            if old is not None:
                registry.unregister(old)
        self._refused = refused
        self._runners = [weakref.ref(runner) for runner in made.runners]
        self._splits += 1
        self._seconds += time.perf_counter() - start
        stats = made.runners[0].stats
        stats.splits, stats.split_s = self._splits, self._seconds
        registry.renew(stats.facts.graph)
        found = " and ".join(sorted(self.account.found))
        trace.cut([runner.stats.facts for runner in made.runners], f"{owner.name} was split around {found}")
        pieces = zip(made.runners, nodes, strict=True)
        self._watch([(runner, part) for runner, part in pieces if isinstance(runner, PartitionRunner)])
        owner.replace(made.run)

    def _assemble(
        self, owner: PartitionRunner, refused: dict[Node, Reason]
    ) -> tuple[Assembly, list[tuple[Node, ...]]]:
        """The pieces, whose results have the partition's strides, and the nodes of each."""
        source, context = self._source, self._context
        with compat.compiling_again(source.traced) as assumes_more:
            if context.by_inductor:
                bring_up_to_date(source.graph, source.inputs)
            partitions = self._scan(refused)
            facts = split_facts(owner.stats.facts, source.first, partitions, refused)
            split = extract(source.graph, partitions)
            made = assemble(
                context, source.graph, source.inputs, split, facts, source.memory, keep_sources=False
            )
            if assumes_more():
                raise Declined("its partitions would be right for some sizes only")
        if context.by_inductor:
            run = as_before(made.run, split, owner.code, [runner.code for runner in made.runners])
            made = dataclasses.replace(made, run=run)
        return made, [partition.nodes for partition in partitions]

    def _undo(self, owner: PartitionRunner, reason: Reason) -> None:
        graph = owner.stats.facts.graph
        for runner in (ref() for ref in self._runners):
            if runner is not None:
                graph = runner.stats.facts.graph  # as it is by now
                registry.unregister(runner)
        ops = owner.stats.facts.device_ops
        owner.stats.facts = dataclasses.replace(owner.stats.facts, graph=graph)
        owner.stats.splits, owner.stats.split_s = self._splits, self._seconds
        registry.register(owner)
        registry.renew(respliced(graph, self._source.first, ops, [OpRun(ops, None)]))
        times = amount(self._splits, "time")
        owner.give_up(_more(reason, f"pgraph split the graph {times}, and no part of it could be captured"))


def _more(reason: Reason, text: str) -> Reason:
    return dataclasses.replace(reason, sentence=f"{reason.sentence}; {text}")


def _kept_outside(reason: Reason, node: Node) -> Reason:
    """The reason of a refused capture as that of one op that stays outside."""
    return Reason(
        reason.code,
        f"{reason.sentence}; pgraph split the graph around it by itself",
        f"{reason.fix} (done for this graph; a mark set before it is compiled saves compiling it twice)",
        user_line(node) or reason.where,
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
