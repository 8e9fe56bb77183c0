"""Each code of the catalogue is reached: a rule, a capture or a launch gives it as a reason."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from support import host
from support_rules import Bench, plain, relu
from table_rules import CASES
from torch import Tensor

import pgraph
from pgraph.capture import build
from pgraph.capture.record import record
from pgraph.drivers import choice
from pgraph.drivers.host.driver import HostDriver, HostSession
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.drivers.interface import HiddenAllocation
from pgraph.errors import CaptureError, MatchError
from pgraph.ops.safety import mark_unsafe, refusal, unmark_unsafe
from pgraph.partition.scan import scan
from pgraph.reason_codes import CATALOGUE
from pgraph.reasons import Reason
from pgraph.runtime.economy import not_worth
from pgraph.runtime.trial import Trial
from pgraph.template.match import match
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import Recording

aten = torch.ops.aten
FRAMEWORK = 0x7EEE_0000_0000

# Code -> the test on a GPU that gives it; nothing but CUDA does.
ON_CUDA = {
    "foreign-graphs": "test_streams_threads_gpu.py",
    "history-too-short": "test_failures_gpu.py",
    "node-kind": "test_refused_gpu.py",
}

Produce = Callable[[pytest.MonkeyPatch], Iterable[Reason]]


@torch.library.custom_op("pgraph_made::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Somebody else's op."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


# -- before anything is captured -----------------------------------------------------------------


def of_rules(code: str) -> Produce:
    """What the rules say of the ops in their table."""
    builds = [case.refused for case in CASES if case.code == code]
    return lambda patch: [found for build in builds if (found := refusal(build(Bench()), device_type="cuda"))]


def marked(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    mark_unsafe("aten::relu", "counts its calls", "count outside")
    try:
        return [found for found in [refusal(relu(Bench()), device_type="cuda")] if found]
    finally:
        unmark_unsafe("aten::relu")


def too_small(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    b = Bench()
    b.module(plain(aten.nonzero.default)(b), relu(b))
    first, *_ = scan(b.graph, lambda node: refusal(node, device_type="cuda"), min_ops=2)
    return first.reasons[1:]


def graph_break(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    host(fn)(torch.ones(4))
    return [p.facts.graph.broken for p in pgraph.report().partitions if p.facts.graph.broken]


def recompile_limit(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    compiled = host(lambda x, n: x * n)
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in (2, 3):
            compiled(torch.ones(4), n)
    return [function.stopped for function in pgraph.report().functions if function.stopped]


def no_device(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    torch.compile(torch.sin, backend="pgraph", options={"driver": "auto", "codegen": "aten"})(torch.ones(4))
    return [reason for _, reasons in pgraph.report().outside for reason in reasons]


def other_allocator(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    patch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    patch.setattr(choice, "_device_of", lambda gm: torch.device("cuda", 0))
    torch.compile(torch.sin, backend="pgraph", options={"codegen": "aten"})(torch.ones(4))
    return [reason for _, reasons in pgraph.report().outside for reason in reasons]


# -- captures ------------------------------------------------------------------------------------


def recorded(fn: Callable[[Tensor], Any], faults: HostFaults | None = None) -> tuple[Recording, Recording]:
    """Two captures of one call of `fn`, each on its own ghost memory."""
    driver = HostDriver()

    def code(args: list[Any]) -> list[Any]:
        return [fn(args.pop())]

    with (
        inject(faults or HostFaults()),
        driver.capture_lock(),
        driver.arena(0) as one,
        driver.arena(1) as two,
    ):
        return tuple(record(driver, arena, code, [torch.ones(4)], [16]) for arena in (one, two))


def refused(fn: Callable[[Tensor], Any], faults: HostFaults | None = None) -> Produce:
    """What a capture of `fn` is refused for."""

    def produce(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
        with pytest.raises(CaptureError) as caught:
            recorded(fn, faults)
        return [caught.value.reason]

    return produce


def ghost_kept(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    kept: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x + 1

    return refused(fn)(patch)


def untracked_output(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    """Memory of the capture that came from no op and no hook."""
    driver = HostDriver()

    def code(args: list[Any]) -> list[Any]:
        args.clear()
        return [arena.tensor(arena.take(16), (4,), (1,), torch.float32)]

    with driver.capture_lock(), driver.arena(0) as arena, pytest.raises(CaptureError) as caught:
        record(driver, arena, code, [torch.ones(4)], [16])
    return [caught.value.reason]


def library_keeps_memory(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    def hidden(self: HostSession) -> list[HiddenAllocation]:
        return [HiddenAllocation(self.arena.take(64), 64, freed=False, kept=True)]

    patch.setattr(HostSession, "hidden", hidden)
    return refused(torch.sin)(patch)


# -- matches -------------------------------------------------------------------------------------


def mismatched(edit: Callable[[Recording, Recording], Recording]) -> Produce:
    """What a match is refused for when the second recording is another than it was."""

    def produce(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
        a, b = recorded(torch.sin)
        assert match(a, b)
        with pytest.raises(MatchError) as caught:
            match(a, edit(a, b))
        return [caught.value.reason]

    return produce


def pointing(faults: HostFaults) -> Produce:
    """The same of a custom op whose kernels are given another word."""

    def produce(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
        a, b = recorded(twice, faults)
        with pytest.raises(MatchError) as caught:
            match(a, b, framework=RangeMap([(FRAMEWORK, 4096, 0)]))
        return [caught.value.reason]

    return produce


# -- runs ----------------------------------------------------------------------------------------


def run(faults: HostFaults) -> Iterable[Reason]:
    compiled = host(lambda x: x.sin().cumsum(0), min_ops=9)  # too few ops to split
    with inject(faults):
        for _ in range(5):
            compiled(torch.ones(4))
    return [p.reason for p in pgraph.report().capturable if p.reason]


def of_sizes(sizes: Sequence[int], **options: Any) -> Produce:
    """What becomes of calls with these sizes."""

    def produce(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
        compiled = host(lambda x: x.sin() + 1, dynamic=True, **options)
        for size in sizes:
            compiled(torch.ones(size, 3))
        return [reason for p in pgraph.report().partitions for reason in p.reasons]

    return produce


def internal_error(patch: pytest.MonkeyPatch) -> Iterable[Reason]:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("injected")

    patch.setattr(build, "plan_of", fails)
    return run(HostFaults())


MADE: dict[str, Produce] = {
    **{case.code: of_rules(case.code) for case in CASES},
    "marked": marked,
    "too-small": too_small,
    "graph-break": graph_break,
    "recompile-limit": recompile_limit,
    "no-device": no_device,
    "other-allocator": other_allocator,
    "capture-failed": refused(torch.sin, HostFaults(refused=frozenset({"sin"}))),
    "capture-lost": refused(torch.sin, HostFaults(fail_at="op", fail_as="lost")),
    "not-permitted": refused(torch.nonzero),
    "random-in-capture": refused(torch.rand_like),
    "not-recorded": refused(twice, HostFaults(elsewhere=frozenset({"twice"}))),
    "ghost-kept": ghost_kept,
    "untracked-output": untracked_output,
    "library-keeps-memory": library_keeps_memory,
    "nodes-differ": mismatched(lambda a, b: dataclasses.replace(b, nodes=())),
    "allocations-differ": mismatched(lambda a, b: dataclasses.replace(b, allocations=())),
    "outputs-differ": mismatched(lambda a, b: dataclasses.replace(b, outputs=())),
    "ghosts-overlap": mismatched(lambda a, b: dataclasses.replace(b, ghost_range=a.ghost_range)),
    "hidden-pointer": pointing(HostFaults(pointer_constant=FRAMEWORK + 8)),
    "ambiguous-word": pointing(HostFaults(moving_words=(FRAMEWORK + 8, FRAMEWORK + 16))),
    "device-failed": lambda patch: run(HostFaults(fail_at="op")),
    "no-gain": lambda patch: [Trial(3, [7e-6] * 3, [9e-6] * 4).reason()],
    "sizes-vary": lambda patch: [not_worth()],
    "size-not-listed": of_sizes([4, 4, 5], capture_sizes=[9, 3]),
    "too-many-sizes": of_sizes([4, 4, 5, 6, 4, 5, 6] * 2, max_captures=1),
    "launch-failed": lambda patch: run(HostFaults(fail_at="launch")),
    "internal-error": internal_error,
}


@pytest.mark.parametrize("code", sorted(CATALOGUE.keys() - ON_CUDA.keys()))
def test_a_code_is_reached(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(MADE[code](monkeypatch))
    assert found
    for reason in found:
        assert reason.code == code, str(reason)
        assert reason.info is CATALOGUE[code]
        assert reason.sentence
        assert reason.fix


@pytest.mark.parametrize(("code", "file"), ON_CUDA.items())
def test_the_others_are_reached_on_a_gpu(code: str, file: str) -> None:
    assert code not in MADE
    assert f'"{code}"' in (pathlib.Path(__file__).parent / "gpu" / file).read_text(encoding="utf-8")
