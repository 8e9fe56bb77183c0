"""Dynamic shapes: which sizes are captured, and telling the user when they make captures pile up."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from pgraph import compat
from pgraph.reasons import Reason
from pgraph.runtime import functions

__all__ = ["Dimension", "Sizes", "dimensions", "symbols_in"]

log = logging.getLogger(__name__)

_MOST: Final = 4096
"""Values of a size that are remembered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dimension:
    """A size that may differ from call to call, and where a partition's arguments (or results) tell it.

    Args:
        label: in the user's words, e.g. ``"dimension 0 of x"``.
        position: among the partition's arguments.
        dim: of that tensor; None if the argument is the number itself.
        of_tensor: the user gave it as a size; False for a number among the user's own arguments, and for what
            the program made of several sizes or numbers.
        derived: what it is where the user's sizes are some of those given; None: it is such a size.
        symbol: that stands for it in the trace; None if several do.
        came: values that it has had, whatever graph of its function it came to.
    """

    label: str
    position: int
    dim: int | None
    of_tensor: bool = True
    derived: Callable[[Collection[int]], frozenset[int] | None] | None = None
    symbol: str | None = None
    came: set[int] = dataclasses.field(default_factory=set, compare=False)

    @property
    def is_number(self) -> bool:
        """It is a number among the user's own arguments, which no padding makes fewer."""
        return not self.of_tensor and self.derived is None

    def of(self, args: Sequence[Any]) -> int:
        """Its value today."""
        value = args[self.position]
        return int(value if self.dim is None else value.size(self.dim))


def dimensions(module: GraphModule) -> tuple[Dimension, ...]:
    """The symbols among the sizes of a module's inputs, and what others were made into (``s // 2``)."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    # What nothing reads (a generator's state that is not needed) may be of any size.
    values = [node.meta.get("val") if node.users else None for node in placeholders]
    plain = symbols_in(values)
    derived: dict[str, Dimension] = {}
    for position, value in enumerate(values):
        for dim, size in enumerate(value.size()) if isinstance(value, torch.Tensor) else [(None, value)]:
            if isinstance(size, torch.SymInt) and not compat.symbol_sources(size).keys() <= plain.keys():
                made = Dimension(_made_of(size), position, dim, False, compat.values_of(size))
                derived.setdefault(str(size), made)
    return (*plain.values(), *derived.values())


def symbols_in(values: Sequence[Any]) -> dict[str, Dimension]:
    """The plain symbols among traced numbers and sizes of tensors, by name: where each is told first."""
    found: dict[str, Dimension] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.SymInt) and (name := compat.plain_symbol(value)):
            label, of_tensor = _label(value, name)
            found.setdefault(name, Dimension(label, position, None, of_tensor, None, name, _came(value)))
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.size()):
                if isinstance(size, torch.SymInt) and (name := compat.plain_symbol(size)):
                    label = _label(size, name)[0]
                    found.setdefault(name, Dimension(label, position, dim, symbol=name, came=_came(size)))
    return found


def _came(size: torch.SymInt) -> set[int]:
    (source,) = compat.symbol_sources(size).values()
    return functions.values(compat.compilation(), source)


def _label(size: torch.SymInt, name: str) -> tuple[str, bool]:
    """A symbol in the user's words, and whether it is a size."""
    plain = re.sub(r"L\['(\w+)'\]", r"\1", compat.symbol_sources(size)[name] or name)
    tensor = re.fullmatch(r"(.*?)(\._base)?\.size\(\)\[(\d+)\]", plain)
    if tensor is None:
        return plain, False
    whose = f"what {tensor[1]} is a view of" if tensor[2] else tensor[1]
    return f"dimension {tensor[3]} of {whose}", True


def _made_of(size: torch.SymInt) -> str:
    """An expression of symbols in the user's words."""
    text = str(size)
    for name in compat.symbol_sources(size):
        text = re.sub(rf"\b{name}\b", f"({_label(size, name)[0]})", text)
    return text


class Sizes:
    """What one partition knows of its sizes. Called with the partition's lock held.

    Args:
        name: of the partition.
        dimensions: that may vary.
        listed: option `capture_sizes`; empty to capture whatever comes.
        limit: option `max_captures`.
    """

    __slots__ = (
        "_crowded",
        "_evicting",
        "_last",
        "_limit",
        "_moved",
        "_name",
        "_varying",
        "_wanted",
        "dimensions",
        "listed",
    )

    def __init__(
        self, name: str, dimensions: tuple[Dimension, ...], listed: tuple[int, ...], limit: int | None
    ) -> None:
        self.dimensions = dimensions
        self.listed = frozenset(listed)
        self._name = name
        self._limit = limit
        self._last: tuple[int, ...] | None = None
        self._wanted: tuple[frozenset[int] | None, ...] | None = None
        self._moved: tuple[Dimension, ...] = ()  # that were seen to vary
        self._varying = self._evicting = self._crowded = False

    def of(self, args: Sequence[Any]) -> tuple[int, ...]:
        """All of them today."""
        return tuple(d.of(args) for d in self.dimensions)

    def note(self, values: Sequence[int]) -> None:
        """They came, in the order of the dimensions."""
        for dimension, value in zip(self.dimensions, values, strict=True):
            if len(dimension.came) < _MOST:
                dimension.came.add(value)

    def wanted(self, args: Sequence[Any]) -> bool:
        """Whether sizes like these are to be captured."""
        return not self._odd(args)

    def _odd(self, args: Sequence[Any]) -> list[Dimension]:
        """Those that are not listed; of what is made of sizes: that no listed ones make."""
        if self._wanted is None:
            self._wanted = tuple(
                self.listed if d.derived is None else d.derived(self.listed) for d in self.dimensions
            )
        if not self.listed:
            return []
        pairs = zip(self.dimensions, self._wanted, strict=True)
        return [d for d, wanted in pairs if wanted is not None and d.of(args) not in wanted]

    def unlisted(self, args: Sequence[Any]) -> Reason:
        """Why sizes like these wait for ever."""
        odd = self._odd(args)
        told = " and ".join(f"{d.label} is {d.of(args)}" for d in odd)
        listed = ", ".join(map(str, sorted(self.listed)))
        fix = (
            f"{_fewer(odd, 'a listed one')}, or list it in option capture_sizes"
            if any(d.is_number for d in odd)
            else ""
        )
        return Reason("size-not-listed", f"{told}, and option capture_sizes lists {listed}", fix)

    def too_many(self, limit: str) -> Reason:
        """Why sizes wait while others are captured.

        Args:
            limit: the option that keeps them out, with its value.
        """
        numbers = any(d.is_number for d in self._moved)
        fix = f"{_fewer(self._moved, 'fewer sizes')}, or raise that option" if numbers else ""
        return Reason("too-many-sizes", f"more sizes or layouts take turns than option {limit} lets in", fix)

    def captured(self, args: Sequence[Any], *, computable: bool) -> None:
        """Note the sizes of a capture; say once that another one was made because of them.

        Args:
            computable: further sizes may be computed, so that captures need not pile up.
        """
        values = self.of(args)
        before, self._last = self._last, values
        if before is None or not (changes := self._changes(before, values)):
            return
        log.log(
            logging.INFO if self._varying or self.listed or computable else logging.WARNING,
            "%s was captured again because %s. Each set of sizes and numbers needs a recording of its own%s. "
            "Fix: %s, or list the ones worth a capture in option capture_sizes",
            self._name,
            _told(changes),
            f" (at most {self._limit} are kept)" if self._limit is not None else "",
            _fewer([d for d, _, _ in changes], "a few sizes"),
        )
        self._varying |= not computable

    def _changes(self, before: tuple[int, ...], now: tuple[int, ...]) -> list[tuple[Dimension, int, int]]:
        """What differs, and the values."""
        triples = zip(self.dimensions, before, now, strict=True)
        found = [(d, old, new) for d, old, new in triples if old != new]
        self._moved = tuple(dict.fromkeys((*self._moved, *(d for d, _, _ in found))))
        return found

    def crowded(self, args: Sequence[Any], limit: str) -> None:
        """Say once that sizes take turns which cannot all be kept.

        Args:
            limit: the option that keeps them out, with its value.
        """
        if self._crowded:
            return
        self._crowded = True
        values = self.of(args)
        changes = self._changes(self._last or values, values)
        log.warning(
            "%s: more sizes or layouts take turns than %s lets in, so some of them run uncaptured; since the "
            "last capture %s. Fix: raise %s, list the sizes worth a capture in option capture_sizes, or %s",
            self._name,
            limit,
            _told(changes) or "layouts or alignments vary",
            limit.partition("=")[0],
            _fewer([d for d, _, _ in changes], "fewer sizes"),
        )

    def evicted(self, limit: str) -> None:
        """Say once that captures are being dropped for new ones.

        Args:
            limit: the option for whose sake, with its value.
        """
        if not self._evicting:
            self._evicting = True
            log.warning(
                "%s: there are more captures than %s lets in: from now on one that is used less goes for a "
                "new one. Fix: raise %s, list the sizes worth a capture in option capture_sizes, or %s",
                self._name,
                limit,
                limit.partition("=")[0],
                _fewer(self._moved, "fewer sizes"),
            )


def _told(changes: Sequence[tuple[Dimension, int, int]]) -> str:
    """They in the user's words."""
    return " and ".join(f"{d.label} went from {old} to {new}" for d, old, new in changes)


def _fewer(dimensions: Sequence[Dimension], goal: str) -> str:
    """What has fewer sets of them come.

    Args:
        goal: what to pad sizes to.
    """
    numbers = [d.label for d in dimensions if d.is_number]
    ways = [f"pad to {goal}"] if len(numbers) < len(dimensions) or not numbers else []
    if numbers:
        ways.insert(
            0, f"pass {' and '.join(numbers)} as a float or a tensor (then one recording serves all values)"
        )
    return ", ".join(ways)
