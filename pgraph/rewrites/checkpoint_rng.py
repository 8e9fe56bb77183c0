"""Checkpointed ops that draw no random number, freed from the generator's state that is kept for them.

When AOTAutograd computes an op again in the backward (`torch.utils.checkpoint`) and the op *may* draw, it
wraps both runs, so that the second draws what the first drew. Attention is such an op, and without
dropout it draws nothing: the wrapper swaps a state that no op reads, on the host, where a captured graph
cannot follow. `unwrap` puts the plain op in its place, where the op's schema and a constant prove it:

====================================  ==========================  ======================================
wrapper                               in                          what is left of it
====================================  ==========================  ======================================
``run_and_save_rng_state``            forward                     op, and a state for the result
``run_with_rng_state``                backward                    op
``graphsafe_run_with_rng_state``      both, on CUDA               op; the generator is dropped
====================================  ==========================  ======================================

Note [Unneeded generator states]
Forward and backward are rewritten apart, and need not agree. An op that draws nothing gives the same
result under any state and leaves the state as it was. So the backward's op needs no state at all, and the
forward's may save any. The backward holds a copy of the same node with the same constant, so both are
rewritten or neither is; and if other code runs the backward, wrapper included, the state that it is
given is a real one, taken when the graph was compiled. Generators: AOTAutograd keeps one for the forward
and one for the backward of each wrapped op, and counts on both being advanced alike. Neither ever is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from pgraph import compat
from pgraph.ops import op_names
from pgraph.ops.fx import copied, is_getitem, op_name, output_values

__all__ = ["Unwrapped", "unwrap"]

# Entries of a node's `meta` that describe its own value, not that of its getitem.
_VALUE_META = frozenset({"val", "tensor_meta"})


@dataclasses.dataclass(frozen=True, slots=True)
class Unwrapped:
    """A graph in which some ops are plain again, and how to call its code in place of the original's.

    Args:
        module: the graph; results that were a saved state are None in it.
        dropped: positions of the inputs that `module` lacks: generators that nothing reads any more.
        states: (position among the results, what stands there instead of None).
    """

    module: GraphModule
    dropped: tuple[int, ...]
    states: tuple[tuple[int, torch.Tensor], ...]

    def inputs(self, of_original: Sequence[Any]) -> list[Any]:
        """The inputs of `module` among those of the original."""
        return [value for i, value in enumerate(of_original) if i not in self.dropped]

    def around(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`run`, which is the code of `module`, with the original's inputs and results.

        Returns:
            A function that AOTAutograd takes for boxed: one list in, which it empties.
        """
        last_first = sorted(self.dropped, reverse=True)

        def call(args: list[Any]) -> Any:
            for position in last_first:
                del args[position]
            results = run(args)
            if not self.states:
                return results
            filled = list(results)
            for position, state in self.states:
                filled[position] = state
            return filled

        return compat.boxed(call)


@dataclasses.dataclass(frozen=True, slots=True)
class _Wrapper:
    node: Node
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # Of the one that saves the state: what is taken out of its pair of state and result.
    saves: bool = False
    saved: tuple[Node, ...] = ()
    results: tuple[Node, ...] = ()

    def stands_for(self) -> tuple[Node, ...]:
        """The nodes whose value is the op's."""
        return self.results if self.saves else (self.node,)

    def inputs(self) -> list[Node]:
        """The nodes among the op's arguments."""
        found: list[Node] = []
        map_arg((self.args, self.kwargs), found.append)
        return found


def unwrap(gm: GraphModule) -> Unwrapped | None:
    """Replace wrappers around ops that draw nothing by the ops; every other wrapper stays.

    Args:
        gm: an ATen graph; not changed.

    Returns:
        The graph without them, or None if there is nothing to replace.
    """
    if not any(_wrapper(node) for node in gm.graph.nodes):
        return None
    graph = copied(gm.graph)
    states: list[tuple[int, torch.Tensor]] = []
    changed = False
    for node in list(graph.nodes):
        wrapper = _wrapper(node)
        if wrapper is None or (meta := _meta(wrapper)) is None:
            continue
        states += _replace(graph, wrapper, meta)
        changed = True
    if not changed:
        return None
    dropped = _drop_generators(graph)
    module = GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    return Unwrapped(module, dropped, tuple(states))


# -- what is a needless wrapper? -----------------------------------------------------------------


def _wrapper(node: Node) -> _Wrapper | None:
    """The wrapper that the node is, if what it wraps draws nothing."""
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
        return None
    name = str(node.target.name())
    if name not in ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"):
        return None
    args, kwargs = list(node.args), dict(node.kwargs)
    if name == "run_with_rng_state":
        del args[0]
    elif name == "graphsafe_run_with_rng_state":
        kwargs.pop("rng_state", None)
    op = args.pop(0)
    if not isinstance(op, OpOverload) or not _draws_nothing(op, args, kwargs):
        return None
    wrapper = _Wrapper(node, op, tuple(args), kwargs, saves=name == "run_and_save_rng_state")
    return _with_users(wrapper) if wrapper.saves else wrapper


def _with_users(wrapper: _Wrapper) -> _Wrapper | None:
    """The wrapper with what is taken out of its pair, if the graph returns the state and does no more."""
    taken: dict[Any, list[Node]] = {0: [], 1: []}
    for user in wrapper.node.users:
        if not is_getitem(user) or user.args[1] not in taken:
            return None
        taken[user.args[1]].append(user)
    if not all(_returned(state, reader) for state in taken[0] for reader in state.users):
        return None
    return dataclasses.replace(wrapper, saved=tuple(taken[0]), results=tuple(taken[1]))


def _returned(value: Node, reader: Node) -> bool:
    results = reader.args[0] if reader.op == "output" else None
    return isinstance(results, (tuple, list)) and value in results


def _draws_nothing(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if op_name(op) not in op_names.DRAWS_NOTHING:
        return False
    name, needed = op_names.DRAWS_NOTHING[op_name(op)]
    value = _argument(op, args, kwargs, name)
    # A number that is known at a call only is a node. `False == 0.0`, so the types count.
    kind = bool if isinstance(needed, bool) else (int, float)
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool) and value == needed


def _argument(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            if name in kwargs:
                return kwargs[name]
            if position < len(args):
                return args[position]
            return argument.default_value if argument.has_default_value() else None
    return None


# -- the change ----------------------------------------------------------------------------------


def _meta(wrapper: _Wrapper) -> dict[str, Any] | None:
    """What the plain op says about itself; None if its value cannot be told.

    The partitioner leaves a wrapper without any of it, but for the second half of the forward's pair,
    which took over all that the op had.
    """
    if wrapper.results and "val" in wrapper.results[0].meta:
        return dict(wrapper.results[0].meta)
    if "val" in wrapper.node.meta and not wrapper.saves:
        return dict(wrapper.node.meta)
    values = map_arg((wrapper.args, wrapper.kwargs), lambda node: node.meta.get("val"))
    mode = compat.fake_mode_of(tree_leaves(values))
    if mode is None or any("val" not in node.meta for node in wrapper.inputs()):
        return None
    with mode:
        value = wrapper.op(*values[0], **values[1])
    items = (user for node in wrapper.stands_for() for user in node.users if is_getitem(user))
    told = next((item.meta for item in items), {})
    meta = {key: what for key, what in (told | wrapper.node.meta).items() if key not in _VALUE_META}
    return meta | {"val": value}


def _replace(graph: Graph, wrapper: _Wrapper, meta: dict[str, Any]) -> list[tuple[int, torch.Tensor]]:
    """Put the op in the wrapper's place; returns where among the results which states belong."""
    with graph.inserting_before(wrapper.node):
        plain = graph.call_function(wrapper.op, wrapper.args, wrapper.kwargs)
    plain.meta = meta
    states = []
    for saved in wrapper.saved:
        output = graph.output_node()
        results = list(output.args[0])  # type: ignore[arg-type]
        for position, value in enumerate(results):
            if value is saved:
                results[position] = None
                states.append((position, _state(plain)))
        output.args = (tuple(results),)
    for result in wrapper.stands_for():
        result.replace_all_uses_with(plain)
    for node in (*wrapper.saved, *wrapper.results, wrapper.node):
        graph.erase_node(node)
    return states


def _state(plain: Node) -> torch.Tensor:
    """A state of the generator that the wrapper would have saved (Note [Unneeded generator states])."""
    for value in output_values(plain):
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return torch.cuda.get_rng_state(value.device)
    return torch.get_rng_state()


def _drop_generators(graph: Graph) -> tuple[int, ...]:
    """Take out generators that nothing reads, which Inductor does not expect (2.11 asserts a reader).

    AOTAutograd puts generators behind all other inputs. Only there are they taken out, so that the
    positions of the others, which several tables count by, stay what they are.
    """
    dropped = []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for position in reversed(range(len(placeholders))):
        node = placeholders[position]
        if not isinstance(node.meta.get("val"), torch.Generator):
            break
        if not node.users:
            graph.erase_node(node)
            dropped.append(position)
    return tuple(reversed(dropped))
