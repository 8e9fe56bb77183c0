"""Steps by `torch.cuda.CUDAGraph.replay`, alone and behind guards: floors on the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WARMUP = 3
"""Calls of each kind that run without a graph."""

SMALL = 4096
"""Elements of an argument that may lie elsewhere at each call, and is copied then."""

__all__ = ["Guarded", "Replaying", "graphed"]

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


class Guarded:
    """A backend of `torch.compile`: Dynamo's guards, and behind them a graph of all that Inductor compiled.

    The guards are Dynamo's own work, at each call of whatever backend. Here nothing else is done but to copy
    the small arguments that the graph only reads, and to replay: AOTAutograd's wrappers are within the graph.
    What it writes into (a cache, a count of tokens) must stay where it is.

    Args:
        model: whose parameters may move, if `anew` is called then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._made: list[_Behind] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        self._made.append(_Behind(compile_fx(graph, inputs), self._model))
        return self._made[-1]

    def forget(self) -> None:
        """Let the graphs go, and the weights that they read."""
        for one in self._made:
            one.forget()

    def anew(self) -> None:
        """Capture again, on the weights as they lie now; the graphs are on the device when this returns."""
        for one in self._made:
            one.capture()
        torch.cuda.synchronize()


class _Behind:
    """One compiled graph: takes what Dynamo hands over."""

    def __init__(self, compiled: Callable[..., Any], model: nn.Module) -> None:
        self._compiled, self._model = compiled, model
        self._calls = 0
        self._written: set[int] = set()
        self._names: dict[int, str] = {}
        self._arguments: list[Any] = []  # None where there is a name
        self._copied: list[tuple[int, Tensor]] = []
        self._staying: list[tuple[int, int]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Any = None

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls < WARMUP:
            return self._compiled(*args)
        if self._calls == WARMUP:
            before = {i: value.clone() for i, value in enumerate(args) if _is_small(value)}
            result = self._compiled(*args)
            self._written = {i for i, value in before.items() if not torch.equal(args[i], value)}
            return result
        if self._graph is None:
            self._take(args)
            self.capture()
        assert self._graph is not None
        for position, address in self._staying:
            if args[position].data_ptr() != address:
                raise RuntimeError(f"argument {position} is written into, and was moved: call forget()")
        for position, own in self._copied:
            own.copy_(args[position])
        self._graph.replay()
        return self._results

    def _take(self, args: Sequence[Any]) -> None:
        names = {id(p): name for name, p in self._model.named_parameters(remove_duplicate=False)}
        self._names = {i: names[id(value)] for i, value in enumerate(args) if id(value) in names}
        self._arguments = [None if i in self._names else value for i, value in enumerate(args)]
        self._copied, self._staying = [], []
        for i, value in enumerate(self._arguments):
            if i in self._written:
                self._staying.append((i, value.data_ptr()))
            elif _is_small(value):
                own = self._arguments[i] = value.clone()
                self._copied.append((i, own))

    def capture(self) -> None:
        """Capture on the weights as they lie now."""
        from cuda.bindings import driver

        there = list(self._arguments)
        for position, name in self._names.items():
            there[position] = self._model.get_parameter(name)
        self.forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._results = self._compiled(*there)
        exec_ = driver.CUgraphExec(graph.raw_cuda_graph_exec())
        (error,) = driver.cuGraphUpload(exec_, torch.cuda.current_stream().cuda_stream)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a graph could not be put on the device: {error.name}")
        self._graph = graph

    def forget(self) -> None:
        """Let the graph go."""
        self._graph = self._results = None


def _is_small(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() <= SMALL
