"""What a user reads about captures: report, and template."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from support import BEFORE_2_14, MLP, host

import pgraph
from pgraph.partition.facts import GraphFacts, PartitionFacts
from pgraph.reasons import Reason
from pgraph.runtime.functions import FunctionStats
from pgraph.runtime.specialization import Standing, State
from pgraph.runtime.statistics import PartitionStats, Report
from pgraph.runtime.uncaptured import UncapturedPartition


def steady(text: str) -> str:
    """A report without what varies from run to run: a partition's number in the process, how long captures
    took, and how many nodes were rewritten (a node whose operands lie where they lay before is not)."""
    text, times = re.subn(r"(\d+ captures?) in [\d,]+ ms", r"\1", text)
    assert times
    text = re.sub(r"(forward|backward|inference) \d+", r"\1 N", text)
    return re.sub(r"\d+ nodes rewritten", "N nodes rewritten", text)


def counted(number: int, outside: tuple[Reason, ...] = (), **counters: Any) -> PartitionStats:
    """The counters of a forward's only part."""
    facts = PartitionFacts(GraphFacts("forward", number, 1), None, not outside, (), outside)
    return PartitionStats(facts.name, facts, **counters)


def warm(calls: Callable[[], object], n: int) -> None:
    for _ in range(n):
        calls()


class TestTexts(expecttest.TestCase):
    def test_a_report_without_anything(self) -> None:
        self.assertExpectedInline(
            str(pgraph.report()),
            """pgraph: 0 captures, 0 nodes, 0 slots, 0 launches, 0 nodes rewritten, 0 refusals""",
        )

    @pytest.mark.skipif(not BEFORE_2_14, reason="AOTAutograd traces fewer ops")
    def test_a_report_after_training(self) -> None:
        model = MLP()
        compiled = host(model)
        warm(lambda: compiled(torch.randn(3, 8)).sum().backward(), 3)
        report = pgraph.report()
        assert 0 < report.rewritten_nodes <= 20  # two launches of ten nodes
        self.assertExpectedInline(
            steady(str(report)),
            """\
pgraph: 2 captures, 10 nodes, 28 slots, 4 launches, N nodes rewritten, 0 refusals, 1,264 B of execs
  forward N: 1 capture, 4 nodes in 1 chunk, 12 slots, 2 launches, 1 uncaptured run, 472 B of execs
  backward N: 1 capture, 6 nodes in 1 chunk, 16 slots, 2 launches, 1 uncaptured run, 792 B of execs""",
        )

    def test_a_report_with_reasons(self) -> None:
        reason = Reason("rng", "no", "go", "a:3")
        partitions = (
            counted(0, standings=[Standing(State.REFUSED, reason=reason)]),
            counted(1, launches=2),
            counted(2, outside=(reason,)),
        )
        self.assertExpectedInline(
            str(Report(partitions)),
            """\
pgraph: 0 captures, 0 nodes, 0 slots, 2 launches, 0 nodes rewritten, 1 refusal
  forward 0: 0 captures, 0 nodes in 0 chunks, 0 slots, 0 launches, 0 uncaptured runs; [rng] no at a:3. Fix: go
  forward 1: 0 captures, 0 nodes in 0 chunks, 0 slots, 2 launches, 0 uncaptured runs
  forward 2: runs uncaptured
    [rng] no at a:3. Fix: go""",
        )

    def test_the_latest_refusal_is_told_last(self) -> None:
        first, second = Reason("rng", "one", "go"), Reason("rng", "two", "go")
        stats = counted(0, standings=[Standing(), Standing()])
        one, two = stats.standings
        for standing, reason in ((two, first), (one, second)):
            standing.state, standing.reason = State.REFUSED, reason
            stats.latest(standing)
        assert (stats.reason, stats.refusals) == (second, (first, second))
        stats.standings.append(Standing(State.REFUSED, reason=first))
        assert stats.refusals == (second, first)

    @pytest.mark.skipif(not BEFORE_2_14, reason="AOTAutograd traces fewer ops")
    def test_the_template_of_an_mlp(self) -> None:
        model = MLP()
        compiled = host(model)
        with torch.no_grad():
            warm(lambda: compiled(torch.randn(3, 8)), 2)
        ((specialization,),) = [p.specializations() for p in pgraph.runtime.registry.live_capturable()]
        self.assertExpectedInline(
            specialization.built.template.render(),
            """\
4 nodes, 12 slots, 9 regions
  region 0: input, 512 bytes, nodes [0, 5)
  region 1: input, 64 bytes, nodes [0, 5)
  region 2: input, 96 bytes, nodes [0, 1)
  region 3: input, 256 bytes, nodes [0, 5)
  region 4: input, 16 bytes, nodes [0, 5)
  region 5: temp, 192 bytes, nodes [0, 2)
  region 6: temp, 192 bytes, nodes [1, 3)
  region 7: temp, 192 bytes, nodes [2, 4)
  region 8: output, 48 bytes, nodes [3, 5)
  node 0: kernel addmm (176 bytes) 0=r1, 32=r2, 80=r0, 128=r5
  node 1: kernel relu (96 bytes) 0=r5, 48=r6
  node 2: memcpy clone (24 bytes) 0=r7, 8=r6
  node 3: kernel addmm (176 bytes) 0=r4, 32=r7, 80=r3, 128=r8
  output 0: region 8 + 0: torch.float32 [3, 4] strides [4, 1]
plan: 4 nodes, 1 chunk, 2 blocks, peak 3,584 B, eager 3,072 B
chunk 0: nodes [0, 4), held 3,584 B
  + b0 512 B: r5@0 r7@0
  + b1 512 B: r6@0 r8@0
  - b0
  ~ r2
""",
        )


def test_sums() -> None:
    report = Report(tuple(counted(i, captures=i, launches=10, exec_bytes=4) for i in range(3)))
    assert (report.captures, report.launches, report.exec_bytes, report.refused) == (3, 30, 12, 0)


def test_a_report_that_was_kept_counts_no_further() -> None:
    """So that two reports show what happened between them."""
    model = MLP()
    compiled = host(model)
    with torch.no_grad():
        warm(lambda: compiled(torch.randn(3, 8)), 2)
        before = pgraph.report()
        warm(lambda: compiled(torch.randn(3, 8)), 3)
    assert pgraph.report().launches - before.launches == 3
    compiled(torch.randn(5, 8))
    assert len(before.partitions[0].standings) == 1


def test_code_that_was_deleted_has_reached_pgraph() -> None:
    ran = FunctionStats("step", "a:3", compilations=1, graphs=1)
    assert "nothing is left of what reached pgraph" in str(Report((), functions=(ran,), asked=True))
    skipped = FunctionStats("step", "a:3", skipped=Reason("graph-break", "no", "go"))
    assert "nothing has reached pgraph" in str(Report((), functions=(skipped,), asked=True))


def test_records_of_plain_parts_go_with_their_code() -> None:
    """A process that compiles for ever does not grow for ever."""
    for i in range(100):
        partition = UncapturedPartition(
            PartitionFacts(GraphFacts("forward", i, 1), None, False), lambda args: args
        )
    assert [p.name for p in pgraph.report().partitions] == ["forward 99"]
    assert pgraph.report().outside == (("forward 99", ()),)
    del partition
    assert pgraph.report().partitions == ()
