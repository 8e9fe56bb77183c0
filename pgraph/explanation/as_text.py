"""An explanation as text."""

from __future__ import annotations

import linecache
import math

from pgraph.explanation.findings import Change, Findings, PartitionExplanation
from pgraph.reasons import Reason
from pgraph.text import amount

__all__ = ["gain", "partition_lines", "place", "render", "summary"]

_SHOWN_OPS = 4


def render(explanation: Findings, *, times: bool) -> str:
    """All of it; see `Explanation.render`."""
    lines = summary(explanation, times=times)
    if explanation.changes:
        lines += ["", "What to change first:"]
        for number, change in enumerate(explanation.changes, 1):
            lines += _change(number, change, explanation, times)
    graph = None
    for partition in explanation.partitions:
        if partition.graph != graph:
            lines += ["", f"{partition.kind} {partition.graph}"]
            graph = partition.graph
        lines += partition_lines(partition, times=times)
    return "\n".join(lines) + "\n"


def place(reason: Reason) -> str | None:
    """``file:line: source`` of the user's own line, as far as it is known."""
    if reason.where is None:
        return None
    path, _, line = reason.where.rpartition(":")
    source = linecache.getline(path, int(line)).strip() if line.isdigit() else ""
    return f"{reason.where}: {source}" if source else reason.where


def summary(explanation: Findings, *, times: bool) -> list[str]:
    """The verdict, and what holds for the program as a whole: a sentence per line."""
    run = [p for p in explanation.partitions if p.calls]
    captured = sum(p.state == "captured" for p in run)
    verdict = f"{captured} of {len(run)} partitions captured"
    if explanation.complete:
        verdict = "all that is compiled is captured"
    if not explanation.partitions:
        verdict = "nothing was compiled"
    if explanation.elsewhere:
        verdict = "nothing reached pgraph: this is compiled already; pass it as it was before torch.compile"
    cuts = len(explanation.breaks)
    shares = [f"device ops {_share(*explanation.device_ops)}", f"kernels {_share(*explanation.kernels)}"]
    if times:
        done, total = explanation.seconds
        shares.append(f"host time {done * 1e6:,.0f} of {total * 1e6:,.0f} us")
    if explanation.stopped:
        verdict += f", {amount(len(explanation.stopped), 'function')} compiled no more"
        verdict += f", {amount(explanation.outside_ops, 'op')} not compiled"
    lines = [
        f"pgraph: {verdict}" + (f", {amount(cuts, 'graph break')}" if cuts else ""),
        f"captured: {', '.join(shares)}",
    ]
    if explanation.preview:
        lines.append(
            "preview without a GPU: judged as if on CUDA, tried on the host driver; times are the CPU's"
        )
    if explanation.exec_bytes:
        lines.append(f"memory of the recordings: {explanation.exec_bytes:,} B of execs")
    lines += [f"peak statistics: {peaks}" for peaks in explanation.ghost_peaks]
    if explanation.uncompiled:
        lines.append(f"not compiled: {amount(explanation.outside_ops, 'op')}: {_ops(explanation.uncompiled)}")
    return lines


def _share(part: float, whole: float) -> str:
    percent = f" ({100 * part / whole:.0f} %)" if whole else ""
    return f"{part:,} of {whole:,}{percent}"


def _change(number: int, change: Change, explanation: Findings, times: bool) -> list[str]:
    return [f"  {number}. {gain(change, explanation, times=times)}", *_reason(change.reason, " " * 5)]


def gain(change: Change, explanation: Findings, *, times: bool) -> str:
    """What a change is good for."""
    if change.reason in explanation.stopped:
        return "compiles and captures the calls that run eagerly now"
    if change.reason in explanation.breaks:
        if not explanation.partitions:
            return "compiles what Python runs there"
        return "joins what lies before and after the break, and compiles what Python runs there"
    what = f"{amount(change.ops, 'more device op')} captured"
    if change.graphs > 0:
        what += f", {amount(change.graphs, 'partition')} fewer"
    if times and change.seconds:
        what += f", of {change.seconds * 1e6:,.0f} us outside now"
    return what


def _reason(reason: Reason, indent: str) -> list[str]:
    lines = [f"{indent}[{reason.code}] {reason.sentence}"]
    if (where := place(reason)) is not None:
        lines.append(f"{indent}at {where}")
    lines.append(f"{indent}fix: {reason.fix}")
    return lines


def partition_lines(partition: PartitionExplanation, *, times: bool) -> list[str]:
    """What is known of one partition, indented by its depth."""
    calls = f" x {partition.calls}" if partition.calls > 1 else ""
    took = f", {partition.seconds * 1e6:,.0f} us" if times and partition.seconds is not None else ""
    lines = [
        f"  partition {partition.place}: {partition.state}{calls}, "
        f"{amount(partition.device_ops, 'device op')}{took}"
    ]
    if partition.ops:
        lines.append(f"    ops: {_ops(partition.ops)}")
    if partition.kernels is not None:
        slots = ", ".join(f"{count} {kind}" for kind, count in partition.slots)
        computed = partition.sizes.computed if partition.sizes is not None else 0
        made = amount(partition.captures - computed, "capture") + (
            f" and {computed:,} computed" if computed else ""
        )
        lines.append(
            f"    {made}: {amount(partition.kernels, 'kernel')}; "
            f"slots {slots}; {partition.exec_bytes:,} B of execs"
        )
        lines.append(
            f"    plan: {amount(partition.chunks, 'chunk')}, {amount(partition.blocks, 'block')}, "
            f"peak {partition.plan_peak:,} B, eager {partition.eager_peak:,} B"
        )
    if partition.sizes is not None:
        lines.append(f"    {partition.sizes}")
    if times and partition.saved_s is not None:
        lines.append(f"    {_saved(partition)}")
    if partition.splits:
        cost = f", in {partition.split_s:.1f} s" if times else ""
        lines.append(f"    split by pgraph itself {amount(partition.splits, 'time')}{cost}")
    for reason in partition.reasons:
        lines += _reason(reason, " " * 4)
    return lines


def _saved(partition: PartitionExplanation) -> str:
    """What its captures save, and when they have paid for themselves."""
    saved, cost = partition.saved_s, f"captured in {partition.capture_s * 1e3:,.0f} ms"
    assert saved is not None
    if saved <= 0:
        return f"saves no host time; {cost}"
    steps = math.ceil(partition.capture_s / saved)
    return f"saves {saved * 1e6:,.0f} us of host time; {cost}, paid back after {amount(steps, 'step')}"


def _ops(ops: tuple[tuple[str, int], ...]) -> str:
    ranked = sorted(ops, key=lambda op: -op[1])
    shown = [f"{name} x {count}" if count > 1 else name for name, count in ranked[:_SHOWN_OPS]]
    rest = len(ranked) - len(shown)
    return ", ".join(shown) + (f", and {amount(rest, 'kind')} more" if rest else "")
