"""A program of varying sizes, Inductor's code on the host driver, and what became of its sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from support import host, same
from torch import Tensor

import pgraph
from pgraph.compute.computer import Computer
from pgraph.runtime import registry

WARM = (3, 3, 5, 5, 9, 9)  # where there are no lessons: three captures, which are compared

# In double precision: Inductor rounds otherwise than eager.
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def work(x: Tensor, w: Tensor) -> Tensor:
    """Generated kernels, products of the same sizes, views, memory that dies."""
    y = torch.relu(x @ w) + x.shape[0]
    z = (y @ w).softmax(-1)
    return (z.t() @ y) @ w + (y * z).sum(0)


def compiled(fn: Callable[..., Any] = work, **options: Any) -> Any:
    return host(fn, codegen="inductor", dynamic=True, **options)


def call(model: Any, sizes: Iterable[int], fn: Callable[..., Any] = work) -> None:
    for n in sizes:
        x = torch.randn(n, 8, dtype=W.dtype)
        same(model(x, W), fn(x, W), rtol=1e-4, atol=1e-5)


def made() -> tuple[int, int]:
    """(captures, of which computed)."""
    report = pgraph.report()
    return report.captures, report.computed


def computer() -> Computer:
    """Of the only partition."""
    (partition,) = registry.live_capturable()
    found = partition._cache.shelf.computer
    assert isinstance(found, Computer)
    return found


def runs(report: pgraph.Report) -> int:
    """Uncaptured ones."""
    return sum(partition.uncaptured_runs for partition in report.partitions)


# What `turned` keeps, by length.
tables: dict[int, Tensor] = {}


@torch.library.custom_op("pgraph_sizes::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """With a table for each length, made when it is first needed."""
    n = x.size(0)
    if n not in tables:
        tables[n] = torch.arange(n, dtype=x.dtype, device=x.device).cos()
    return x * tables[n][:, None]


@turned.register_fake
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)
