"""What an explanation consists of: text and numbers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pgraph.drivers.peak_stats import GhostPeaks
from pgraph.reasons import Reason
from pgraph.runtime import statistics
from pgraph.runtime.met import SizesTold

__all__ = ["Change", "Findings", "PartitionExplanation"]


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionExplanation:
    """One part of one graph.

    Args:
        name: as in the log, e.g. ``"backward 1, partition 0"``.
        kind: "forward", "backward" or "inference".
        graph: number of the graph in this process.
        partition: position in the graph.
        state: "captured", "uncaptured", "too small", "refused", "set aside", "waiting", "warming up"
            or "not run".
        ops: (name, count) of its device ops.
        kernels: nodes of the capture in use; None if there is none.
        captures: made so far, one per set of sizes and alignments.
        slots: words rebound at each launch, as ("input" | "output" | "temp" | "workspace", count).
        chunks: execs launched one after the other.
        blocks: allocations at each launch.
        eager_peak: bytes at the peak of running the nodes one by one.
        plan_peak: bytes at the peak of a launch.
        exec_bytes: device memory held for all execs.
        calls: in one step.
        seconds: of host time in one step, all calls together; None if it did not run.
        own_s: host seconds that its own code takes in one step; None where that was not measured.
        capture_s: seconds that its captures took.
        sizes: what became of the sizes that it met; None if it met one at most.
        reasons: why it is not captured.
        piece: position in what pgraph made of the partition when it split it by itself; None if it did not.
        splits: how often pgraph split this partition by itself; counted at the first of what became of it.
        split_s: seconds that these splits took, compilation included.
    """

    name: str
    kind: str
    graph: int
    partition: int
    state: statistics.PartitionState
    ops: tuple[tuple[str, int], ...]
    kernels: int | None
    captures: int
    slots: tuple[tuple[str, int], ...]
    chunks: int
    blocks: int
    eager_peak: int
    plan_peak: int
    exec_bytes: int
    calls: int
    seconds: float | None
    reasons: tuple[Reason, ...]
    piece: int | None = None
    splits: int = 0
    split_s: float = 0.0
    own_s: float | None = None
    capture_s: float = 0.0
    sizes: SizesTold | None = None

    @property
    def saved_s(self) -> float | None:
        """Host seconds that launches save in one step; None where that was not measured."""
        return None if self.own_s is None or self.seconds is None else self.own_s - self.seconds

    @property
    def place(self) -> str:
        """Where it stands in its graph: ``"2"``, or ``"2.1"`` if partition 2 was split once more."""
        return f"{self.partition}" if self.piece is None else f"{self.partition}.{self.piece}"

    @property
    def device_ops(self) -> int:
        return sum(count for _, count in self.ops)


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Something that the user can change, and what it would bring.

    Args:
        reason: with the fix.
        ops: device ops that would be captured in addition, over all graphs.
        graphs: partitions that would be left between these graphs, less than now.
        seconds: host time per step of the partitions that it keeps outside.
    """

    reason: Reason
    ops: int
    graphs: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """What `explain` found.

    Args:
        partitions: in the order in which they ran, then those that did not run.
        breaks: graph breaks: Python runs between two graphs.
        changes: what to change, the most rewarding first.
        uncompiled: (name, count) of the ops of one step that run outside compiled code.
        steps: how often the program was run.
        ghost_peaks: devices whose peak statistics may be too high by what captures counted.
        stopped: functions of this program that Dynamo compiles no more.
        elsewhere: what was passed is compiled already, and nothing of it reached pgraph.
        preview: there is no GPU, so it was judged as if on CUDA and tried on the host driver.
    """

    partitions: tuple[PartitionExplanation, ...]
    breaks: tuple[Reason, ...]
    changes: tuple[Change, ...]
    uncompiled: tuple[tuple[str, int], ...]
    steps: int
    ghost_peaks: tuple[GhostPeaks, ...] = ()
    stopped: tuple[Reason, ...] = ()
    elsewhere: bool = False
    preview: bool = False

    @property
    def exec_bytes(self) -> int:
        """Device memory held for all execs of all partitions."""
        return sum(p.exec_bytes for p in self.partitions)

    @property
    def complete(self) -> bool:
        """All that is compiled is captured, except draws of seeds; no graph break cuts it, no limit ends it.

        A captured partition has reasons if some of its specializations are refused. One that warmed up, and
        was not called in the measured step, served sizes of the first step for which others are compiled now.
        """
        ran = any(p.calls for p in self.partitions)
        done = all(
            all(r.info.free for r in p.reasons) if p.reasons else p.state == "captured"
            for p in self.partitions
            if p.state != "not run" and p.device_ops and not (p.state == "warming up" and ran and not p.calls)
        )
        return done and bool(self.partitions) and not self.breaks and not self.stopped

    @property
    def device_ops(self) -> tuple[int, int]:
        """(captured, all) device ops of one step; with those outside, if Dynamo stopped compiling some."""
        captured, compiled = self._shares(lambda p: p.device_ops * p.calls)
        return captured, compiled + (self.outside_ops if self.stopped else 0)

    @property
    def outside_ops(self) -> int:
        """Ops of one step that run outside compiled code."""
        return sum(count for _, count in self.uncompiled)

    @property
    def kernels(self) -> tuple[int, int]:
        """(captured, all) kernels of one step; an op that is not captured counts as one; see `device_ops`."""
        captured, compiled = self._shares(
            lambda p: (p.kernels if p.kernels is not None else p.device_ops) * p.calls
        )
        return captured, compiled + (self.outside_ops if self.stopped else 0)

    @property
    def seconds(self) -> tuple[float, float]:
        """(in launches, in all partitions) seconds of host time of one step."""
        captured, total = self._shares(lambda p: p.seconds or 0.0)
        return captured, total

    def _shares(self, of: Callable[[PartitionExplanation], Any]) -> tuple[Any, Any]:
        return sum(of(p) for p in self.partitions if p.state == "captured"), sum(
            of(p) for p in self.partitions
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, fit for `json.dumps`."""
        shares = {"device_ops": self.device_ops, "kernels": self.kernels, "seconds": self.seconds}
        return {
            "complete": self.complete,
            "preview": self.preview,
            "steps": self.steps,
            "exec_bytes": self.exec_bytes,
            "ghost_peaks": [dataclasses.asdict(peaks) for peaks in self.ghost_peaks],
            **{name: {"captured": part, "all": whole} for name, (part, whole) in shares.items()},
            "partitions": [
                {
                    **dataclasses.asdict(p),
                    "device_ops": p.device_ops,
                    "ops": dict(p.ops),
                    "slots": dict(p.slots),
                    "reasons": [dataclasses.asdict(r) for r in p.reasons],
                }
                for p in self.partitions
            ],
            "uncompiled": dict(self.uncompiled),
            "stopped": [dataclasses.asdict(r) for r in self.stopped],
            "breaks": [dataclasses.asdict(r) for r in self.breaks],
            "changes": [dataclasses.asdict(c) for c in self.changes],
        }
