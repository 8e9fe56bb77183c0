"""Dynamo: graph breaks, symbols of sizes, and the function that is being compiled."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._guards import CompileContext, CompileId, TracingContext
from torch._logging._internal import trace_structured

__all__ = [
    "compilation",
    "evaluate",
    "graph_break",
    "hearing_graph_breaks",
    "is_compiled",
    "marked_unbacked",
    "other_numbers",
    "plain_symbol",
    "symbol_sources",
    "trace",
    "traced_function",
    "values_of",
]


def graph_break(gm: torch.fx.GraphModule) -> tuple[str, Sequence[Any]] | None:
    """(Dynamo's text, the user's frames, innermost last) if a graph ends before its function does."""
    found = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    return str(found.reason), tuple(found.user_stack)


def compilation() -> str | None:
    """The id of the compilation under way, ``"3/0"``, as logs have it; None where there is none."""
    found = CompileContext.current_compile_id()
    return str(found) if found is not None else None


def trace(name: str, text: Callable[[], str], of: str | None) -> None:
    """Add a text to ``TORCH_TRACE``, if anybody listens.

    Args:
        name: of the file in which `tlparse` shows it.
        of: the id of the compilation that it is about.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name.replace(" ", "_"), "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
        compile_id=CompileId.from_string(of),
    )


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextlib.contextmanager
def hearing_graph_breaks() -> Iterator[list[str]]:
    """Dynamo's messages about graph breaks (as with ``TORCH_LOGS=graph_breaks``), collected in a list.

    Only these tell of breaks that leave no graph behind: a break in a loop skips the whole function.
    """
    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    before = logger.level, logger.propagate
    listener = _Listener()
    if not logger.isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    logger.addHandler(listener)
    try:
        yield listener.heard
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def is_compiled(fn: Any) -> bool:
    """Whether torch.compile made it, or compiled it in place (``module.compile()``)."""
    if isinstance(fn, torch._dynamo.eval_frame.OptimizedModule) or hasattr(fn, "_torchdynamo_orig_callable"):
        return True
    return isinstance(fn, torch.nn.Module) and fn._compiled_call_impl is not None


def plain_symbol(size: torch.SymInt) -> str | None:
    """The name of a symbolic number that is a symbol itself, not an expression of others."""
    expression = size.node.expr
    return str(expression) if expression.is_symbol else None


def evaluate(size: torch.SymInt, numbers: Mapping[str, int]) -> int | None:
    """A symbolic number where its symbols have these values; None if one of them has none; 2.11, 2.13."""
    expression = size.node.expr
    known = {symbol: numbers.get(str(symbol)) for symbol in expression.free_symbols}
    return None if None in known.values() else int(expression.subs(known))


_TRIED = 64  # sets of numbers
_STEPS = (-1, -8, 0, -3, -16, 8, -32, 16, 1, 32, -64, 64, -128, 128)
"""From a number to others, odd ones and such that have its divisors. 0 stands for its half."""


def other_numbers(values: Sequence[Any], count: int) -> list[dict[str, int]]:
    """Numbers for the symbols in traced values, by name: those of the trace, then up to `count` others, for
    which all holds that the trace has assumed of its symbols. No symbol has a number twice, if it may have
    others. Nothing if the data tell one of the symbols; 2.11, 2.13, 2.15.

    Args:
        values: symbolic numbers, and others, which count for nothing.
    """
    traced = [value for value in values if isinstance(value, torch.SymInt)]
    symbols = sorted({symbol for size in traced for symbol in size.node.expr.free_symbols}, key=str)
    if not symbols:
        return []
    env: Any = traced[0].node.shape_env
    known = dict(env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val)
    if not known.keys() >= set(symbols):
        return []
    found = [{symbol: int(known[symbol]) for symbol in symbols}]
    varying = [symbol for symbol in symbols if not env.var_to_range[symbol].is_singleton()]
    assumed = [guard.expr for guard in env.guards if not guard.expr.free_symbols.isdisjoint(symbols)]
    concerned = {symbol for expression in assumed for symbol in expression.free_symbols}
    others = {symbol: other for symbol, other in env.replacements.items() if symbol in concerned}
    chosen = random.Random(0)
    for _ in range(_TRIED if varying else 0):
        moved = {symbol: _moved(found[0][symbol], chosen.choice(_STEPS)) for symbol in varying}
        if any(moved[symbol] == other[symbol] for symbol in varying for other in found):
            continue
        within = all(number in env.var_to_range[symbol] for symbol, number in moved.items())
        if within and _hold(assumed, others, known | moved):
            found.append(found[0] | moved)
        if len(found) > count:
            break
    return [{str(symbol): number for symbol, number in numbers.items()} for numbers in found]


def _moved(number: int, step: int) -> int:
    return number + step if step else number // 2


def _hold(guards: Sequence[Any], others: Mapping[Any, Any], numbers: Mapping[Any, int]) -> bool:
    """Whether guards certainly hold.

    Args:
        others: symbols that are made of others.
    """

    def number(expression: Any) -> Any:
        return expression.subs({symbol: value(symbol) for symbol in expression.free_symbols})

    def value(symbol: Any) -> Any:
        return number(others[symbol]) if symbol in others else numbers[symbol]

    with contextlib.suppress(ArithmeticError, KeyError, TypeError, ValueError):  # such sizes cannot be
        return all(number(guard) == True for guard in guards)  # noqa: E712 - sympy's
    return False


_COMBINATIONS = 4096


def values_of(size: torch.SymInt) -> Callable[[Collection[int]], frozenset[int] | None]:
    """What a symbolic number comes to where each of its symbols has one of the values given; None if there
    are too many ways; 2.13, 2.15. Nothing of the trace is kept.
    """
    expression = size.node.expr
    symbols = tuple(expression.free_symbols)

    def found(values: Collection[int]) -> frozenset[int] | None:
        if len(values) ** len(symbols) > _COMBINATIONS:
            return None
        made = set()
        for way in itertools.product(values, repeat=len(symbols)):
            with contextlib.suppress(ArithmeticError, TypeError, ValueError):  # such sizes cannot be
                made.add(int(expression.subs(dict(zip(symbols, way, strict=True)))))
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


def traced_function() -> str | None:
    """Name of the function that Dynamo compiles, e.g. ``Block.forward``; None outside a compilation."""
    context = TracingContext.try_get()
    code = context.traced_code[0] if context is not None and context.traced_code else None
    return code.co_qualname if code is not None else None
