"""Which op is to blame: from a node of a recording, or a dispatched op, to the nodes of a graph."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from pgraph.capture.culprit import culprit_of, dispatch_at, dispatch_of, nodes_of, numbered
from pgraph.ops.fx import flat_values
from pgraph.partition.facts import GraphFacts, OpRun, respliced
from pgraph.reasons import Dispatch, Reason
from pgraph.template.recording import Recording
from pgraph.template.topology import chain

aten = torch.ops.aten


def body(fn: Any, *inputs: Tensor, mode: str = "fake") -> list[torch.fx.Node]:
    gm = make_fx(fn, tracing_mode=mode)(*inputs)
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def call(op: Any, *args: Any, **kwargs: Any) -> Dispatch:
    return dispatch_of(op, args, kwargs, 0, 1)


def positions(found: list[torch.fx.Node], nodes: list[torch.fx.Node]) -> list[int]:
    return [nodes.index(node) for node in found]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_what_looks_alike(mode: str) -> None:
    """By name, then by shapes; then by strides, then by other arguments, as far as something is left."""
    x, y = torch.randn(4, 4), torch.randn(4, 7)

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        a = aten.mm.default(x, x)
        return [a, aten.mm.default(x, y), aten.mm.default(a, a), aten.sum.dim_IntList(a, [0])]

    nodes = body(fn, x, y, mode=mode)
    if mode == "fake":
        assert positions(nodes_of(call(aten.mm.default, x, x), nodes), nodes) == [0, 2]
        assert positions(nodes_of(call(aten.mm.default, x, y), nodes), nodes) == [1]
    else:
        assert 1 in positions(nodes_of(call(aten.mm.default, x, y), nodes), nodes)
    everywhere = nodes_of(call(aten.mm.default, y.t(), y), nodes)
    assert {node.target for node in everywhere} == {aten.mm.default}
    assert nodes_of(call(aten.cos.default, x), nodes) == []


def test_literals_and_strides_decide_last() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [
            aten.sum.dim_IntList(x, [0]),
            aten.sum.dim_IntList(x, [1]),
            aten.sum.dim_IntList(x.t() * 1, [1]),
        ]

    x = torch.randn(4, 4)
    nodes = body(fn, x)
    sums = [node for node in nodes if node.target is aten.sum.dim_IntList]
    first, second, _ = sums
    assert nodes_of(call(aten.sum.dim_IntList, x, [0]), nodes) == [first]
    assert nodes_of(call(aten.sum.dim_IntList, x, [1]), nodes)[0] is second


def test_inductors_name_for_a_product() -> None:
    """`addmm` becomes `mm.out`, whose result is no operand; a product of other shapes does not answer."""
    bias, a, b = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
    nodes = body(
        lambda bias, a, b: [aten.addmm.default(bias, a, b), aten.addmm.default(bias, b.t(), b)], bias, a, b
    )
    products = [node for node in nodes if node.target is aten.addmm.default]
    out = call(aten.mm.out, a, b, out=torch.empty(3, 5))
    assert [size for _, size, _ in out.tensors] == [(3, 4), (4, 5)]
    assert nodes_of(out, nodes) == products[:1]
    assert nodes_of(call(aten.mm.default, b, b.t()), nodes) == []


def test_a_dispatch_holds_no_tensor() -> None:
    found = call(aten.cat.default, [torch.randn(2), torch.randn(3)], 0)
    assert found.tensors == ((torch.float32, (2,), (1,)), (torch.float32, (3,), (1,)))
    assert found.literals == (0,)


def recording(*ops: Dispatch) -> Recording:
    return Recording((), chain(0), (), 0, (), (0, 0), None, ops=ops)


def test_from_a_node_to_its_op() -> None:
    """Nodes between two ops are generated kernels, which nobody is blamed for."""
    ops = (Dispatch("aten::a", 1, 3), Dispatch("aten::b", 5, 6))
    assert [getattr(dispatch_at(ops, node), "op", None) for node in (0, 1, 2, 3, 5, 6, None)] == [
        None,
        "aten::a",
        "aten::a",
        None,
        "aten::b",
        None,
        None,
    ]
    assert culprit_of(recording(*ops), recording(), 5) is ops[1]


def test_which_of_several_alike() -> None:
    """Those with such arguments that came before are counted, where an op is to blame."""
    like, other = ((torch.float32, (2,), (1,)),), ((torch.float32, (3,), (1,)),)
    ops = tuple(Dispatch("my::a", i, i + 1, tensors) for i, tensors in enumerate([like, other, like, like]))
    assert [dispatch_at(ops, node).nth for node in range(4)] == [0, 0, 1, 2]
    second = (*ops[:3], Dispatch("my::a", 3, 5, like))
    assert culprit_of(recording(*ops), recording(*second), None) == numbered(ops[:3], ops[3])
    assert numbered(ops[:3], ops[3]).nth == 2


def test_flat_values_are_the_leaves() -> None:
    x = torch.randn(2)
    point = collections.namedtuple("point", "x y")
    for values in (
        x,
        (),
        None,
        (x, 2, "a", None, True, 1.5, torch.float32, torch.device("cpu"), torch.strided),
        [x, [x, (x, None)], {"b": [x], "a": 1}],
        (torch.nn.Parameter(x), point(x, [3]), torch.return_types.max((x, x))),
        {"out": x, "alpha": 2},
        torch.Size([2, 3]),
    ):
        assert list(map(id, flat_values(values))) == list(map(id, tree_leaves(values)))


def test_an_op_that_records_more_nodes_the_second_time() -> None:
    first = (Dispatch("my::a", 0, 1), Dispatch("my::b", 1, 2), Dispatch("my::c", 2, 3))
    second = (Dispatch("my::a", 0, 1), Dispatch("my::b", 1, 4), Dispatch("my::c", 4, 5))
    assert culprit_of(recording(*first), recording(*second), None) is first[1]
    assert culprit_of(recording(*first), recording(*first), None) is None
    # The kernels between a and b differ: generated code.
    moved = (Dispatch("my::a", 0, 1), Dispatch("my::b", 2, 3))
    assert culprit_of(recording(*first), recording(*moved), None) is None


def test_steps_of_a_graph_that_was_split() -> None:
    no, why = Reason("marked", "no", "no"), Reason("tagged", "why", "why")
    graph = GraphFacts("forward", 0, 1, (OpRun(2, None), OpRun(1, no), OpRun(5, None)))
    split = respliced(graph, 3, 5, (OpRun(2, None), OpRun(1, why), OpRun(2, None)))
    assert [(s.ops, s.reason) for s in split.op_runs] == [(2, None), (1, no), (2, None), (1, why), (2, None)]
    assert respliced(split, 3, 5, (OpRun(5, None),)) == graph
    inside = respliced(GraphFacts("forward", 0, 1, (OpRun(8, None),)), 2, 3, (OpRun(3, why),))
    assert [(s.ops, s.reason) for s in inside.op_runs] == [(2, None), (3, why), (3, None)]
