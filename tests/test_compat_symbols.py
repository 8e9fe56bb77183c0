"""Each private interface of symbolic sizes that pgraph uses (see `test_compat`)."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]  # no stubs
import torch
from support_dynamo import heard_by
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from pgraph import compat
from pgraph.compat import symbols


def test_sizes_that_were_marked_unbacked() -> None:
    """They are told from sizes that data tells."""

    def told(gm: torch.fx.GraphModule) -> tuple[set[str], set[str]]:
        values = [node.meta.get("example_value") for node in gm.graph.nodes]
        tensors = [value for value in values if isinstance(value, Tensor)]
        marked = {str(symbol) for value in tensors for symbol in compat.marked_unbacked(value)}
        return marked, {str(size) for value in tensors for size in value.size() if type(size) is not int}

    x = torch.ones(3, 5)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    ((marked, sizes),) = heard_by(lambda x: x + 1, x, look=told)
    assert marked == sizes == {"u0"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ((marked, sizes),) = heard_by(lambda x: x.nonzero() + 1, torch.ones(3), look=told)
    assert (marked, "u0" in sizes) == (set(), True)
    assert compat.marked_unbacked(3) == frozenset()


def nonzero_rows() -> torch.SymInt:
    """A number that only data tell."""
    env = ShapeEnv()
    found = env.create_unbacked_symint()
    assert isinstance(found, torch.SymInt)
    return found


def test_where_a_symbol_comes_from() -> None:
    def sources(gm: torch.fx.GraphModule) -> list[str | None]:
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        sizes = [size for x in values if isinstance(x, Tensor) for size in x.size()]
        found = [compat.symbol_sources(size) for size in sizes if isinstance(size, torch.SymInt)]
        assert sorted(compat.symbol_sources(sizes[0] * 2 + sizes[1])) == sorted({**found[0], **found[1]})
        return [source for each in found for source in each.values()]

    (found,) = heard_by(lambda x: x + 1, torch.ones(3, 5), look=sources, dynamic=True)
    assert found == ["L['x'].size()[0]", "L['x'].size()[1]"]
    assert set(compat.symbol_sources(nonzero_rows()).values()) == {None}


def numbers_of(gm: torch.fx.GraphModule) -> list[Any]:
    """The symbolic numbers among the inputs of a graph that Dynamo has traced, and their trace's guards."""
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    return [n for x in values for n in ([*x.size(), *x.stride()] if isinstance(x, Tensor) else [x])]


def test_other_numbers_that_a_trace_allows() -> None:
    """All of its guards hold, and a symbol that may vary does."""

    def told(gm: torch.fx.GraphModule) -> Any:
        numbers = numbers_of(gm)
        told = compat.SymbolicNumbers(numbers)
        found = told.made_up(3)
        sizes = [i for i, n in enumerate(numbers) if isinstance(n, torch.SymInt)]
        rows = [[told.at(values)[i] for i in sizes] for values in found]
        assert rows == [[compat.evaluate(numbers[i], values) for i in sizes] for values in found]
        assert all(map(told.hold, found))
        x = next(name for name, n in told.symbols.items() if n == 32)
        served = [n for n in range(2, 60) if told.hold(told.symbols | {x: n})]
        return [int(numbers[i]) for i in sizes], rows, served

    def picky(x: Tensor, y: Tensor) -> Tensor:
        if x.size(0) % 4 or x.size(0) > 40 or x.size(1) < 3:
            return x
        return x.view(-1, 4).sum() + y[: x.size(0)].sum()

    (found,) = heard_by(picky, torch.ones(32, 6), torch.ones(50), look=told, dynamic=True)
    hints, (first, *others), served = found
    assert served == list(range(4, 41, 4))
    assert first == hints
    assert len(others) == 3
    by_size = dict(zip(hints, zip(*others, strict=True), strict=True))
    assert {n % 4 for n in by_size[32]} == {0}
    assert max(by_size[32]) <= 40
    assert all(len({n, *made}) == 4 for n, made in by_size.items()), "each differs from all others"
    assert all(y >= x for x, y in zip(by_size[32], by_size[50], strict=True))


def test_other_numbers_of_sizes_that_are_equal() -> None:
    """Their symbols are one, whatever guards call them."""

    def added(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def told(gm: torch.fx.GraphModule) -> list[dict[str, int]]:
        return compat.SymbolicNumbers(numbers_of(gm)).made_up(2)

    compiled: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(told(gm))
        return gm

    fn = torch.compile(added, backend=backend, dynamic=True)
    fn(torch.ones(2, 300), torch.ones(300))
    fn(torch.ones(6, 9), torch.ones(6, 9))
    assert [len(found) for found in compiled] == [3, 3]


def test_what_is_assumed_later_counts_too() -> None:
    """As by a backward that is compiled after its forward; from the first question on nothing more does."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        rows = next(n for n in numbers_of(gm) if isinstance(n, torch.SymInt))
        found.append(compat.SymbolicNumbers([rows]))
        assert rows % 4 == 0
        return gm

    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.ones(24))
    (told,) = found
    (name,) = told.symbols
    assert [n for n in range(2, 20) if told.hold({name: n})] == [4, 8, 12, 16]
    assert {values[name] % 4 for values in told.made_up(3)} == {0}


def test_expressions_as_sympy_evaluates_them() -> None:
    """Also where the code that it prints is another expression."""
    n, m = sympy.symbols("n m", integer=True, positive=True)
    expressions = [
        Mod(FloorDiv(n, 4), FloorDiv(n, 3) * FloorDiv(m, 2) + 1),
        sympy.Eq(FloorDiv(n * m, FloorDiv(n, 2) + 1), sympy.Max(n, m)),
        sympy.Ne(PythonMod(n, 7), m**2 - 3 * n),
        sympy.And(n >= m, sympy.Or(n < 9, m > 3)),
        n * (m + 1) - 5,
    ]
    for a in range(2, 14):
        for b in range(1, 9):
            for expression in expressions:
                found = symbols._function(expression)({"n": a, "m": b})
                assert found == expression.subs({n: a, m: b})


def test_no_other_numbers() -> None:
    """None where the data tell a number, or where nothing is symbolic; a number that guards pin is alone."""
    for numbers in ([nonzero_rows()], [3, None, 4.0]):
        told = compat.SymbolicNumbers(numbers)
        assert (told.symbols, told.made_up(2)) == ({}, [])

    def only(x: Tensor) -> Tensor:
        return x if x.size(0) == 12 or x.size(0) < 12 or x.size(0) > 13 else x + 1

    (found,) = heard_by(
        only, torch.ones(13), look=lambda gm: compat.SymbolicNumbers(numbers_of(gm)).made_up(2), dynamic=True
    )
    assert len(found) <= 1


def test_what_sizes_made_of_some_values_are() -> None:
    def values(gm: torch.fx.GraphModule) -> list[Any]:
        (x,) = (node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder") if node.users)
        if not isinstance(x, Tensor):
            return []
        rows, columns = x.size()
        sums = [compat.values_of(n) for n in (rows, rows // 2, rows + columns, 60 // (rows - 4))]
        return [each((4, 9)) for each in sums] + [sums[2](range(65)), sums[0](range(65))]

    (found,) = heard_by(lambda x: x + 1, torch.ones(3, 5), look=values, dynamic=True)
    assert found[:4] == [{4, 9}, {2, 4}, {8, 13, 18}, {12}]
    assert found[4] is None, "4,225 ways"
    assert found[5] == set(range(65))


def test_numbers_for_symbols() -> None:
    gm = make_fx(lambda x: x.reshape(-1, 2), tracing_mode="symbolic")(torch.randn(6, 5, 2))
    x = next(n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder")
    rows, columns = (compat.plain_symbol(size) for size in x.size()[:2])
    sizes = [n.meta["val"].size(0) for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert compat.evaluate(sizes[-1], {str(rows): 7, str(columns): 3}) == 21
    assert compat.evaluate(sizes[-1], {str(rows): 7}) is None
