"""Programs that make constants on the CPU, as published models do; on any device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def scaled(x: Tensor) -> Tensor:
    """Attention scores by the root of a size, held in a tensor (DeBERTa)."""
    return (x / torch.sqrt(torch.tensor(48, dtype=torch.float) * 3)).tanh()


def masked(x: Tensor) -> Tensor:
    """The lowest number of a type, held in a tensor (T5, OPT)."""
    lowest = torch.tensor(torch.finfo(x.dtype).min)
    return torch.where(x > 0, x, torch.full((), -1.0, dtype=x.dtype)) + torch.max(x, lowest)


def filled(x: Tensor) -> Tensor:
    """`masked_fill` with a tensor without dimensions."""
    return x.masked_fill(x > 0, torch.tensor(0.1)) * 2


def buckets(x: Tensor) -> Tensor:
    """Logarithmic buckets of relative positions (DeBERTa, T5)."""
    n, mid = x.shape[-1], 4
    q = torch.arange(0, n)[:, None] - torch.arange(0, n)[None]
    near = torch.where((q < mid) & (q > -mid), torch.tensor(mid - 1).type_as(q), torch.abs(q))
    far = torch.ceil(torch.log(near / mid) / torch.log(torch.tensor(15 / mid)) * (mid - 1)) + mid
    found = torch.where(near <= mid, q.type_as(far), far * torch.sign(q)).long()
    return x * found.to(x.device)


def logarithms(x: Tensor) -> Tensor:
    """Floating-point numbers, whose last bits depend on who computes them."""
    return x * torch.log(torch.arange(1, x.shape[-1] + 1) / 7.0).to(x.device)


def positions(x: Tensor) -> Tensor:
    """Relative positions written into slices (ConViT)."""
    n = math.isqrt(x.shape[-1])
    found = torch.zeros(1, n * n, n * n, 3)
    step = torch.arange(n).view(1, -1) - torch.arange(n).view(-1, 1)
    along = step.repeat(n, n)
    across = step.repeat_interleave(n, dim=0).repeat_interleave(n, dim=1)
    found[:, :, :, 2] = (along**2 + across**2).unsqueeze(0)
    found[:, :, :, 1] = across.unsqueeze(0)
    found[:, :, :, 0] = along.unsqueeze(0)
    return x.view(1, n * n, n * n, 1) * found.to(x.device)


def indexed(x: Tensor) -> Tensor:
    """Indices left on the CPU."""
    return x[torch.tensor([2, 0, 1])] * x[:, torch.arange(3)].sum()


def literal(x: Tensor) -> Tensor:
    """A table of numbers, with a type of its own and transposed."""
    table = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], dtype=torch.float64).t()
    return x[:3, :2] * table.to(x.device, x.dtype) + torch.tensor([1.0, 2.0]).to(x.device)


def mutated(x: Tensor) -> Tensor:
    """A constant that the program changes."""
    steps = torch.arange(x.shape[-1]).to(x.device, x.dtype)
    steps.add_(x[0])
    steps[0] = 3
    return x * steps


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (scaled, masked, filled, buckets, logarithms, positions, indexed, literal, mutated)
}


def causal(x: Tensor) -> Tensor:
    """A mask of positions, for any size."""
    n = x.shape[-1]
    seen = torch.arange(n)[None] <= torch.arange(n)[:, None]
    return x.masked_fill(~seen.to(x.device), -1.0)


def steps(x: Tensor) -> Tensor:
    """Positions as numbers, zeros and ones, for any size."""
    n = x.shape[-1]
    counted = torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(1, n) * 3])
    return x * counted.to(x.device, torch.float) + torch.full((n,), 0.3).to(x.device)


def gathered(x: Tensor) -> Tensor:
    """Indices on the CPU, for any size."""
    return x[torch.arange(x.shape[0])] * 2


SIZED: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (causal, steps, gathered)}
