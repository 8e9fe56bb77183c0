"""Each private interface of Dynamo that pgraph uses (see `test_compat`)."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from support_dynamo import heard_by
from torch import Tensor

from pgraph import compat


def broken(x: Tensor) -> Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def test_why_a_graph_ends() -> None:
    """The first one before its function does, in a line of the user's; the last one with it."""
    first, last = heard_by(broken, torch.ones(2), look=compat.graph_break)
    assert last is None
    text, frames = first
    assert "graph_break" in text
    assert (frames[-1].filename, frames[-1].lineno) == (__file__, broken.__code__.co_firstlineno + 2)


def test_which_compilation_is_under_way() -> None:
    assert compat.compilation() is None
    (found,) = heard_by(lambda x: x + 1, torch.ones(2), look=lambda gm: compat.compilation())
    assert found.endswith("/0")
    assert found.split("/")[0].isdigit()


class Kept(logging.Handler):
    """Records as they came."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_a_text_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made only if somebody listens, and says which compilation it is of."""
    trace, kept, made = torch._logging._internal.trace_log, Kept(), []

    def text() -> str:
        made.append("a plan")
        return made[-1]

    monkeypatch.setattr(trace, "handlers", [])
    compat.trace("my plan", text, "3/0")
    assert not made
    for name, value in (("handlers", [kept]), ("disabled", False), ("propagate", False)):
        monkeypatch.setattr(trace, name, value)
    monkeypatch.setattr(trace, "level", logging.DEBUG)
    monkeypatch.setattr(trace, "_cache", {})  # of the levels that it is enabled for
    compat.trace("my plan", text, "3/0")
    assert made == ["a plan"]
    (record,) = kept.records
    assert record.metadata["artifact"] == {"name": "my_plan", "encoding": "string"}
    assert (record.metadata["frame_id"], record.metadata["frame_compile_id"]) == (3, 0)
    assert record.payload == "a plan"


def test_graph_breaks_are_heard() -> None:
    """Of functions that are skipped whole, too; afterwards nobody listens."""

    def looping(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
        return x + 1

    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    before = logger.level, logger.propagate, list(logger.handlers)
    with compat.hearing_graph_breaks() as heard:
        heard_by(looping, torch.ones(2), look=len)
    assert any("looping" in text or __file__ in text for text in heard)
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_what_is_compiled() -> None:
    module = torch.nn.Linear(2, 2)
    assert not compat.is_compiled(module)
    assert not compat.is_compiled(module.forward)
    assert compat.is_compiled(torch.compile(module, backend="eager"))
    assert compat.is_compiled(torch.compile(module.forward, backend="eager"))
    module.compile(backend="eager")
    assert compat.is_compiled(module)


def test_traced_function() -> None:
    """The compiled function comes first, whatever it calls."""
    found: list[Any] = []

    def inner(x: Tensor) -> Tensor:
        return x + 1

    def outer(x: Tensor) -> Tensor:
        return inner(x) * 2

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(compat.traced_function())
        return gm

    assert compat.traced_function() is None
    torch.compile(outer, backend=backend)(torch.randn(3))
    assert found == [outer.__qualname__]


def test_compilations_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every function: its end, what it was compiled for, why Dynamo gave up, and the limit; 2.13."""
    ended: list[compat.Compilation] = []
    stopped: list[compat.Compilation] = []
    handler = torch._dynamo.callback.callback_handler
    logger = logging.getLogger("torch._dynamo.convert_frame")
    monkeypatch.setattr(handler, "end_callbacks", [])
    monkeypatch.setattr(handler, "clear", type(handler).clear.__get__(handler))
    monkeypatch.setattr(logger, "handlers", [])
    resets = []
    compat.hear_compilations(ended.append, stopped.append, lambda: resets.append(1))

    def backend(gm: torch.fx.GraphModule, inputs: Any, options: Any = None) -> Any:
        return gm

    def times(x: Tensor, n: int) -> Tensor:
        return x * n

    def looping(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
        return x + 1

    with torch._dynamo.config.patch(recompile_limit=2):
        compiled = torch.compile(times, backend=backend, options={"a": 1}, dynamic=False)
        for n in (3, 4, 5):
            compiled(torch.randn(3), n)
    assert [one.name.split(".")[-1] for one in ended] == ["times", "times"]
    assert all(one.backend is backend and one.options == {"a": 1} for one in (*ended, *stopped))
    assert ended[0].where == f"{__file__}:{times.__code__.co_firstlineno}"
    assert (ended[0].guard, "n == 3" in str(ended[1].guard)) == (None, True)
    (limited,) = stopped
    assert limited.limit == ("recompile_limit", 2)
    assert "n == 4" in str(limited.guard)
    assert compat.known_backends().count(backend) == 1
    torch._dynamo.reset()
    assert resets == [1]
    assert not compat.known_backends()
    ended.clear()
    torch.compile(looping, backend=backend)(torch.randn(3))
    torch.compile(torch.nn.LSTM(2, 2), backend=backend)(torch.randn(3, 1, 2))
    first, lstm = ended
    assert "graph_break()" in str(first.error)
    assert first.frames[-1] == (__file__, looping.__code__.co_firstlineno + 2)
    assert (lstm.name, lstm.where) == ("LSTM", None)
    try:
        raise torch._dynamo.exc.Unsupported("the caller's own")
    except torch._dynamo.exc.Unsupported:
        torch.compile(times, backend=backend, dynamic=False)(torch.randn(3), 1)
    assert ended[-1].error is None


HOW = ("module", "of torch", "method", "closure", "global", "wrapped", "compiled", "argument", "attribute")


@pytest.mark.parametrize("how", HOW)
def test_the_module_with_a_parameter(how: str) -> None:
    """Of the function that is being compiled, or used by it; 2.13."""
    model: Any = torch.nn.Linear(2, 2) if how == "of torch" else Doubling()
    found = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        (parameter, *_) = (x for x in inputs if isinstance(x, torch.nn.Parameter))
        found.append(compat.module_with(parameter))
        assert compat.module_with(torch.nn.Parameter(torch.ones(2))) is None
        return gm

    def uses(x: Tensor) -> Tensor:
        return inner(x)

    def takes(x: Tensor, module: Any = model) -> Tensor:
        return module(x)

    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def step(self, x: Tensor) -> Tensor:
            return self.model(x)

    def wraps(function: Any) -> Any:
        return lambda x: function(x)

    inner = torch.compile(model, backend="eager") if how == "compiled" else model
    named: dict[str, Any] = {"model": model}
    exec("def fn(x): return model(x)", named)
    fns = {"method": model.forward, "global": named["fn"], "argument": takes, "attribute": Trainer().step}
    fns["wrapped"] = wraps(named["fn"])
    fn = fns.get(how, model if how in ("module", "of torch") else uses)
    torch.compile(fn, backend=backend)(torch.ones(2, 2))
    assert found == [model]
    assert compat.module_with(next(model.parameters())) is None  # nothing is being compiled


class Doubling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Impatient:
    """A lock that nobody waits for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        assert self.lock.acquire(blocking=False), "this would wait for ever"

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_who_hears_of_compilations_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward in a function that Dynamo skips is compiled with Dynamo at work, and a lock held; 2.13."""
    handler = torch._dynamo.callback.callback_handler
    lock = "_CompilationCallbackHandler__pending_callbacks_counter_lock"
    assert isinstance(getattr(handler, lock), type(threading.Lock()))
    monkeypatch.setattr(handler, lock, Impatient())
    logger = logging.getLogger("torch._dynamo.convert_frame")
    monkeypatch.setattr(handler, "end_callbacks", [])
    monkeypatch.setattr(handler, "clear", type(handler).clear.__get__(handler))
    monkeypatch.setattr(logger, "handlers", [])
    ended: list[compat.Compilation] = []
    compat.hear_compilations(ended.append, ended.append, lambda: None)
    weight = torch.ones(3, requires_grad=True)

    def loss() -> Tensor:
        return (weight * 2).sum()

    def step() -> None:
        for _ in range(2):
            loss().backward()
            torch._dynamo.graph_break()

    torch.compile(step, backend="aot_eager")()
    assert "loss" in {one.name.split(".")[-1] for one in ended}
