"""Constructors on the CPU whose sizes vary: moved to the device where every number stays what it was.

``torch.arange(x.shape[1])`` depends on no tensor, but on a size that dynamic shapes leave open, so it has no
value that could be kept. Whole numbers come out alike on every device, and so does whatever moves numbers
without computing any. PyTorch has such a pass (`move_constructors_to_gpu`), which moves floating-point
arithmetic too, whose last bit may differ, and which comes after the graph was cut.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from pgraph import compat
from pgraph.ops.fx import VIEWS, op_name, output_values
from pgraph.rewrites.operands import COPIES, PLAIN_TYPES, is_copied, is_pure, replaced

__all__ = ["is_on", "meta_of", "move", "there"]

_aten = torch.ops.aten

# They make a tensor of numbers that are known: no arithmetic.
_FILLS: Final = frozenset(
    {
        "aten::full",
        "aten::full_like",
        "aten::ones",
        "aten::ones_like",
        "aten::scalar_tensor",
        "aten::zeros",
        "aten::zeros_like",
    }
)
# They put numbers elsewhere, or convert them: from whole ones, or between types of floating point.
_CARRIERS: Final = VIEWS | {
    "aten::_to_copy",
    "aten::cat",
    "aten::clone",
    "aten::constant_pad_nd",
    "aten::copy",
    "aten::flip",
    "aten::repeat",
    "aten::roll",
    "aten::select_scatter",
    "aten::slice_scatter",
    "aten::stack",
    "aten::tril",
    "aten::triu",
    "aten::where",
    "prims::broadcast_in_dim",
    "prims::convert_element_type",
}
# Exact on whole numbers. Not here: division, which fails on the CPU and not on the device when it is by zero.
_WHOLE: Final = frozenset(
    f"aten::{name}"
    for name in (
        "abs",
        "add",
        "arange",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "clamp",
        "clamp_max",
        "clamp_min",
        "cumsum",
        "eq",
        "ge",
        "gt",
        "le",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "maximum",
        "minimum",
        "mul",
        "ne",
        "neg",
        "rsub",
        "sign",
        "sub",
    )
) | {"prims::iota"}

# What a new node takes over from the one that it stands for; the rest is about that one's op or values.
_KEPT_META: Final = (
    "ac_graph_id",
    "nn_module_stack",
    "partitioner_tag",
    "recompute",
    "seq_nr",
    "stack_trace",
)


def move(graph: Graph, device: torch.device) -> int:
    """Give the device's ops the numbers that the CPU made for them out of sizes, made on the device.

    Args:
        graph: an ATen graph with ``meta["val"]``; it is changed.
        device: whose ops are served.

    Returns:
        How many ops were moved.
    """
    movable: dict[Node, None] = {}
    for node in graph.nodes:
        if _is_movable(node, movable):
            movable[node] = None
    moved = _Moved(graph, device)
    for node in list(graph.nodes):
        if node in movable or not is_on(node, device):
            continue
        for source in node.all_input_nodes:
            if source in movable:
                _serve(node, source, moved)
    for node in reversed(movable):
        if not node.users:
            graph.erase_node(node)
    return len(moved.twins)


def _serve(node: Node, source: Node, moved: _Moved) -> None:
    if node.target in COPIES:
        exact = node.meta["val"].is_floating_point() or not source.meta["val"].is_floating_point()
        if exact and (twin := moved.twin(source)) is not None:
            node.args, node.kwargs = replaced(node, source, twin)
            if node.target is torch.ops.prims.device_put.default:
                # On one device it would return what it is given.
                node.target, node.args, node.kwargs = _aten.clone.default, (twin,), {}
    elif is_copied(node, source) and (twin := moved.twin(source)) is not None:
        node.args, node.kwargs = replaced(node, source, twin)


@dataclasses.dataclass(slots=True)
class _Moved:
    graph: Graph
    device: torch.device
    twins: dict[Node, Node] = dataclasses.field(default_factory=dict)

    def twin(self, node: Node) -> Node | None:
        """The same value on the device; None if no fake tensor can be made of it there."""
        pending = [node]
        while pending:
            wanted = pending[-1]
            missing = [n for n in wanted.all_input_nodes if n not in self.twins and _is_tensor(n)]
            if missing:
                pending += missing
                continue
            pending.pop()
            if wanted not in self.twins and not self._make(wanted):
                return None
        return self.twins[node]

    def _make(self, node: Node) -> bool:
        mode = compat.fake_mode_of([node.meta["val"]])
        if mode is None:
            return False
        args, given = map_arg((node.args, node.kwargs), lambda n: self.twins.get(n, n))
        kwargs = dict(given)
        if "device" in kwargs or not any(_is_tensor(n) for n in node.all_input_nodes):
            kwargs["device"] = self.device
        with self.graph.inserting_before(node):
            twin = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            twin.meta = meta_of(node, node.target(*values[0], **values[1]))  # type: ignore[operator]
        self.twins[node] = twin
        return True


def _is_movable(node: Node, known: dict[Node, None]) -> bool:
    """Whether the node is on the CPU, depends on no tensor but such ones, and is exact on any device."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not is_pure(node.target):
        return False
    values = output_values(node)
    if len(values) != 1 or not isinstance(values[0], torch.Tensor) or values[0].device.type != "cpu":
        return False
    sources = [source for source in node.all_input_nodes if _is_tensor(source)]
    if any(source not in known for source in sources) or node.kwargs.get("pin_memory"):
        return False
    return _is_exact(node, values[0], [source.meta["val"] for source in sources])


def _is_exact(node: Node, value: torch.Tensor, sources: list[torch.Tensor]) -> bool:
    name = op_name(node.target)
    if any(tensor.dtype not in PLAIN_TYPES for tensor in (value, *sources)):
        return False
    if name in _FILLS:
        return True
    whole = [not tensor.is_floating_point() for tensor in (value, *sources)]
    if name in _WHOLE:
        return all(whole)
    # What does not fit into a whole number becomes another one on each device.
    return name in _CARRIERS and (not whole[0] or all(whole))


def _is_tensor(node: Node) -> bool:
    return any(not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) for value in _told(node))


def _told(node: Node) -> list[Any]:
    # A node that says nothing may be a tensor.
    return output_values(node) or [None]


def is_on(node: Node, device: torch.device) -> bool:
    """Whether the node returns one tensor, on the device."""
    values = output_values(node)
    return len(values) == 1 and isinstance(values[0], torch.Tensor) and values[0].device == device


def there(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor's like on another device."""
    mode: Any = compat.fake_mode_of([value])
    with mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


def meta_of(node: Node, value: Any) -> dict[str, Any]:
    """What a node says about itself that stands for `node` and has this value."""
    return {key: node.meta[key] for key in _KEPT_META if key in node.meta} | {"val": value}
