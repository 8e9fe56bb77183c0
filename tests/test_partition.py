"""Parts keep program order and values: whatever the cut, the calls compute what the graph computes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import torch._inductor.inductor_prims  # isort: skip  # registers prims.inductor_seeds
from pgraph.errors import PgraphError
from pgraph.ops.safety import refusal
from pgraph.partition.extract import Const, SplitPlan, extract
from pgraph.partition.scan import scan
from pgraph.reasons import Reason

aten = torch.ops.aten


def refuse_packets(*packets: Any, code: str = "marked") -> Callable[[Node], Reason | None]:
    def refuse(node: Node) -> Reason | None:
        packet = getattr(node.target, "overloadpacket", None)
        return Reason(code, f"{node.name} refused", "none") if packet in packets else None

    return refuse


def run(plan: SplitPlan, args: list[Any]) -> list[Any]:
    """The executor that a plan is made for; dead slots are poisoned, so that a wrong last use shows."""
    dead = object()
    values: list[Any] = [dead] * plan.n_slots
    for slot, value in zip(plan.input_slots, args, strict=True):
        values[slot] = value
    for call in plan.calls:
        taken = [values[slot] for slot in call.inputs]
        assert all(value is not dead for value in taken)
        results = call.module(*taken)
        assert isinstance(results, tuple)
        for slot, value in zip(call.outputs, results, strict=True):
            values[slot] = value
        for slot in call.last_use:
            values[slot] = dead
    returned = [slot.value if isinstance(slot, Const) else values[slot] for slot in plan.output_slots]
    assert all(value is not dead for value in returned)
    live = {slot for slot in plan.output_slots if isinstance(slot, int)}
    if plan.calls:
        assert all(value is dead for slot, value in enumerate(values) if slot not in live)
    return returned


def check(gm: GraphModule, refuse: Callable[[Node], Reason | None], args: list[Any], min_ops: int = 1):
    """Cut `gm`, run it both ways on copies of `args`, compare the results and the mutated inputs."""
    before = str(gm.graph)
    partitions = scan(gm.graph, refuse, min_ops=min_ops)
    plan = extract(gm, partitions)
    assert str(gm.graph) == before, "the graph was changed"
    for call in plan.calls:
        call.module.graph.lint()

    def clone(values: list[Any]) -> list[Any]:
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]

    ours, theirs = clone(args), clone(args)
    expected = gm(*theirs)
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    torch.testing.assert_close(run(plan, ours), expected, rtol=0, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return partitions, plan


def shape(partitions) -> list[tuple[bool, list[str]]]:
    return [(partition.safe, [node.name for node in partition.nodes]) for partition in partitions]


def test_wholly_safe_graph_is_left_alone_whatever_its_size():
    gm = make_fx(lambda x: (x + 1, None, 3, x))(torch.ones(2))
    partitions, plan = check(gm, refuse_packets(), [torch.ones(2)], min_ops=99)
    assert [partition.safe for partition in partitions] == [True]
    assert plan.calls[0].module is gm


def test_unsafe_op_in_the_middle_and_values_that_skip_a_part():
    def f(x):
        a = x + 1
        b = a.sin()
        return a * b, a

    gm = make_fx(f)(torch.ones(3))
    partitions, plan = check(gm, refuse_packets(aten.sin), [torch.randn(3)])
    assert shape(partitions) == [(True, ["add"]), (False, ["sin"]), (True, ["mul"])]
    assert [call.outputs for call in plan.calls] == [(1,), (2,), (3,)]
    assert [call.last_use for call in plan.calls] == [(0,), (), (2,)]  # slot 1 is returned
    assert plan.output_slots == (3, 1)


def test_mutation_stays_behind_an_earlier_read():
    def f(x):
        before = x.sin()
        middle = before.cos()
        x.add_(1)
        after = x.sin()
        x.mul_(2)
        return middle + after

    gm = make_fx(f)(torch.ones(3))
    for packets in ([aten.sin], [aten.add_], [aten.cos, aten.mul_], [aten.add_, aten.mul_, aten.add]):
        check(gm, refuse_packets(*packets), [torch.randn(3)])


def test_part_that_only_mutates_is_kept():
    def f(x, y):
        y.add_(x.sin())
        return (x.cos(),)

    gm = make_fx(f)(torch.ones(3), torch.ones(3))
    partitions, plan = check(gm, refuse_packets(aten.cos), [torch.randn(3), torch.randn(3)])
    assert shape(partitions)[0] == (True, ["sin", "add_"])
    assert plan.calls[0].outputs == ()


def test_view_taken_in_one_part_and_written_in_another():
    def f(x):
        row = x.select(0, 1)
        y = x.sin()
        row.mul_(3)
        return x + y

    gm = make_fx(f)(torch.ones(3, 3))
    partitions, _ = check(gm, refuse_packets(aten.sin), [torch.randn(3, 3)])
    assert shape(partitions)[0] == (False, ["select", "sin"])  # a leading neutral node joins what follows
    check(gm, refuse_packets(aten.mul_), [torch.randn(3, 3)])


def test_getitem_stays_with_its_producer():
    def f(x):
        values, indices = aten.sort.default(x)
        s = x.sin()
        return values + s, indices

    gm = make_fx(f)(torch.ones(4))
    # Move the getitems behind the refused op: they must still end up next to the sort.
    sin = next(node for node in gm.graph.nodes if node.target is aten.sin.default)
    for node in [node for node in gm.graph.nodes if node.target is operator.getitem]:
        sin.append(node)
    gm.recompile()
    partitions, _ = check(gm, refuse_packets(aten.sin), [torch.randn(4)])
    assert [partition.safe for partition in partitions] == [True, False, True]
    assert sum(node.target is operator.getitem for node in partitions[0].nodes) == 2


def test_getitem_of_a_leading_view_does_not_leave_the_tuple_behind():
    def f(x):
        left, right = aten.split.Tensor(x, 2)
        return left.sin() + right.cos()

    gm = make_fx(f)(torch.ones(4))
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes["sin"].append(nodes["getitem_1"])
    gm.recompile()
    _, plan = check(gm, refuse_packets(aten.sin), [torch.randn(4)])
    assert not any(isinstance(v, tuple) for v in run(plan, [torch.ones(4)]))


def test_literals_duplicates_inputs_and_unused_inputs_in_the_output():
    def f(x, unused, y):
        a = x.sin() + 1
        return a, None, 7, a, y, x

    gm = make_fx(f)(torch.ones(2), torch.ones(2), torch.ones(2))
    _, plan = check(gm, refuse_packets(aten.sin), [torch.randn(2) for _ in range(3)])
    assert plan.output_slots[1:3] == (Const(None), Const(7))
    assert plan.output_slots[0] == plan.output_slots[3]
    assert 1 in plan.calls[0].last_use


def test_bare_and_nested_outputs():
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (x,))
    graph.output(y)
    _, plan = check(GraphModule({}, graph), refuse_packets(), [torch.randn(2)])
    assert len(plan.output_slots) == 1
    graph.output_node().args = ((y, [y]),)
    gm = GraphModule({}, graph)
    with pytest.raises(PgraphError, match="nested"):
        extract(gm, scan(graph, refuse_packets(), min_ops=1))


def test_missing_nodes_are_told():
    gm = make_fx(lambda x: x.sin().cos())(torch.ones(2))
    partitions = scan(gm.graph, refuse_packets(aten.sin), min_ops=1)
    with pytest.raises(PgraphError, match="misses"):
        extract(gm, partitions[:1])


def test_graph_without_ops():
    gm = make_fx(lambda x: (x, None))(torch.ones(2))
    partitions, plan = check(gm, refuse_packets(), [torch.ones(2)])
    assert partitions == []
    assert plan.calls == ()


def test_attributes_are_copied_into_each_part_that_reads_them():
    weight = torch.tensor([1.0, 2.0])

    def f(x):
        return (x * weight).sin() * weight, weight

    gm = make_fx(f)(torch.ones(2))
    _, plan = check(gm, refuse_packets(aten.sin), [torch.randn(2)])
    assert [bool(list(c.module.graph.find_nodes(op="get_attr"))) for c in plan.calls] == [True, False, True]
    assert isinstance(plan.output_slots[1], Const)


def test_small_runs_join_their_unsafe_neighbours():
    def f(x):
        return (x.sin() + 1).sin().cos().tan().exp()

    gm = make_fx(f)(torch.ones(2))
    partitions, _ = check(gm, refuse_packets(aten.sin), [torch.randn(2)], min_ops=2)
    assert shape(partitions) == [(False, ["sin", "add", "sin_1"]), (True, ["cos", "tan", "exp"])]
    assert [reason.code for reason in partitions[0].reasons] == ["marked", "too-small", "marked"]
    assert str(partitions[0].reasons[1]) == (
        "[too-small] 1 op between uncaptured ones cannot pay for a launch (min_ops is 2). "
        "Fix: capture more around them, or lower min_ops"
    )


def test_run_of_views_only_is_never_a_part_of_its_own():
    def f(x):
        return aten.sin.default(aten.sin.default(x).view(-1)).view(2, 1)

    gm = make_fx(f)(torch.ones(2))
    partitions, _ = check(gm, refuse_packets(aten.sin), [torch.randn(2)], min_ops=0)
    assert len(partitions) == 1
    assert all(reason.code == "marked" for reason in partitions[0].reasons)


def seeded_graph(draw_first: bool) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.cos.default, (x,))
    if draw_first:
        y = graph.call_function(aten.bernoulli.default, (y,))
    seeds = graph.call_function(torch.ops.prims.inductor_seeds.default, (2, torch.device("cpu")))
    graph.output((graph.call_function(aten.add.Tensor, (y, seeds)),))
    return GraphModule({}, graph)


@pytest.mark.parametrize("code", ["rng", "marked"])
def test_seeds_are_drawn_first_unless_something_drew_before(code: str):
    """Whatever the op that drew is refused for."""
    refuse = refuse_packets(torch.ops.prims.inductor_seeds, aten.bernoulli, code=code)
    assert shape(scan(seeded_graph(False).graph, refuse, min_ops=1)) == [
        (False, ["inductor_seeds_default"]),
        (True, ["cos_default", "add_tensor"]),
    ]
    partitions = scan(seeded_graph(True).graph, refuse, min_ops=1)
    assert shape(partitions)[1] == (False, ["bernoulli_default", "inductor_seeds_default"])


def test_every_symbol_of_a_part_is_an_input_of_its_own():
    """Without this Inductor says 'For 2*s77, expected [s77] to have been codegen-ed'."""

    def f(n, x):
        doubled = torch.cat([x, x])
        y = doubled.sin()
        return y + 1, doubled.cos() * n

    gm = make_fx(f, tracing_mode="symbolic")(5, torch.ones(5))
    # make_fx gives the number as a symbol of its own; AOTAutograd gives the size itself.
    by_name = {node.name: node for node in gm.graph.nodes}
    size = by_name["x_1"].meta["val"].shape[0]
    by_name["n_1"].meta["val"] = size
    _, plan = check(gm, refuse_packets(aten.sin), [5, torch.randn(5)])
    for call in plan.calls:
        values = [node.meta["val"] for node in call.module.graph.find_nodes(op="placeholder")]
        plain = [v.node.expr for v in values if isinstance(v, torch.SymInt)]
        assert size.node.expr in plain
        assert 0 in call.inputs
        output = call.module.graph.output_node()
        assert output.meta["user_visible_output_idxs"] == list(range(len(call.outputs)))


def test_symbolic_shapes_and_numbers_cross_parts():
    def f(x, y):
        n = x.shape[0] * 2
        z = aten.sin.default(y)
        return z.new_ones(n + 1), z.view(x.shape[0], -1), n

    gm = make_fx(f, tracing_mode="symbolic")(torch.ones(3), torch.ones(6))
    for packets in ([aten.sin], [aten.new_ones], [aten.view], [aten.sym_size]):
        check(gm, refuse_packets(*packets), [torch.randn(3), torch.randn(6)])
        check(gm, refuse_packets(*packets), [torch.randn(4), torch.randn(8)])


def test_with_the_real_rules_on_the_host_device():
    def f(x, mask):
        y = (x * 2).relu()
        picked = aten.index.Tensor(y, [mask])
        return picked.sum() + y.sum()

    mask = torch.tensor([True, False, True])
    graph = make_fx(f)(torch.ones(3), mask)
    partitions, _ = check(graph, lambda node: refusal(node, device_type="cpu"), [torch.randn(3), mask])
    assert [partition.safe for partition in partitions] == [True, False, True]
    assert [reason.code for reason in partitions[1].reasons] == ["bool-index"]


UNARY = ("sin", "cos", "neg_", "add_one_", "view", "sort", "split", "copy_in")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(UNARY), st.integers(0, 30), st.booleans()), min_size=1, max_size=14),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_any_chain_with_any_refusals_computes_the_same(chain, min_ops, random):
    def f(x, y):
        values = [x, y]
        for name, pick, _ in chain:
            v = values[pick % len(values)]
            if name == "neg_":
                values.append(aten.neg_.default(v))
            elif name == "add_one_":
                values.append(aten.add_.Scalar(v, 1))
            elif name == "view":
                values.append(aten.select.int(v.view(2, 2), 0, pick % 2).view(-1).repeat(2))
            elif name == "sort":
                values.extend(aten.sort.default(v)[:1])
            elif name == "split":
                left, right = aten.split.Tensor(v, 2)
                values.append(torch.cat([right, left]))
            elif name == "copy_in":
                values.append(aten.copy_.default(x, v))
            else:
                values.append(getattr(aten, name).default(v))
        return [*random.sample(values, k=min(3, len(values))), None]

    state = random.getstate()
    gm = make_fx(f)(torch.ones(4), torch.ones(4))
    random.setstate(state)
    # Dead reads must stay dead or alive alike: no dead code is removed on either side.
    ops = [node for node in gm.graph.nodes if node.op == "call_function"]
    refused = {node for node in ops if random.random() < 0.3}

    def refuse(node: Node) -> Reason | None:
        return Reason("marked", node.name, "none") if node in refused else None

    partitions, plan = check(gm, refuse, [torch.randn(4), torch.randn(4)], min_ops)
    ordered = [
        node for partition in partitions for node in partition.nodes if node.target is not operator.getitem
    ]
    assert ordered == [node for node in ops if node.target is not operator.getitem]
    if len(partitions) > 1:
        for partition in partitions:
            assert not partition.safe or sum(True for node in partition.nodes) >= min_ops
            assert partition.safe or partition.reasons
    assert all(a.safe != b.safe for a, b in itertools.pairwise(partitions))
    assert len(plan.calls) == len(partitions)
