"""An explanation as one page: a bar per partition, in the order in which they run. No script, no network."""

from __future__ import annotations

import html

from pgraph.explanation import as_text
from pgraph.explanation.as_text import place
from pgraph.explanation.findings import Findings, PartitionExplanation
from pgraph.reasons import Reason
from pgraph.text import amount

__all__ = ["render"]

_NOTHING_TO_DO = "outside, nothing to do"

# State -> (colour, mark): the mark tells them apart without colours too.
_LOOKS = {
    "captured": ("#2e7d32", "●"),
    "uncaptured": ("#c62828", "○"),
    "too small": ("#ef6c00", "◌"),
    "refused": ("#6a1b9a", "✕"),
    "set aside": ("#1565c0", "◇"),
    "waiting": ("#8d6e63", "◔"),
    "warming up": ("#546e7a", "…"),
    "not run": ("#9e9e9e", "-"),
    _NOTHING_TO_DO: ("#78909c", "○"),
}

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em; max-width: 75em; color: #212121; }
h1 { font-size: 1.3em; } h2 { font-size: 1em; margin: 1.2em 0 .3em; }
.row { display: flex; gap: 2px; }
.bar { min-width: 2.2em; padding: .45em .3em; color: #fff; border-radius: 3px; overflow: hidden;
       white-space: nowrap; text-overflow: ellipsis; font-size: 12px; }
.legend span { padding: .1em .5em; margin-right: .5em; color: #fff; border-radius: 3px; font-size: 12px; }
table { border-collapse: collapse; margin-top: 1em; }
td, th { border-bottom: 1px solid #ddd; padding: .3em .7em; text-align: left; vertical-align: top; }
code { background: #f3f3f3; padding: 0 .2em; }
pre { font-size: 12px; white-space: pre-wrap; }
"""


def render(explanation: Findings, *, times: bool) -> str:
    """The whole page; widths are host time if `times`, device ops otherwise."""
    verdict, *others = as_text.summary(explanation, times=times)
    body = [f"<h1>{_escape(verdict)}</h1>", *(f"<p>{_escape(line)}</p>" for line in others)]
    legend = "".join(
        f'<span style="background:{colour}">{mark} {state}</span>' for state, (colour, mark) in _LOOKS.items()
    )
    body.append(f'<p class="legend">{legend}</p>')
    if explanation.changes:
        rows = "".join(
            f"<tr><td>{i}</td><td>{_escape(as_text.gain(change, explanation, times=times))}</td>"
            f"<td>{_reason(change.reason)}</td></tr>"
            for i, change in enumerate(explanation.changes, 1)
        )
        body.append("<h2>What to change first</h2>")
        body.append(f"<table><tr><th></th><th>gain</th><th>what</th></tr>{rows}</table>")
    graphs: dict[int, list[PartitionExplanation]] = {}
    for partition in explanation.partitions:
        graphs.setdefault(partition.graph, []).append(partition)
    for number, partitions in graphs.items():
        body.append(f"<h2>{partitions[0].kind} {number}</h2>")
        body.append(f'<div class="row">{"".join(_bar(partition, times) for partition in partitions)}</div>')
        told = [line for p in partitions for line in as_text.partition_lines(p, times=times)]
        body.append(
            f"<details><summary>each partition</summary><pre>{_escape(chr(10).join(told))}</pre></details>"
        )
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>pgraph</title><style>{_STYLE}</style></head>\n'
        "<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _bar(partition: PartitionExplanation, times: bool) -> str:
    colour, mark = _LOOKS[_look(partition)]
    took = f"{partition.seconds * 1e6:,.0f} us" if times and partition.seconds is not None else ""
    weight = (
        (partition.seconds or 0.0) * 1e6 if times else float(partition.device_ops * max(partition.calls, 1))
    )
    known = as_text.partition_lines(partition, times=times)
    title = _escape("\n".join([f"{partition.name}: {partition.state}", *known]))
    label = _escape(
        f"{mark} partition {partition.place}: {amount(partition.device_ops, 'op')} {took}".rstrip()
    )
    style = f"flex:{max(weight, 0.1):.1f};background:{colour}"
    return f'<div class="bar" style="{style}" title="{title}">{label}</div>'


def _look(partition: PartitionExplanation) -> str:
    """What is outside for reasons that nobody can change is no fault."""
    changeable = any(reason.info.actionable for reason in partition.reasons)
    captured = partition.state == "captured"
    return _NOTHING_TO_DO if partition.reasons and not changeable and not captured else partition.state


def _reason(reason: Reason) -> str:
    where = f"<br><code>{_escape(found)}</code>" if (found := place(reason)) else ""
    return f"[{_escape(reason.code)}] {_escape(reason.sentence)}{where}<br>fix: {_escape(reason.fix)}"


def _escape(value: str) -> str:
    return html.escape(value, quote=True)
