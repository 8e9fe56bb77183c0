"""Which ops may be captured in a CUDA graph whose addresses are rebound at each launch.

One pure function, `refusal`, asks a table of small rules, `RULES`. Each rule states one way in which
a launch could differ from running the op again: it works on the host, its result's shape depends on
data, it draws random numbers, it hides an address. Ops are matched by packet (``ns::name``), so that
an overload, an in-place or an ``out=`` sibling of one name is judged together.

What no rule refuses is not trusted for that: the two captures prove it, and a failure there falls
back. A rule exists so that one known op does not cost its whole partition the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node

from pgraph import optable
from pgraph.errors import OptionError
from pgraph.nodes import (
    METADATA_OPS,
    argument,
    input_values,
    is_neutral,
    is_structural,
    op_name,
    op_of,
    output_values,
    unbacked,
    user_line,
)
from pgraph.reasons import Reason

__all__ = ["RULES", "is_neutral", "mark_unsafe", "refusal", "unmark_unsafe", "user_line"]

Rule = Callable[[Node, str], Reason | None]

_marks: dict[str, tuple[str, str]] = {}


# --- the user's own marks


def mark_unsafe(op: OpOverload | OpOverloadPacket | str, reason: str, fix: str) -> None:
    """Keep every overload of an op out of all graphs compiled from now on.

    Marking the same op again replaces its texts, so that a module may be imported twice.

    Args:
        op: an op, a packet such as ``torch.ops.my.op``, or ``"my::op"`` (it need not exist yet).
        reason: what the op does that a graph cannot repeat, e.g. ``"counts its calls on the host"``.
        fix: what a user of the op can change.

    Raises:
        OptionError: `op` names no op, or a text is empty.
    """
    name = _mark_name(op)
    for label, text in (("reason", reason), ("fix", fix)):
        if not isinstance(text, str) or not text.strip():
            raise OptionError(
                f"mark_unsafe({name!r}): {label} is {text!r}. Fix: say it in a sentence, it is what users see"
            )
    _marks[name] = (reason.strip(), fix.strip())


def unmark_unsafe(op: OpOverload | OpOverloadPacket | str) -> None:
    """Take a mark back; an op that is not marked is left alone."""
    _marks.pop(_mark_name(op), None)


def _mark_name(op: Any) -> str:
    if isinstance(op, OpOverload):
        return op_name(op)
    if isinstance(op, OpOverloadPacket):
        return str(op._qualified_op_name)
    if isinstance(op, str) and re.fullmatch(r"\w+::\w+", op):
        return op
    raise OptionError(
        f"mark_unsafe: {op!r} is no op. Fix: pass torch.ops.ns.name, one of its overloads, or 'ns::name'"
    )


# --- rules. Each gets the node and the device type that is captured.


def _marked(node: Node, device_type: str) -> Reason | None:
    name = op_name(op_of(node))
    if name not in _marks:
        return None
    reason, fix = _marks[name]
    return _reason(node, "marked", f"{name} is marked unsafe: {reason}", fix)


def _not_an_op(node: Node, device_type: str) -> Reason | None:
    # A Python call is opaque: it may do anything on the host, and a launch would not repeat it.
    if isinstance(op_of(node), (OpOverload, HigherOrderOperator)) or is_neutral(node):
        return None
    name = op_name(op_of(node))
    if any(unbacked(v) for v in (*output_values(node), *(v for _, v in input_values(node)))):
        return None  # the rule on data-dependent sizes explains it better
    return _reason(
        node,
        "not-an-op",
        f"{name} ({node.op}) is a Python call, which a launch does not repeat",
        "wrap it in torch.library.custom_op",
    )


def _tagged(node: Node, device_type: str) -> Reason | None:
    # The author of the op says so.
    op = op_of(node)
    if not isinstance(op, OpOverload) or torch.Tag.cudagraph_unsafe not in op.tags:
        return None
    return _reason(
        node,
        "tagged",
        f"{op_name(op)} carries torch.Tag.cudagraph_unsafe",
        "remove the tag if the op only launches kernels on the current stream",
    )


def _higher_order(node: Node, device_type: str) -> Reason | None:
    # Control flow picks its branch on the host, effects order host calls: refused, save a short list.
    op = op_of(node)
    if not isinstance(op, HigherOrderOperator):
        return None
    name = str(op.name())
    if name in optable.RNG_STATE_HOPS:
        return _reason(
            node,
            "rng-state",
            f"{name} swaps the generator's state on the host",
            "checkpoint with preserve_rng_state=False, or leave random ops out of the checkpointed region",
        )
    if name not in optable.ALLOWED_HOPS:
        return _reason(
            node,
            "higher-order",
            f"{name} is decided or ordered on the host at each call",
            "write it with torch.where or masks, or keep it between two compiled regions",
        )
    if name in optable.SUBGRAPH_HOPS:
        return _unsafe_subgraph(node, device_type)
    return None


def _unsafe_subgraph(node: Node, device_type: str) -> Reason | None:
    for source in node.all_input_nodes:
        if source.op != "get_attr":
            continue
        module = _attribute(source)
        if isinstance(module, torch.Tensor):
            continue
        if not isinstance(module, torch.fx.GraphModule):
            return _reason(
                node,
                "higher-order",
                f"{op_name(op_of(node))} calls {source.target}, whose graph is not at hand",
                "pass a function that torch.compile can trace",
            )
        for inner in module.graph.nodes:
            if is_structural(inner):
                continue
            # Inner values are placeholders for scalars of a kernel: no metadata is no fault here.
            for rule in RULES:
                if rule is not _no_metadata and (found := rule(inner, device_type)):
                    return found
    return None


def _attribute(node: Node) -> Any:
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def _collective(node: Node, device_type: str) -> Reason | None:
    # NCCL's nodes cannot be updated, and its buffers hide in tables: it runs between launches.
    name = op_name(op_of(node))
    if name.split("::")[0] not in optable.COLLECTIVE_NAMESPACES:
        return None
    return _reason(
        node,
        "collective",
        f"{name} communicates, and a captured communication keeps its buffers' addresses",
        "nothing to do: it runs between two graphs; group collectives to have fewer, longer graphs",
    )


def _stream(node: Node, device_type: str) -> Reason | None:
    # Streams and events belong to the moment of the call, not to a recording.
    name = op_name(op_of(node))
    if name.split("::")[0] not in optable.STREAM_NAMESPACES and name not in optable.STREAM_OPS:
        return None
    return _reason(
        node, "stream", f"{name} handles a stream or an event", "use streams outside the compiled region"
    )


def _host_read(node: Node, device_type: str) -> Reason | None:
    # The host waits for the device: not possible while capturing, not repeated by a launch.
    op = op_of(node)
    name = op_name(op)
    tagged = isinstance(op, OpOverload) and torch.Tag.data_dependent_output in op.tags
    if not tagged and name not in optable.HOST_READS:
        return None
    return _reason(
        node,
        "host-read",
        f"{name} reads a tensor's value on the host",
        "keep the value in a tensor (torch.where instead of if), or read it outside the compiled region",
    )


def _host_sync(node: Node, device_type: str) -> Reason | None:
    # Ops whose CUDA code waits for the device, some of them only for some arguments.
    name = op_name(op_of(node))
    if name == "aten::histc" and argument(node, "min") != argument(node, "max"):
        return None  # the range is looked up in the data only when it is not given
    if name in ("aten::segment_reduce", "aten::_segment_reduce_backward"):
        # The lengths are checked on the host unless the caller vouches for them.
        if name.endswith("backward") or argument(node, "unsafe") is True:
            return None
    elif name not in optable.HOST_SYNCS:
        return None
    return _reason(node, "host-sync", f"{name} waits for the device", optable.HOST_SYNCS[name])


def _bool_index(node: Node, device_type: str) -> Reason | None:
    # A mask as index is turned into positions by a hidden nonzero, which waits for the device.
    name = op_name(op_of(node))
    if name not in optable.INDEX_OPS:
        return None
    for index in argument(node, "indices") or ():
        for value in output_values(index) if isinstance(index, Node) else ():
            if isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8):
                return _reason(
                    node,
                    "bool-index",
                    f"{name} is indexed by the mask {_describe(index, value)}, which hides a nonzero",
                    "use torch.where, masked_fill, or integer indices",
                )
    return None


def _dynamic_shape(node: Node, device_type: str) -> Reason | None:
    op = op_of(node)
    name = op_name(op)
    if not isinstance(op, OpOverload) or torch.Tag.dynamic_output_shape not in op.tags:
        return None
    if name in optable.INDEX_OPS:
        return None  # dynamic for masks only: `_bool_index`
    if name == "aten::repeat_interleave" and argument(node, "output_size") is not None:
        return None  # with the size given, nothing is looked up
    return _reason(
        node,
        "dynamic-shape",
        f"{name} has a result whose shape depends on data",
        optable.DYNAMIC_FIXES.get(
            name, "use an op with a fixed shape: torch.where, topk, or a padded result"
        ),
    )


def _unbacked_size(node: Node, device_type: str) -> Reason | None:
    # A size known only after a kernel has run cannot choose a recording before it runs.
    found: set[Any] = set(node.meta.get("unbacked_bindings") or ())
    for value in (*output_values(node), *(value for _, value in input_values(node))):
        found |= unbacked(value)
    if not found:
        return None
    names = ", ".join(sorted(map(str, found)))
    return _reason(
        node,
        "unbacked-size",
        f"{op_name(op_of(node))} uses {names}, a number known only after a kernel has run",
        "pad to a fixed size, or compute it outside and pass it in",
    )


def _layout(node: Node, device_type: str) -> Reason | None:
    # Several hidden tensors, or numbers kept on the host, behind one value.
    name = op_name(op_of(node))
    for source, value in (*((node, v) for v in output_values(node)), *input_values(node)):
        if not isinstance(value, torch.Tensor):
            continue
        kind = None
        if value.is_nested or value.layout == torch.jagged:
            kind = "nested"
        elif value.layout != torch.strided:
            kind = str(value.layout).removeprefix("torch.").removeprefix("_")
        elif value.is_quantized:
            kind = "quantized"
        if kind:
            return _reason(
                node, "layout", f"{name} meets the {kind} tensor {source.name}", "use dense (strided) tensors"
            )
    if name in optable.JAGGED_OPS:
        return _reason(node, "layout", f"{name} works on jagged tensors", "use padded dense tensors")
    return None


def _solver(node: Node, device_type: str) -> Reason | None:
    # Factorisations: batched ones build pointer tables on the host, others wait for an error code.
    name = op_name(op_of(node))
    short = name.removeprefix("aten::")
    listed = short in optable.SOLVERS or short.startswith(("linalg_", "_linalg_", "cholesky", "_cholesky"))
    if not name.startswith("aten::") or not listed or short in optable.PLAIN_LINALG:
        return None
    return _reason(
        node,
        "solver",
        f"{name} may build pointer tables on the host or wait for an error code",
        "factorise outside the compiled region, or less often",
    )


def _library_state(node: Node, device_type: str) -> Reason | None:
    # cuDNN and MIOpen keep dropout states and packed weights of recurrent nets behind handles.
    name = op_name(op_of(node))
    short = name.removeprefix("aten::")
    if not short.startswith(optable.STATEFUL_PREFIXES) and short not in optable.STATEFUL:
        return None
    return _reason(
        node,
        "library-state",
        f"{name} keeps state inside its library",
        "write the cell with plain ops, e.g. torch.nn.LSTMCell in a loop",
    )


def _storage(node: Node, device_type: str) -> Reason | None:
    # Changes what a tensor *is* on the host. A launch repeats kernels only, so it would not happen.
    op = op_of(node)
    name = op_name(op)
    view = isinstance(op, OpOverload) and torch.Tag.inplace_view in op.tags
    if not view and name not in optable.STORAGE_OPS:
        return None
    return _reason(
        node,
        "storage",
        f"{name} changes a tensor's storage or shape in place on the host",
        "make a new tensor instead",
    )


def _pinned(node: Node, device_type: str) -> Reason | None:
    # Page-locked memory is allocated by the host.
    name = op_name(op_of(node))
    if name not in optable.PIN_OPS and argument(node, "pin_memory") is not True:
        return None
    return _reason(node, "pinned", f"{name} pins host memory", "pin it outside the compiled region")


def _device_copy(node: Node, device_type: str) -> Reason | None:
    # From pageable memory a copy waits; from pinned memory it would read a frozen host address.
    name = op_name(op_of(node))
    if name not in optable.COPY_OPS:
        return None
    values = [*output_values(node), *(value for _, value in input_values(node))]
    kinds = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    if len(kinds) < 2:
        return None
    return _reason(
        node,
        "device-copy",
        f"{name} copies between {' and '.join(sorted(kinds))}",
        f"copy before the compiled region (pinned memory with non_blocking=True makes it cheap, pinned or not "
        f"it stays outside the graph), or create the tensor on {device_type}",
    )


def _random(node: Node, device_type: str) -> Reason | None:
    # The generator's offset moves on the host at each call: a launch would draw the same numbers.
    op = op_of(node)
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    if _draws_nothing(node):
        return None
    name = op_name(op)
    if name in optable.SEED_OPS:
        fix = "nothing to do: seeds are drawn before the graph, which takes them as an input"
    else:
        fix = "use the default codegen, which passes seeds as an input, or set the dropout to 0"
    return _reason(node, "rng", f"{name} draws from the global generator", fix)


def _draws_nothing(node: Node) -> bool:
    if argument(node, "train") is False or argument(node, "training") is False:
        return True
    probability = next(
        (p for key in ("dropout_p", "dropout") if (p := argument(node, key)) is not None),
        argument(node, "p") if op_name(op_of(node)) in optable.DROPOUT_OPS else None,
    )
    return isinstance(probability, (int, float)) and probability == 0


def _no_metadata(node: Node, device_type: str) -> Reason | None:
    # Without a value nothing can be said about devices and shapes.
    op = op_of(node)
    returns_none = isinstance(op, OpOverload) and not op._schema.returns
    if "val" in node.meta or returns_none or is_neutral(node):
        return None
    if op_name(op) == "higher_order::triton_kernel_wrapper_mutation":
        return None
    return _reason(
        node,
        "no-metadata",
        f"{op_name(op)} has no value recorded, so its device and shape are unknown",
        "keep meta['val'] in custom graph passes",
    )


def _other_device(node: Node, device_type: str) -> Reason | None:
    name = op_name(op_of(node))
    # Metadata questions are answered by the host, wherever the tensor lives.
    if name in METADATA_OPS:
        return None
    # Attention without dropout leaves its unused seed and offset on the CPU; nobody reads them.
    unused_seed = name in optable.ATTENTION_OPS and argument(node, "dropout_p") in (0, 0.0)
    for source, value in (*((node, v) for v in output_values(node)), *input_values(node)):
        if not isinstance(value, torch.Tensor) or value.device.type == device_type:
            continue
        scalar = value.dim() == 0 and value.device.type == "cpu"
        if unused_seed and value.device.type == "cpu" and (scalar or not value.is_floating_point()):
            continue
        if scalar and source is not node:
            return _reason(
                node,
                "cpu-scalar",
                f"{name} takes the CPU scalar {_describe(source, value)}, whose value would be frozen",
                f"create it on {device_type}, or pass a Python number",
            )
        return _reason(
            node,
            "other-device",
            f"{name} works on {_describe(source, value)}, not on {device_type}",
            f"create the tensor on {device_type}",
        )
    return None


def _several_devices(node: Node, device_type: str) -> Reason | None:
    # One graph is launched on one device.
    found = {
        v.device
        for v in (*output_values(node), *(value for _, value in input_values(node)))
        if isinstance(v, torch.Tensor) and v.device.type == device_type
    }
    if len(found) < 2:
        return None
    names = ", ".join(sorted(map(str, found)))
    return _reason(
        node,
        "several-devices",
        f"{op_name(op_of(node))} spans {names}",
        "keep each compiled region on one device",
    )


def _host_only(node: Node, device_type: str) -> Reason | None:
    # An op without tensors acts on the host alone, and a launch would not repeat it.
    if not isinstance(op_of(node), OpOverload) or is_neutral(node):
        return None
    for value in (*output_values(node), *(value for _, value in input_values(node))):
        if isinstance(value, torch.Tensor):
            return None
    return _reason(
        node,
        "host-only",
        f"{op_name(op_of(node))} has no tensors: it acts on the host, where a launch does not repeat it",
        "call it outside the compiled region",
    )


def _opaque(node: Node, device_type: str) -> Reason | None:
    # A C++ object may hold tensors, whose addresses nobody can see or rebind.
    for source, value in input_values(node):
        if isinstance(value, torch.ScriptObject) or type(value).__name__ in optable.OPAQUE_TYPES:
            return _reason(
                node,
                "opaque",
                f"{op_name(op_of(node))} takes the object {source.name}, which may hide tensors",
                "pass its tensors as arguments",
            )
    return None


# The order is the order in which a user would want to hear of it: the most specific first.
RULES: Final[tuple[Rule, ...]] = (
    _marked,
    _tagged,
    _higher_order,
    _collective,
    _stream,
    _host_read,
    _host_sync,
    _bool_index,
    _dynamic_shape,
    _storage,
    _pinned,
    _device_copy,
    _solver,
    _library_state,
    _random,
    _layout,
    _unbacked_size,
    _opaque,
    _not_an_op,
    _no_metadata,
    _other_device,
    _several_devices,
    _host_only,
)


def refusal(node: Node, *, device_type: str, rng_is_safe: bool = False) -> Reason | None:
    """Why `node` must stay out of every graph, or None when it may be captured.

    Args:
        node: a node of an ATen graph, with ``meta["val"]``. Placeholders, attributes and the output
            are never refused.
        device_type: type of the device that is captured, e.g. ``"cuda"``; the host driver captures
            ``"cpu"``.
        rng_is_safe: the launcher moves the generator itself, so that random ops may be captured.

    Returns:
        The first refusal in the order of `RULES`. None for neutral nodes too (`is_neutral`), unless
        they touch another device or a size known only after a kernel has run.
    """
    if is_structural(node):
        return None
    for rule in RULES:
        if rng_is_safe and rule is _random:
            continue
        found = rule(node, device_type)
        if found is not None:
            return found
    return None


def _reason(node: Node, code: str, sentence: str, fix: str) -> Reason:
    return Reason(code, sentence, fix, user_line(node))


def _describe(node: Node, value: torch.Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{node.name} ({dtype}{list(value.shape)} on {value.device})"
