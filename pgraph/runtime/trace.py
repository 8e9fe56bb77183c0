"""What pgraph adds to `TORCH_TRACE`: how each graph was cut, and why, at the compilation that it is of.

`tlparse` shows each text as a file beside Dynamo's and Inductor's, under the id of the compilation. A text
is written when a graph has been cut, when pgraph splits it once more, and when a capture is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgraph import compat
from pgraph.partition.facts import PartitionFacts
from pgraph.reasons import Reason
from pgraph.text import amount

__all__ = ["cut", "refused"]


def cut(facts: Sequence[PartitionFacts], why: str = "") -> None:
    """Trace the partitions of a graph, or the pieces of one of them.

    Args:
        facts: of each, in order; at least one.
        why: it was cut now, and not when it was compiled.
    """
    graph = facts[0].graph
    compat.trace("pgraph " + graph.name, lambda: _text(facts, why), graph.compilation)


def refused(facts: PartitionFacts, reason: Reason) -> None:
    """Trace that a capture was refused."""
    text = f"{facts.name} runs uncaptured, since its capture was refused:\n  {reason}"
    compat.trace(f"pgraph {facts.graph.name} refused", lambda: text, facts.graph.compilation)


def _text(facts: Sequence[PartitionFacts], why: str) -> str:
    graph, safe = facts[0].graph, [partition for partition in facts if partition.safe]
    ops = sum(partition.device_ops for partition in facts)
    mine = sum(partition.device_ops for partition in safe)
    parts = f"{len(safe)} of {amount(len(facts), 'partition')}"
    lines = [f"{graph.name}: {mine} of {amount(ops, 'device op')} to be captured, in {parts}"]
    lines += [f"  {why}"] if why else []
    lines += [f"  the graph ends here: {graph.broken}"] if graph.broken is not None else []
    for partition in facts:
        verdict = "to be captured" if partition.safe else "runs uncaptured"
        named = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in partition.ops)
        lines.append(f"partition {partition.place}: {amount(partition.device_ops, 'device op')}, {verdict}")
        lines += [f"  in {partition.module}"] if partition.module else []
        lines += [f"  {reason}" for reason in partition.reasons]
        lines += [f"  {named}"] if named else []
    return "\n".join(lines)
