"""Nodes for the tests of the rules, built on fake tensors: "cuda" here needs no GPU.

An op is called on values made by `FakeTensorMode`, or its result is stated where torch cannot compute it
without a CUDA build.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.source
from torch._higher_order_ops.flex_attention import flex_attention
from torch._prims.rng_prims import (
    graphsafe_run_with_rng_state,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch._inductor.inductor_prims  # isort: skip  # registers prims.inductor_*
from pgraph.rewrites.checkpoint_rng import unwrap

aten = torch.ops.aten
prims = torch.ops.prims

LIB = torch.library.Library("pgraph_test", "DEF")
LIB.define("plain(Tensor x) -> Tensor")
LIB.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
LIB.define("writes(Tensor(a!) x) -> ()")
LIB.define("silent(int x) -> int")
COLLECTIVES = {
    "_c10d_functional": (
        "all_gather_into_tensor",
        "all_reduce",
        "all_reduce_",
        "all_to_all_single",
        "broadcast",
        "reduce_scatter_tensor",
        "wait_tensor",
    ),
    "_c10d_functional_autograd": ("all_gather_into_tensor", "all_to_all_single"),
    "_dtensor": ("shard_dim_alltoall",),
    "c10d": ("allreduce_", "send"),
    "symm_mem": ("one_shot_all_reduce",),
}
FBGEMM = ("dense_to_jagged", "jagged_to_padded_dense", "jagged_dense_elementwise_add", "dense_sum")
for _namespace, _names in {**COLLECTIVES, "fbgemm": FBGEMM}.items():
    # A build without distributed or fbgemm still has to judge graphs that name their ops.
    _fragment = torch.library.Library(_namespace, "FRAGMENT")
    for _name in _names:
        if not hasattr(getattr(torch.ops, _namespace), _name):
            _fragment.define(f"{_name}(Tensor x) -> Tensor")


class Bench:
    """Builds nodes: placeholders by value, calls by op, with results computed or stated."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def tensor(self, *size: int, device: str = "cuda", **options: Any) -> Node:
        with self.mode:
            return self.value(torch.empty(size, device=device, **options))

    def value(self, value: Any) -> Node:
        node = self.graph.placeholder(f"p{len(self.graph.nodes)}")
        node.meta["val"] = value
        return node

    def call(self, op: Any, *args: Any, like: Any = None, **kwargs: Any) -> Node:
        node = self.graph.call_function(op, args, kwargs)
        if like is not None:
            node.meta["val"] = like.meta["val"] if isinstance(like, Node) else like
            return node

        def unwrap(x: Any) -> Any:
            return torch.fx.node.map_arg(x, lambda n: n.meta["val"])

        with self.mode:
            node.meta["val"] = op(*unwrap(args), **unwrap(kwargs))
        return node

    def unbacked(self) -> Node:
        return self.value(self.mode.shape_env.create_unbacked_symint())

    def attribute(self, name: str, value: Any) -> Node:
        if self.graph.owning_module is None:
            self.graph.owning_module = torch.nn.Module()
        if isinstance(value, torch.nn.Module):
            self.graph.owning_module.add_module(name, value)
        else:
            self.graph.owning_module.register_buffer(name, value)
        return self.graph.get_attr(name)

    def module(self, *results: Node) -> GraphModule:
        """The graph that returns these, with its attributes."""
        owner = self.graph.owning_module or torch.nn.Module()
        self.graph.output(results)
        return GraphModule(owner, self.graph)


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Case:
    """A rule's code, a node it refuses, and the nearest node that is fine."""

    code: str
    name: str
    refused: Callable[[Bench], Node]
    accepted: Callable[[Bench], Node]


def subgraph(*ops: Any) -> GraphModule:
    graph = Graph()
    node = graph.placeholder("score")
    for op in ops:
        node = graph.call_function(op, (node,))
    graph.output(node)
    return GraphModule({}, graph)


def flex(bench: Bench, *ops: Any) -> Node:
    q = bench.tensor(1, 1, 8, 8)
    fn = bench.attribute("score_mod", subgraph(*ops))
    return bench.call(flex_attention, q, q, q, fn, (8, 8), 1.0, {}, like=q)


def symbolic_mm(bench: Bench) -> Node:
    size = bench.mode.shape_env.create_symintnode(
        bench.mode.shape_env.create_symbol(5, torch._dynamo.source.ConstantSource("s")), hint=5
    )
    return bench.call(aten.mul.Tensor, bench.tensor(size, 4), bench.tensor(4))


def sdpa(bench: Bench, dropout: float, seed_device: str = "cpu") -> Node:
    q = bench.tensor(1, 1, 8, 8)
    seed = bench.tensor(device=seed_device, dtype=torch.int64)
    vals = (q.meta["val"], q.meta["val"], seed.meta["val"], seed.meta["val"])
    op = aten._scaled_dot_product_efficient_attention.default
    return bench.call(op, q, q, q, None, True, dropout, like=vals)


def sdpa_backward(bench: Bench, dropout: float) -> Node:
    q, seed = bench.tensor(1, 1, 8, 8), bench.tensor(device="cpu", dtype=torch.int64)
    op = aten._scaled_dot_product_flash_attention_backward.default
    args = (q, q, q, q, q, q, None, None, 8, 8, dropout, False, seed, seed)
    return bench.call(op, *args, like=[q.meta["val"]] * 3)


def checkpointed_attention(bench: Bench, dropout: float) -> Node:
    """Attention as AOTAutograd wraps it, after the pass that comes before the rules."""
    plain, generator = sdpa(bench, dropout), bench.value(torch.Generator())
    call = bench.graph.call_function
    wrapped = call(graphsafe_run_with_rng_state, (plain.target, *plain.args), {"rng_state": generator})
    wrapped.meta["val"] = plain.meta["val"]
    bench.graph.output((wrapped,))
    gm = GraphModule(torch.nn.Module(), bench.graph)
    found = unwrap(gm)
    return (gm if found is None else found.module).graph.output_node().args[0][0]


def index(bench: Bench, op: Any, dtype: torch.dtype, *more: Node) -> Node:
    x = bench.tensor(4)
    return bench.call(op, x, [bench.tensor(4, dtype=dtype)], *more, like=x)


def plain(op: Any, *more: Any) -> Callable[[Bench], Node]:
    """A call of `op` on one 4x4 CUDA tensor, whose result is stated to be like it."""

    def build(bench: Bench) -> Node:
        x = bench.tensor(4, 4)
        return bench.call(op, x, *more, like=x)

    return build


def grouped(bench: Bench, dtype: torch.dtype = torch.bfloat16, offsets: bool = True, **more: Any) -> Node:
    a = bench.tensor(*((8, 16) if offsets else (2, 8, 16)), dtype=dtype)
    offs = bench.tensor(2, dtype=torch.int32) if offsets else None
    return bench.call(aten._grouped_mm.default, a, bench.tensor(2, 16, 8, dtype=dtype), offs, **more, like=a)


def batched(bench: Bench) -> Node:
    return bench.call(aten.bmm.default, bench.tensor(2, 4, 4), bench.tensor(2, 4, 4))


def python_scalar(bench: Bench) -> Node:
    """A number that may differ from call to call: a capture is made for each value of it."""
    number = bench.value(
        bench.mode.shape_env.create_symintnode(
            bench.mode.shape_env.create_symbol(7, torch._dynamo.source.ConstantSource("n")), hint=7
        )
    )
    return bench.call(aten.add.Scalar, bench.tensor(4), number, like=bench.tensor(4))


relu = plain(aten.relu.default)
