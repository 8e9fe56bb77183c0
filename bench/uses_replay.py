"""Steps by `torch.cuda.CUDAGraph.replay` alone: what no backend can go below on the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

WARMUP = 3
"""Calls of each kind that run without a graph."""

__all__ = ["Replaying", "graphed"]

_Graph = tuple[torch.cuda.CUDAGraph, dict[Any, Tensor], Any, Any]


def graphed(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A graph of a call that has run before; it reads and writes where that call did."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class Replaying:
    """In the place of a compiled model's call: a graph for each set of shapes, with nothing around it.

    No guards, no wrappers of AOTAutograd's: the arguments are copied to where the graph reads them, and it is
    replayed. Its cache must be the same object at each call.

    Args:
        compiled: takes keyword arguments; those that are tensors are copied, all others must stay.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled = compiled
        self._graphs: dict[Hashable, _Graph] = {}
        self._calls: dict[Hashable, int] = {}

    def __call__(self, **given: Any) -> Any:
        tensors = _tensors(given)
        kept = tuple(id(value) for value in given.values() if not isinstance(value, Tensor | dict))
        key = tuple((name, tuple(value.shape)) for name, value in tensors.items()), kept
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= WARMUP:  # a cache counts its tokens: no call may be made twice
            return self._compiled(**given)
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._captured(given, tensors)
        graph, static, result, _ = found
        for name, value in tensors.items():
            static[name].copy_(value)
        graph.replay()
        return result

    def _captured(self, given: dict[str, Any], tensors: dict[Any, Tensor]) -> _Graph:
        static = {name: value.clone() for name, value in tensors.items()}
        there = _with(given, static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._compiled(**there)
        return graph, static, result, given


def _tensors(given: dict[str, Any]) -> dict[Any, Tensor]:
    """By name; those in a dict (a mask for each kind of attention) by both names."""
    found: dict[Any, Tensor] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, dict):
            found |= {(name, inner): one for inner, one in value.items() if isinstance(one, Tensor)}
    return found


def _with(given: dict[str, Any], tensors: dict[Any, Tensor]) -> dict[str, Any]:
    """The arguments with these tensors in their places."""
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, dict):
            changed[name] = {inner: tensors.get((name, inner), one) for inner, one in value.items()}
        else:
            changed[name] = tensors.get(name, value)
    return changed
