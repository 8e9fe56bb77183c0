"""Dynamic shapes: which sizes are captured, and telling the user when they make captures pile up."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from pgraph import compat
from pgraph.reasons import Reason

__all__ = ["Dimension", "Sizes", "dimensions", "symbols_in"]

log = logging.getLogger(__name__)


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
    """

    label: str
    position: int
    dim: int | None
    of_tensor: bool = True
    derived: Callable[[Collection[int]], frozenset[int] | None] | None = None

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
            found.setdefault(name, Dimension(label, position, None, of_tensor))
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.size()):
                if isinstance(size, torch.SymInt) and (name := compat.plain_symbol(size)):
                    found.setdefault(name, Dimension(_label(size, name)[0], position, dim))
    return found


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
        self._varying = self._evicting = self._crowded = False

    def of(self, args: Sequence[Any]) -> tuple[int, ...]:
        """All of them today."""
        return tuple(d.of(args) for d in self.dimensions)

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
        odd = [f"{d.label} is {d.of(args)}" for d in self._odd(args)]
        listed = ", ".join(map(str, sorted(self.listed)))
        return Reason("size-not-listed", f"{' and '.join(odd)}, and option capture_sizes lists {listed}")

    @staticmethod
    def too_many(limit: str) -> Reason:
        """Why sizes wait while others are captured.

        Args:
            limit: the option that keeps them out, with its value.
        """
        return Reason("too-many-sizes", f"more sizes or layouts take turns than option {limit} lets in")

    def captured(self, args: Sequence[Any], *, computable: bool) -> None:
        """Note the sizes of a capture; say once that another one was made because of them.

        Args:
            computable: further sizes may be computed, so that captures need not pile up.
        """
        values = self.of(args)
        before, self._last = self._last, values
        if before is None or before == values:
            return
        log.log(
            logging.INFO if self._varying or self.listed or computable else logging.WARNING,
            "%s was captured again because %s. Each set of sizes needs a recording of its own%s. Fix: pad to "
            "a few sizes, or list the ones worth a capture in option capture_sizes",
            self._name,
            self._changes(before, values),
            f" (at most {self._limit} are kept)" if self._limit is not None else "",
        )
        self._varying |= not computable

    def _changes(self, before: tuple[int, ...], now: tuple[int, ...]) -> str:
        """What differs, in the user's words; empty if no size does."""
        return " and ".join(
            f"{d.label} went from {old} to {new}"
            for d, old, new in zip(self.dimensions, before, now, strict=True)
            if old != new
        )

    def crowded(self, args: Sequence[Any], limit: str) -> None:
        """Say once that sizes take turns which cannot all be kept.

        Args:
            limit: the option that keeps them out, with its value.
        """
        if self._crowded:
            return
        self._crowded = True
        values = self.of(args)
        changes = self._changes(self._last or values, values) or "layouts or alignments vary"
        log.warning(
            "%s: more sizes or layouts take turns than %s lets in, so some of them run uncaptured; since the "
            "last capture %s. Fix: raise %s, list the sizes worth a capture in option capture_sizes, or pad "
            "to fewer sizes",
            self._name,
            limit,
            changes,
            limit.partition("=")[0],
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
                "new one. Fix: raise %s, list the sizes worth a capture in option capture_sizes, or "
                "pad to fewer sizes",
                self._name,
                limit,
                limit.partition("=")[0],
            )
