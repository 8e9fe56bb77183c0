"""Ops that stay outside: the reason is named, the rest is launched around them, the numbers are right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_helpers import (
    check,
    compile_pgraph,
    explain,
    index,
    outside_codes,
    randn,
    report,
    run_once,
    same_bits,
)
from torch import Tensor

import pgraph
from pgraph.ops.safety import unmark_unsafe

pytestmark = pytest.mark.gpu


@torch.library.custom_op("pgraph_gpu::tagged", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def tagged(x: Tensor) -> Tensor:
    """Says of itself that it must not be captured."""
    return x + 1


@tagged.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@functools.cache
def _table() -> Tensor:
    """A row of numbers in page-locked memory of the host; it lives as long as the process."""
    return torch.arange(60, dtype=torch.float32).pin_memory()


@torch.library.custom_op("pgraph_gpu::from_host", mutates_args=())
def from_host(x: Tensor) -> Tensor:
    """Copies from the host: a node of the graph, whose address no launch may rewrite."""
    return x + _table().to(x.device, non_blocking=True)


@from_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _around(middle: Callable[..., Any]) -> Callable[..., Any]:
    """`middle` between two runs of ops that are worth a launch each."""

    def fn(x: Tensor, *others: Any) -> Any:
        x = ((x * 2).sin() + 1).cos() * 3
        y = middle(x, *others)
        return y, ((x + 1).exp() * 0.5).tanh() + x

    return fn


def _item(x: Tensor) -> Tensor:
    return x * (x[0, 0] * 10).long().item()


REFUSED = [
    ("dynamic-shape", lambda x: torch.nonzero(x > 0), ()),
    ("dynamic-shape", lambda x: torch.masked_select(x, x > 0), ()),
    ("dynamic-shape", lambda x, i: torch.bincount(i, minlength=9), (lambda: index(50, high=9),)),
    ("host-read", _item, ()),
    ("bool-index", lambda x, v: torch.ops.aten.index_put(x, [x > 0], v), (lambda: randn(1)[0],)),
    ("host-sync", lambda x: torch.histc(x, 10), ()),
    ("host-sync", lambda x, y: torch.isin(x, y), (lambda: randn(40),)),
    ("solver", lambda x: torch.linalg.inv(x[:, :40] + 50 * torch.eye(40, device=x.device)), ()),
    ("cpu-scalar", lambda x, s: x * s, (lambda: torch.tensor(2.5, dtype=torch.float64),)),
    ("device-copy", lambda x: x.cpu() + 1, ()),
    ("tagged", lambda x: tagged(x), ()),
]


@pytest.mark.parametrize(("code", "middle", "makers"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_refused_op_in_the_middle(code: str, middle: Callable[..., Any], makers: tuple[Any, ...]) -> None:
    if code == "cpu-scalar" and not torch.cuda.is_available():
        pytest.skip("needs two devices")
    config = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with config:
        check(
            _around(middle),
            lambda: (randn(40, 60), *(make() for make in makers)),
            label=code,
            exact=code != "solver",
            launched=0,
        )
    summary = report()
    assert code in outside_codes(), f"no reason {code!r}{explain()}"
    assert len(summary.capturable) == 2, f"one safe part before and one after{explain()}"
    assert all(p.launches >= 2 and p.reason is None for p in summary.capturable), explain()
    named = [r for _, reasons in summary.outside for r in reasons if r.code == code]
    assert all(r.fix and r.sentence for r in named), explain()


def test_a_copy_from_the_host_is_refused_for_its_node() -> None:
    """No rule knows the op; the recording shows what it does."""
    fn = _around(from_host)
    _table()
    compiled = compile_pgraph(fn, codegen="aten")
    for _ in range(4):
        x = randn(40, 60)
        for mine, eager in zip(compiled(x), fn(x), strict=True):
            assert same_bits(mine, eager), explain()
    codes = {reason.code for partition in report().partitions for reason in partition.reasons}
    assert "node-kind" in codes, explain()


def test_marked_op_stays_outside_and_the_rest_is_launched() -> None:
    pgraph.mark_unsafe("aten::cumsum", "counts on the host", "use another op")
    try:
        check(_around(lambda x: x.cumsum(0)), lambda: (randn(40, 60),), label="marked", launched=2)
    finally:
        unmark_unsafe("aten::cumsum")
    assert "marked" in outside_codes(), explain()


def test_graph_breaks_leave_two_graphs_that_are_both_launched() -> None:
    """What Dynamo cuts is two graphs, each captured for itself."""

    def fn(x: Tensor) -> Tensor:
        x = ((x * 2).sin() + 1).cos()
        torch._dynamo.graph_break()
        return ((x + 1).exp() * 0.5).tanh()

    check(fn, lambda: (randn(40, 60),), label="graph break", launched=2)
    assert len(report().capturable) == 2, explain()


def test_random_op_as_aten_stays_outside_and_draws_what_eager_draws() -> None:
    """Under one seed the numbers are eager's; from call to call they differ."""

    def fn(x: Tensor) -> Tensor:
        x = ((x * 2).sin() + 1).cos()
        x = torch.nn.functional.dropout(x, 0.5, training=True)
        return ((x + 1).exp() * 0.5).tanh()

    compiled = compile_pgraph(fn, codegen="aten")
    x = randn(100, 100)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append([run_once(compiled, (x,))[0] for _ in range(5)])
    torch.manual_seed(7)
    expected = [run_once(fn, (x,))[0] for _ in range(5)]
    for once, again, eager in zip(*results, expected, strict=True):
        assert same_bits(once, again), f"one seed, two results{explain()}"
        assert same_bits(once, eager), f"not eager's numbers{explain()}"
    assert not same_bits(results[0][3], results[0][4]), f"two calls drew the same numbers{explain()}"
    assert "rng" in outside_codes(), explain()
