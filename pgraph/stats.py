"""What pgraph has done in this process: counters per partition, and their sum."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import TYPE_CHECKING, Any

from pgraph.reasons import Reason

if TYPE_CHECKING:
    from pgraph.build import Built
    from pgraph.runner import PartitionRunner

__all__ = ["PartitionStats", "Report", "live_partitions", "note_plain", "register", "report"]

_partitions: weakref.WeakSet[Any] = weakref.WeakSet()
_outside: list[tuple[str, tuple[Reason, ...]]] = []
_lock = threading.Lock()


@dataclasses.dataclass(slots=True)
class PartitionStats:
    """Counters of one safe partition.

    Args:
        name: e.g. ``"backward 1"``.
        captures: templates made (each from two recordings).
        nodes: graph nodes over all templates.
        slots: words that are rebound, over all templates.
        chunks: execs.
        exec_bytes: device memory the driver took for the execs.
        capture_s: seconds spent capturing, matching, planning and instantiating.
        launches: calls served by a launch.
        rewritten_nodes: nodes set, over all launches.
        plain_runs: calls served by plain code (warm-up included).
        reason: why it fell back, if it did.
    """

    name: str
    captures: int = 0
    nodes: int = 0
    slots: int = 0
    chunks: int = 0
    exec_bytes: int = 0
    capture_s: float = 0.0
    launches: int = 0
    rewritten_nodes: int = 0
    plain_runs: int = 0
    reason: Reason | None = None

    def captured(self, built: Built) -> None:
        """Count a new template."""
        self.captures += 1
        self.nodes += len(built.template.nodes)
        self.slots += len(built.template.slots)
        self.chunks += len(built.execs)
        self.exec_bytes += sum(e.nbytes for e in built.execs)
        self.capture_s += built.seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Totals over all live partitions, and each partition's own counters.

    Args:
        partitions: counters of the safe partitions.
        outside: (name, reasons) of the parts that run plainly by the safety rules.
    """

    partitions: tuple[PartitionStats, ...]
    outside: tuple[tuple[str, tuple[Reason, ...]], ...]

    def _sum(self, field: str) -> Any:
        return sum(getattr(p, field) for p in self.partitions)

    @property
    def captures(self) -> int:
        return self._sum("captures")

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
    def capture_s(self) -> float:
        return self._sum("capture_s")

    @property
    def fallbacks(self) -> int:
        """Safe partitions that could not be captured after all."""
        return sum(p.reason is not None for p in self.partitions)

    def summary(self) -> str:
        """One line: captures, nodes, slots, launches, rewritten nodes, fallbacks."""
        return (
            f"pgraph: {self.captures} captures, {self.nodes} nodes, {self.slots} slots, "
            f"{self.launches} launches, {self.rewritten_nodes} nodes rewritten, {self.fallbacks} fallbacks"
        )

    def __str__(self) -> str:
        lines = [self.summary()]
        for p in self.partitions:
            what = f"{p.captures} captures, {p.nodes} nodes in {p.chunks} chunks, {p.slots} slots, "
            what += f"{p.launches} launches, {p.plain_runs} plain runs"
            lines.append(f"  {p.name}: {what}" + (f"; {p.reason}" if p.reason else ""))
        for name, reasons in self.outside:
            lines.append(f"  {name}: runs plainly")
            lines += [f"    {reason}" for reason in reasons]
        return "\n".join(lines)


def register(runner: PartitionRunner) -> None:
    """Have a partition counted for as long as it lives."""
    _partitions.add(runner)


def note_plain(name: str, reasons: tuple[Reason, ...]) -> None:
    """Remember that a part runs plainly, and why."""
    with _lock:
        _outside.append((name, reasons))
        del _outside[:-1000]  # a process that compiles for ever must not grow for ever


def live_partitions() -> list[PartitionRunner]:
    """Every safe partition that is still in use."""
    return sorted(_partitions, key=lambda p: p.name)


def forget() -> None:
    """Drop the list of parts that run plainly."""
    with _lock:
        _outside.clear()


def report() -> Report:
    """Counters of this process, now."""
    with _lock:
        outside = tuple(_outside)
    return Report(tuple(p.stats for p in live_partitions()), outside)
