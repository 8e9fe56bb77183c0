"""What pgraph has done in this process: counters per partition, and their sum.

A record lives as long as the compiled code that it is about, and holds neither the code nor a model.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal

from pgraph.capture.build import Built
from pgraph.drivers.peak_stats import GhostPeaks
from pgraph.partition.facts import PartitionFacts
from pgraph.reasons import Reason
from pgraph.runtime.functions import FunctionStats
from pgraph.runtime.met import Met, SizesTold
from pgraph.runtime.specialization import Standing, State
from pgraph.text import amount

__all__ = ["PartitionState", "PartitionStats", "Report"]

PartitionState = Literal[
    "captured", "uncaptured", "too small", "refused", "set aside", "waiting", "warming up", "not run"
]


@dataclasses.dataclass(slots=True)
class PartitionStats:
    """Facts and counters of one partition.

    Args:
        name: e.g. ``"backward 1"``, or ``"forward 0, partition 2"``.
        facts: what was known when it was compiled.
        captures: templates made, captured or computed.
        computed: those that were computed (Note [Computed recordings]).
        ahead: those that were computed before they were called for (Note [Computed ahead]).
        nodes: graph nodes over all templates.
        slots: words that are rebound, over all templates.
        chunks: of their plans.
        exec_bytes: device memory that the driver holds for the execs that there are now, each counted once.
        recipe_bytes: about what the captures that there are now take of the host's memory.
        capture_s: seconds spent capturing, matching, planning and instantiating.
        launches: calls served by a launch.
        rewritten_nodes: nodes set, over all launches.
        uncaptured_runs: calls served by its own code (warm-up included).
        splits: how often pgraph split this partition by itself; counted at the first of what became of it.
        split_s: seconds that these splits took, compilation included.
        standings: of its specializations.
        met: the sizes that it met.
        waits: why some of them wait for a capture, although they have run often enough.
        gone: calls when its model was deleted, or Dynamo was reset; None before.
    """

    name: str
    facts: PartitionFacts
    captures: int = 0
    computed: int = 0
    ahead: int = 0
    nodes: int = 0
    slots: int = 0
    chunks: int = 0
    exec_bytes: int = 0
    recipe_bytes: int = 0
    capture_s: float = 0.0
    launches: int = 0
    rewritten_nodes: int = 0
    uncaptured_runs: int = 0
    splits: int = 0
    split_s: float = 0.0
    standings: list[Standing] = dataclasses.field(default_factory=list)
    met: Met = dataclasses.field(default_factory=Met)
    waits: Reason | None = None
    gone: int | None = None

    @property
    def calls(self) -> int:
        """Served by a launch or by its own code."""
        return self.launches + self.uncaptured_runs

    @property
    def dead(self) -> bool:
        """Its model was deleted, or Dynamo was reset, and it was not called since."""
        return self.gone is not None and self.gone == self.calls

    def at_present(self) -> PartitionStats:
        """A copy, which counts no further."""
        standings = [copy.copy(standing) for standing in self.standings]
        return dataclasses.replace(self, standings=standings, met=self.met.at_present())

    @property
    def sizes(self) -> SizesTold | None:
        """What became of its sizes; None if it met one at most."""
        if len(self.met.sizes) < 2:
            return None
        return SizesTold(
            met=len(self.met.sizes),
            captured=self.captures - self.computed,
            computed=self.computed,
            refused=sum(standing.state is State.REFUSED for standing in self.standings),
            exec_bytes=self.exec_bytes,
            recipe_bytes=self.recipe_bytes,
            obstacle=self.met.obstacle,
            latest=self.met.latest,
            padding=self.met.padding(),
            more=self.met.more,
            ahead=self.ahead,
        )

    def captured(self, built: Built) -> None:
        """Count a new template."""
        self.captures += 1
        self.computed += built.computed
        self.nodes += len(built.template.nodes)
        self.slots += len(built.template.slots)
        self.chunks += len(built.recipes)
        self.capture_s += built.seconds

    def told(self, built: Built) -> str:
        """A template that was counted, in words."""
        return (
            f"{'computed' if built.computed else 'captured'} in {built.seconds * 1e3:.0f} ms: "
            f"{amount(len(built.template.nodes), 'node')} in {amount(len(built.recipes), 'chunk')}; "
            f"{amount(self.captures, 'capture')} of it so far, in {self.capture_s * 1e3:.0f} ms"
        )

    def forget_captures(self) -> None:
        """All of them were freed by a reset, as if there had been none."""
        self.captures = self.computed = self.ahead = self.nodes = self.slots = self.chunks = 0
        self.exec_bytes = self.recipe_bytes = 0
        self.capture_s = 0.0

    def give_up(self, reason: Reason) -> None:
        """What was split from it could not be captured either: this is why, for all that was refused."""
        refused = [s for s in self.standings if s.state is State.REFUSED] or [Standing(State.REFUSED)]
        for standing in refused:
            standing.reason = reason
        self.standings += [s for s in refused if s not in self.standings]

    def latest(self, standing: Standing) -> None:
        """It was refused just now: it comes last from now on."""
        if standing in self.standings:
            self.standings.remove(standing)
            self.standings.append(standing)

    @property
    def refusals(self) -> tuple[Reason, ...]:
        """Why specializations of it are refused, the latest last."""
        found = [
            s.reason for s in reversed(self.standings) if s.reason is not None and s.state is State.REFUSED
        ]
        return tuple(reversed(dict.fromkeys(found)))

    @property
    def reason(self) -> Reason | None:
        """The latest of these."""
        return self.refusals[-1] if self.refusals else None

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why all or some of its calls run uncaptured: rules, refusals, or a capture would not pay."""
        aside = [s.reason for s in self.standings if s.reason is not None and s.state is State.SET_ASIDE]
        waits = (self.waits,) if self.waits is not None else ()
        return (*self.facts.reasons, *self.refusals, *dict.fromkeys(aside), *waits)

    @property
    def state(self) -> PartitionState:
        """Where it stands: its best specialization decides. What the rules say was decided before."""
        if not self.facts.safe:
            small = self.facts.reasons and all(r.info.too_small for r in self.facts.reasons)
            return "too small" if small else "uncaptured"
        states = [standing.state for standing in self.standings]  # a set would hash hundreds, in Python
        if State.CAPTURED in states or State.ON_TRIAL in states:
            return "captured"
        if State.REFUSED in states:
            return "refused"
        if State.SET_ASIDE in states:
            return "set aside"
        if self.waits is not None:
            return "waiting"
        return "warming up" if self.uncaptured_runs else "not run"

    def to_dict(self) -> dict[str, Any]:
        """Facts and counters as plain data."""
        counters = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("facts", "standings", "met", "waits", "gone"):
            del counters[name]
        return {
            "name": counters.pop("name"),
            "kind": self.facts.graph.kind,
            "graph": self.facts.graph.number,
            "partition": self.facts.index or 0,
            "piece": self.facts.piece,
            "state": self.state,
            "dead": self.dead,
            "device_ops": self.facts.device_ops,
            "ops": dict(self.facts.ops),
            **counters,
            "sizes": dataclasses.asdict(self.sizes) if self.sizes is not None else None,
            "reasons": [dataclasses.asdict(reason) for reason in self.reasons],
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Totals over all live partitions, and each partition's own counters.

    Args:
        partitions: in the order of the graphs, and of the partitions in each.
        ghost_peaks: devices whose peak statistics may be too high by what captures counted.
        functions: that Dynamo was asked to compile for pgraph, since it was reset.
        asked: whether torch.compile was called with pgraph since then.
        missing: what is done without the native helpers that could not be built, and why.
    """

    partitions: tuple[PartitionStats, ...]
    ghost_peaks: tuple[GhostPeaks, ...] = ()
    functions: tuple[FunctionStats, ...] = ()
    asked: bool = False
    missing: tuple[str, ...] = ()

    @property
    def dead(self) -> tuple[PartitionStats, ...]:
        """Those whose model was deleted, or which Dynamo has forgotten; `pgraph.reset()` frees what they
        hold."""
        return tuple(p for p in self.partitions if p.dead)

    @property
    def capturable(self) -> tuple[PartitionStats, ...]:
        """The safe ones."""
        return tuple(p for p in self.partitions if p.facts.safe)

    @property
    def outside(self) -> tuple[tuple[str, tuple[Reason, ...]], ...]:
        """(name, reasons) of the partitions that run uncaptured by the safety rules."""
        return tuple((p.name, p.facts.reasons) for p in self.partitions if not p.facts.safe)

    def _sum(self, field: str) -> Any:
        return sum(getattr(p, field) for p in self.partitions)

    @property
    def captures(self) -> int:
        return self._sum("captures")

    @property
    def computed(self) -> int:
        return self._sum("computed")

    @property
    def nodes(self) -> int:
        return self._sum("nodes")

    @property
    def slots(self) -> int:
        return self._sum("slots")

    @property
    def launches(self) -> int:
        return self._sum("launches")

    @property
    def rewritten_nodes(self) -> int:
        return self._sum("rewritten_nodes")

    @property
    def exec_bytes(self) -> int:
        return self._sum("exec_bytes")

    @property
    def recipe_bytes(self) -> int:
        return self._sum("recipe_bytes")

    @property
    def capture_s(self) -> float:
        return self._sum("capture_s")

    @property
    def splits(self) -> int:
        return self._sum("splits")

    @property
    def split_s(self) -> float:
        return self._sum("split_s")

    @property
    def refused(self) -> int:
        """Safe partitions that could not be captured after all."""
        return sum(p.reason is not None for p in self.partitions)

    @property
    def on_trial(self) -> int:
        """Captures that are compared with the partitions' own code just now."""
        return sum(s.state is State.ON_TRIAL for p in self.partitions for s in p.standings)

    def summary(self) -> str:
        """One line: captures and their time, nodes, slots, launches, rewritten nodes, refusals, splits,
        memory."""
        return (
            f"pgraph: {_captures(self)}, {amount(self.nodes, 'node')}, "
            f"{amount(self.slots, 'slot')}, {amount(self.launches, 'launch')}, "
            f"{amount(self.rewritten_nodes, 'node')} rewritten, {amount(self.refused, 'refusal')}"
            f"{_of_splits(self.splits, self.split_s)}{_of_execs(self.exec_bytes)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Totals and partitions as plain data, fit for `json.dumps`."""
        totals = (
            "captures",
            "computed",
            "nodes",
            "slots",
            "launches",
            "rewritten_nodes",
            "refused",
            "exec_bytes",
            "recipe_bytes",
            "splits",
        )
        return {
            **{name: getattr(self, name) for name in totals},
            "capture_s": self.capture_s,
            "split_s": self.split_s,
            "ghost_peaks": [dataclasses.asdict(peaks) for peaks in self.ghost_peaks],
            "missing": list(self.missing),
            "functions": [function.to_dict() for function in self.functions],
            "partitions": [p.to_dict() for p in self.partitions],
        }

    def _nothing(self) -> str:
        """Why there is no partition, although torch.compile was called with pgraph."""
        if any(function.graphs for function in self.functions):
            return "nothing is left of what reached pgraph: the compiled code was deleted"
        what = "Dynamo compiles nothing of the functions below"
        if not self.functions:
            what = (
                "what was compiled with it was not called, or Dynamo skips it: a fused optimizer, a module "
                "of torch.nn itself (nn.Sequential) that is compiled in place, or what was first called "
                "under a dispatch mode (FlopCounterMode and its like). Fix: torch.compile(module) in the "
                "place of module.compile(); a first call without the mode"
            )
        return f'nothing has reached pgraph: {what} (TORCH_LOGS="+dynamo" says more)'

    def __str__(self) -> str:
        lines = [self.summary(), *(f"  {peaks}" for peaks in self.ghost_peaks)]
        lines += [f"  {lack}" for lack in self.missing]
        if self.dead:
            held = sum(p.captures for p in self.dead)
            lines.append(
                f"  of models that are gone: {amount(len(self.dead), 'partition')}, "
                f"{amount(held, 'capture')}{_of_execs(sum(p.exec_bytes for p in self.dead))}"
                f"{'; pgraph.reset() frees them' if held else ''}"
            )
        if self.asked and not self.partitions:
            lines.append(f"  {self._nothing()}")
        for function in sorted(self.functions, key=lambda function: function.stopped is None):
            if function.reason is not None or function.often or not self.partitions:
                lines.append(f"  {function}")
        for p in self.partitions:
            name = f"{p.name} (gone)" if p.dead else p.name
            if not p.facts.safe:
                lines.append(f"  {name}: runs uncaptured{_of_splits(p.splits, p.split_s)}")
                lines += [f"    {reason}" for reason in p.reasons]
                continue
            what = f"{_captures(p)}, {amount(p.nodes, 'node')} in "
            what += f"{amount(p.chunks, 'chunk')}, {amount(p.slots, 'slot')}, "
            what += f"{amount(p.launches, 'launch')}, {amount(p.uncaptured_runs, 'uncaptured run')}"
            what += _of_splits(p.splits, p.split_s) + _of_execs(p.exec_bytes)
            lines.append("; ".join([f"  {name}: {what}", *map(str, p.reasons)]))
            if p.sizes is not None:
                lines.append(f"    {p.sizes}")
        return "\n".join(lines)


def _captures(counts: PartitionStats | Report) -> str:
    computed = f" and {counts.computed:,} computed" if counts.computed else ""
    took = f" in {counts.capture_s * 1e3:,.0f} ms" if counts.captures else ""
    return f"{amount(counts.captures - counts.computed, 'capture')}{computed}{took}"


def _of_splits(splits: int, seconds: float) -> str:
    return f", {amount(splits, 'split')} in {seconds:.1f} s" if splits else ""


def _of_execs(nbytes: int) -> str:
    return f", {nbytes:,} B of execs" if nbytes else ""
