"""Numbers of the program that no op of a graph reads, counted beside it.

Where a program counts in Python, as a cache with a sliding window does at each token, and Dynamo has seen
the number vary, the graph takes it and gives the next one back (``s0 + 1``). In a partition it would tell one
call from the next, and each call would need a recording of its own. So results that are made of numbers alone
are left out of the graph, if nothing in it reads one of these numbers any more, and whoever calls its code
makes them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from pgraph import compat
from pgraph.ops.fx import output_values, symbols

__all__ = ["Counted", "take_out"]

_UNREAD = 2
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """A graph without such results, and how to call its code in place of the original's.

    Args:
        module: the graph, with the same inputs; the results that were left out are None in it.
        taken: positions of the inputs that these are made of.
        freed: positions of the inputs that nothing in the graph reads any more.
        results: their positions.
        make: makes them of these inputs.
    """

    module: GraphModule
    taken: tuple[int, ...]
    freed: tuple[int, ...]
    results: tuple[int, ...]
    make: Callable[..., Sequence[Any]]

    def around(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`run`, which is the code of `module`, with the original's results.

        Returns:
            A function that AOTAutograd takes for boxed: one list in, which it empties.
        """
        taken, freed, positions, make = self.taken, self.freed, self.results, self.make

        def call(args: list[Any]) -> Any:
            made = make(*[args[position] for position in taken])
            for position in freed:  # the same number at each call, which no recording has to be told by
                args[position] = _UNREAD
            results = list(run(args))
            for position, number in zip(positions, made, strict=True):
                results[position] = number
            return results

        return compat.boxed(call)


def take_out(gm: GraphModule) -> Counted | None:
    """Leave out results that are made of numbers which nothing else in the graph reads.

    Args:
        gm: an ATen graph; not changed.

    Returns:
        The graph without them, or None if there are none.
    """
    made_of = _made_of_numbers(gm.graph)
    idle: set[Node] = set()
    for node in reversed(made_of):
        if all(user in idle or user.op == "output" for user in node.users):
            idle.add(node)
    # Code tells a size that several inputs have by any of them.
    read = set[Any]().union(*(symbols(v) for n in gm.graph.nodes if n not in idle for v in output_values(n)))
    freed = {
        node
        for node in idle
        if node.op == "placeholder" and node.users and not symbols(node.meta["val"]) & read
    }
    counted = [node for node in made_of if node in idle and made_of[node] & freed]
    values: Any = gm.graph.output_node().args[0]
    positions = tuple(i for i, value in enumerate(values) if isinstance(value, Node) and value in counted)
    if not positions:
        return None
    taken, make = _alone(gm, made_of, [values[i] for i in positions])
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    unread = tuple(position for position, node in enumerate(inputs) if node in freed)
    module = _without(gm, set(positions), counted)
    return Counted(module, taken, unread, positions, make)


def _made_of_numbers(graph: Graph) -> dict[Node, frozenset[Node]]:
    """Nodes that are numbers made of the graph's own numbers, in order, and the inputs each is made of."""
    found: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        if not isinstance(node.meta.get("val"), _NUMBERS):
            continue
        if node.op == "placeholder":
            found[node] = frozenset({node})
        elif node.op == "call_function" and all(source in found for source in node.all_input_nodes):
            found[node] = frozenset().union(*(found[source] for source in node.all_input_nodes))
    return found


def _alone(
    gm: GraphModule, made_of: dict[Node, frozenset[Node]], results: Sequence[Node]
) -> tuple[tuple[int, ...], Callable[..., Sequence[Any]]]:
    """The positions of the inputs that these results are made of, and what makes them."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    needed = set[Node]().union(*(made_of[node] for node in results))
    taken = tuple(position for position, node in enumerate(inputs) if node in needed)
    graph, made = Graph(), dict[Node, Node]()
    for position in taken:
        made[inputs[position]] = graph.placeholder(inputs[position].name)
    for node, sources in made_of.items():
        if node not in made and sources <= needed:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in results))
    graph.eliminate_dead_code()
    return taken, GraphModule({}, graph, class_name="IdleNumbers").forward


def _without(gm: GraphModule, positions: Collection[int], counted: Sequence[Node]) -> GraphModule:
    """A copy of the graph without these results, and without what only they need."""
    graph, made = Graph(), dict[Node, Node]()
    values: Any = graph.graph_copy(gm.graph, made)
    output = graph.output(tuple(None if i in positions else value for i, value in enumerate(values)))
    output.meta = copy.copy(gm.graph.output_node().meta)
    for node in reversed(counted):
        if node.op != "placeholder":
            graph.erase_node(made[node])
    module = GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    return module
