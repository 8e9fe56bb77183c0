"""Nothing is silent: what Dynamo skips, or compiles no more, is told by report, explain and hard mode."""

from __future__ import annotations

import contextlib
import gc
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import BEFORE_2_14, MLP, host
from support_explain import lines
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import pgraph
from pgraph.compiler.graph_breaks import from_text
from pgraph.errors import FullCaptureError
from pgraph.explanation.session import _breaks
from pgraph.runtime import registry


class Layer(nn.Module):
    """A block with a number of its own, by which Dynamo specializes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight, self.number = nn.Parameter(torch.ones(4)), number

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).relu() + self.number


def blocks(count: int, **options: Any) -> Any:
    compiled = [host(Layer(i), **options) for i in range(count)]

    def step(x: Tensor) -> Tensor:
        for block in compiled:
            x = block(x)
        return x

    return step


@pytest.fixture(autouse=True)
def few() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=3):
        yield


# -- compiled too often ------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["heard", "before"])
def test_a_function_that_is_compiled_no_more_comes_first(late: bool) -> None:
    """Also if it happened before anybody asked."""
    step, x = blocks(5), torch.randn(2, 4)
    with torch.no_grad():
        if late:
            step(x)
        found = pgraph.explain(step)(x)
    (reason,) = found.stopped
    assert found.changes[0].reason == reason
    assert reason.code == "recompile-limit"
    assert "self.number == 2" in reason.sentence
    assert "recompile_limit is 3" in reason.sentence
    assert "Layer.forward 3 times" in reason.sentence
    assert "allow_unspec_int_on_nn_module" in reason.fix
    assert lines(found)[0] == "def forward(self, x: Tensor) -> Tensor:"
    assert not found.complete
    assert found.device_ops == (9, 15)  # two layers of three ops run eagerly
    assert "3 of 3 partitions captured, 1 function compiled no more, 6 ops not compiled" in str(found)
    assert str(found).count("9 of 15 (60 %)") == 2, "ops and kernels"
    assert found.to_dict()["stopped"][0]["code"] == "recompile-limit"


def test_the_report_has_it_too() -> None:
    step = blocks(5)
    for _ in range(2):
        step(torch.randn(2, 4))
    report = pgraph.report()
    (function,) = report.functions
    assert (function.name, function.compilations, function.graphs) == ("Layer.forward", 3, 3)
    assert function.stopped is not None
    assert "self.number == 1" in function.guards
    assert str(report).splitlines()[1].startswith("  Layer.forward: compiled no more; [recompile-limit]")
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    torch._dynamo.reset()
    assert pgraph.report().functions == ()


def test_hard_mode_refuses_to_run_eagerly() -> None:
    """At the call that would be compiled once too often, and at every later one."""
    step = blocks(4, require_full_capture=True)
    for _ in range(2):
        with pytest.raises(FullCaptureError, match=r"Layer\.forward stays.*\n.*\n.*\[recompile-limit\]"):
            step(torch.ones(4))


def test_other_backends_limits_are_none_of_ours() -> None:
    for i in range(5):
        torch.compile(Layer(i), backend="eager", dynamic=False)(torch.ones(4))
    assert pgraph.report().functions == ()


@pytest.mark.parametrize(
    ("calls", "fix"),
    [
        (lambda fn: [fn(torch.ones(n)) for n in range(2, 7)], "dynamic=True"),
        (lambda fn: [fn(torch.ones(2), past_key_values=n) for n in range(5)], "use_cache=False"),
        (lambda fn: [fn(torch.ones(2), scale=n) for n in range(5)], "the same in all calls"),
    ],
)
def test_the_fix_fits_the_guard(calls: Any, fix: str) -> None:
    def fn(x: Tensor, past_key_values: int = 0, scale: int = 0) -> Tensor:
        return x * 2 + past_key_values + scale

    calls(host(fn))
    (function,) = pgraph.report().functions
    assert function.stopped is not None
    assert fix in function.stopped.fix
    assert "recompile_limit" in function.stopped.fix


# -- skipped whole -----------------------------------------------------------------------------------


def looping(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x * 2
        torch._dynamo.graph_break()
    return x


def test_what_dynamo_skips_is_in_the_report() -> None:
    host(nn.LSTM(4, 4))(torch.randn(3, 2, 4))
    host(looping)(torch.ones(3))
    report = str(pgraph.report())
    assert "nothing has reached pgraph: Dynamo compiles nothing of the functions below" in report
    assert "LSTM: skipped by Dynamo; [graph-break] Dynamo does not trace torch.nn.RNN" in report
    assert "looping: skipped by Dynamo; [graph-break]" in report
    assert f"{__file__}:" in report
    host(lambda x: x * 2 + 1)(torch.ones(3))
    report = str(pgraph.report())
    assert "nothing has reached" not in report
    assert "looping: skipped by Dynamo" in report


def test_a_module_of_torch_compiled_in_place_is_told_of() -> None:
    """Dynamo skips it without a word, so that nothing else could be said."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.compile(backend="pgraph", options={"driver": "host", "codegen": "aten", "min_ops": 1})
    model(torch.ones(2, 4))
    if BEFORE_2_14:  # from 2.14 on Dynamo compiles it
        assert "nothing has reached pgraph" in str(pgraph.report())
        assert "Fix: torch.compile(module) in the place of module.compile()" in str(pgraph.report())
    fixed = host(model)
    fixed(torch.ones(2, 4))
    assert pgraph.report().partitions


def test_the_step_of_an_optimizer_is_skipped_with_a_fix_that_helps() -> None:
    """Its own break ends the function's graph before it began: what else is in the function runs eagerly."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    sgd = torch.optim.SGD([weight], lr=torch.tensor(0.1))
    host(lambda: sgd.step())()
    assert "Fix: remove the call; Optimizer.step() has one of its own" in str(pgraph.report())
    torch._dynamo.reset()
    host(sgd.step)()
    assert "skipped by Dynamo" not in str(pgraph.report())
    assert any(p.facts.safe and not p.dead for p in pgraph.report().partitions)


def test_what_was_skipped_before_is_explained() -> None:
    """Dynamo tells only once; nothing of it runs in a partition."""
    run = host(looping)
    run(torch.ones(3))
    found = pgraph.explain(run)(torch.ones(3))
    assert [r.code for r in found.breaks] == ["graph-break"]
    assert not found.complete
    assert "torch._dynamo.graph_break()" in lines(found)


class Recurrent(nn.Module):
    """Dynamo skips it as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0].tanh() * 2  # type: ignore[no-any-return]


def test_what_was_skipped_beside_what_runs_is_explained() -> None:
    """It was skipped before anybody asked, and the rest of the program is captured."""
    first, second = host(Layer(1)), host(Recurrent())
    x = torch.randn(2, 3, 4)

    def step() -> Tensor:
        return second(first(x))  # type: ignore[no-any-return]

    with torch.no_grad():
        for _ in range(4):
            step()
        found = pgraph.explain(step)()
    assert not found.complete
    assert [change.reason.code for change in found.changes] == ["graph-break"]
    assert "torch.nn.RNN, GRU and LSTM" in str(found.breaks[0])


def breaking(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.sin() * 2


def by_a_call(x: Tensor) -> Tensor:
    return breaking(x) + 1


@pytest.mark.parametrize("broken", [breaking, by_a_call])
def test_a_break_before_the_first_op_is_explained(broken: Callable[[Tensor], Tensor]) -> None:
    """No graph ends there, so none tells; it was compiled before anybody asked."""
    first, second, x = host(Layer(1)), host(broken), torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(4):
            second(first(x))
        found = pgraph.explain(lambda: second(first(x)))()
    assert not found.complete
    (reason,) = found.breaks
    assert "torch._dynamo.graph_break()" in reason.sentence


def test_what_was_skipped_for_another_program_is_not_this_ones() -> None:
    host(looping)(torch.ones(3))
    found = pgraph.explain(lambda x: x)(torch.ones(3))
    assert found.breaks == ()
    assert "graph break" not in str(found)


def test_what_was_stopped_for_another_program_is_not_this_ones() -> None:
    step, x = blocks(5), torch.randn(2, 4)
    with torch.no_grad():
        step(x)
    assert any(function.stopped is not None for function in pgraph.report().functions)
    found = pgraph.explain(host(lambda x: (x * 2).relu() + 1))(x)
    assert found.stopped == ()
    assert found.complete, str(found)


def test_what_was_first_called_under_a_mode_is_told_of() -> None:
    """Dynamo does not compile it there, nor ever again."""

    def layer(x: Tensor) -> Tensor:
        return (x @ x).relu() + 1

    compiled, x = host(layer), torch.ones(3, 3)
    with FlopCounterMode(display=False) as counter:
        compiled(x)
    assert counter.get_total_flops() == 2 * 27
    compiled(x)
    if pgraph.report().partitions:
        return  # 2.15 compiles it once the mode has gone: nothing is lost, and there is nothing to tell
    report = str(pgraph.report())
    assert "first called under a dispatch mode (FlopCounterMode and its like)" in report
    assert "a first call without the mode" in report
    torch._dynamo.reset()  # as another process would have it: the fix
    compiled = host(layer)
    compiled(x)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(compiled(x), layer(x))
    assert counter.get_total_flops() >= 2 * 27
    assert len(pgraph.report().partitions) == 1


def test_what_says_nothing_is_told_of_as_well() -> None:
    """A generator is skipped without a word."""

    def numbers(x: Tensor) -> Any:
        yield x + 1

    assert "nothing has reached" not in str(pgraph.report())
    list(host(numbers)(torch.ones(3)))
    assert "nothing has reached pgraph" in str(pgraph.report())


def test_a_function_that_compiles_after_all_is_no_news() -> None:
    """It is another call of the same function that counts."""

    def fn(x: Tensor, broken: bool) -> Tensor:
        return looping(x) if broken else x * 2

    compiled = host(fn)
    compiled(torch.ones(3), True)
    assert pgraph.report().functions[0].skipped is not None
    torch._dynamo.reset()
    compiled(torch.ones(3), False)
    (function,) = pgraph.report().functions
    assert (function.skipped, function.graphs) == (None, 1)
    assert "skipped" not in str(pgraph.report())


def test_ddp_itself_is_not_traced() -> None:
    """Its own breaks have one fix, and none of them is in Python's library."""
    for text in ("method `set_runtime_stats_and_log` of class", "function `X._inside_ddp_forward` in file"):
        reason = from_text(text, [(__file__, 3), (contextlib.__file__, 5)])
        assert "DistributedDataParallel(torch.compile(model))" in reason.fix
        assert reason.where == f"{__file__}:3"


def test_what_cannot_be_traced_is_none_of_pgraphs_faults() -> None:
    """Dynamo would have it reported to pgraph."""
    table = nn.Embedding(20, 6, sparse=True, padding_idx=0)
    host(lambda tokens: table(tokens))(torch.arange(12)).sum().backward()
    report = str(pgraph.report())
    assert re.search(r"aten\.[\w.]+ cannot be traced: .* Fix: .* torch\.compiler\.disable", report), report


def test_the_step_of_a_fused_optimizer() -> None:
    """Dynamo leaves it, so that no graph comes of it."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    step, run = host(optimizer.step), host(layer)
    for _ in range(3):
        run(torch.randn(2, 4)).sum().backward()
        step()
    (told,) = [line for line in str(pgraph.report()).splitlines() if ".step: " in line]
    assert "Dynamo does not trace fused optimizers. Fix: leave the step uncompiled" in told


class Queue(nn.Module):
    """It writes further on at each call, and counts where."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.register_buffer("kept", torch.zeros(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept[self.at : self.at + 2] = x
        self.at += 2
        return self.kept.sum(0) * 2 + 1


def test_what_is_compiled_at_each_call_is_told_before_the_limit() -> None:
    queue = host(Queue())
    with torch._dynamo.config.patch(recompile_limit=8):
        for _ in range(3):
            queue(torch.randn(2, 4))
        assert "the last guard" not in str(pgraph.report())
        queue(torch.randn(2, 4))
    (told,) = [line for line in str(pgraph.report()).splitlines() if "Queue.forward" in line]
    assert "compiled x 4; the last guard that failed: self.at == 4" in told
    assert "Fix: hold the number in a tensor" in told


def by_size(x: Tensor) -> Tensor:
    if x.size(0) // 16 * x.size(1) < 40:
        return x + 1
    return x - 1 if x.size(0) * 3 > 200 else x * 2


@pytest.mark.parametrize(
    ("dynamic", "fix"),
    [
        (False, "compile with dynamic=True, or pad to a few sizes"),
        (None, "pad to sizes for which the code goes one way, or have it go one way for all of them"),
    ],
)
def test_sizes_that_make_dynamo_compile_anew(dynamic: bool | None, fix: str) -> None:
    """Where they already vary it is the code that tells them apart."""
    model = host(by_size, dynamic=dynamic)
    for n in (3, 20, 40, 100, 5, 7, 11):
        model(torch.ones(n, n + 1))
    (told,) = [line for line in str(pgraph.report()).splitlines() if "by_size: compiled" in line]
    assert f"Fix: {fix}" in told


def test_hooks_that_dynamo_says_nothing_of() -> None:
    """An explanation may be empty."""
    layer = nn.Linear(4, 4)
    layer.register_full_backward_hook(lambda *_: None)
    host(lambda x: layer(x) + 1)(torch.randn(2, 4, requires_grad=True)).sum().backward()
    report = str(pgraph.report())
    assert "hooks" in report
    assert ": ." not in report


def test_a_step_that_a_scheduler_counts() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    sgd = torch.optim.SGD([weight], lr=torch.tensor(0.1))
    torch.optim.lr_scheduler.LinearLR(sgd)
    host(lambda: sgd.step())()
    assert "Fix: compile the step by itself: torch.compile(optimizer.step)" in str(pgraph.report())
    torch._dynamo.reset()
    step = host(sgd.step)
    found = pgraph.explain(step)()
    assert any(p.facts.safe and not p.dead for p in pgraph.report().partitions)
    assert "skipped by Dynamo" not in str(pgraph.report()), "the step inside is compiled"
    assert found.complete, str(found)


def test_a_learning_rate_that_a_scheduler_changes() -> None:
    """The fix for a step that is compiled too often holds."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    told = []
    for lr in (0.1, torch.tensor(0.1)):
        sgd = torch.optim.SGD([weight], lr=lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9)
        step = host(sgd.step)
        for _ in range(6):
            step()
            scheduler.step()
        told.append([f.stopped.fix for f in pgraph.report().functions if f.stopped is not None])
        torch._dynamo.reset()
    assert ["lr=torch.tensor(" in fix for fix in told[0]] == [True]
    assert told[1] == []


def test_a_break_is_told_once_where_its_place_is_known() -> None:
    messages = [
        f"Graph break in user code at {path}:3\nGraph Break Reason: Tensor.item()\nUser code traceback:\n"
        for path in (__file__, torch.__file__)
    ]
    assert [reason.where for reason in _breaks([], messages)] == [f"{__file__}:3"]
    assert [reason.where for reason in _breaks([], messages[1:])] == [None]


# -- sizes that wait ---------------------------------------------------------------------------------


def test_sizes_that_match_no_call() -> None:
    compiled = host(lambda x: x.sin() + 1, dynamic=True, capture_sizes=[8, 9])
    found = pgraph.explain(lambda x: compiled(x))(torch.ones(16, 4))
    (partition,) = found.partitions
    assert partition.state == "waiting"
    (reason,) = partition.reasons
    assert reason.sentence == (
        "dimension 0 of x is 16 and dimension 1 of x is 4, and option capture_sizes lists 8, 9"
    )
    assert [(c.reason, c.ops) for c in found.changes] == [(reason, 2)]
    assert str(reason) in str(pgraph.report())
    compiled(torch.ones(8, 9))
    compiled(torch.ones(8, 9))
    assert pgraph.report().partitions[0].state == "captured"


def test_sizes_that_never_come_again() -> None:
    """Not "warming up" for ever, whatever may be captured."""
    compiled = host(lambda x, n: (x * n).sin(), dynamic=True, step_aside=False)
    for n in range(3, 30):
        compiled(torch.randn(4), n)
    (told,) = (p for p in pgraph.report().partitions if p.calls)
    assert (told.captures, told.state) == (0, "waiting")
    assert [reason.code for reason in told.reasons] == ["sizes-vary"]
    assert "none of them often enough" in str(told.reasons[0])
    for _ in range(3):
        compiled(torch.randn(4), 5)
    (told,) = (p for p in pgraph.report().partitions if p.calls)
    assert (told.captures, told.state, told.reasons) == (1, "captured", ())


@pytest.mark.parametrize(
    ("options", "sizes", "code"),
    [
        ({"capture_sizes": [3, 4]}, [3, 3, 3, 5], "size-not-listed"),
        ({"max_captures": 1}, [3, 4, 5] * 4, "too-many-sizes"),
        ({}, range(3, 30), "sizes-vary"),
    ],
)
def test_hard_mode_refuses_sizes_that_stay_outside(options: Any, sizes: Any, code: str) -> None:
    compiled = host(lambda x: x.sin() * 2, dynamic=True, require_full_capture=True, **options)

    def call_all() -> None:
        for size in sizes:
            compiled(torch.randn(size))

    with pytest.raises(FullCaptureError, match=re.escape(f"[{code}]")):
        call_all()


def test_more_sizes_than_captures() -> None:
    compiled = host(lambda x: x.sin() + 1, dynamic=True, max_captures=1)
    for size in [3, 4, 5] * 4:
        compiled(torch.ones(size))
    (partition,) = pgraph.report().partitions
    assert [reason.code for reason in partition.reasons] == ["too-many-sizes"]
    assert "max_captures=1" in str(pgraph.report())


# -- what is gone ------------------------------------------------------------------------------------


def test_inductors_graphs_know_their_model_too(inductor_cache: Any) -> None:
    layer = Layer(0)
    with torch.no_grad():
        host(layer, "inductor")(torch.randn(2, 4))
    assert [p.dead for p in pgraph.report().partitions] == [False]
    del layer
    gc.collect()
    assert [p.dead for p in pgraph.report().partitions] == [True]


def test_models_that_are_gone_are_told_apart() -> None:
    """Dynamo keeps their code for others of the class, and the recordings live until a reset."""
    first, second = Layer(0), MLP()
    for module, size in ((first, 4), (second, 8)):
        compiled = host(module)
        for _ in range(3):
            compiled(torch.randn(2, size)).sum().backward()
    report = pgraph.report()
    assert (report.captures, report.dead) == (4, ())
    del first, module, compiled
    gc.collect()
    report = pgraph.report()
    assert [p.dead for p in report.partitions] == [True, True, False, False]
    assert "of models that are gone: 2 partitions, 2 captures" in str(report)
    assert "(gone): 1 capture" in str(report)
    assert "pgraph.reset() frees them" in str(report)
    pgraph.reset()
    report = pgraph.report()
    assert "of models that are gone: 2 partitions, 0 captures" in str(report)
    assert "pgraph.reset() frees them" not in str(report)  # there is nothing left to free
    third = Layer(0)
    host(third)(torch.randn(2, 4)).sum().backward()
    assert pgraph.report().dead == ()


def test_a_parameter_can_be_swapped() -> None:
    """As `Module.to` does where a parameter is of a type of its own: it must have no weak reference."""
    model = Layer(0)
    compiled = host(model)
    for _ in range(3):
        compiled(torch.randn(2, 4)).sum().backward()
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.full((4,), 2.0)))
    assert compiled(torch.ones(2, 4)).tolist() == [[2.0] * 4] * 2


def test_a_reset_takes_the_counts_of_what_it_frees() -> None:
    compiled = host(MLP())
    for _ in range(3):
        compiled(torch.randn(2, 8)).sum().backward()
    pgraph.reset()
    report = pgraph.report()
    assert (report.captures, report.nodes, report.slots, report.capture_s, report.exec_bytes) == (0,) * 5
    assert report.launches == 4
    assert report.partitions[0].chunks == 0
    for _ in range(2):
        compiled(torch.randn(2, 8)).sum().backward()
    assert pgraph.report().captures == 2


def test_what_dynamo_has_forgotten_is_gone() -> None:
    compiled = host(lambda x: x.sin() + 1)
    kept = [compiled(torch.randn(2)) for _ in range(3)]
    held = registry.live_partitions()
    torch._dynamo.reset()
    assert [p.dead for p in pgraph.report().partitions] == [True]
    del kept, held
