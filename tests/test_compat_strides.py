"""Each private PyTorch interface that pgraph uses for strides, one test each (see `test_compat`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import BEFORE_2_15
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pgraph import compat


def sizes_that_vary(*size: int) -> torch.Size:
    """A size of symbols, of which these are today's numbers."""
    gm = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(size))
    return gm.graph.find_nodes(op="placeholder")[0].meta["val"].size()


def test_output_strides_are_taken_over() -> None:
    """Inside, nobody asks for strides; then there are those of the list, symbols as numbers before 2.15."""
    size = sizes_that_vary(3, 4)[1]
    assert isinstance(size, torch.SymInt)
    with FakeTensorMode() as mode, tracing(TracingContext(mode)):
        context = TracingContext.get()
        context.output_strides = kept = []
        with compat.own_output_strides() as told:
            assert context.output_strides is None
            told += [None, (size * 2, 1)]
        assert context.output_strides is kept
        assert kept == [None, (8, 1)]
        assert (type(kept[1][0]) is int) == BEFORE_2_15
    with compat.own_output_strides():  # without a context
        assert TracingContext.try_get() is None


@pytest.mark.usefixtures("inductor_cache")
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_tells_the_strides_of_what_it_returns(dynamic: bool) -> None:
    """As numbers or formulas of the graph's own symbols; nothing is said by other code."""
    seen: list[Any] = []

    def inner(gm: torch.fx.GraphModule, inputs: Any, *unused: Any, **kwargs: Any) -> Any:
        compiled = compat.compile_graph(gm, inputs, {}, **kwargs)
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        seen.append(compat.returned_strides(compiled, values))
        assert compat.returned_strides(compat.boxed_module(gm), values) is None
        return compiled

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compat.compile_model(gm, inputs, inner, {}, lambda joint: None)

    torch.compile(lambda x: (x.t().sin(), None), backend=backend, dynamic=dynamic)(torch.randn(4, 6))
    (strides,) = seen[0]
    assert tuple(getattr(s, "node", None) is None for s in strides) == (True, not dynamic)
    assert strides[1] == 6


def test_strides_are_compared_without_a_guard() -> None:
    rows, columns = sizes_that_vary(3, 4)
    env = rows.node.shape_env
    guards = len(env.guards)
    assert compat.same_number(rows * 2, rows + rows)
    assert compat.same_number(4, 4)
    assert not compat.same_number(rows, columns)
    assert not compat.same_number(columns, 4)
    assert len(env.guards) == guards


def test_a_graph_is_traced_anew_for_other_strides() -> None:
    """Where a view has become impossible there is a reshape."""

    def fn(x: torch.Tensor) -> Any:
        return torch.ops.aten.view.default(x, [12]) + 1, x.sin()

    mode = FakeTensorMode()
    gm = make_fx(fn)(mode.from_tensor(torch.ones(3, 4)))
    given = compat.restrided(mode.from_tensor(torch.ones(3, 4)), (8, 1))
    assert (given.size(), given.stride()) == ((3, 4), (8, 1))
    compat.propagate(gm, [given])
    flat, sine = (node.meta["val"] for node in gm.graph.output_node().args[0])
    assert flat.size() == (12,)
    assert sine.stride() == (4, 1)
    assert gm.graph.find_nodes(op="placeholder")[0].meta["val"].stride() == (8, 1)
