"""Numbers of the program that no op of a graph reads, or only what was made of them.

Where a program counts in Python, as a cache with a sliding window does at each token, and Dynamo has seen
the number vary, the graph takes it and gives the next one back (``s0 + 1``). Or an op reads where in a ring
it is (``s0 % 8``). In a partition such a number would tell each call from the next, and each would need a
recording of its own.

What a graph computes depends on a number that no op reads by what ops read of it alone. So its code may be
given any number of which they read the same: the first one with which that came. Results that are made of
numbers are left out of the graph, and made of the true ones by whoever calls its code. A number that the size
of an input tells as well stays as it is: code may read it from either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node

from pgraph import compat
from pgraph.ops.fx import copied, output_values, symbols

__all__ = ["IdleNumbers", "take_out"]

_NUMBERS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MOST: Final = 1024
"""Numbers that are remembered, for one graph."""

Numbers = tuple[Any, ...]
MadeOf = dict[Node, frozenset[Node]]


@dataclasses.dataclass(frozen=True, slots=True)
class IdleNumbers:
    """A graph in which no op reads some numbers among the inputs, and how to call its code.

    Args:
        module: the graph, with the same inputs; results that are made of these numbers are None in it.
        counters: positions of the numbers among the inputs.
        others: positions of further numbers, of which results or what ops read are made as well.
        results: positions of the results that are left out.
        make: makes these of the counters and the others, and what ops read.
        first: the counters that came first, for each set of others and of what ops read.
    """

    module: GraphModule
    counters: tuple[int, ...]
    others: tuple[int, ...]
    results: tuple[int, ...]
    make: Callable[..., tuple[Sequence[Any], Sequence[Any]]]
    first: dict[Hashable, Numbers] = dataclasses.field(default_factory=dict)

    def around(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`run`, which is the code of `module`, with the original's inputs and results.

        Returns:
            A function that AOTAutograd takes for boxed: one list in, which it empties.
        """
        counters, others, positions, make = self.counters, self.others, self.results, self.make
        first = self.first

        def call(args: list[Any]) -> Any:
            numbers, given = tuple(args[p] for p in counters), tuple(args[p] for p in others)
            made, read = make(*numbers, *given)
            if len(first) >= _MOST:
                first.clear()
            numbers = first.setdefault((*map(_bits, given), *map(_bits, read)), numbers)
            for position, number in zip(counters, numbers, strict=True):
                args[position] = number
            results = list(run(args))
            for position, number in zip(positions, made, strict=True):
                results[position] = number
            return results

        return compat.boxed(call)


def take_out(gm: GraphModule) -> IdleNumbers | None:
    """Find numbers that no op reads, and leave out what results are made of them.

    Args:
        gm: an ATen graph; not changed.

    Returns:
        The graph without these results, or None if there are no such numbers.
    """
    made_of = _made_of_numbers(gm.graph)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    found = _counters(inputs, made_of)
    if not found:
        return None
    values: list[Any] = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    results = [i for i, v in enumerate(values) if isinstance(v, Node) and v in made_of and made_of[v] & found]
    read = [node for node in made_of if made_of[node] & found and _readers(node, made_of)]
    needed = set[Node]().union(*(made_of[node] for node in (*read, *(values[i] for i in results))))
    counters = [node for node in inputs if node in found]
    # A backward may be given several numbers that were made of one: code tells it by any of them.
    mine = set[Any]().union(*(symbols(node.meta["val"]) for node in found))
    needed |= {node for node in inputs if node in made_of and symbols(node.meta["val"]) & mine}
    others = [node for node in inputs if node in needed - found]
    make = _maker([*counters, *others], made_of, [values[i] for i in results], read)
    place = {node: position for position, node in enumerate(inputs)}
    return IdleNumbers(
        _without(gm, results),
        tuple(place[node] for node in counters),
        tuple(place[node] for node in others),
        tuple(results),
        make,
    )


def _made_of_numbers(graph: Graph) -> MadeOf:
    """Nodes that are numbers made of the graph's own numbers, in order, and the inputs each is made of."""
    found: MadeOf = {}
    for node in graph.nodes:
        if not isinstance(node.meta.get("val"), _NUMBERS):
            continue
        if node.op == "placeholder":
            found[node] = frozenset({node})
        elif node.op == "call_function" and all(source in found for source in node.all_input_nodes):
            found[node] = frozenset().union(*(found[source] for source in node.all_input_nodes))
    return found


def _readers(number: Node, made_of: MadeOf) -> list[Node]:
    """The ops that read a number."""
    return [user for user in number.users if user not in made_of and user.op != "output"]


def _counters(inputs: Sequence[Node], made_of: MadeOf) -> set[Node]:
    """The numbers among the inputs that no op reads, but for less than all that they tell."""
    found = set()
    sizes = set[Any]().union(*(symbols(v) for n in inputs if n not in made_of for v in output_values(n)))
    read = [node for node in made_of if _readers(node, made_of)]
    for node in inputs:
        mine = symbols(node.meta["val"]) if node in made_of else set()
        if len(mine) != 1 or mine & sizes or node in read:
            continue
        if not any(_tells_all(part, *mine) for part in read if symbols(part.meta["val"]) & mine):
            found.add(node)
    return found


def _tells_all(part: Node, symbol: Any) -> bool:
    """Whether what was made of a number is another one for each, such as ``s0 + 1``."""
    expression = part.meta["val"].node.expr
    return bool(getattr(expression, "is_polynomial", lambda _: False)(symbol))


def _bits(number: Any) -> Hashable:
    return str(number) if isinstance(number, float) else number  # 0.0 == -0.0


def _maker(
    inputs: Sequence[Node], made_of: MadeOf, results: Sequence[Node], read: Sequence[Node]
) -> Callable[..., tuple[Sequence[Any], Sequence[Any]]]:
    """What makes results, and what ops read, of these inputs."""
    graph, made = Graph(), dict[Node, Node]()
    for node in inputs:
        made[node] = graph.placeholder(node.name)
    for node, sources in made_of.items():
        if node not in made and sources <= made.keys():
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output((tuple(made[node] for node in results), tuple(made[node] for node in read)))
    graph.eliminate_dead_code()
    return GraphModule({}, graph, class_name="Counters").forward  # type: ignore[no-any-return]


def _without(gm: GraphModule, positions: Collection[int]) -> GraphModule:
    """A copy of the graph without these results, and without what only they need."""
    graph = copied(gm.graph)
    output = graph.output_node()
    values: Any = output.args[0]
    output.args = (tuple(None if i in positions else value for i, value in enumerate(values)),)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and isinstance(node.meta.get("val"), _NUMBERS):
            graph.erase_node(node)
    module = GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    return module
