"""Checkpointed attention: captured where it draws nothing, left alone where it draws."""

from __future__ import annotations

import copy
import operator
import pathlib
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from support import TIGHT, Block, host, launching, same
from torch import Tensor, nn
from torch._prims.rng_prims import (
    graphsafe_run_with_rng_state,
    run_and_save_rng_state,
    run_with_rng_state,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pgraph
from pgraph import backend, compat
from pgraph.compiler import compile_graph
from pgraph.compiler.context import Context
from pgraph.drivers import choice
from pgraph.native import libraries
from pgraph.options import parse
from pgraph.rewrites.checkpoint_rng import unwrap

aten = torch.ops.aten

FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
STACK = 'File "/home/me/model.py", line 17, in forward\n'


# -- the pass ------------------------------------------------------------------------------------


class Made:
    """A graph made by hand around a wrapper, as the partitioner leaves it."""

    def __init__(self, device: str = "cuda") -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.device = device
        with self.mode:
            qkv = [torch.empty(2, 2, 8, 16, device=device, dtype=torch.bfloat16) for _ in range(3)]
        self.qkv = [self.input(f"primals_{i + 1}", value) for i, value in enumerate(qkv)]

    def input(self, name: str, value: Any) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def state(self, name: str) -> Node:
        with self.mode:
            return self.input(name, torch.empty(16, dtype=torch.uint8))

    def generator(self, name: str) -> Node:
        return self.input(name, torch.Generator())

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def item(self, node: Node, index: int, val: Any = None) -> Node:
        taken = self.call(operator.getitem, node, index)
        taken.meta = {"val": val, "stack_trace": STACK, "original_aten": FLASH}
        return taken

    def value(self, op: Any, *rest: Any, **kwargs: Any) -> Any:
        with self.mode:
            return op(*(node.meta["val"] for node in self.qkv), *rest, **kwargs)

    def saving(self, op: Any, *rest: Any, **kwargs: Any) -> tuple[Node, Node]:
        """`run_and_save_rng_state` around the op: the state, and the op's first result."""
        value = self.value(op, *rest, **kwargs)
        pair = self.call(run_and_save_rng_state, op, *self.qkv, *rest, **kwargs)
        with self.mode:
            state = self.item(pair, 0, torch.empty(16, dtype=torch.uint8))
        return state, self.item(self.item(pair, 1, value), 0, value[0])

    def graphsafe(self, op: Any, *rest: Any, rng_state: Node, **kwargs: Any) -> Node:
        node = self.call(graphsafe_run_with_rng_state, op, *self.qkv, *rest, rng_state=rng_state, **kwargs)
        return self.item(node, 0, self.value(op, *rest, **kwargs)[0])

    def module(self, *results: Any) -> GraphModule:
        self.graph.output(tuple(results)).meta["user_visible_output_idxs"] = [0]
        return GraphModule(nn.Module(), self.graph)


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def lines(gm: GraphModule) -> str:
    return "\n".join(
        f"{node.name} = {getattr(node.target, '__name__', node.target)}{node.args} {dict(node.kwargs)}"
        for node in gm.graph.nodes
    )


class TestBeforeAndAfter(expecttest.TestCase):
    def test_forward_on_cuda(self) -> None:
        made = Made()
        generator = made.generator("fwd_rng_state_0")
        out = made.graphsafe(FLASH, 0.0, True, rng_state=generator, scale=0.5)
        gm = made.module(out, *made.qkv)
        before = lines(gm)
        found = unwrap(gm)
        assert found is not None
        assert lines(gm) == before, "the original was changed"
        self.assertExpectedInline(
            f"{before}\n\n{lines(found.module)}",
            """\
primals_1 = primals_1() {}
primals_2 = primals_2() {}
primals_3 = primals_3() {}
fwd_rng_state_0 = fwd_rng_state_0() {}
graphsafe_run_with_rng_state = graphsafe_run_with_rng_state(<OpOverload(op='aten._scaled_dot_product_flash_attention', overload='default')>, primals_1, primals_2, primals_3, 0.0, True) {'rng_state': fwd_rng_state_0, 'scale': 0.5}
getitem = getitem(graphsafe_run_with_rng_state, 0) {}
output = output((getitem, primals_1, primals_2, primals_3),) {}

primals_1 = primals_1() {}
primals_2 = primals_2() {}
primals_3 = primals_3() {}
_scaled_dot_product_flash_attention_default = _scaled_dot_product_flash_attention.default(primals_1, primals_2, primals_3, 0.0, True) {'scale': 0.5}
getitem = getitem(_scaled_dot_product_flash_attention_default, 0) {}
output = output((getitem, primals_1, primals_2, primals_3),) {}""",  # noqa: E501
        )

    def test_forward_that_saves_the_state(self) -> None:
        made = Made("cpu")
        state, out = made.saving(ON_CPU, 0.0, True)
        found = unwrap(made.module(out, state))
        assert found is not None
        self.assertExpectedInline(
            lines(found.module),
            """\
primals_1 = primals_1() {}
primals_2 = primals_2() {}
primals_3 = primals_3() {}
_scaled_dot_product_flash_attention_for_cpu_default = _scaled_dot_product_flash_attention_for_cpu.default(primals_1, primals_2, primals_3, 0.0, True) {}
getitem_2 = getitem(_scaled_dot_product_flash_attention_for_cpu_default, 0) {}
output = output((getitem_2, None),) {}""",  # noqa: E501
        )


def test_the_op_says_what_it_said_before_it_was_wrapped() -> None:
    made = Made()
    _, out = made.saving(FLASH, 0.0)
    found = unwrap(made.module(out))
    assert found is not None
    (plain,) = (node for node in found.module.graph.nodes if node.target is FLASH)
    original = out.args[0].meta  # type: ignore[union-attr]
    assert plain.meta == original
    assert found.module.graph.output_node().meta == {"user_visible_output_idxs": [0]}


@pytest.mark.parametrize("op", [FLASH, EFFICIENT, CUDNN])
def test_what_nobody_noted_is_computed_again(op: Any) -> None:
    """The partitioner leaves the backward's wrapper and the graph-safe one without a word."""
    made = Made()
    rest = (0.0,) if op is FLASH else (None, True, 0.0)
    wrapped = made.call(run_with_rng_state, made.state("rng_state_output_0"), op, *made.qkv, *rest)
    want = made.value(op, *rest)
    found = unwrap(made.module(made.item(wrapped, 0, want[0])))
    assert found is not None
    (plain,) = (node for node in found.module.graph.nodes if node.target is op)
    assert plain.meta["stack_trace"] == STACK
    assert len(plain.meta["val"]) == len(want)
    for got, value in zip(plain.meta["val"], want, strict=True):
        assert type(got) is type(value)
        if isinstance(value, Tensor):
            assert (got.shape, got.stride(), got.dtype) == (value.shape, value.stride(), value.dtype)
            assert got.device == value.device


def attention(made: Made, op: Any, *rest: Any, **kwargs: Any) -> Node:
    return made.graphsafe(op, *rest, rng_state=made.generator("fwd_rng_state_0"), **kwargs)


def dropout(made: Made, p: Any, train: Any) -> Node:
    generator = made.generator("fwd_rng_state_0")
    node = made.call(
        graphsafe_run_with_rng_state, aten.native_dropout.default, made.qkv[0], p, train, rng_state=generator
    )
    return made.item(node, 0)


PROVED: list[tuple[str, Callable[[Made], Node]]] = [
    ("flash by position", lambda m: attention(m, FLASH, 0.0)),
    ("flash by default", lambda m: attention(m, FLASH)),
    ("flash by keyword", lambda m: attention(m, FLASH, is_causal=True, dropout_p=0.0)),
    ("flash, a whole number", lambda m: attention(m, FLASH, 0)),
    ("efficient", lambda m: attention(m, EFFICIENT, None, True, 0.0)),
    ("efficient by default", lambda m: attention(m, EFFICIENT, None, False)),
    ("cudnn", lambda m: attention(m, CUDNN, None, True, 0.0)),
    ("evaluated dropout", lambda m: dropout(m, 0.5, False)),
]
UNPROVED: list[tuple[str, Callable[[Made], Node]]] = [
    ("flash", lambda m: attention(m, FLASH, 0.1)),
    ("efficient", lambda m: attention(m, EFFICIENT, None, False, 0.1)),
    ("efficient, log-sum-exp is no dropout", lambda m: attention(m, EFFICIENT, None, 0, 0.5)),
    ("cudnn", lambda m: attention(m, CUDNN, None, True, 0.1)),
    ("dropout", lambda m: dropout(m, 0.5, True)),
    ("dropout of nothing, which draws on CUDA", lambda m: dropout(m, 0.0, True)),
    ("dropout that trains by default", lambda m: dropout(m, 0.0, None)),
    ("dropout, a number in place of a truth", lambda m: dropout(m, 0.5, 0)),
]


@pytest.mark.parametrize(("name", "make"), PROVED, ids=[name for name, _ in PROVED])
def test_proved(name: str, make: Callable[[Made], Node]) -> None:
    made = Made()
    found = unwrap(made.module(make(made)))
    assert found is not None
    assert graphsafe_run_with_rng_state not in targets(found.module)
    assert found.dropped == (3,)


@pytest.mark.parametrize(("name", "make"), UNPROVED, ids=[name for name, _ in UNPROVED])
def test_not_proved(name: str, make: Callable[[Made], Node]) -> None:
    made = Made()
    gm = made.module(make(made))
    before = lines(gm)
    assert unwrap(gm) is None
    assert lines(gm) == before


def test_a_number_from_outside_proves_nothing() -> None:
    made = Made()
    number = made.input("p", 0.0)
    node = made.call(
        graphsafe_run_with_rng_state, FLASH, *made.qkv, number, rng_state=made.generator("fwd_rng_state_0")
    )
    assert unwrap(made.module(made.item(node, 0))) is None


def test_a_state_that_is_computed_with_is_kept() -> None:
    made = Made("cpu")
    state, out = made.saving(ON_CPU, 0.0)
    assert unwrap(made.module(out, made.call(aten.clone.default, state))) is None


def test_only_generators_that_nothing_reads_are_left_out() -> None:
    """One op draws, one does not; and a tensor behind a generator keeps its position."""
    made = Made()
    first, second = made.generator("fwd_rng_state_0"), made.generator("fwd_rng_state_1")
    results = [
        made.graphsafe(FLASH, 0.0, rng_state=first),
        made.graphsafe(FLASH, 0.1, rng_state=second),
    ]
    found = unwrap(made.module(*results))
    assert found is not None
    assert found.dropped == (3,)
    assert targets(found.module).count(graphsafe_run_with_rng_state) == 1
    assert found.inputs(["q", "k", "v", "first", "second"]) == ["q", "k", "v", "second"]

    made = Made()
    generator, behind = made.generator("fwd_rng_state_0"), made.state("tangents_1")
    found = unwrap(made.module(made.graphsafe(FLASH, 0.0, rng_state=generator), behind))
    assert found is not None
    assert found.dropped == ()


# -- what runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_generator_among_the_arguments(last: bool, in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken out in front, and where it is not, it is nothing that a launch would ask for."""
    if not in_c:
        monkeypatch.setattr(libraries, "load_call", lambda: None)
    made = Made("cpu")
    generator = made.generator("fwd_rng_state_0")
    inputs = [*made.qkv, generator]
    if not last:
        inputs.append(made.state("tangents_1"))
    doubled = made.call(aten.mul.Tensor, made.graphsafe(ON_CPU, 0.0, True, rng_state=generator), 2)
    doubled.meta["val"] = made.qkv[0].meta["val"]
    gm = made.module(doubled)
    options = parse({"driver": "host", "codegen": "aten", "min_ops": 1})
    values = [node.meta["val"] for node in inputs]
    context = Context(choice.choose("host", gm), options, "forward", backend._compile_aten)
    run = compile_graph.compile_partitions(gm, values, context)

    def call() -> tuple[Tensor, Tensor]:
        qkv = [torch.randn(2, 2, 8, 16, dtype=torch.bfloat16) for _ in range(3)]
        # Another generator each time: nobody may compare it with the one of the capture.
        args: list[Any] = [*qkv, torch.Generator().manual_seed(7)]
        if not last:
            args.append(torch.zeros(16, dtype=torch.uint8))
        (got,) = run(args)
        return got, functional.scaled_dot_product_attention(*qkv, is_causal=True) * 2

    call()
    with launching(3):
        for _ in range(3):
            got, want = call()
            same(got, want)


class Checkpointed(nn.Module):
    """Two blocks, each recomputed in the backward; dropout in the attention, if there is any, is the same."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, 2) for _ in range(2))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        if self.p:
            x = checkpoint(functional.dropout, x, self.p, use_reentrant=False)
        return x


def losses(model: nn.Module, run: Any, steps: int = 4) -> list[Any]:
    optimizer, trace = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for step in range(steps):
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        loss = run(x).square().mean()
        loss.backward()
        trace.append([loss.detach(), x.grad, [p.grad.clone() for p in model.parameters()]])  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return trace


@pytest.mark.parametrize(("codegen", "dynamic"), [("aten", False), ("aten", True), ("inductor", False)])
def test_checkpointed_attention_is_captured_whole(
    codegen: str, dynamic: bool, inductor_cache: pathlib.Path
) -> None:
    plain = Checkpointed()
    twin, third = copy.deepcopy(plain), copy.deepcopy(plain)
    want = losses(plain, plain)
    reference = losses(third, torch.compile(third, backend="aot_eager", dynamic=dynamic))
    # The size of the generator's state is a symbol too, and no size of the program.
    sizes = {"capture_sizes": (2, 6)} if dynamic else {}
    run = host(twin, codegen, dynamic=dynamic, require_full_capture=True, **sizes)
    with launching(6):
        got = losses(twin, run)
    same(got, want, **({"rtol": 1e-6, "atol": 1e-7} if codegen == "aten" else TIGHT))
    if codegen == "aten":
        same(got, reference)
    report = pgraph.report()
    assert report.captures == 2, str(report)
    assert [partition.name.rsplit(" ", 1)[0] for partition in report.partitions] == ["forward", "backward"]
    assert not report.outside, str(report)


def test_two_forwards_before_their_backwards() -> None:
    """What each saves is its own."""
    plain = Checkpointed()
    twin = copy.deepcopy(plain)
    run = host(twin)

    def both(model: nn.Module, call: Any) -> list[Any]:
        trace = []
        for step in range(3):
            inputs = [torch.full((2, 6, 16), float(step + i)).cos().requires_grad_() for i in range(2)]
            outs = [call(x) for x in inputs]
            for out in outs:
                out.sin().sum().backward()
            trace.append([x.grad for x in inputs])
        return trace

    want = both(plain, plain)
    with launching(8):
        got = both(twin, run)
    same(got, want, rtol=1e-6, atol=1e-7)


def test_a_backward_that_others_run_gets_a_state_that_can_be_set() -> None:
    """Compiled autograd traces the backward as it was, wrapper included, with another backend."""
    model = Checkpointed()
    run = host(model, require_full_capture=False)
    x = torch.randn(2, 6, 16, requires_grad=True)
    (want,) = torch.autograd.grad(model(x).square().mean(), x)
    before = torch.get_rng_state()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        for _ in range(3):
            (got,) = torch.autograd.grad(run(x).square().mean(), x)
            same(got, want, rtol=1e-6, atol=1e-7)
    same(torch.get_rng_state(), before)


def attend(q: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q * 2, q, q, dropout_p=0.3) * q


def test_attention_with_dropout_stays_outside_and_draws_the_same_again() -> None:
    """As aot_eager, under one seed: results and gradients, and both change from call to call."""

    def program(q: Tensor) -> Tensor:
        return checkpoint(attend, q, use_reentrant=False)

    def trace(run: Any) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(3)
        found = []
        for _ in range(4):
            q = torch.ones(2, 2, 8, 16, requires_grad=True)
            out = run(q)
            found.append((out.detach(), *torch.autograd.grad(out.sum(), q)))
        return found

    want = trace(torch.compile(program, backend="aot_eager"))
    run = host(program)
    with launching(2):
        got = trace(run)
    same(got, want)
    assert not torch.equal(got[2][1], got[3][1])
    codes = {reason.code for _, reasons in pgraph.report().outside for reason in reasons}
    assert codes & {"rng", "rng-state"}, str(pgraph.report())


def test_dropout_beside_attention_is_refused_alone() -> None:
    model = Checkpointed(p=0.5)
    run = host(model)
    for _ in range(3):
        x = torch.randn(2, 6, 16, requires_grad=True)
        out = run(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.isfinite(grad).all()
        assert 0.3 < (out == 0).float().mean() < 0.7
    reasons = [r for _, found in pgraph.report().outside for r in found]
    assert {"rng-state"} <= {r.code for r in reasons}, str(pgraph.report())
    assert not any("attention" in r.sentence for r in reasons), str(pgraph.report())


def test_plain_running_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device to capture there is nothing to gain."""
    monkeypatch.setattr(
        compile_graph, "unwrap", lambda gm: pytest.fail("a graph that nobody captures was changed")
    )
    model = Checkpointed()
    run = host(model, driver="auto")
    x = torch.randn(2, 6, 16, requires_grad=True)
    (got,) = torch.autograd.grad(run(x).sum(), x)
    same(got, torch.autograd.grad(model(x).sum(), x)[0], rtol=1e-6, atol=1e-7)
    assert compat.fake_mode_of([got]) is None
