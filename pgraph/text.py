"""Numbers with their nouns, for everything that pgraph reports. No torch."""

from __future__ import annotations

__all__ = ["amount"]


def amount(number: int, noun: str) -> str:
    """``"1 launch"``, ``"2,000 launches"``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"
