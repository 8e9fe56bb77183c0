"""Rules that judge an op by what it is: its name, its tags, its literal arguments.

Each takes a node and the type of the captured device, and returns why the node must stay outside, or
None. Names and facts are in `pgraph.ops.op_names`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from pgraph import compat
from pgraph.ops import op_names
from pgraph.ops.fx import (
    argument,
    input_values,
    is_neutral,
    op_name,
    op_of,
    output_values,
    unbacked,
    user_line,
    why,
)
from pgraph.reasons import Reason

__all__ = [
    "collective",
    "higher_order",
    "host_read",
    "host_sync",
    "library_state",
    "listed",
    "not_an_op",
    "pinned",
    "random",
    "solver",
    "storage",
    "stream",
    "tagged",
]


def not_an_op(node: Node, device_type: str) -> Reason | None:
    # A Python call is opaque: it may do anything on the host, and a launch would not repeat it.
    if isinstance(op_of(node), (OpOverload, HigherOrderOperator)) or is_neutral(node):
        return None
    name = op_name(op_of(node))
    if any(unbacked(v) for v in (*output_values(node), *(v for _, v in input_values(node)))):
        return None  # the rule on data-dependent sizes explains it better
    return why(
        node,
        "not-an-op",
        f"{name} ({node.op}) is a Python call, which a launch does not repeat",
        "wrap it in torch.library.custom_op",
    )


def tagged(node: Node, device_type: str) -> Reason | None:
    # The author of the op says so.
    op = op_of(node)
    if not isinstance(op, OpOverload) or torch.Tag.cudagraph_unsafe not in op.tags:
        return None
    return why(
        node,
        "tagged",
        f"{op_name(op)} carries torch.Tag.cudagraph_unsafe",
        "remove the tag if the op only launches kernels on the current stream",
    )


def listed(node: Node, device_type: str) -> Reason | None:
    # The user has told Inductor to keep it out of CUDA graphs: said once is enough.
    op = op_of(node)
    if not isinstance(op, OpOverload):
        return None
    if not {op_name(op), f"{op_name(op)}.{op._overloadname}"} & compat.partition_ops():
        return None
    return why(
        node,
        "marked",
        f"{op_name(op)} is listed in Inductor's custom_should_partition_ops",
        "take it from that list",
    )


def higher_order(node: Node, device_type: str) -> Reason | None:
    # Control flow picks its branch on the host, effects order host calls: refused, save a short list.
    op = op_of(node)
    if not isinstance(op, HigherOrderOperator):
        return None
    name = str(op.name())
    if name in op_names.RNG_STATE_HOPS:
        drawn = [op_name(a) for a in node.args if isinstance(a, OpOverload)]
        reason = why(
            node,
            "rng-state",
            f"{name} swaps the generator's state on the host{f' to repeat {drawn[0]}' if drawn else ''}",
            "draw the numbers outside the checkpointed region and pass them in, or do without dropout there "
            "(attention with dropout_p=0 is captured); preserve_rng_state=False changes nothing here",
        )
        # The node was made long after tracing; what goes into it stands at the same place, or just before.
        lines = (user_line(source) for source in node.all_input_nodes if source.op != "placeholder")
        return reason if reason.where else dataclasses.replace(reason, where=next(filter(None, lines), None))
    if name not in op_names.ALLOWED_HOPS:
        return why(
            node,
            "higher-order",
            f"{name} is decided or ordered on the host at each call",
            "write it with torch.where or masks, or keep it between two compiled regions",
        )
    return None


def collective(node: Node, device_type: str) -> Reason | None:
    # NCCL's nodes cannot be updated, and its buffers hide in tables: it runs between launches.
    name = op_name(op_of(node))
    if name.split("::")[0] not in op_names.COLLECTIVE_NAMESPACES:
        return None
    return why(
        node,
        "collective",
        f"{name} communicates, and a captured communication keeps its buffers' addresses",
        "nothing to do: it runs between two graphs; group collectives to have fewer, longer graphs",
    )


def stream(node: Node, device_type: str) -> Reason | None:
    # Streams and events belong to the moment of the call, not to a recording.
    name = op_name(op_of(node))
    if name.split("::")[0] not in op_names.STREAM_NAMESPACES and name not in op_names.STREAM_OPS:
        return None
    return why(
        node, "stream", f"{name} handles a stream or an event", "use streams outside the compiled region"
    )


def host_read(node: Node, device_type: str) -> Reason | None:
    # The host waits for the device: not possible while capturing, not repeated by a launch.
    op = op_of(node)
    name = op_name(op)
    tagged = isinstance(op, OpOverload) and torch.Tag.data_dependent_output in op.tags
    if not tagged and name not in op_names.HOST_READS:
        return None
    return why(
        node,
        "host-read",
        f"{name} reads a tensor's value on the host",
        "keep the value in a tensor (torch.where instead of if), or read it outside the compiled region",
    )


def host_sync(node: Node, device_type: str) -> Reason | None:
    # Ops whose CUDA code waits for the device, some of them only for some arguments.
    name = op_name(op_of(node))
    if name == "aten::histc" and argument(node, "min") != argument(node, "max"):
        return None  # the range is looked up in the data only when it is not given
    if name in ("aten::segment_reduce", "aten::_segment_reduce_backward"):
        # The lengths are checked on the host unless the caller vouches for them.
        if name.endswith("backward") or argument(node, "unsafe") is True:
            return None
    elif name not in op_names.HOST_SYNCS:
        return None
    return why(node, "host-sync", f"{name} waits for the device", op_names.HOST_SYNCS[name])


def solver(node: Node, device_type: str) -> Reason | None:
    # Factorisations: batched ones build pointer tables on the host, others wait for an error code.
    name = op_name(op_of(node))
    short = name.removeprefix("aten::")
    listed = short in op_names.SOLVERS or short.startswith(("linalg_", "_linalg_", "cholesky", "_cholesky"))
    if not name.startswith("aten::") or not listed or short in op_names.PLAIN_LINALG:
        return None
    return why(
        node,
        "solver",
        f"{name} may build pointer tables on the host or wait for an error code",
        "factorise outside the compiled region, or less often",
    )


def library_state(node: Node, device_type: str) -> Reason | None:
    # cuDNN and MIOpen keep dropout states and packed weights of recurrent nets behind handles.
    name = op_name(op_of(node))
    short = name.removeprefix("aten::")
    if not short.startswith(op_names.STATEFUL_PREFIXES) and short not in op_names.STATEFUL:
        return None
    return why(
        node,
        "library-state",
        f"{name} keeps state inside its library",
        "write the cell with plain ops, e.g. torch.nn.LSTMCell in a loop",
    )


def storage(node: Node, device_type: str) -> Reason | None:
    # Changes what a tensor *is* on the host. A launch repeats kernels only, so it would not happen.
    op = op_of(node)
    name = op_name(op)
    view = isinstance(op, OpOverload) and torch.Tag.inplace_view in op.tags
    if not view and name not in op_names.STORAGE_OPS:
        return None
    return why(
        node,
        "storage",
        f"{name} changes a tensor's storage or shape in place on the host",
        "make a new tensor instead",
    )


def pinned(node: Node, device_type: str) -> Reason | None:
    # Page-locked memory is allocated by the host.
    name = op_name(op_of(node))
    if name not in op_names.PIN_OPS and argument(node, "pin_memory") is not True:
        return None
    return why(node, "pinned", f"{name} pins host memory", "pin it outside the compiled region")


def random(node: Node, device_type: str) -> Reason | None:
    # The generator's offset moves on the host at each call: a launch would draw the same numbers.
    op = op_of(node)
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    if _draws_nothing(node):
        return None
    name = op_name(op)
    if name in op_names.SEED_OPS:
        fix = "nothing to do: seeds are drawn before the graph, which takes them as an input"
    else:
        fix = "use the default codegen, which passes seeds as an input, or set the dropout to 0"
    return why(node, "rng", f"{name} draws from the global generator", fix)


def _draws_nothing(node: Node) -> bool:
    if argument(node, "train") is False or argument(node, "training") is False:
        return True
    probability = next(
        (p for key in ("dropout_p", "dropout") if (p := argument(node, key)) is not None),
        argument(node, "p") if op_name(op_of(node)) in op_names.DROPOUT_OPS else None,
    )
    return isinstance(probability, (int, float)) and probability == 0
