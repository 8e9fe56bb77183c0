"""Dynamo: graph breaks, and the function that is being compiled."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._guards import CompileContext, CompileId, TracingContext
from torch._logging._internal import trace_structured

__all__ = [
    "compilation",
    "graph_break",
    "hearing_graph_breaks",
    "is_compiled",
    "trace",
    "traced_function",
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


def traced_function() -> str | None:
    """Name of the function that Dynamo compiles, e.g. ``Block.forward``; None outside a compilation."""
    context = TracingContext.try_get()
    code = context.traced_code[0] if context is not None and context.traced_code else None
    return code.co_qualname if code is not None else None
