"""What an FX node of an ATen graph says about itself: op, arguments, values, source line.

Small pure helpers shared by the safety rules and the partitioner. Values are the fake tensors and
symbolic ints that AOTAutograd leaves in ``node.meta["val"]``; nothing here runs an op.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from pgraph.compat import WRAPPED_MUTATIONS
from pgraph.reasons import Reason

__all__ = [
    "FRAME",
    "METADATA_OPS",
    "VIEWS",
    "argument",
    "copied",
    "describe",
    "flat_values",
    "input_values",
    "is_builtin",
    "is_custom",
    "is_getitem",
    "is_neutral",
    "is_structural",
    "is_token",
    "is_users",
    "op_name",
    "op_of",
    "output_values",
    "solver_of_check",
    "symbols",
    "touched_values",
    "unbacked",
    "user_frame",
    "user_line",
    "why",
]

# Views: a new size, stride and offset over the same storage, no kernel. An allow-list, because the
# schema's alias annotation also covers ops that sometimes copy (reshape, contiguous, to).
VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "view_as_complex",
        "view_as_real",
    )
)

# Host questions about a tensor's metadata: they never look at its data, wherever it lives.
METADATA_OPS = frozenset(
    f"aten::{name}"
    for name in (
        "dim",
        "is_contiguous",
        "numel",
        "size",
        "storage_offset",
        "stride",
        "sym_is_contiguous",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
    )
)

_OWN_NAMESPACES = frozenset({"aten", "prim", "prims", "inductor", "quantized", "quantized_decomposed"})

# What an op is given most, and what is no container of anything.
_ATOMS = frozenset(
    {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, torch.dtype, torch.device}
)

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OWN_ROOTS = tuple(
    os.path.join(os.path.realpath(package), "")
    for package in (os.path.dirname(str(torch.__file__)), os.path.dirname(os.path.dirname(__file__)))
)
_LIBRARY = os.path.join(os.path.realpath(sysconfig.get_paths()["stdlib"]), "")
_INSTALLED = ("site-packages", "dist-packages")
_TYPED = ("<stdin>", "<console>", "<ipython-input-", "<python-input-")  # what a user types has no file


def copied(graph: Graph) -> Graph:
    """A copy of a graph, with all that its nodes say of themselves."""
    copy_of = Graph()
    copy_of.output(copy_of.graph_copy(graph, {}))
    copy_of.output_node().meta = copy.copy(graph.output_node().meta)
    return copy_of


def is_structural(node: Node) -> bool:
    """Whether the node is a placeholder, a get_attr or the output: no op at all."""
    return node.op in ("placeholder", "get_attr", "output")


def is_getitem(node: Node) -> bool:
    """Whether the node takes one element out of another node's tuple or list."""
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", None) == "getitem"
        and not isinstance(node.target, (OpOverload, HigherOrderOperator))
    )


def is_token(node: Node) -> bool:
    """Whether the node's value only orders side effects: nothing is computed from it."""
    if is_getitem(node) and node.args[1] == 0 and isinstance(node.args[0], Node):
        return op_name(node.args[0].target) == "higher_order::with_effects"
    return op_name(node.target) == "prims::_make_token"


def solver_of_check(node: Node) -> Node | None:
    """The solver whose error code the node reads on the host; None if it does nothing of the kind.

    Where a user calls ``torch.linalg.inv``, tracing makes of it an op that returns a code, and such a check:
    an effect, so that it is kept although nothing uses it.
    """
    if op_name(node.target) != "higher_order::with_effects" or len(node.args) < 3:
        return None
    _, effect, code, *_ = node.args  # behind the token
    if not isinstance(code, Node) or op_name(effect) != "aten::_linalg_check_errors":
        return None
    return code.args[0] if is_getitem(code) and isinstance(code.args[0], Node) else code


def op_of(node: Node) -> Any:
    """The op that runs: the node's target, or the op inside an ``auto_functionalized`` wrapper."""
    target = node.target
    if target in WRAPPED_MUTATIONS and node.args:
        return node.args[0]
    return target


def op_name(op: Any) -> str:
    """``ns::name`` of an op, without its overload; a readable name for anything else.

    Rules match on this and never on ``str(op)``, which carries the overload and so misses siblings.
    """
    if isinstance(op, OpOverload):
        return _schema_name(op)
    if isinstance(op, HigherOrderOperator):
        return f"higher_order::{op.name()}"
    return str(getattr(op, "__name__", None) or op)


@functools.lru_cache(maxsize=4096)
def _schema_name(op: OpOverload) -> str:
    return str(op._schema.name)


def flat_values(values: Any) -> list[Any]:
    """The flat values among an op's arguments or results: as `tree_leaves`, in a tenth of its time."""
    kind = type(values)
    if kind in _ATOMS:
        return [values]
    if kind is not tuple and kind is not list:
        return tree_leaves(values)
    found = []
    for value in values:
        if type(value) in _ATOMS:
            found.append(value)
        else:
            found += flat_values(value)
    return found


def is_builtin(op: Any) -> bool:
    """Whether the op is PyTorch's own, written by hand: its sources tell what it does."""
    return isinstance(op, OpOverload) and op.namespace in _OWN_NAMESPACES


def is_custom(op: Any) -> bool:
    """Whether the op is somebody else's than PyTorch's: a custom op, whose code nobody here knows."""
    return isinstance(op, OpOverload) and not is_builtin(op)


def argument(node: Node, name: str, default: Any = None) -> Any:
    """The argument `name` of the node's op, by keyword, position or schema default.

    Returns:
        The FX argument as it stands in the node (a literal, a Node, or a list of them); `default`
        when the op has no such argument.
    """
    if name in node.kwargs:
        return node.kwargs[name]
    op = op_of(node)
    if not isinstance(op, OpOverload):
        return default
    for position, arg in enumerate(op._schema.arguments):
        if arg.name != name:
            continue
        if op is node.target and not arg.kwarg_only and position < len(node.args):
            return node.args[position]
        return arg.default_value if arg.has_default_value() else default
    return default


def output_values(node: Node) -> list[Any]:
    """The flat values that the node returns; empty when it returns none or says nothing."""
    return tree_leaves(node.meta.get("val"))


def input_values(node: Node) -> Iterator[tuple[Node, Any]]:
    """Each flat value that enters the node, with the node it comes from."""
    for source in node.all_input_nodes:
        for value in output_values(source):
            yield source, value


def touched_values(node: Node) -> Iterator[tuple[Node, Any]]:
    """Each flat value that leaves the node or enters it, with the node that it comes from."""
    for value in output_values(node):
        yield node, value
    yield from input_values(node)


def storage_of(node: Node) -> int | None:
    """What stands for the storage of a traced tensor; None if it has none, or no single one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata


def symbols(value: Any) -> set[Any]:
    """The free symbols of one flat value's sizes, strides, offset, or of a symbolic number."""
    if isinstance(value, _SYMBOLIC) or _is_plain(value):
        return set(free_symbols(value))
    return set()


def unbacked(value: Any) -> set[Any]:
    """The symbols of `value` that stand for a number known only after some kernel has run."""
    if isinstance(value, _SYMBOLIC) or _is_plain(value):
        return set(free_unbacked_symbols(value))
    return set()


def _is_plain(value: Any) -> bool:
    # Sparse and nested tensors refuse to tell strides; they are never captured, so their symbols
    # are not needed.
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def is_neutral(node: Node) -> bool:
    """Whether the node does no work on any device, so that it may sit in any partition.

    Neutral are: structural nodes, getitem, views, questions about a tensor's metadata, and host
    arithmetic on symbolic numbers. A number known only after a kernel has run is never neutral.
    """
    if is_structural(node):
        return True
    if node.op != "call_function":
        return False
    if any(unbacked(value) for value in output_values(node)):
        return False
    if is_getitem(node):
        return True
    op = op_of(node)
    if isinstance(op, OpOverload):
        return op_name(op) in VIEWS or op_name(op) in METADATA_OPS
    if isinstance(op, HigherOrderOperator):
        return False
    # operator.*, math.*, torch.sym_*: host arithmetic, unless a tensor goes in or out.
    return not any(isinstance(v, torch.Tensor) or unbacked(v) for _, v in touched_values(node))


def user_line(node: Node) -> str | None:
    """``file:line`` of the innermost frame of the user's own code behind the node, if recorded.

    Frames of torch and of pgraph are skipped, and so is code that some library made (``<string>``).
    """
    trace = node.meta.get("stack_trace") or node.stack_trace
    return user_frame(FRAME.findall(trace or ""))


def user_frame(frames: Sequence[tuple[str, Any]]) -> str | None:
    """``file:line`` of the innermost of these (path, line) frames that is the user's own. Of a program that
    was given to ``python -c``, code without a file is the user's, where nothing else is.
    """
    found = [f"{path}:{line}" for path, line in frames if is_users(path)]
    if not found and sys.argv[:1] == ["-c"]:
        found = [f"{path}:{line}" for path, line in frames if path == "<string>"]
    return found[-1] if found else None


def is_users(path: str) -> bool:
    """Whether a file is neither PyTorch's nor pgraph's nor Python's own. What somebody typed has none."""
    if path.startswith("<"):
        return path.startswith(_TYPED)
    real = os.path.realpath(path)
    if real.startswith(_OWN_ROOTS):
        return False
    return not real.startswith(_LIBRARY) or any(folder in real for folder in _INSTALLED)


def why(node: Node, code: str, sentence: str, fix: str = "") -> Reason:
    """A reason with the user's own line behind `node`; without a `fix`, the catalogue's of the code."""
    return Reason(code, sentence, fix, user_line(node))


def describe(node: Node, value: torch.Tensor) -> str:
    """A value of `node` in words: name, type, shape, device."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{node.name} ({dtype}{list(value.shape)} on {value.device})"
