"""Somebody looks at ops, or stands in for tensors: modes, vmap, hooks on what was saved, default devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import host, launching, same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pgraph


class LooksAtValues(TorchDispatchMode):
    """Reads every result, as a search for NaNs does: a ghost would be fatal.

    Except what nobody has written yet: autograd takes memory as it finds it for a gradient that is to have
    another layout, and there may be a NaN in it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        unwritten = "empty" in func.name()
        if isinstance(out, Tensor) and out.is_floating_point() and not unwritten:
            assert not torch.isnan(out).any()
        return out


@pytest.mark.parametrize("since", [1, 3])
def test_a_mode_sees_real_tensors_and_every_op_once(since: int) -> None:
    """Around a backward that is due to be captured, and around one that has been."""
    compiled = host(lambda x, w: (x @ w).sin(), min_ops=1)
    counts = []
    for call in range(6):
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        y = compiled(x, w).sum()
        if call < since:
            y.backward()
        else:
            launches = pgraph.report().launches
            with FlopCounterMode(display=False) as counter, LooksAtValues():
                y.backward()
            assert pgraph.report().launches == launches, "a device's kernels would show it nothing"
            counts.append(counter.get_total_flops())
    assert counts == [2 * 2 * 3 * 4 * 3] * len(counts)
    y = compiled(x, w).sum()
    with launching(1):
        y.backward()  # without a mode it goes on


def test_gradients_in_batches() -> None:
    """vmap's tensors lie nowhere: such a backward runs uncaptured."""

    def fn(x: Tensor) -> Tensor:
        return (x * x).sin().cumsum(0)

    compiled = host(fn)
    for _ in range(4):
        x = torch.randn(3, requires_grad=True)
        (mine,) = torch.autograd.grad(compiled(x), x, torch.eye(3), is_grads_batched=True)
        same(mine, torch.autograd.functional.jacobian(fn, x))
        compiled(x).sum().backward()
    assert pgraph.report().launches > 4


def test_another_default_device() -> None:
    compiled = host(lambda x: x * 2, min_ops=1)
    for _ in range(3):
        compiled(torch.randn(3, 4))
    x = torch.randn(3, 4)
    with torch.device("meta"):
        same(compiled(x), x * 2)


def test_saved_tensors_that_come_back_in_another_type() -> None:
    """ATen code takes them as they come; a launch must not read their bytes as what was traced."""

    def fn(x: Tensor) -> Tensor:
        return x.sin() * x

    compiled = host(fn)
    for call in range(6):
        x = torch.randn(64)
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        lower = (lambda t: t.bfloat16()) if call >= 3 else (lambda t: t)
        with torch.autograd.graph.saved_tensors_hooks(lower, lambda t: t):
            y, z = compiled(mine), fn(theirs)
        y.sum().backward()
        z.sum().backward()
        same(mine.grad, theirs.grad, rtol=0.05, atol=0.05)
