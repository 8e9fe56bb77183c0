"""Which ops may be captured in a CUDA graph whose addresses are rebound at each launch.

One pure function, `refusal`, asks a table of small rules, `RULES`. Each rule states one way in which
a launch could differ from running the op again: it works on the host, its result's shape depends on
data, it draws random numbers, it hides an address. Ops are matched by packet (``ns::name``), so that
an overload, an in-place or an ``out=`` sibling of one name is judged together.

What no rule refuses is not trusted for that: the two captures prove it, and a failure there falls
back. A rule exists so that one known op does not cost its whole partition the graph.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from pgraph import compat
from pgraph.errors import OptionError
from pgraph.ops import name_rules as names
from pgraph.ops import op_names
from pgraph.ops import op_rules as ops
from pgraph.ops import value_rules as values
from pgraph.ops.fx import is_neutral, is_structural, op_name, op_of, user_line, why
from pgraph.reasons import Reason

__all__ = [
    "RULES",
    "forget_judged",
    "is_neutral",
    "mark_unsafe",
    "refusal",
    "unmark_unsafe",
    "user_line",
]

Rule = Callable[[Node, str], Reason | None]

log = logging.getLogger(__name__)

_marks: dict[str, tuple[str, str]] = {}
# Since Dynamo was reset: names of the ops in the graphs that were compiled, and of those kept out for a mark.
_judged: set[str] = set()
_kept_out: set[str] = set()


# --- the user's own marks


def mark_unsafe(op: OpOverload | OpOverloadPacket | str, reason: str, fix: str) -> None:
    """Keep every overload of an op out of all graphs compiled from now on.

    Marking the same op again replaces its texts, so that a module may be imported twice. `unmark_unsafe`
    takes a mark back; no reset does. Composite ops (``aten::linear``, ``aten::matmul``) are gone before
    pgraph sees a graph: mark what they become, as `explain` names it. A warning says that the op is not
    registered yet, or is in graphs that are compiled already.

    Args:
        op: an op, a packet such as ``torch.ops.my.op``, or ``"my::op"`` (it need not exist yet).
        reason: what the op does that a graph cannot repeat, e.g. ``"counts its calls on the host"``.
        fix: what a user of the op can change.

    Raises:
        OptionError: `op` names no op, or one that no graph has (PyTorch has no such op, or it is composite);
            or a text is empty.
    """
    name = _mark_name("mark_unsafe", op)
    for label, text in (("reason", reason), ("fix", fix)):
        if not isinstance(text, str) or not text.strip():
            raise OptionError(
                f"mark_unsafe({name!r}): {label} is {text!r}. Fix: say it in a sentence, it is what users see"
            )
    if name not in _marks:
        _check_that_it_helps(name)
    _marks[name] = (reason.strip(), fix.strip())


def unmark_unsafe(op: OpOverload | OpOverloadPacket | str) -> None:
    """Take a mark back; an op that is not marked is left alone.

    A warning says that it is not marked, or is outside of graphs that are compiled already.
    """
    name = _mark_name("unmark_unsafe", op)
    if _marks.pop(name, None) is None:
        near = difflib.get_close_matches(name, _marks, n=1)
        meant = f"did you mean {near[0]}?" if near else "pass the name that mark_unsafe was given"
        log.warning("unmark_unsafe(%r): it is not marked, so nothing changes. Fix: %s", name, meant)
    elif name in _kept_out:
        log.warning(
            "unmark_unsafe(%r): it stays outside of the graphs that are compiled already. Fix: call "
            "torch._dynamo.reset(), which has them compiled again",
            name,
        )


def forget_judged() -> None:
    """Dynamo was reset: what was compiled is compiled again."""
    _judged.clear()
    _kept_out.clear()


def _check_that_it_helps(name: str) -> None:
    """Say so where a mark can do nothing."""
    namespace, _, short = name.partition("::")
    if not compat.is_registered(name):
        if namespace in ("aten", "prims"):
            near = difflib.get_close_matches(short, dir(getattr(torch.ops, namespace)), n=1)
            meant = f"did you mean {namespace}::{near[0]}?" if near else "explain names the ops of a program"
            raise OptionError(f"mark_unsafe({name!r}): PyTorch has no such op. Fix: {meant}")
        log.warning(
            "mark_unsafe(%r): no such op is registered yet. Fix: check its name, or mark it after the import "
            "that registers it",
            name,
        )
    elif compat.is_composite(name):
        raise OptionError(
            f"mark_unsafe({name!r}): it is composite, so PyTorch replaces it by other ops before pgraph sees "
            "a graph. Fix: mark what it becomes (aten::linear becomes aten::addmm), as explain names it"
        )
    if name in _judged:
        log.warning(
            "mark_unsafe(%r): it is in graphs that are compiled already, and they keep it. Fix: mark it "
            "before the first call, or call torch._dynamo.reset()",
            name,
        )


def _mark_name(caller: str, op: Any) -> str:
    if isinstance(op, OpOverload):
        return op_name(op)
    if isinstance(op, OpOverloadPacket):
        return str(op._qualified_op_name)
    if isinstance(op, str) and re.fullmatch(r"\w+::\w+", op):
        return op
    raise OptionError(
        f"{caller}: {op!r} is no op. Fix: pass torch.ops.ns.name, one of its overloads, or 'ns::name'"
    )


# --- the table


def _marked(node: Node, device_type: str) -> Reason | None:
    name = next((name for name in _names(node) if name in _marks), None)
    if name is None:
        return None
    _kept_out.add(name)
    reason, fix = _marks[name]
    return why(node, "marked", f"{name} is marked unsafe: {reason}", fix)


def _names(node: Node) -> tuple[str, ...]:
    """Inductor's front end takes many ops apart; what is left of one still names it."""
    origin = node.meta.get("original_aten")
    return op_name(op_of(node)), *((op_name(origin),) if isinstance(origin, OpOverload) else ())


def _unsafe_subgraph(node: Node, device_type: str) -> Reason | None:
    # A kernel made from the user's functions is as safe as they are.
    if op_name(op_of(node)).removeprefix("higher_order::") not in op_names.SUBGRAPH_HOPS:
        return None
    for source in node.all_input_nodes:
        if source.op != "get_attr":
            continue
        module = _attribute(source)
        if isinstance(module, torch.Tensor):
            continue
        if not isinstance(module, torch.fx.GraphModule):
            sentence = f"{op_name(op_of(node))} calls {source.target}, whose graph is not at hand"
            return why(node, "higher-order", sentence, "pass a function that torch.compile can trace")
        for inner in module.graph.nodes:
            for rule in () if is_structural(inner) else RULES:
                if rule not in _OUTER_RULES and (found := rule(inner, device_type)):
                    return found
    return None


def _attribute(node: Node) -> Any:
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


# The order is the order in which a user would want to hear of it: the most specific first.
RULES: Final[tuple[Rule, ...]] = (
    _marked,
    names.TAGGED,
    ops.listed,
    ops.higher_order,
    _unsafe_subgraph,
    names.COLLECTIVE,
    names.STREAM,
    names.HOST_READ,
    ops.host_sync,
    values.grouped,
    values.bool_index,
    names.SOLVER,
    names.LIBRARY_STATE,
    values.dynamic_shape,
    names.STORAGE,
    ops.pinned,
    values.device_copy,
    ops.random,
    values.layout,
    values.unbacked_size,
    values.opaque,
    ops.not_an_op,
    values.no_metadata,
    values.other_device,
    values.several_devices,
    values.host_only,
)

# Values inside a subgraph are scalars of one kernel; what they come from is judged at the op itself.
_OUTER_RULES: Final = frozenset({values.no_metadata, values.other_device, values.host_only})

# They ask how CUDA does it, and not where the tensors are.
_OF_CUDA: Final = frozenset({values.grouped})


def refusal(
    node: Node,
    *,
    device_type: str,
    rng_is_safe: bool = False,
    as_cuda: bool = False,
    by_inductor: bool = True,
) -> Reason | None:
    """Why `node` must stay out of every graph, or None when it may be captured.

    Args:
        node: a node of an ATen graph, with ``meta["val"]``. Placeholders, attributes and the output
            are never refused.
        device_type: type of the device that is captured, e.g. ``"cuda"``; the host driver captures
            ``"cpu"``.
        rng_is_safe: the launcher moves the generator itself, so that random ops may be captured.
        as_cuda: the CPU stands for a GPU: what holds for kernels of CUDA holds for its ops.
        by_inductor: Inductor makes the code.

    Returns:
        The first refusal in the order of `RULES`. None for neutral nodes too (`is_neutral`), unless
        they touch another device or a size known only after a kernel has run.
    """
    if is_structural(node):
        return None
    _judged.update(_names(node))
    for rule in RULES:
        if rng_is_safe and rule is ops.random:
            continue
        found = rule(node, "cuda" if as_cuda and rule in _OF_CUDA else device_type)
        if found is not None:
            return found
    return None if by_inductor else ops.for_inductor(node, device_type)
