"""Rules that judge a node by its values: devices, sizes, layouts of what goes in and out.

Each takes a node and the type of the captured device, and returns why the node must stay outside, or
None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from pgraph.compat import marked_unbacked
from pgraph.ops import op_names
from pgraph.ops.fx import (
    METADATA_OPS,
    argument,
    describe,
    input_values,
    is_neutral,
    op_name,
    op_of,
    output_values,
    touched_values,
    unbacked,
    why,
)
from pgraph.reasons import Reason
from pgraph.text import amount

__all__ = [
    "bool_index",
    "device_copy",
    "dynamic_shape",
    "grouped",
    "host_only",
    "layout",
    "no_metadata",
    "opaque",
    "other_device",
    "several_devices",
    "unbacked_size",
]


def bool_index(node: Node, device_type: str) -> Reason | None:
    # A mask as index is turned into positions by a hidden nonzero, which waits for the device.
    name = op_name(op_of(node))
    if name not in op_names.INDEX_OPS:
        return None
    for index in argument(node, "indices") or ():
        for value in output_values(index) if isinstance(index, Node) else ():
            if isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8):
                mask = describe(index, value)
                return why(node, "bool-index", f"{name} is indexed by the mask {mask}, which hides a nonzero")
    return None


def dynamic_shape(node: Node, device_type: str) -> Reason | None:
    op = op_of(node)
    name = op_name(op)
    if not isinstance(op, OpOverload) or torch.Tag.dynamic_output_shape not in op.tags:
        return None
    if name in op_names.INDEX_OPS:
        return None  # dynamic for masks only: `bool_index`
    if name == "aten::repeat_interleave" and argument(node, "output_size") is not None:
        return None  # with the size given, nothing is looked up
    sentence = f"{name} has a result whose shape depends on data"
    return why(node, "dynamic-shape", sentence, op_names.DYNAMIC_FIXES.get(name, ""))


def unbacked_size(node: Node, device_type: str) -> Reason | None:
    # A size known only after a kernel has run cannot choose a recording before it runs.
    found: set[Any] = set(node.meta.get("unbacked_bindings") or ())
    marked: set[Any] = set()
    for _, value in touched_values(node):
        found |= unbacked(value)
        marked |= marked_unbacked(value)
    if not found:
        return None
    names = ", ".join(sorted(map(str, found)))
    if found <= marked:
        sentence = f"{op_name(op_of(node))} uses {names}, a size of an input that was marked unbacked"
        return why(
            node, "unbacked-size", sentence, "torch._dynamo.mark_dynamic in the place of mark_unbacked"
        )
    sentence = f"{op_name(op_of(node))} uses {names}, a number known only after a kernel has run"
    return why(node, "unbacked-size", sentence)


def layout(node: Node, device_type: str) -> Reason | None:
    # Several hidden tensors, or numbers kept on the host, behind one value.
    name = op_name(op_of(node))
    for source, value in _tensors(node):
        kind = None
        if value.is_nested or value.layout == torch.jagged:
            kind = "nested"
        elif value.layout != torch.strided:
            kind = str(value.layout).removeprefix("torch.").removeprefix("_")
        elif value.is_quantized:
            kind = "quantized"
        if kind:
            return why(node, "layout", f"{name} meets the {kind} tensor {source.name}")
    if name in op_names.JAGGED_OPS or (name.startswith("fbgemm::") and "jagged" in name):
        return why(node, "layout", f"{name} works on jagged tensors", "use padded dense tensors")
    return None


def device_copy(node: Node, device_type: str) -> Reason | None:
    # From pageable memory a copy waits; from pinned memory it would read a frozen host address.
    name = op_name(op_of(node))
    if name not in op_names.COPY_OPS:
        return None
    kinds = {value.device.type for _, value in _tensors(node)}
    if len(kinds) < 2:
        return None
    return why(
        node,
        "device-copy",
        f"{name} copies between {' and '.join(sorted(kinds))}",
        f"create the tensor on {device_type}, or copy before the compiled region (from pinned memory with "
        "non_blocking=True it need not wait; pinned or unpinned, it stays outside the graph)",
    )


def grouped(node: Node, device_type: str) -> Reason | None:
    # Without a kernel of its own, a grouped product is a loop over the offsets, read on the host.
    if op_name(op_of(node)) != "aten::_grouped_mm" or device_type != "cuda" or argument(node, "offs") is None:
        return None
    matrices = [argument(node, "self"), argument(node, "mat2")]
    types = {v.dtype for m in matrices if isinstance(m, Node) for v in output_values(m)}
    types.add(argument(node, "out_dtype") or torch.bfloat16)
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
    if types == {torch.bfloat16} and (major is None or major in op_names.GROUPED_GPUS):
        return None
    names = ", ".join(sorted(str(t).removeprefix("torch.") for t in types))
    return why(
        node,
        "host-sync",
        f"aten::_grouped_mm reads its offsets on the host, since this GPU has no kernel for {names}",
        "use bfloat16 on a GPU of compute capability 9 or 10, or a batched product with padding",
    )


def no_metadata(node: Node, device_type: str) -> Reason | None:
    # Without a value nothing can be said about devices and shapes.
    op = op_of(node)
    returns_none = isinstance(op, OpOverload) and not op._schema.returns
    if "val" in node.meta or returns_none or is_neutral(node):
        return None
    if op_name(op) == "higher_order::triton_kernel_wrapper_mutation":
        return None
    sentence = f"{op_name(op)} has no value recorded, so its device and shape are unknown"
    return why(node, "no-metadata", sentence)


def other_device(node: Node, device_type: str) -> Reason | None:
    name = op_name(op_of(node))
    # Metadata questions are answered by the host, wherever the tensor lives.
    if name in METADATA_OPS:
        return None
    if name == op_names.NUMBERS_OP:
        numbers = amount(len(node.all_input_nodes), "number")
        sentence = f"{numbers} on the CPU, such as a Python float that may vary, must be copied at each call"
        fix = (
            "where floats never change, compile without dynamic=True or set "
            "torch._dynamo.config.specialize_float; else pass tensors on the device"
        )
        return why(node, "cpu-scalar", sentence, fix)
    # Attention without dropout leaves its unused seed and offset on the CPU; nobody reads them.
    unused_seed = name in op_names.ATTENTION_OPS and argument(node, "dropout_p") in (0, 0.0)
    for source, value in _tensors(node):
        if value.device.type == device_type:
            continue
        scalar = value.dim() == 0 and value.device.type == "cpu"
        if unused_seed and value.device.type == "cpu" and (scalar or not value.is_floating_point()):
            continue
        if scalar and source is not node:
            return why(
                node,
                "cpu-scalar",
                f"{name} takes the CPU scalar {describe(source, value)}, whose value would be frozen",
                f"create it on {device_type}, or pass a Python number",
            )
        return why(
            node,
            "other-device",
            f"{name} works on {describe(source, value)}, not on {device_type}",
            f"create the tensor on {device_type}",
        )
    return None


def several_devices(node: Node, device_type: str) -> Reason | None:
    # One graph is launched on one device.
    found = {value.device for _, value in _tensors(node) if value.device.type == device_type}
    if len(found) < 2:
        return None
    names = ", ".join(sorted(map(str, found)))
    return why(node, "several-devices", f"{op_name(op_of(node))} spans {names}")


def host_only(node: Node, device_type: str) -> Reason | None:
    # An op without tensors acts on the host alone, and a launch would not repeat it.
    op = op_of(node)
    if not isinstance(op, OpOverload) or is_neutral(node) or any(_tensors(node)):
        return None
    sentence = f"{op_name(op)} has no tensors: it acts on the host, where a launch does not repeat it"
    return why(node, "host-only", sentence)


def opaque(node: Node, device_type: str) -> Reason | None:
    # A C++ object may hold tensors, whose addresses nobody can see or rebind.
    for source, value in input_values(node):
        if isinstance(value, torch.ScriptObject) or type(value).__name__ in op_names.OPAQUE_TYPES:
            sentence = f"{op_name(op_of(node))} takes the object {source.name}, which may hide tensors"
            return why(node, "opaque", sentence)
    return None


def _tensors(node: Node) -> Iterator[tuple[Node, torch.Tensor]]:
    """Each tensor that leaves the node or enters it, with the node that it comes from."""
    return ((source, value) for source, value in touched_values(node) if isinstance(value, torch.Tensor))
