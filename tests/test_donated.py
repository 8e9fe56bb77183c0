"""Buffers that AOTAutograd gives to the backward are told by position; a part has positions of its own."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch
from support import host, launching, same
from torch import Tensor

import pgraph
from pgraph.ops.safety import unmark_unsafe


@pytest.fixture
def cutting_cumsum() -> Iterator[None]:
    pgraph.mark_unsafe("aten::cumsum", "cuts the graph of a test", "none")
    yield
    unmark_unsafe("aten::cumsum")


def test_parts_of_a_backward_write_into_nobodys_tensors(
    cutting_cumsum: None, inductor_cache: pathlib.Path
) -> None:
    """The results of `cumsum` are donated: inputs 5 and 6 of the whole, where a part has the user's."""

    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        total = a.sin() + b.sin() + c.sin() + d.sin() + e.sin()
        return total.cumsum(0).tanh().cumsum(0).sin()

    compiled = host(fn, "inductor")

    def step() -> None:
        inputs = [torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(5)]
        before = [x.detach().clone() for x in inputs]
        tangent = torch.randn(8, 8, dtype=torch.float64)
        kept = tangent.clone()
        got = torch.autograd.grad(compiled(*inputs), inputs, tangent)
        same([x.detach() for x in inputs], before)
        same(tangent, kept)
        same(got, torch.autograd.grad(fn(*inputs), inputs, tangent), rtol=1e-9, atol=1e-9)

    step()
    with launching(4):
        step()
        step()
    cut = [name for name, reasons in pgraph.report().outside if any(r.code == "marked" for r in reasons)]
    assert any("backward" in name for name in cut), "the backward was not cut: the test shows nothing"
