"""Symbolic sizes: what a trace calls them and assumes of them, and their values."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import sympy  # type: ignore[import-untyped]  # no stubs
import torch
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

__all__ = [
    "SymbolicNumbers",
    "evaluate",
    "marked_unbacked",
    "plain_symbol",
    "symbol_sources",
    "values_of",
]


def plain_symbol(size: torch.SymInt) -> str | None:
    """The name of a symbolic number that is a symbol itself, not an expression of others."""
    expression = size.node.expr
    return str(expression) if expression.is_symbol else None


def evaluate(size: torch.SymInt, numbers: Mapping[str, int]) -> int | None:
    """A symbolic number where its symbols have these values; None if one of them has none; 2.11, 2.13."""
    expression = size.node.expr
    known = numbers.keys() >= set(map(str, expression.free_symbols))
    return int(_function(expression)(numbers)) if known else None


_TRIED: Final = 64  # sets of numbers
_STEPS: Final = (-1, -8, 0, -3, -16, 8, -32, 16, 1, 32, -64, 64, -128, 128)
"""From a number to others, odd ones and such that have its divisors. 0 stands for its half."""


class SymbolicNumbers:
    """Numbers of a trace, some of them symbolic, where its symbols have other values; 2.11, 2.13, 2.15. What
    the trace has assumed is read when it is first asked for: a backward that is compiled later may assume
    more. From then on no more of the trace is kept than expressions.

    Args:
        values: symbolic numbers, and others.

    Attributes:
        symbols: their values in the trace, by name; empty if the data tell one of them, or if there are none.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        traced = [value for value in values if isinstance(value, torch.SymInt)]
        found = sorted({symbol for size in traced for symbol in size.node.expr.free_symbols}, key=str)
        self.symbols: dict[str, int] = {}
        if not found:
            return
        env: Any = traced[0].node.shape_env
        known = dict(env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val)
        if not known.keys() >= set(found):
            return
        self.symbols = {str(symbol): int(known[symbol]) for symbol in found}
        self._numbers = [_function(v.node.expr if isinstance(v, torch.SymInt) else v) for v in values]
        self._assumed: Callable[[], tuple[dict[str, Any], list[_Evaluate]]] = functools.cache(
            functools.partial(_assumed, [env], found, known)
        )

    def made_up(self, count: int) -> list[dict[str, int]]:
        """Values by name: those of the trace, then up to `count` others for which `hold` is true. No symbol
        has a value twice, if it may have others.
        """
        if not self.symbols:
            return []
        found, chosen = [self.symbols], random.Random(0)
        varying = [name for name, within in self._assumed()[0].items() if not within.is_singleton()]
        for _ in range(_TRIED if varying else 0):
            moved = {name: _moved(self.symbols[name], chosen.choice(_STEPS)) for name in varying}
            if any(moved[name] == other[name] for name in varying for other in found):
                continue
            if self.hold(self.symbols | moved):
                found.append(self.symbols | moved)
            if len(found) > count:
                break
        return found

    def hold(self, values: Mapping[str, int]) -> bool:
        """Whether all certainly holds that the trace has assumed of its symbols.

        Args:
            values: of each symbol, by name.
        """
        ranges, guards = self._assumed()
        if any(values[name] not in within for name, within in ranges.items()):
            return False
        with contextlib.suppress(ArithmeticError, KeyError, TypeError, ValueError):  # such sizes cannot be
            return all(holds(values) == True for holds in guards)  # noqa: E712 - sympy's
        return False

    def at(self, values: Mapping[str, int]) -> list[int]:
        """All numbers, where symbols have these values."""
        return [int(number(values)) for number in self._numbers]


_OPERATIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    sympy.Add: lambda *numbers: sum(numbers),
    sympy.Mul: lambda *numbers: math.prod(numbers),
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
}
"""Those that most expressions are made of. All others are evaluated by sympy itself."""

_Evaluate = Callable[[Mapping[str, int]], Any]


def _function(expression: Any) -> _Evaluate:
    """An expression as a function of its symbols' values, by name. To have sympy put them into it takes a
    hundred times as long, and the code that sympy prints is wrong for some (``a % b * c``; sympy 1.14).
    """
    if not isinstance(expression, sympy.Basic):
        return lambda values: expression
    if expression.is_Symbol:
        name = str(expression)
        return lambda values: values[name]
    if not expression.args:
        number = int(expression) if expression.is_Integer else expression
        return lambda values: number
    operation = _OPERATIONS.get(expression.func, expression.func)
    parts = [_function(part) for part in expression.args]
    return lambda values: operation(*[part(values) for part in parts])


def _assumed(
    trace: list[Any], symbols: Sequence[Any], known: Mapping[Any, Any]
) -> tuple[dict[str, Any], list[_Evaluate]]:
    """Ranges of symbols, by name, and guards.

    Args:
        trace: its `ShapeEnv`, which is taken out: it is not kept any longer.
    """
    env = trace.pop()
    ranges = {str(symbol): env.var_to_range[symbol] for symbol in symbols}
    guards = [guard.expr for guard in env.guards if not guard.expr.free_symbols.isdisjoint(symbols)]
    replaced = dict.fromkeys(_replaced(guard, env.replacements, symbols, known) for guard in guards)
    return ranges, [_function(guard) for guard in replaced]


def _replaced(
    guard: Any, replacements: Mapping[Any, Any], symbols: Collection[Any], known: Mapping[Any, Any]
) -> Any:
    """A guard of these symbols alone: what others were made of, or else their values in the trace."""
    while others := guard.free_symbols.difference(symbols):
        guard = guard.subs({other: replacements.get(other, known.get(other)) for other in others})
    return guard


def _moved(number: int, step: int) -> int:
    return number + step if step else number // 2


_COMBINATIONS: Final = 4096


def values_of(size: torch.SymInt) -> Callable[[Collection[int]], frozenset[int] | None]:
    """What a symbolic number comes to where each of its symbols has one of the values given; None if there
    are too many ways; 2.13, 2.15. Nothing of the trace is kept.
    """
    symbols, value = tuple(map(str, size.node.expr.free_symbols)), _function(size.node.expr)

    def found(values: Collection[int]) -> frozenset[int] | None:
        if len(values) ** len(symbols) > _COMBINATIONS:
            return None
        made = set()
        for way in itertools.product(values, repeat=len(symbols)):
            with contextlib.suppress(ArithmeticError, TypeError, ValueError):  # such sizes cannot be
                made.add(int(value(dict(zip(symbols, way, strict=True)))))
        return frozenset(made)

    return found


def symbol_sources(size: torch.SymInt) -> dict[str, str | None]:
    """Where Dynamo found each symbol of a symbolic number, by its name, e.g. ``L['x'].size()[0]``; None for
    what data tell; 2.13, 2.15.
    """
    env: Any = size.node.shape_env
    found: dict[str, str | None] = {}
    for symbol in sorted(size.node.expr.free_symbols, key=str):
        told = [source.name for source in env.var_to_sources.get(symbol) or () if source is not None]
        names = [str(name() if callable(name) else name) for name in told]
        # The size of what an argument is a view of comes under a name that no program has.
        named = [name for name in names if "._base" not in name] or names
        found[str(symbol)] = named[0] if named else None
    return found


def marked_unbacked(value: Any) -> frozenset[Any]:
    """The symbols of inputs' sizes that a user marked unbacked (`mark_unbacked`) in the trace that has this
    value; seen on 2.13 to 2.15. None where a release has no such list.
    """
    holder = value.node if isinstance(value, torch.SymInt) else getattr(value, "fake_mode", None)
    env = getattr(holder, "shape_env", None)
    return frozenset(getattr(env, "unbacked_inputs", ()))
