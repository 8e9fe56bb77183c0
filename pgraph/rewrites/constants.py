"""What a program makes on the CPU, made on the device instead: no copy at run time, or one.

`on_device` changes an ATen graph before it is partitioned into forward and backward, and before it is cut:

=========================================  =========================================================
a value on the CPU that depends on ...     becomes, where an op on the device takes it
=========================================  =========================================================
nothing; one number throughout             a Python number, or `aten.full` on the device
nothing; different numbers                 a tensor on the device that the code holds, copied when used
sizes that vary, whole numbers only        the same ops on the device (`pgraph.rewrites.moving`)
scalars that the call brings               copied to the device, all at once (`pgraph.rewrites.scalars`)
anything else                              what it is: it stays outside, with its reason
=========================================  =========================================================

Note [Constants as eager makes them]
What depends on nothing is computed once, by the ops that eager runs and on the CPU where eager runs them, so
that it has eager's bits: the GPU's logarithm differs from the CPU's in the last one, and a position bucket
with it. A conversion that comes with the copy is done before it, as eager does.

Note [Constants are copied on use]
A graph may return a value, and its backward may overwrite what the forward saved. So the tensor that the code
holds is never handed out: each use reads a copy, `lift_fresh_copy`, that Inductor fuses into the readers.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pgraph import compat
from pgraph.ops.fx import is_getitem, output_values, symbols
from pgraph.rewrites import moving, scalars
from pgraph.rewrites.moving import is_on, meta_of, there
from pgraph.rewrites.operands import COPIES, PLAIN_TYPES, by_number, is_copied, is_pure, replaced

__all__ = ["LARGEST", "on_device"]

log = logging.getLogger(__name__)

LARGEST: Final = 16 << 20
"""Bytes that the constants of one graph may hold on the device, and that any value on the way may have.

They are held as long as the code lives. A mask or table of positions for 1,024 tokens has 1 to 8 MiB.
"""

_aten = torch.ops.aten


def on_device(gm: GraphModule, device_type: str = "cuda", *, by_inductor: bool = True) -> None:
    """Replace what ops on the device take from the CPU, where it depends on no input but scalars.

    Args:
        gm: an ATen graph with ``meta["val"]``, joint or not; it is changed.
        device_type: graphs with tensors on no such device, or on several, are left as they are.
        by_inductor: Inductor makes the code; else the ops run as they are.
    """
    devices = {
        value.device
        for node in gm.graph.nodes
        for value in output_values(node)
        if isinstance(value, torch.Tensor) and value.device.type == device_type
    }
    if len(devices) != 1:
        return
    device = devices.pop()
    folding = _Folding(gm, device)
    with compat.real_values():
        folding.run()
        moved = moving.move(gm.graph, device)
        taken = scalars.take_along(gm, device, by_inductor=by_inductor)
    if not (folding.folded or moved or taken):
        return
    gm.recompile()
    if folding.folded:
        log.info(
            "constants made on the CPU: %d folded, of which the code holds %d bytes on %s",
            folding.folded,
            folding.held_bytes,
            device,
        )
    if moved:
        log.info("ops on the CPU that depend on sizes only: %d moved to %s", moved, device)
    if taken:
        log.info("scalars on the CPU that calls bring: %d copied to %s at each call", taken, device)


@dataclasses.dataclass(slots=True)
class _Folding:
    gm: GraphModule
    device: torch.device
    folded: int = 0
    held_bytes: int = 0
    _constants: dict[Node, None] = dataclasses.field(default_factory=dict)
    _values: dict[Node, Any] = dataclasses.field(default_factory=dict)
    # The node on the device that replaces each node on the CPU.
    _made: dict[Node, Node] = dataclasses.field(default_factory=dict)

    def run(self) -> None:
        nodes = list(self.gm.graph.nodes)
        for node in nodes:
            if _is_constant(node, self._constants):
                self._constants[node] = None
        for node in nodes:
            if node not in self._constants and any(n in self._constants for n in node.all_input_nodes):
                self._serve(node)
        for node in reversed(self._constants):
            if not node.users:
                self.gm.graph.erase_node(node)

    # -- uses of a constant ----------------------------------------------------------------------

    def _serve(self, node: Node) -> None:
        """Give one op on the device numbers or tensors of the device in the place of constants."""
        if not is_on(node, self.device):
            return
        if node.target in COPIES:
            self._replace_copy(node)
            return
        for source in node.all_input_nodes:
            if source not in self._constants:
                continue
            if (op := by_number(node, source)) is not None:
                self._use_number(node, op, source)
            elif is_copied(node, source):
                self._use_tensor(node, source)

    def _replace_copy(self, node: Node) -> None:
        # With the copy's conversion, on the CPU: see Note [Constants as eager makes them].
        value, told = self._evaluate(node.all_input_nodes[0]), node.meta["val"]
        made = None if value is None else self._on_device(node, value.to(told.dtype), told)
        if made is not None:
            node.replace_all_uses_with(made)
            self.gm.graph.erase_node(node)
            self.folded += 1

    def _use_number(self, node: Node, op: OpOverload, source: Node) -> None:
        value = self._evaluate(source)
        if value is not None:
            node.target = op
            node.args, node.kwargs = replaced(node, source, value.item())
            self.folded += 1

    def _use_tensor(self, node: Node, source: Node) -> None:
        if source not in self._made:
            value, told = self._evaluate(source), source.meta["val"]
            made = None if value is None else self._on_device(node, value, there(told, self.device))
            if made is None:
                return
            self._made[source] = made
            self.folded += 1
        node.args, node.kwargs = replaced(node, source, self._made[source])

    # -- values ----------------------------------------------------------------------------------

    def _evaluate(self, node: Node) -> torch.Tensor | None:
        """A constant's value, computed on the CPU; None if it is not what the graph says that it is."""
        try:
            value = self._value_of(node)
        except RuntimeError as e:
            log.debug("%s stays where it is: %s", node.name, e)
            return None  # the program fails when it runs, where it would have failed
        told = node.meta["val"]
        if value.shape != told.shape or value.dtype != told.dtype or value.device.type != "cpu":
            return None
        return value

    def _value_of(self, node: Node) -> Any:
        pending = [node]
        while pending:
            wanted = pending[-1]
            missing = [n for n in wanted.all_input_nodes if n not in self._values]
            if missing:
                pending += missing
                continue
            pending.pop()
            if wanted in self._values:
                continue
            if wanted.op == "get_attr":
                self._values[wanted] = getattr(self.gm, str(wanted.target))
                continue
            args, kwargs = map_arg((wanted.args, dict(wanted.kwargs)), self._values.__getitem__)
            self._values[wanted] = wanted.target(*args, **kwargs)  # type: ignore[operator]
        return self._values[node]

    # -- the same on the device -------------------------------------------------------------------

    def _on_device(self, before: Node, value: torch.Tensor, told: torch.Tensor) -> Node | None:
        """A node with a fresh tensor of this value on the device, as `told`; None if that cannot be had."""
        if value.dtype not in PLAIN_TYPES:
            return None
        graph = self.gm.graph
        number = _one_number(value)
        if number is not None and told.is_contiguous():
            with graph.inserting_before(before):
                made = graph.call_function(
                    _aten.full.default,
                    (list(told.shape), number),
                    {
                        "dtype": told.dtype,
                        "layout": torch.strided,
                        "device": told.device,
                        "pin_memory": False,
                    },
                )
            made.meta = meta_of(before, told)
            return made
        return self._hold(before, value, told)

    def _hold(self, before: Node, value: torch.Tensor, told: torch.Tensor) -> Node | None:
        # Dimensions in the order of memory: what is held is contiguous, a view of it has the strides.
        order = sorted(range(told.dim()), key=lambda d: (told.stride(d), told.shape[d] == 1), reverse=True)
        nbytes = value.numel() * value.element_size()
        if self.held_bytes + nbytes > LARGEST or not told.permute(order).is_contiguous():
            return None
        held = _held(value.permute(order).contiguous(), self.device)
        name = _free_name(self.gm)
        self.gm.register_buffer(name, held, persistent=False)
        self.held_bytes += nbytes
        graph = self.gm.graph
        with graph.inserting_before(before):
            made = graph.call_function(_aten.lift_fresh_copy.default, (graph.get_attr(name),))
            made.meta = meta_of(before, torch.empty_like(told.permute(order)))
            if order != list(range(told.dim())):
                back = [order.index(d) for d in range(told.dim())]
                view = graph.call_function(_aten.permute.default, (made, back))
                view.meta = meta_of(before, made.meta["val"].permute(back))
                made = view
        return made


def _held(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the device, whatever stream will read it."""
    held = value.to(device, copy=True)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return held


# -- what is a constant? -------------------------------------------------------------------------


def _is_constant(node: Node, known: dict[Node, None]) -> bool:
    """Whether the node is on the CPU and depends on nothing but constants."""
    if node.op == "get_attr":
        return _is_literal(node)
    if node.op != "call_function" or any(source not in known for source in node.all_input_nodes):
        return False
    values = output_values(node)
    if not values or not all(_is_plain(value) for value in values):
        return False
    return is_getitem(node) or is_pure(node.target)


def _is_literal(node: Node) -> bool:
    """Whether it is made of numbers in the traced code (``torch.tensor(3.0)``), so that no other code has it.

    Tracing keeps such a tensor, and what the program gets is a copy. Any other attribute may be the user's.
    """
    value = getattr(node.graph.owning_module, str(node.target), None)
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        return False
    return bool(node.users) and all(user.target is _aten.lift_fresh_copy.default for user in node.users)


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or symbols(value):
        return False
    if value.layout != torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
        return False
    return value.numel() * value.element_size() <= LARGEST


def _one_number(value: torch.Tensor) -> Any:
    """The number that every element is, bit for bit; None if they differ, if there is none, or for NaN."""
    if value.numel() == 0:
        return None
    flat = value.contiguous().reshape(-1)
    number = flat[0].item()
    as_bytes = flat.view(torch.uint8).reshape(flat.numel(), -1)
    if number != number or not bool((as_bytes == as_bytes[0]).all()):
        return None
    return number


def _free_name(gm: GraphModule) -> str:
    number = 0
    while hasattr(gm, f"_pgraph_constant{number}"):
        number += 1
    return f"_pgraph_constant{number}"
