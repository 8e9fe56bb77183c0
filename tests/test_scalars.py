"""Numbers that a call brings on the CPU go to the device together, and change no bit."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support import host, same
from support_constants import DEVICE, PARTITIONS, Compiled, OnCpu, compiled
from support_rules import CUDA, Bench
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from pgraph.compiler import assemble
from pgraph.ops.safety import refusal
from pgraph.partition.extract import extract
from pgraph.partition.scan import scan
from pgraph.rewrites import constants
from pgraph.rewrites import numbers as numbers_op

aten = torch.ops.aten
OP = torch.ops.pgraph.numbers_on_device.default


class Norm(nn.Module):
    """As many models have it: with dynamic shapes its float is an input of the graph."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.eps)).type_as(x)


NORMS = nn.Sequential(*(Norm(10.0**-k) for k in range(2, 6)))


def norms(x: Tensor) -> Tensor:
    out: Tensor = NORMS(x) * 2
    return out


def copies(gm: GraphModule) -> list[int]:
    """How many numbers each copy takes."""
    return [len(n.args[0]) for n in gm.graph.nodes if n.target is OP]


def outside(found: Compiled) -> list[list[str]]:
    """Codes of each partition that stays outside, by graph; the first partition first."""
    return [[r.code for p in parts if not p.safe for r in p.reasons] for parts in found.partitions()]


def on_cpu_of_the_device(gm: GraphModule) -> list[str]:
    """Ops on the device that still take something from the CPU."""
    return [
        n.name
        for n in gm.graph.nodes
        if n.op == "call_function"
        and n.target is not OP
        and n.meta["val"].device.type == DEVICE
        and any(
            isinstance(v := s.meta.get("val"), Tensor) and v.device.type == "cpu" for s in n.all_input_nodes
        )
    ]


def test_without_the_pass_each_use_cuts_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled(norms, torch.randn(4, 8), patch=monkeypatch, dynamic=True, cured=False)
    (parts,) = found.partitions()
    assert sum(not p.safe for p in parts) == 4


@pytest.mark.parametrize("by_inductor", [False, True])
def test_inference_is_one_copy_and_one_partition(by_inductor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    found = compiled(norms, x, patch=monkeypatch, dynamic=True, by_inductor=by_inductor)
    (gm,) = found.graphs
    assert copies(gm) == [4]
    assert not on_cpu_of_the_device(gm)
    assert outside(found) == [["cpu-scalar"]]
    assert [p.safe for p in found.partitions()[0]] == [False, True]
    floats = [torch.tensor(10.0**-k, dtype=torch.float64) for k in range(2, 6)]
    for y in (x, torch.randn(3, 8, dtype=torch.bfloat16)):
        (got,) = found.run(0, *given(gm, y, floats))
        same(got, norms(y))


def given(gm: GraphModule, x: Tensor, floats: list[Tensor]) -> list[Any]:
    """Arguments of a graph in its order: sizes, the tensor, the floats."""
    floats = list(floats)
    values = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return [len(x) if isinstance(v, torch.SymInt) else floats.pop(0) if v.dim() == 0 else x for v in values]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_backward_takes_them_from_the_device(partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, scale: float) -> Tensor:
        return torch.sin(x * scale)

    x = torch.randn(4, 8, requires_grad=True)
    found = compiled(fn, x, 0.25, patch=monkeypatch, dynamic=True, partition=partition)
    forward, backward = found.graphs
    assert [copies(forward), copies(backward)] == [[1], []]
    assert not [*on_cpu_of_the_device(forward), *on_cpu_of_the_device(backward)]
    assert outside(found) == [["cpu-scalar"], []]
    scale = torch.tensor(0.7, dtype=torch.float64)
    got, *saved = found.run(0, *given(forward, x.detach(), [scale]))
    want = fn(x, 0.7)
    same(got, want.detach())
    grad = torch.randn(4, 8)
    kept = [value for value in saved if isinstance(value, Tensor)]
    sizes = [value for value in saved if not isinstance(value, Tensor)]
    results = found.run(1, *sizes, *kept, grad)
    gradient = next(r for r in results if r is not None and r.dim())
    torch.testing.assert_close(gradient, torch.autograd.grad(want, x, grad)[0])


def test_arithmetic_of_scalars_stays_on_the_cpu_and_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, s: Tensor) -> Tensor:
        y = x + 1
        return y.sin() * (s * 3 + s.exp())

    found = compiled(fn, torch.randn(7), torch.tensor(0.1), patch=monkeypatch)
    (gm,) = found.graphs
    assert [p.safe for p in found.partitions()[0]] == [False, True]
    assert copies(gm) == [1]
    for number in (0.1, -2.0):
        x, s = torch.randn(7), torch.tensor(number)
        same(found.run(0, x, s)[0], fn(x, s))


def test_one_copy_for_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor, n: Tensor) -> Tensor:
        return torch.where(x > a, x * b, x) + torch.arange(7, device=x.device) * n

    scalars = [torch.tensor(0.5), torch.tensor(2.0), torch.tensor(3)]
    found = compiled(fn, torch.randn(7), *scalars, patch=monkeypatch)
    (gm,) = found.graphs
    assert sorted(copies(gm)) == [1, 2]
    x = torch.randn(7)
    same(found.run(0, x, *scalars)[0], fn(x, *scalars))


@pytest.mark.parametrize(
    ("fn", "dtype", "by_inductor"),
    [
        (torch.mul, torch.bfloat16, True),  # eager rounds the product alone, not the scalar
        (torch.mul, torch.float64, True),
        (torch.div, torch.float32, False),  # ATen multiplies by the reciprocal
        (torch.pow, torch.float32, False),  # ATen asks whether it is 2
    ],
)
def test_scalars_that_would_be_rounded_elsewhere_stay(
    fn: Callable[..., Tensor], dtype: torch.dtype, by_inductor: bool
) -> None:
    bench = Bench()
    kind = torch.float32 if dtype is torch.float64 else dtype
    x, scale = bench.tensor(4, dtype=kind), bench.tensor(device="cpu", dtype=dtype)
    op = {torch.mul: aten.mul.Tensor, torch.div: aten.div.Tensor, torch.pow: aten.pow.Tensor_Tensor}[fn]
    gm = bench.module(bench.call(op, x, scale, like=x))
    before = gm.code
    constants.on_device(gm, by_inductor=by_inductor)
    assert gm.code == before


def test_a_copy_of_the_programs_own_is_its_own() -> None:
    """It may write into what it copied."""
    bench = Bench()
    bench.tensor(4)
    gm = bench.module(bench.call(aten._to_copy.default, bench.tensor(device="cpu"), device=CUDA))
    before = gm.code
    constants.on_device(gm)
    assert gm.code == before


def test_what_explain_says() -> None:
    bench = Bench()
    x, a, b = bench.tensor(4), bench.tensor(device="cpu"), bench.tensor(device="cpu")
    gm = bench.module(bench.call(aten.mul.Tensor, bench.call(aten.mul.Tensor, x, a), b))
    constants.on_device(gm)
    (copy,) = (n for n in gm.graph.nodes if n.target is OP)
    reason = refusal(copy, device_type="cuda")
    assert reason is not None
    assert reason.code == "cpu-scalar"
    assert re.search(
        "^2 numbers on the CPU, such as a Python float.* must be copied at each call$", reason.sentence
    )
    assert "dynamic=True" in reason.fix


def test_the_op_copies_values_in_order() -> None:
    numbers = [torch.tensor(float(k), dtype=torch.float64) for k in (3, 1, 2)]
    got = torch.ops.pgraph.numbers_on_device(numbers, torch.device("cpu"))
    same(got, torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64))
    torch.library.opcheck(OP, (numbers, torch.device("cpu")), test_utils=("test_schema", "test_faketensor"))


def test_what_was_copied_is_found_by_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers_op, "_copied_before", OrderedDict())
    monkeypatch.setattr(numbers_op, "_MOST", 2)
    meta = torch.device("meta")  # stands for the device

    def copied(*numbers: float) -> Tensor:
        together = torch.tensor(numbers, dtype=torch.float64)
        return numbers_op._known(tuple(map(float.hex, numbers)), together, meta)

    zeros = copied(0.0, 1.0)
    assert zeros.device == meta
    assert copied(0.0, 1.0) is zeros
    assert copied(-0.0, 1.0) is not zeros
    assert copied(0.0, 1.0) is zeros
    copied(float("nan"), 1.0)
    assert len(numbers_op._copied_before) == 2
    assert copied(0.0, 1.0) is zeros, "the one that was used least goes first"


def test_a_call_is_given_a_copy_of_what_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the device: the same numbers on the same stream are told by their bits."""
    keys: list[Any] = []
    kept: dict[Any, Tensor] = {}

    def known(key: Any, together: Tensor, device: torch.device) -> Tensor:
        keys.append(key)
        return kept.setdefault(key, together)

    streams = iter((5, 5, 5, 6))
    monkeypatch.setattr(numbers_op, "_known", known)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(streams), raising=False)
    zero, minus, one = (torch.tensor(x, dtype=torch.float64) for x in (0.0, -0.0, 1.0))
    for numbers in ([zero, one], [zero, one], [minus, one], [zero, one]):
        got = numbers_op._numbers_on_device(numbers, torch.device("cuda", 0))
        assert got.tolist() == [0.0, 1.0]
        got.fill_(7)
    assert len(kept) == 3
    assert keys[0] == keys[1] == (0, 5, torch.float64, bytes(8) + b"\0\0\0\0\0\0\xf0\x3f")


# -- the short cut --------------------------------------------------------------------------------


class Stand(NamedTuple):
    """The first partition of a graph, whose code only copies; and how often that code ran."""

    cut: numbers_op.ShortCut
    module: GraphModule
    ran: list[int]


def stand(gm: GraphModule, patch: pytest.MonkeyPatch) -> Stand | None:
    """With the CPU in the place of the device."""
    found = scan(gm.graph, lambda node: refusal(node, device_type=DEVICE), min_ops=1)
    module = extract(gm, found).calls[0].module
    ran: list[int] = []

    def plain(args: list[Any]) -> tuple[Tensor, ...]:
        ran.append(len(args))
        return tuple(OnCpu(copy.deepcopy(module)).run(*args))

    cut = numbers_op.short_cut(module, plain, torch.device("cuda", 0))
    kept: dict[Any, Tensor] = {}
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(numbers_op, "_place", lambda device: (0, 5))
    patch.setattr(numbers_op, "_known", lambda key, together, device: kept.setdefault(key, together))
    return Stand(cut, module, ran) if cut is not None else None


def called_with(module: GraphModule, *numbers: float) -> list[Tensor]:
    metas = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    return [torch.tensor(x, dtype=m.dtype) for x, m in zip(numbers, metas, strict=True)]


def test_the_short_cut_gives_what_the_code_gives_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled(norms, torch.randn(4, 8), patch=monkeypatch, dynamic=True)
    assert numbers_op.stay_inside(found.graphs[0])
    mine = stand(found.graphs[0], monkeypatch)
    assert mine is not None
    sets = ((0.0, 1.0, 2.0, 3.0), (-0.0, 1.0, 2.0, 3.0), (0.0, 1.0, 2.0, float("nan")))
    first = [mine.cut(called_with(mine.module, *numbers)) for numbers in sets]
    for numbers, got in zip(sets, first, strict=True):
        want = OnCpu(copy.deepcopy(mine.module)).run(*called_with(mine.module, *numbers))
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            same(a, b)
        assert mine.cut(called_with(mine.module, *numbers)) is got
    assert not mine.ran
    args = called_with(mine.module, *sets[0])
    mine.cut(args)
    assert args == []


def test_who_looks_at_ops_sees_the_code_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled(norms, torch.randn(4, 8), patch=monkeypatch, dynamic=True)
    mine = stand(found.graphs[0], monkeypatch)
    assert mine is not None
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        mine.cut(called_with(mine.module, 0.0, 1.0, 2.0, 3.0))
    assert mine.ran == [4]


def test_numbers_that_change_at_each_call_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled(norms, torch.randn(4, 8), patch=monkeypatch, dynamic=True)
    mine = stand(found.graphs[0], monkeypatch)
    assert mine is not None
    for k in range(100):
        mine.cut(called_with(mine.module, 0.0, 1.0, 2.0, float(k)))
    assert len(mine.cut._found) <= numbers_op._KEPT


def test_copies_of_two_types_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor, n: Tensor) -> Tensor:
        return torch.where(x > a, x * b, x) + torch.arange(7, device=x.device) * n

    numbers = [torch.tensor(0.5), torch.tensor(2.0), torch.tensor(3)]
    found = compiled(fn, torch.randn(7), *numbers, patch=monkeypatch)
    mine = stand(found.graphs[0], monkeypatch)
    assert mine is not None
    for given_numbers in (numbers, [numbers[1], numbers[0], numbers[2]]):
        got, want = mine.cut(list(given_numbers)), OnCpu(copy.deepcopy(mine.module)).run(*given_numbers)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            same(a, b)


def test_code_that_computes_before_it_copies_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, s: Tensor) -> Tensor:
        y = x + 1
        return y.sin() * (s * 3 + s.exp())

    found = compiled(fn, torch.randn(7), torch.tensor(0.1), patch=monkeypatch)
    assert stand(found.graphs[0], monkeypatch) is None


@pytest.mark.parametrize("inside", [True, False])
def test_it_runs_in_the_place_of_the_code_where_numbers_stay(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def cut(module: GraphModule, plain: Any, device: torch.device) -> Any:
        def run(args: list[Any]) -> Any:
            ran.append(len(args))
            return plain(args)

        return run

    monkeypatch.setattr(assemble, "short_cut", cut)
    monkeypatch.setattr(assemble, "stay_inside", lambda gm: inside)
    fn = host(lambda x: (x.sin() + torch.rand_like(x).floor()).cos(), min_ops=1)  # no capture draws
    x = torch.randn(8)
    same(fn(x), x.sin().cos())
    assert bool(ran) is inside


def test_what_a_graph_returns_is_no_short_cut_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receiver may write there."""
    bench = Bench()
    x, a = bench.tensor(4), bench.tensor(device="cpu", dtype=torch.float32)
    whole = bench.call(numbers_op.COPY, [a], torch.device(CUDA))
    one = bench.call(aten.select.int, whole, 0, 0)
    product = bench.call(aten.mul.Tensor, x, one)
    assert numbers_op.stay_inside(GraphModule({}, returning(bench.graph, product)))
    assert not numbers_op.stay_inside(GraphModule({}, returning(bench.graph, one)))
    alias = bench.call(aten.view.default, one, [1])
    assert not numbers_op.stay_inside(GraphModule({}, returning(bench.graph, product, alias)))


def returning(graph: Graph, *results: Node) -> Graph:
    made = copy.deepcopy(graph)
    twins = {n.name: n for n in made.nodes}
    for old in graph.nodes:
        twins[old.name].meta = old.meta
    made.output(tuple(twins[n.name] for n in results))
    return made
