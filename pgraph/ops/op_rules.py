"""Rules that judge an op by what it is: its kind, and its name together with its literal arguments.

Each takes a node and the type of the captured device, and returns why the node must stay outside, or
None. Names and facts are in `pgraph.ops.op_names`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from pgraph import compat
from pgraph.ops import name_rules, op_names
from pgraph.ops.fx import (
    argument,
    is_neutral,
    op_name,
    op_of,
    solver_of_check,
    touched_values,
    unbacked,
    user_line,
    why,
)
from pgraph.reasons import Reason

__all__ = [
    "for_inductor",
    "higher_order",
    "host_sync",
    "listed",
    "not_an_op",
    "pinned",
    "random",
]


def not_an_op(node: Node, device_type: str) -> Reason | None:
    # A Python call is opaque: it may do anything on the host, and a launch would not repeat it.
    if isinstance(op_of(node), (OpOverload, HigherOrderOperator)) or is_neutral(node):
        return None
    if any(unbacked(value) for _, value in touched_values(node)):
        return None  # the rule on data-dependent sizes explains it better
    name = op_name(op_of(node))
    return why(node, "not-an-op", f"{name} ({node.op}) is a Python call, which a launch does not repeat")


def listed(node: Node, device_type: str) -> Reason | None:
    # The user has told Inductor to keep it out of CUDA graphs: said once is enough.
    op = op_of(node)
    if not isinstance(op, OpOverload):
        return None
    if not {op_name(op), f"{op_name(op)}.{op._overloadname}"} & compat.partition_ops():
        return None
    sentence = f"{op_name(op)} is listed in Inductor's custom_should_partition_ops"
    return why(node, "marked", sentence, "take it from that list")


def higher_order(node: Node, device_type: str) -> Reason | None:
    # Control flow picks its branch on the host, effects order host calls: refused, save a short list.
    op = op_of(node)
    if not isinstance(op, HigherOrderOperator):
        return None
    solver = solver_of_check(node)
    if solver is not None and (found := name_rules.SOLVER(solver, device_type)):
        return found  # one thing to change, told once
    name = str(op.name())
    if name in op_names.RNG_STATE_HOPS:
        drawn = [op_name(a) for a in node.args if isinstance(a, OpOverload)]
        repeated = f" to repeat {drawn[0]}" if drawn else ""
        reason = why(node, "rng-state", f"{name} swaps the generator's state on the host{repeated}")
        # The node was made long after tracing; what goes into it stands at the same place, or just before.
        lines = (user_line(source) for source in node.all_input_nodes if source.op != "placeholder")
        return reason if reason.where else dataclasses.replace(reason, where=next(filter(None, lines), None))
    if name not in op_names.ALLOWED_HOPS:
        return why(node, "higher-order", f"{name} is decided or ordered on the host at each call")
    return None


def for_inductor(node: Node, device_type: str) -> Reason | None:
    # A capture of ATen code watches each op that it calls, and PyTorch shows it no higher-order ones.
    op = op_of(node)
    if not isinstance(op, HigherOrderOperator):
        return None
    return why(
        node,
        "higher-order",
        f"{op.name()} becomes kernels in Inductor's code; ATen code calls it as it is",
        "use the default codegen",
    )


def host_sync(node: Node, device_type: str) -> Reason | None:
    # Ops whose CUDA code waits for the device, some of them only for some arguments.
    name = op_name(op_of(node))
    if name == "aten::histc" and argument(node, "min") != argument(node, "max"):
        return None  # the range is looked up in the data only when it is not given
    if name == "aten::segment_reduce" and argument(node, "unsafe") is True:
        return None  # the lengths are checked on the host unless the caller vouches for them
    if name not in op_names.HOST_SYNCS:
        return None
    return why(node, "host-sync", f"{name} waits for the device", op_names.HOST_SYNCS[name])


def pinned(node: Node, device_type: str) -> Reason | None:
    # Page-locked memory is allocated by the host.
    name = op_name(op_of(node))
    if name not in op_names.PIN_OPS and argument(node, "pin_memory") is not True:
        return None
    return why(node, "pinned", f"{name} pins host memory")


def random(node: Node, device_type: str) -> Reason | None:
    # The generator's offset moves on the host at each call: a launch would draw the same numbers.
    op = op_of(node)
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    if _draws_nothing(node):
        return None
    name = op_name(op)
    code = "rng-seeds" if name in op_names.SEED_OPS else "rng"
    return why(node, code, f"{name} draws from the global generator")


def _draws_nothing(node: Node) -> bool:
    if argument(node, "train") is False or argument(node, "training") is False:
        return True
    probability = next(
        (p for key in ("dropout_p", "dropout") if (p := argument(node, key)) is not None),
        argument(node, "p") if op_name(op_of(node)) in op_names.DROPOUT_OPS else None,
    )
    return isinstance(probability, (int, float)) and probability == 0
