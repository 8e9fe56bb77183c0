"""Which of the user's modules a partition comes from, for the profiler and for reports.

While a profiler is active, each uncaptured run, capture and launch of a partition runs under a
`record_function` range such as ``pgraph::launch forward 0, partition 2: Block layers.3``
(`pgraph.runtime.profiler`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch.fx import Node

from pgraph import compat
from pgraph.ops.fx import is_neutral

__all__ = ["module_of"]


def module_of(nodes: Iterable[Node]) -> str:
    """The innermost module of the user's that all device ops come from, as ``Class path``.

    The compiled module itself has no path; for a compiled function it is the function's name. Nodes
    that compiler passes made know no modules and are left out. Empty if nothing is known.
    """
    stacks = [_stack(node) for node in nodes if not is_neutral(node) and _is_users(node)]
    common = stacks[0] if stacks else []
    for stack in stacks[1:]:
        same = (i for i, (a, b) in enumerate(zip(common, stack, strict=False)) if a != b)
        common = common[: next(same, min(len(common), len(stack)))]
    if not common:
        return _root()
    path, name = common[-1]
    return f"{name} {path}" if path else name


def _is_users(node: Node) -> bool:
    return any(node.meta.get(key) for key in (*_STACKS, "stack_trace"))


# A backward node has no module of its own, but knows its forward's.
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def _stack(node: Node) -> list[tuple[str, str]]:
    """(path, class) of the modules around a node, outermost first."""
    entries: dict[str, Any] = next((node.meta[key] for key in _STACKS if node.meta.get(key)), {})
    # The path begins with the variable that holds the compiled module: L['self'].layers.3
    return [
        (re.sub(r"^L\['\w+'\]\.?", "", str(path)), getattr(module, "__name__", str(module)))
        for path, module in entries.values()
    ]


def _root() -> str:
    """The compiled module's class, or the compiled function's name."""
    name = compat.traced_function() or ""
    name = re.sub(r"torch_dynamo_resume_in_(\w+?)_at_\d+", r"\1", name)  # what follows a graph break
    return name.split("<locals>.")[-1].removesuffix(".forward")
