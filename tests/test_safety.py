"""Each rule refuses its op and lets the nearest neighbour through."""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Callable

import expecttest
import pytest
import torch
from torch.fx import Node

import torch._inductor.inductor_prims  # isort: skip  # registers prims.inductor_*
from support import host, launching, same
from support_rules import CPU, CUDA, Bench, Case, grouped, index, plain, relu
from table_rules import CASES
from torch._higher_order_ops.out_dtype import out_dtype

import pgraph
from pgraph.errors import OptionError
from pgraph.ops import op_rules
from pgraph.ops.fx import is_neutral, user_line
from pgraph.ops.safety import RULES, _marked, mark_unsafe, refusal, unmark_unsafe

aten = torch.ops.aten


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.name}")
def test_rule_and_its_neighbour(case: Case):
    found = refusal(case.refused(Bench()), device_type="cuda")
    assert found is not None
    assert found.code == case.code
    assert found.fix
    assert not found.sentence.endswith(".")
    assert refusal(case.accepted(Bench()), device_type="cuda") is None


def test_every_rule_has_a_case():
    fired = {_marked, op_rules.listed}  # have tests of their own
    for case in CASES:
        node = case.refused(Bench())
        fired.add(next(rule for rule in RULES if rule(node, "cuda")))
    assert fired == set(RULES)


def test_ops_listed_for_inductor() -> None:
    """By packet and by overload."""
    node = plain(torch.ops.pgraph_test.plain.default)(Bench())
    for name in ("pgraph_test::plain", "pgraph_test::plain.default"):
        with torch._inductor.config.patch(custom_should_partition_ops=[name]):
            found = refusal(node, device_type="cuda")
            assert found is not None
            assert found.code == "marked"
            assert refusal(relu(Bench()), device_type="cuda") is None
    assert refusal(node, device_type="cuda") is None


@pytest.mark.parametrize(("major", "safe"), [(8, False), (9, True), (10, True), (12, False)])
def test_grouped_products_need_a_kernel(major: int, safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (major, 0))
    assert (refusal(grouped(Bench()), device_type="cuda") is None) == safe
    assert refusal(grouped(Bench(), offsets=False), device_type="cuda") is None


def test_structural_nodes_are_never_refused():
    bench = Bench()
    x = bench.tensor(4, device="cpu")
    attribute = bench.attribute("weight", torch.ones(1))
    for node in (x, attribute, bench.graph.output((x,))):
        assert refusal(node, device_type="cuda") is None
        assert is_neutral(node)


def test_neutral_nodes():
    bench = Bench()
    x = bench.tensor(4, 4)
    neutral = [
        bench.call(aten.view.default, x, [16]),
        bench.call(aten.transpose.int, x, 0, 1),
        bench.call(aten.sym_size.int, x, 0),
        bench.call(operator.mul, 3, 4),
        bench.call(operator.getitem, x, 0, like=x),
    ]
    working = [relu(bench), bench.call(aten.clone.default, x), bench.call(aten.contiguous.default, x, like=x)]
    assert all(map(is_neutral, neutral))
    assert not any(map(is_neutral, working))
    assert not is_neutral(bench.call(operator.add, bench.unbacked(), 1))


def test_host_driver_captures_the_cpu():
    bench = Bench()
    node = bench.call(aten.relu.default, bench.tensor(4, device="cpu"))
    assert refusal(node, device_type="cpu") is None
    assert refusal(node, device_type="cuda").code == "other-device"
    assert refusal(relu(bench), device_type="cpu").code == "other-device"


def test_random_ops_when_the_launcher_moves_the_generator():
    bench = Bench()
    node = bench.call(aten.rand.default, [4], device=CUDA)
    assert refusal(node, device_type="cuda", rng_is_safe=True) is None
    assert refusal(node, device_type="cuda").code == "rng"


def test_higher_order_ops_are_for_inductor() -> None:
    """A capture of ATen code cannot watch them: they stay outside, the rest of their part does not."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return out_dtype(aten.mm.default, torch.int32, a, b).sin() + 1

    a, b = (torch.ones(3, 3, dtype=torch.int8) for _ in range(2))
    compiled = host(fn)
    with launching(2):
        for _ in range(3):
            same(compiled(a, b), fn(a, b))
    outside = [p.facts for p in pgraph.report().partitions if not p.facts.safe]
    assert ["out_dtype becomes kernels in Inductor's code" in str(facts.reasons) for facts in outside] == [
        True
    ]


def test_marks_match_every_overload_and_may_be_repeated():
    bench = Bench()
    nodes = [plain(aten.add.Scalar, 1)(bench), plain(aten.add.Tensor, bench.tensor(4, 4))(bench)]
    for mark in (aten.add, aten.add.Tensor, "aten::add"):
        for _ in range(2):
            mark_unsafe(mark, "counts its calls", "count outside")
        try:
            assert [refusal(node, device_type="cuda").code for node in nodes] == ["marked", "marked"]
        finally:
            unmark_unsafe(mark)
        assert all(refusal(node, device_type="cuda") is None for node in nodes)
    unmark_unsafe("aten::add")


@pytest.mark.parametrize("op", ["add", "aten::add.Tensor", "", 3, torch.add])
def test_marks_that_name_no_op(op):
    with pytest.raises(OptionError, match="Fix: pass"):
        mark_unsafe(op, "a", "b")


@pytest.mark.parametrize("texts", [("", "b"), ("a", " "), (None, "b")])
def test_marks_need_texts(texts):
    with pytest.raises(OptionError, match="say it in a sentence"):
        mark_unsafe("my::op", *texts)


def test_user_line_is_the_innermost_frame_of_the_users_own():
    node = relu(Bench())
    assert user_line(node) is None
    inside = f'File "{torch.__file__}", line 9, in relu\n    pass'
    node.meta["stack_trace"] = (
        '  File "/home/me/train.py", line 3, in <module>\n    main()\n'
        '  File "/home/me/model.py", line 17, in forward\n    x.relu()\n'
        f'  {inside}\n  File "<string>", line 1, in <lambda>\n'
    )
    assert user_line(node) == "/home/me/model.py:17"
    node.meta["stack_trace"] = inside
    assert user_line(node) is None


class TestTexts(expecttest.TestCase):
    def text(self, build: Callable[[Bench], Node]) -> str:
        node = build(Bench())
        node.meta["stack_trace"] = 'File "/home/me/model.py", line 17, in forward\n'
        return textwrap.fill(str(refusal(node, device_type="cuda")), 100)

    def test_bool_index(self) -> None:
        self.assertExpectedInline(
            self.text(lambda b: index(b, aten.index_put.default, torch.bool)),
            """\
[bool-index] aten::index_put is indexed by the mask p1 (bool[4] on cuda:0), which hides a nonzero at
/home/me/model.py:17. Fix: use torch.where, masked_fill, or integer indices""",
        )

    def test_cpu_scalar(self) -> None:
        self.assertExpectedInline(
            self.text(lambda b: b.call(aten.mul.Tensor, b.tensor(4), b.tensor(device="cpu"))),
            """\
[cpu-scalar] aten::mul takes the CPU scalar p1 (float32[] on cpu), whose value would be frozen at
/home/me/model.py:17. Fix: create it on cuda, or pass a Python number""",
        )

    def test_device_copy(self) -> None:
        self.assertExpectedInline(
            self.text(lambda b: b.call(aten._to_copy.default, b.tensor(4), device=CPU)),
            """\
[device-copy] aten::_to_copy copies between cpu and cuda at /home/me/model.py:17. Fix: create the
tensor on cuda, or copy before the compiled region (from pinned memory with non_blocking=True it
need not wait; pinned or unpinned, it stays outside the graph)""",
        )

    def test_nonzero(self) -> None:
        self.assertExpectedInline(
            self.text(plain(aten.nonzero.default)),
            """\
[dynamic-shape] aten::nonzero has a result whose shape depends on data at /home/me/model.py:17. Fix:
use torch.where(mask, a, b), or torch.nonzero_static with a size""",
        )

    def test_random(self) -> None:
        self.assertExpectedInline(
            self.text(lambda b: b.call(aten.rand.default, [4], device=CUDA)),
            """\
[rng] aten::rand draws from the global generator at /home/me/model.py:17. Fix: use the default
codegen, which passes seeds as an input, or set the dropout to 0""",
        )


# -- marks that can do nothing


def test_a_mark_on_an_op_that_pytorch_does_not_have() -> None:
    with pytest.raises(OptionError, match=r"Fix: did you mean aten::cumsum\?"):
        mark_unsafe("aten::cumsumm", "a", "b")


@pytest.mark.parametrize("op", ["aten::linear", "aten::einsum", aten.matmul])
def test_a_mark_on_a_composite_op(op) -> None:
    with pytest.raises(OptionError, match=r"composite.*Fix: mark what it becomes"):
        mark_unsafe(op, "a", "b")


def test_a_mark_on_an_op_that_is_to_come(caplog) -> None:
    for _ in range(2):  # a module may be imported twice
        mark_unsafe("to_come::op", "a", "b")
    unmark_unsafe("to_come::op")
    assert [r.getMessage().count("no such op is registered yet. Fix: ") for r in caplog.records] == [1]


def test_a_mark_that_comes_too_late(caplog) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="pgraph", options={"driver": "host"})
    compiled(torch.ones(3))
    for _ in range(2):
        mark_unsafe("aten::sin", "a", "b")
        unmark_unsafe("aten::sin")
        torch._dynamo.reset()
    told = [r.getMessage() for r in caplog.records if "compiled already" in r.getMessage()]
    assert len(told) == 1
    assert "Fix: mark it before the first call" in told[0]


def test_a_mark_that_is_taken_back_too_late(caplog) -> None:
    mark_unsafe("aten::sin", "a", "b")
    compiled = torch.compile(lambda x: x.sin() + 1, backend="pgraph", options={"driver": "host"})
    compiled(torch.ones(3))
    unmark_unsafe("aten::sin")
    mark_unsafe("aten::sin", "a", "b")
    torch._dynamo.reset()
    unmark_unsafe("aten::sin")
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("unmark_unsafe")]
    assert len(told) == 1
    assert "Fix: call torch._dynamo.reset()" in told[0]


def test_a_mark_that_was_never_made(caplog) -> None:
    mark_unsafe("aten::cumsum", "a", "b")
    unmark_unsafe("aten::cumsumm")
    unmark_unsafe("aten::cumsum")
    (told,) = [r.getMessage() for r in caplog.records]
    assert "is not marked, so nothing changes. Fix: did you mean aten::cumsum?" in told


def test_each_function_speaks_in_its_own_name() -> None:
    with pytest.raises(OptionError, match=r"^mark_unsafe: 'sin' is no op"):
        mark_unsafe("sin", "a", "b")
    with pytest.raises(OptionError, match=r"^unmark_unsafe: 'sin' is no op"):
        unmark_unsafe("sin")
