"""`pgraph.explain` on small programs, hard mode, listed sizes, and what is said once."""

from __future__ import annotations

import gc
import html
import itertools
import json
import logging
import pathlib
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import MLP, host, same
from support_explain import HOST, explain, lines, text
from support_rules import Bench, grouped
from torch import Tensor, nn

import pgraph
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.errors import FullCaptureError, OptionError
from pgraph.explanation import as_page
from pgraph.explanation.explanation import Explanation
from pgraph.explanation.session import _changes, _partition
from pgraph.ops.safety import mark_unsafe, refusal, unmark_unsafe
from pgraph.runtime import observe, registry
from pgraph.runtime.specialization import State


@pytest.fixture
def marked() -> Iterator[None]:
    mark_unsafe("aten::sin", "is marked by a test", "unmark it")
    yield
    unmark_unsafe("aten::sin")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name.startswith("pgraph") and r.levelno >= logging.WARNING
    ]


# -- explain ---------------------------------------------------------------------------------------


def wave(x: Tensor) -> Tensor:
    a = (x * 2).cumsum(0)
    b = torch.sin(a)
    return (b + 1).cumsum(0) * 3


@pytest.mark.usefixtures("marked")
def test_parts_states_and_gains() -> None:
    found = explain(wave, torch.randn(4))
    assert [p.state for p in found.partitions] == ["captured", "uncaptured", "captured"]
    assert [p.device_ops for p in found.partitions] == [2, 1, 3]
    assert [p.kernels for p in found.partitions] == [2, None, 3]
    assert found.device_ops == (5, 6)
    assert found.kernels == (5, 6)
    (change,) = found.changes
    assert (change.ops, change.graphs) == (1, 2)
    assert (change.reason.code, change.reason.fix) == ("marked", "unmark it")
    assert lines(found) == ["b = torch.sin(a)"]
    assert not found.complete


@pytest.mark.usefixtures("marked")
def test_a_part_that_is_too_small() -> None:
    """What it would gain counts with the op that cuts it off."""
    found = explain(wave, torch.randn(4), min_ops=3)
    assert [p.state for p in found.partitions] == ["uncaptured", "captured"]
    assert [r.code for r in found.partitions[0].reasons] == ["marked", "too-small"]
    assert [c.ops for c in found.changes] == [3]


def test_a_capture_that_is_refused() -> None:
    with inject(HostFaults(fail_at="op", fail_as="lost")):
        found = explain(lambda x: (x * 2).cumsum(0), torch.randn(4))
    (partition,) = found.partitions
    assert partition.state == "refused"
    assert [(c.reason.code, c.ops) for c in found.changes] == [(partition.reasons[0].code, 2)]
    assert "refused" in text(found)


def test_one_refused_size_does_not_mark_the_others_and_is_told() -> None:
    """Two sizes in one step, one of them refused: the partition is captured, and not all of it."""
    compiled = host(lambda x: (x * 2).cumsum(0), dynamic=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        compiled(x)
        with inject(HostFaults(fail_at="op", fail_as="lost")):
            compiled(y)

    for _ in range(4):
        step(torch.randn(4), torch.randn(6))
    (partition,) = pgraph.report().partitions
    assert (partition.state, pgraph.report().refused) == ("captured", 1)
    assert [s.state for s in partition.standings] == [State.CAPTURED, State.REFUSED]
    (reason,) = partition.reasons
    assert str(reason) in str(pgraph.report())
    (told,) = (_partition(p, [[]]) for p in registry.live_partitions())
    found = Explanation((told,), (), _changes([told], [], {}, ()), (), 4)
    assert not found.complete
    assert [change.reason for change in found.changes] == [reason]
    assert reason.sentence in text(found)


def test_a_graph_without_a_device() -> None:
    found = explain(lambda x: x * 2, torch.randn(4), driver="auto")
    assert [p.state for p in found.partitions] == ["uncaptured"]
    assert found.changes[0].reason.code == "no-device"


def previewed(fn: Any, options: dict[str, Any]) -> list[Any]:
    """The partitions of a function that is compiled after a preview of it."""
    compiled = torch.compile(fn, backend="pgraph", options=options)
    before = set(map(id, registry.live_partitions()))
    compiled(torch.randn(4))
    return [p.stats for p in registry.live_partitions() if id(p) not in before]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_a_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, also of a program that is compiled at its first call; not if a driver is chosen."""

    def fn(x: Tensor) -> Tensor:
        return (x * 2).cumsum(0)

    options = {"codegen": "aten", "min_ops": 1}
    step = torch.compile(fn, backend="pgraph", options={**options, "warmup": 2})
    for found in (
        pgraph.explain(fn, options=options)(torch.randn(4)),
        pgraph.explain(lambda x: step(x))(torch.randn(4)),
    ):
        assert found.complete
        assert found.preview
        assert found.to_dict()["preview"]
        assert "preview without a GPU: judged as if on CUDA, tried on the host driver" in str(found)
    assert [p.state for p in previewed(fn, options)] == ["uncaptured"], "it leaves nothing behind"
    found = pgraph.explain(fn, driver="host", **options)(torch.randn(4))
    assert (found.complete, found.preview) == (True, False)
    found = pgraph.explain(fn, driver="auto", **options)(torch.randn(4))
    assert (found.complete, found.preview) == (False, False)
    monkeypatch.setenv("PGRAPH_DRIVER", "auto")
    assert not pgraph.explain(fn, options={**options, "warmup": 3})(torch.randn(4)).preview


def test_a_preview_judges_as_if_on_cuda() -> None:
    """A grouped product reads its offsets on the host there, and not on the CPU."""
    node = grouped(Bench(), torch.float32)
    assert refusal(node, device_type="cpu") != refusal(node, device_type="cpu", as_cuda=True)


def test_a_backward_that_does_not_run() -> None:
    """It is compiled when it is needed; hard mode compiles it at once."""
    found = explain(lambda x: x.sin().sum(), torch.randn(4, requires_grad=True), require_full_capture=True)
    assert [(p.kind, p.state) for p in found.partitions] == [("forward", "captured"), ("backward", "not run")]
    assert found.complete


def test_a_compiled_program_keeps_its_options() -> None:
    compiled = host(lambda x: x * 2 + 1)
    assert pgraph.explain(compiled)(torch.randn(4)).complete
    assert pgraph.explain(lambda x: compiled(x) * 2)(torch.randn(4)).uncompiled == (("aten::mul", 1),)
    with pytest.raises(OptionError, match="compiled already"):
        pgraph.explain(compiled, min_ops=2)(torch.randn(4))
    module = MLP()
    module.compile(backend="pgraph", options=HOST)
    assert pgraph.explain(module)(torch.randn(2, 8)).complete


def test_a_program_of_another_backend_is_told_so() -> None:
    other = torch.compile(lambda x: x * 2 + 1, backend="eager")
    found = pgraph.explain(other)(torch.randn(4))
    assert found.elsewhere
    assert str(found).startswith("pgraph: nothing reached pgraph: this is compiled already; pass it as it")
    assert not pgraph.explain(lambda x: x)(torch.randn(4)).elsewhere
    with pytest.raises(OptionError, match="or pass the program as it was before that"):
        pgraph.explain(other, min_ops=2)(torch.randn(4))


def test_graphs_that_others_have_taken_the_place_of_are_no_loss() -> None:
    """Those of static sizes, which the second step's sizes replaced by dynamic ones."""
    rows = itertools.cycle((2, 3, 4))
    compiled = host(lambda x: (x * 2).cumsum(0), dynamic=None)
    found = pgraph.explain(lambda: compiled(torch.ones(next(rows), 4)))()
    assert {(p.state, p.calls) for p in found.partitions} == {("warming up", 0), ("captured", 1)}, str(found)
    assert found.complete, str(found)
    found = pgraph.explain(host(lambda x: (x * 2).cumsum(0), warmup=50))(torch.ones(4))
    assert [(p.state, p.calls) for p in found.partitions] == [("warming up", 1)]
    assert not found.complete


def test_seeds_are_no_loss(inductor_cache: pathlib.Path) -> None:
    """Drawn before the graph that takes them: shown, but nothing to change."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU())
    compiled = host(model, "inductor")
    found = pgraph.explain(lambda x: compiled(x).sum().backward())(torch.randn(3, 4))
    assert [p.state for p in found.partitions] == ["uncaptured", "captured", "captured"]
    assert [r.code for r in found.partitions[0].reasons] == ["rng-seeds"]
    assert found.changes == ()
    assert found.complete
    assert ("aten::ones_like", 1) in found.uncompiled  # the backward's first gradient


def test_wrong_calls_are_told_before_anything_runs() -> None:
    calls = []
    for wrong, told in (
        ({"warmpu": 2}, "warmpu"),
        ({"options": {"warmpu": 2}}, "warmpu"),
        ({"options": 3}, "must be a dict"),
        ({"options": {"warmup": 2}, "warmup": 2}, r"\['warmup'\] are given twice"),
    ):
        with pytest.raises(OptionError, match=told):
            pgraph.explain(calls.append, **wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="5 is no model or function"):
        pgraph.explain(5)  # type: ignore[arg-type]
    assert not calls


def test_options_as_for_torch_compile() -> None:
    given = {**HOST, "warmup": 3}
    found = pgraph.explain(wave, options=given, dynamic=False)(torch.randn(4))
    assert found.complete
    assert not found.preview
    assert found.steps >= 3 + 2
    assert given == {**HOST, "warmup": 3}


def test_a_size_that_is_not_listed_is_not_called_captured() -> None:
    found = pgraph.explain(
        lambda x: (x * 2).sin() + 1,
        dynamic=True,
        driver="host",
        codegen="aten",
        min_ops=1,
        capture_sizes=(8,),
    )(torch.ones(16, 4))
    assert not found.complete
    assert "0 of 1 partitions captured" in str(found)


def test_steps_are_counted_and_checked() -> None:
    calls = []

    def fn(x: Tensor) -> Tensor:
        return x * 2

    compiled = host(fn)

    def step(x: Tensor) -> None:
        calls.append(compiled(x))

    found = pgraph.explain(step, steps=2)(torch.randn(4))
    assert (found.steps, len(calls)) == (3, 3)
    with pytest.raises(OptionError, match="steps"):
        pgraph.explain(step, steps=0)


def test_one_capture_that_serves_many_layers() -> None:
    """Calls per step multiply ops and kernels."""
    compiled = host(lambda x, w: (x @ w).relu())
    weights = [torch.randn(4, 4) for _ in range(3)]

    def step(x: Tensor) -> Tensor:
        for w in weights:
            x = compiled(x, w)
        return x

    found = pgraph.explain(step)(torch.randn(2, 4))
    assert [(p.calls, p.captures) for p in found.partitions] == [(3, 1)]
    assert found.device_ops == (6, 6)
    assert "captured x 3" in text(found)


@pytest.mark.usefixtures("marked")
def test_as_data_and_as_a_page(tmp_path: pathlib.Path) -> None:
    found = explain(wave, torch.randn(4))
    assert json.loads(found.to_json()) == found.to_dict()
    page = found.to_html(tmp_path / "timeline.html")
    assert (tmp_path / "timeline.html").read_text() == page
    assert page.count('class="bar"') == 3
    assert "fix: unmark it" in page
    assert "b = torch.sin(a)" in page
    assert found.to_html(times=False) == found.to_html(times=False)
    assert_same_content(found)
    assert " us" not in found.render(times=False)
    assert " us" in str(found)
    report = pgraph.report()
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert [p["state"] for p in report.to_dict()["partitions"]] == ["captured", "uncaptured", "captured"]


def assert_same_content(found: pgraph.Explanation) -> None:
    """Whatever the text says is on the page."""
    page = html.unescape(re.sub(r"<[^>]+>", "\n", found.to_html()))
    shown = {line.strip() for line in page.splitlines()}
    for line in str(found).splitlines():
        plain = re.sub(r"^\d+\. |^at ", "", line.strip())
        assert plain.rstrip(":") in shown, plain


def test_what_nobody_can_change_is_not_red(inductor_cache: pathlib.Path) -> None:
    compiled = host(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU()), "inductor")
    found = pgraph.explain(lambda x: compiled(x).sum().backward())(torch.randn(3, 4))
    assert [p.state for p in found.partitions] == ["uncaptured", "captured", "captured"]
    assert_same_content(found)
    seeds, *captured = re.findall(r'class="bar" style="[^"]*background:(#\w+)"', found.to_html())
    red = as_page._LOOKS["uncaptured"][0]
    assert seeds != red
    assert set(captured) == {as_page._LOOKS["captured"][0]}


def test_nothing_is_watched_afterwards() -> None:
    explain(lambda x: x * 2, torch.randn(4))
    assert observe.watch is None
    with pytest.raises(ZeroDivisionError):
        explain(lambda x: 1 / 0, torch.randn(4))
    assert observe.watch is None


def test_records_die_with_the_code() -> None:
    """Neither the report nor an explanation keeps a model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    gone = weakref.ref(model)
    found = explain(model, torch.randn(2, 4))
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    assert found.complete
    assert registry.live_partitions() == []


# -- from a first try to full capture ----------------------------------------------------------------

WHITEN = torch.eye(4) * 2


def first_try(x: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    h = x @ torch.linalg.inv(WHITEN)
    h = h / h.abs().max().item()
    return ((h[counts] - target[counts]) ** 2).mean()


def second_try(x: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    h = x @ torch.linalg.inv(WHITEN)
    h = h / h.abs().max()
    return ((h[counts] - target[counts]) ** 2).mean()


def third_try(x: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    h = x @ torch.linalg.inv(WHITEN)
    h = h / h.abs().max()
    error = torch.where(counts[:, None], (h - target) ** 2, 0)
    return error.sum() / (counts.sum() * 4)


UNWHITEN = torch.linalg.inv(WHITEN)


def last_try(x: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    h = x @ UNWHITEN
    h = h / h.abs().max()
    error = torch.where(counts[:, None], (h - target) ** 2, 0)
    return error.sum() / (counts.sum() * 4)


def test_a_new_user_gets_to_full_capture() -> None:
    """Each explanation names the next problem, its line and the fix that the next version applies."""
    data = torch.randn(6, 4), torch.randn(6, 4), torch.tensor([True, False, True, True, False, True])
    expected = [
        (
            first_try,
            "h = h / h.abs().max().item()",
            "keep the value in a tensor: x * s instead of x * s.item(), torch.where instead of if",
        ),
        (
            second_try,
            "return ((h[counts] - target[counts]) ** 2).mean()",
            "use torch.where, masked_fill, or integer indices",
        ),
        (
            third_try,
            "h = x @ torch.linalg.inv(WHITEN)",
            "factorise outside the compiled region, or less often",
        ),
    ]
    for version, line, fix in expected:
        found = explain(version, *data)
        assert lines(found)[0] == line
        assert found.changes[0].reason.fix == fix
        assert not found.complete
        with pytest.raises(FullCaptureError):
            host(version, require_full_capture=True)(*data)
        torch._dynamo.reset()
    found = explain(last_try, *data, require_full_capture=True)
    assert found.complete
    assert not found.changes
    for version, *_ in expected:
        torch.testing.assert_close(last_try(*data), version(*data))


# -- hard mode ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("marked")
def test_hard_mode_refuses_an_unsafe_op() -> None:
    ran = torch.zeros(1)

    def fn(x: Tensor) -> Tensor:
        ran.add_(1)
        return torch.sin(x)

    compiled = host(fn, require_full_capture=True)
    for _ in range(2):
        with pytest.raises(FullCaptureError, match=r"\[marked\] .* Fix: unmark it"):
            compiled(torch.randn(4))
    same(ran, torch.zeros(1))


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_hard_mode_refuses_an_unsafe_backward(codegen: str, inductor_cache: pathlib.Path) -> None:
    """Before the forward has run."""
    compiled = host(lambda x: (x * 2).cos().sum(), codegen, require_full_capture=True)
    with pytest.raises(FullCaptureError, match="backward"):
        compiled(torch.randn(4, requires_grad=True))


def test_hard_mode_refuses_a_graph_break() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    with pytest.raises(FullCaptureError, match="graph-break"):
        host(fn, require_full_capture=True)(torch.randn(4))


def test_hard_mode_refuses_the_cpu() -> None:
    with pytest.raises(FullCaptureError, match="no-device"):
        host(lambda x: x + 1, require_full_capture=True, driver="auto")(torch.randn(4))


def test_hard_mode_refuses_a_failed_capture() -> None:
    """The call that was to be captured raises, and so do the ones after it; none has run."""
    total = torch.zeros(4)
    compiled = host(lambda x: total.add_(x).cumsum(0), require_full_capture=True)
    compiled(torch.ones(4))
    lost = HostFaults(fail_at="op", fail_as="lost")
    with inject(lost), pytest.raises(FullCaptureError, match="stays outside every graph"):
        compiled(torch.ones(4))
    with pytest.raises(FullCaptureError):
        compiled(torch.ones(4))
    same(total, torch.ones(4))
    pgraph.reset()
    compiled(torch.ones(4))
    compiled(torch.ones(4))
    assert pgraph.report().launches == 1


def test_hard_mode_refuses_a_failed_launch() -> None:
    compiled = host(lambda x: (x * 2).cumsum(0), require_full_capture=True)
    for _ in range(3):
        compiled(torch.ones(4))
    with inject(HostFaults(fail_at="launch")), pytest.raises(FullCaptureError, match="launch-failed"):
        compiled(torch.ones(4))
    with pytest.raises(FullCaptureError, match="launch-failed"):
        compiled(torch.ones(4))


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_hard_mode_lets_a_model_train(codegen: str, inductor_cache: pathlib.Path) -> None:
    """Dropout's seeds are drawn before the graph, which is no loss."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5 if codegen == "inductor" else 0.0), nn.Linear(8, 2))
    compiled = host(model, codegen, require_full_capture=True)
    for _ in range(3):
        compiled(torch.randn(3, 4)).sum().backward()
    assert pgraph.report().launches >= 4


# -- sizes ---------------------------------------------------------------------------------------------


def running_sum(x: Tensor) -> Tensor:
    return (x + x.shape[0]).cumsum(0)


def call(compiled: Any, *sizes: int) -> None:
    for n in sizes:
        x = torch.randn(n, 3)
        same(compiled(x), running_sum(x))


@pytest.mark.parametrize("listed", [[2, 5], (2, 5)])
def test_only_listed_sizes_are_captured(listed: Any) -> None:
    compiled = host(running_sum, dynamic=True, capture_sizes=[*listed, 3])  # 3: the other dimension
    call(compiled, *[2, 4, 5, 6] * 3)
    report = pgraph.report()
    assert report.captures == 2
    assert report.launches == 4
    (partition,) = registry.live_capturable()
    assert len(partition.specializations()) == 2


def test_listed_sizes_hold_in_the_backward() -> None:
    compiled = host(running_sum, dynamic=True, capture_sizes=[2, 3])
    for n in [2, 4, 5] * 3:
        x = torch.randn(n, 3, requires_grad=True)
        compiled(x).sum().backward()
        same(x.grad, torch.arange(n, 0, -1.0)[:, None].expand(n, 3).contiguous())
    assert [(p.captures, p.launches) for p in pgraph.report().capturable] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("wrong", [5, [1.5], ["2"], [True], [-1]])
def test_listed_sizes_are_checked(wrong: Any) -> None:
    with pytest.raises(Exception, match="capture_sizes"):
        host(running_sum, capture_sizes=wrong)(torch.randn(2, 3))


def test_static_shapes_need_not_be_listed() -> None:
    compiled = host(running_sum, capture_sizes=[7])
    call(compiled, 2, 2, 2)
    assert pgraph.report().launches == 2


def test_new_captures_and_evictions_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    compiled = host(running_sum, dynamic=True, max_captures=2)
    call(compiled, 2, 2)
    assert warnings(caplog) == []
    call(compiled, 3, 3, 4, 4, 5, 5, 6, 6)
    varied, evicting = warnings(caplog)
    assert "captured again because dimension 0 of x went from 2 to 3" in varied
    assert "capture_sizes" in varied
    assert "max_captures=2" in evicting
    assert "raise max_captures" in evicting


def test_a_fall_back_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    compiled = host(running_sum, dynamic=True)
    with inject(HostFaults(fail_at="end", fail_as="lost")):
        call(compiled, *[2, 3, 4] * 3)
    (told,) = warnings(caplog)
    assert "runs uncaptured" in told
    assert "Fix: " in told


def test_the_log_tells_what_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    """What TORCH_LOGS="+pgraph" shows."""
    with caplog.at_level(logging.DEBUG, logger="pgraph"):
        call(host(running_sum), 2, 2)
    told = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("pgraph"))
    assert "2 device ops, to be captured" in told
    assert re.search(r"captured in \d+ ms: 2 nodes in 1 chunk; 1 capture of it so far, in \d+ ms", told)
    assert "node 0: kernel" in told
