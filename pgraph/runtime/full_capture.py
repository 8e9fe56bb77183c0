"""Hard mode: option `require_full_capture` turns whatever stays outside into an error.

The error comes out of the user's call before anything of the graph has run. While Dynamo compiles it
would be wrapped into another one, so what is refused at compile time becomes a function that raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from pgraph.errors import FullCaptureError
from pgraph.partition.facts import PartitionFacts
from pgraph.reasons import Reason

__all__ = ["insist", "raising", "refuse"]


def insist(partitions: Iterable[PartitionFacts]) -> None:
    """All partitions may be captured, or only draw seeds for those that may.

    Raises:
        FullCaptureError: naming every partition that may not, with its reasons.
    """
    outside = [p for p in partitions if not (p.safe or p.seeds_only or not (p.device_ops or p.reasons))]
    if outside:
        ops = sum(p.device_ops for p in outside)
        raise FullCaptureError(
            _text(
                f"{outside[0].graph.name} cannot be captured as a whole: {ops} device ops stay outside",
                [(p.name, p.reasons) for p in outside],
            )
        )


def refuse(name: str, reason: Reason, report: str = "") -> NoReturn:
    """One thing stays outside.

    Raises:
        FullCaptureError: always.
    """
    text = _text(f"{name} stays outside every graph", [(name, (reason,))])
    raise FullCaptureError(f"{text}\n{report}" if report else text)


def _text(what: str, outside: Iterable[tuple[str, Iterable[Reason]]]) -> str:
    lines = [f"{what}, and require_full_capture is set (nothing of it has run)"]
    for name, reasons in outside:
        lines.append(f"  {name}")
        lines += [f"    {reason}" for reason in reasons]
    return "\n".join(lines)


def raising(error: FullCaptureError) -> Callable[..., Any]:
    """A compiled function that does nothing but raise; anew each time, so that no frame is kept."""
    text = str(error)

    def refused(*args: Any) -> NoReturn:
        raise FullCaptureError(text)

    return refused
