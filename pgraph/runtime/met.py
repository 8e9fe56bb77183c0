"""The sizes that a partition met, as a user is told of them."""

from __future__ import annotations

import dataclasses
from typing import Final

from pgraph.text import amount

__all__ = ["Met", "SizesTold"]

_MOST: Final = 4096  # that are remembered
_MULTIPLES: Final = (8, 16, 32, 64, 128, 256, 512, 1024)
_FEWER: Final = 4
"""Padding is worth a word where it leaves a quarter of the sizes."""


@dataclasses.dataclass(slots=True)
class Met:
    """Of one partition.

    Args:
        labels: of the dimensions that may vary, in the user's words.
        numbers: which of them are numbers among the user's arguments, and no sizes.
        sizes: of these dimensions, each that came; not more than 4,096 are remembered.
        more: whether there were others.
        obstacle: why recordings are captured, and none is computed, if that is known.
        latest: why one was not computed, of all the last.
    """

    labels: tuple[str, ...] = ()
    numbers: frozenset[int] = frozenset()
    sizes: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    obstacle: str | None = None
    latest: str | None = None
    more: bool = False

    def note(self, sizes: tuple[int, ...]) -> None:
        """They came."""
        if len(self.sizes) < _MOST:
            self.sizes.add(sizes)
        elif not self.more:
            self.more = sizes not in self.sizes

    @property
    def varies(self) -> bool:
        """Whether more than one came."""
        return len(self.sizes) > 1

    def at_present(self) -> Met:
        """A copy."""
        return Met(self.labels, self.numbers, set(self.sizes), self.obstacle, self.latest, self.more)

    def padding(self) -> str | None:
        """What padding would gain; None if nothing much. Only a size can be padded."""
        varying = [i for i in range(len(self.labels)) if len({sizes[i] for sizes in self.sizes}) > 1]
        padded = [i for i in varying if i not in self.numbers]
        for multiple in _MULTIPLES if padded else ():
            left = {
                tuple(-(-sizes[i] // multiple) if i in padded else sizes[i] for i in varying)
                for sizes in self.sizes
            }
            if len(left) * _FEWER <= len(self.sizes):
                labels = " and ".join(self.labels[i] for i in padded)
                leaves = amount(len(left), "size")
                return (
                    f"{labels} padded to multiples of {multiple}: {leaves} in the place of {len(self.sizes)}"
                )
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class SizesTold:
    """What became of the sizes of a partition.

    Args:
        met: how many came, of those that are remembered.
        more: whether there were others.
        captured, computed: recordings made, of sizes, layouts and alignments.
        ahead: of those computed: that were before they came (Note [Computed ahead]).
        refused: that cannot be captured.
        exec_bytes, recipe_bytes: of the device's memory and of the host's that they take now.
        obstacle: why none is computed, if that is known.
        latest: why the last that was not computed was not, if any is.
        padding: what that would gain, in words.
    """

    met: int
    captured: int
    computed: int
    refused: int
    exec_bytes: int
    recipe_bytes: int
    obstacle: str | None
    latest: str | None
    padding: str | None
    more: bool = False
    ahead: int = 0

    def __str__(self) -> str:
        told = f"{'at least ' if self.more else ''}{self.met:,} met, "
        ahead = f" ({self.ahead} of them ahead of their first call)" if self.ahead else ""
        told += f"{self.captured} captured, {self.computed} computed{ahead}, {self.refused} refused; "
        told += f"{self.exec_bytes:,} B of execs, {self.recipe_bytes:,} B of the host's memory"
        if self.obstacle is not None:
            told += f"; none is computed: {self.obstacle}"
        elif self.latest is not None:
            told += f"; of those that were not computed the last was not because {self.latest}"
        return f"sizes: {told}" + (f"; {self.padding}" if self.padding else "")
