"""Numbers that a call brings on the CPU, taken to the device together: one copy at the start of a graph.

Note [Numbers of the call]
With dynamic shapes `torch.compile` makes a tensor on the CPU of each Python float, a module's ``eps`` too,
and hands it to the graph anew at each call. Ops on the device take such a scalar as an argument of their
kernels, where a recording would keep its value. So the graph begins with `pgraph::numbers_on_device`, which
copies all of them at once and is never captured, and the ops take them from there. One copy for each type,
in place of a break at each op.

A copy from the host takes some 80 us (H200), and most numbers never change. So what was copied stays on the
device, for each stream; as long as the numbers are the same, to the last bit, the graph is given that, or a
copy of it (`pgraph.rewrites.numbers`).

Conversions that every device does alike follow on the device. Other arithmetic of such scalars stays on the
CPU, and goes before the copy.

An op takes a scalar from the device only where that changes no bit: where the scalar has the type that the
op computes in, for a scalar of another type is rounded at another place. Inductor's code divides by either in
the same way, ATen's multiplies by the reciprocal of one on the CPU (Note [CPU scalars are numbers]).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from pgraph import compat
from pgraph.ops.fx import op_name, output_values
from pgraph.rewrites.moving import is_on, meta_of
from pgraph.rewrites.numbers import COPY
from pgraph.rewrites.operands import COPIES, PLAIN_TYPES, is_copied, is_pure, replaced

__all__ = ["take_along"]

log = logging.getLogger(__name__)

_aten = torch.ops.aten

# One rounding, or none, on every device.
_COMPUTED: Final = PLAIN_TYPES - {torch.float16, torch.bfloat16}
_CONVERSIONS: Final = frozenset({torch.ops.prims.convert_element_type.default, _aten._to_copy.default})
# ATen's kernels compute the same with either. Not `div`; nor `pow`, which asks whether a scalar is 2.
_ALIKE: Final = frozenset(
    {
        "aten::add",
        "aten::bitwise_and",
        "aten::bitwise_or",
        "aten::bitwise_xor",
        "aten::eq",
        "aten::ge",
        "aten::gt",
        "aten::le",
        "aten::lt",
        "aten::mul",
        "aten::ne",
        "aten::sub",
    }
)


def take_along(gm: GraphModule, device: torch.device, *, by_inductor: bool) -> int:
    """Give the device's ops the scalars that a call brings on the CPU, copied to the device.

    Args:
        gm: an ATen graph with ``meta["val"]``, joint or not; it is changed.
        device: whose ops are served.
        by_inductor: Inductor makes the code; else the ops run as they are.

    Returns:
        How many scalars are copied.
    """
    brought = _brought(gm.graph)
    served = [
        (node, source)
        for node in gm.graph.nodes
        if is_on(node, device)
        for source in node.all_input_nodes
        if source in brought and _same_from_device(node, source, by_inductor)
    ]
    if not served:
        return 0
    roots = dict.fromkeys(_root(source) for _, source in served)
    numbers = _copied(gm.graph, device, roots, brought)
    twins: dict[Node, Node] = dict(numbers)
    for node, source in served:
        node.args, node.kwargs = replaced(node, source, _converted(gm.graph, source, twins))
    for node in reversed(list(brought)):
        if node.op == "call_function" and not node.users:
            gm.graph.erase_node(node)
    return len(numbers)


def _brought(graph: Graph) -> dict[Node, None]:
    """Scalars on the CPU that a call brings, and what is computed of nothing else."""
    found: dict[Node, None] = {}
    for node in graph.nodes:
        values = output_values(node)
        if len(values) != 1 or not _is_scalar(values[0]):
            continue
        if node.op == "placeholder":
            given = "tangents" not in node.name  # a backward's come later
        else:
            given = node.op == "call_function" and is_pure(node.target) and _is_of(node, found)
        if given:
            found[node] = None
    return found


def _is_scalar(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.dim() == 0
        and value.dtype in PLAIN_TYPES
    )


def _is_of(node: Node, known: Iterable[Node]) -> bool:
    return bool(node.all_input_nodes) and all(source in known for source in node.all_input_nodes)


def _same_from_device(node: Node, source: Node, by_inductor: bool) -> bool:
    """Whether the op gives the same numbers if it finds the scalar on the device."""
    if node.target in COPIES:
        return False  # the program's own copy, whose result may be written
    if is_copied(node, source):
        return True
    op = node.target
    if not isinstance(op, OpOverload) or not is_pure(op) or torch.Tag.pointwise not in op.tags:
        return False
    if not by_inductor and op_name(op) not in _ALIKE:
        return False
    taken = {
        value.dtype for n in node.all_input_nodes for value in output_values(n) if isinstance(value, Tensor)
    }
    return len(taken) == 1 and taken <= _COMPUTED


def _root(source: Node) -> Node:
    """What is copied for a scalar: itself, or what was converted to it in ways that all devices share."""
    while source.op == "call_function" and source.target in _CONVERSIONS:
        (before,) = source.all_input_nodes
        floating = before.meta["val"].is_floating_point(), source.meta["val"].is_floating_point()
        if floating == (True, False):  # what does not fit into a whole number becomes another one on each
            break
        source = before
    return source


def _copied(
    graph: Graph, device: torch.device, roots: Iterable[Node], brought: dict[Node, None]
) -> dict[Node, Node]:
    """A scalar on the device for each root, at the start of the graph."""
    start = _move_up(graph, roots, brought)
    made = {}
    kinds: dict[torch.dtype, list[Node]] = {}
    for root in roots:
        kinds.setdefault(root.meta["val"].dtype, []).append(root)
    for same in kinds.values():
        whole = _call(graph, start, same[0], COPY, (same, device))
        for position, root in enumerate(same):
            made[root] = _call(graph, start, root, _aten.select.int, (whole, 0, position))
    return made


def _move_up(graph: Graph, roots: Iterable[Node], brought: dict[Node, None]) -> Node:
    """Compute the roots before anything else; returns the node that comes after them."""
    start = next(node for node in graph.nodes if node.op != "placeholder" and node not in brought)
    needed: dict[Node, None] = {}
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node.op != "placeholder" and node not in needed:
            needed[node] = None
            pending += node.all_input_nodes
    for node in brought:
        if node in needed:
            start.prepend(node)
    return start


def _converted(graph: Graph, source: Node, twins: dict[Node, Node]) -> Node:
    """The scalar on the device, with the conversions that follow its copy."""
    if source not in twins:
        before = _converted(graph, source.all_input_nodes[0], twins)
        convert = torch.ops.prims.convert_element_type.default
        following = before.next
        twins[source] = _call(graph, following, source, convert, (before, source.meta["val"].dtype))
    return twins[source]


def _call(graph: Graph, before: Node, like: Node, op: Callable[..., Any], args: tuple[Any, ...]) -> Node:
    mode: Any = compat.fake_mode_of([like.meta["val"]])
    with graph.inserting_before(before):
        made = graph.call_function(op, args)
    with mode:
        made.meta = meta_of(like, op(*map_arg(args, lambda n: n.meta["val"])))
    return made
