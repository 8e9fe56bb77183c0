"""Shared by the tests of `pgraph.explain`: explain on the host driver, and normalised text."""

from __future__ import annotations

import re
from typing import Any

import pgraph

HOST = {"driver": "host", "codegen": "aten", "min_ops": 1}


def explain(fn: Any, *args: Any, steps: int | None = None, **options: Any) -> pgraph.Explanation:
    """Explain `fn`, compiled on the host driver with fixed shapes."""
    return pgraph.explain(fn, steps=steps, dynamic=False, **{**HOST, **options})(*args)


def text(explanation: pgraph.Explanation) -> str:
    """Without times, folders and line numbers (the source text tells the line); graphs numbered from 0."""
    plain = re.sub(r"(?:/[^\s/:]+)+/([^\s/:]+):\d+", r"\1", explanation.render(times=False))
    numbers: dict[str, str] = {}
    return re.sub(
        r"\b(forward|backward|inference) (\d+)",
        lambda m: f"{m[1]} {numbers.setdefault(m[2], str(len(numbers)))}",
        plain,
    )


def lines(explanation: pgraph.Explanation) -> list[str]:
    """The user's source lines that the explanation points at, most rewarding first."""
    return [
        line.split(": ", 1)[1]
        for line in text(explanation).split("What to change first:")[-1].splitlines()
        if line.startswith("     at ")
    ]
