"""Sizes that take turns: which of them are captured, and that nothing grows with their number."""

from __future__ import annotations

import gc
import logging
import random
import resource
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from support import host, same
from torch import Tensor

import pgraph
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.ops.safety import mark_unsafe, unmark_unsafe
from pgraph.runtime import registry
from pgraph.runtime.keeping import PATIENCE, WAITING
from pgraph.runtime.specialization import Specialization


def running_sum(x: Tensor) -> Tensor:
    return (x + x.shape[0]).cumsum(0)


def call(compiled: Any, sizes: Iterable[int]) -> list[bool]:
    """One call per size, compared with eager; which of them were launches."""
    launched = []
    for n in sizes:
        before = pgraph.report().launches
        x = torch.randn(n, 3)
        same(compiled(x), running_sum(x))
        launched.append(pgraph.report().launches > before)
        assert len(kept()) <= LIMIT
    return launched


LIMIT = 3


def kept() -> list[int]:
    """The sizes that have a capture."""
    (partition,) = registry.live_capturable()
    return sorted(v.guards.tensors[0].size[0] for v in partition.specializations() if v.program is not None)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    mine = [r for r in caplog.records if r.name.startswith("pgraph")]
    return [r.getMessage() for r in mine if r.levelno >= logging.WARNING]


def test_two_sizes_in_turn_with_room_for_one(caplog: pytest.LogCaptureFixture) -> None:
    """One of them is captured and stays, and the user is told once which dimension varies."""
    compiled = host(running_sum, dynamic=True, max_captures=1)
    launched = call(compiled, [5, 7] * 60)
    assert pgraph.report().captures == 1
    assert sum(launched) == 60 - 1
    assert kept() == [5]
    (told,) = warnings(caplog)
    assert "max_captures=1" in told
    assert "dimension 0 of x went from 5 to 7" in told
    assert "raise max_captures" in told


@pytest.mark.parametrize("sizes", [4, 7])
def test_more_sizes_in_turn_than_room(sizes: int) -> None:
    """The least recently used capture is always the next one needed: none may go for that."""
    compiled = host(running_sum, dynamic=True, max_captures=LIMIT)
    launched = call(compiled, list(range(2, 2 + sizes)) * 30)
    assert pgraph.report().captures == LIMIT
    assert sum(launched) == LIMIT * (30 - 1)


def test_work_that_moves_on_is_followed_at_once() -> None:
    """A new size, used alone, is captured after its warm-up, whatever was captured before."""
    compiled = host(running_sum, dynamic=True, max_captures=1)
    for n in range(2, 2 + PATIENCE + 4):
        assert sum(call(compiled, [n] * 12)) >= 12 - 1 - PATIENCE
        assert kept() == [n]
    assert pgraph.report().captures == PATIENCE + 4


def test_long_turns_are_followed_and_short_ones_are_not() -> None:
    compiled = host(running_sum, dynamic=True, max_captures=1)
    call(compiled, ([5] * 3 + [7] * 3) * 40)
    short = pgraph.report().captures
    assert short <= 4
    launched = call(compiled, ([5] * 30 + [7] * 30) * 4)
    assert pgraph.report().captures - short >= 6
    assert sum(launched) > 0.6 * len(launched)


def test_a_busy_newcomer_takes_the_place_of_a_resting_one() -> None:
    """Two captures in use and one that rests: the newcomer takes the resting one's place."""
    compiled = host(running_sum, dynamic=True, max_captures=3)
    call(compiled, [2, 2, 3, 3, 4, 4])
    call(compiled, [3, 4, 9] * (PATIENCE + 4))
    assert kept() == [3, 4, 9]
    assert pgraph.report().captures == 4


def test_a_size_used_far_more_often_takes_a_place() -> None:
    """Also when nothing rests."""
    compiled = host(running_sum, dynamic=True, max_captures=1)
    call(compiled, [2, 2])
    call(compiled, [2, 9, 9, 9] * PATIENCE)
    assert kept() == [9]


def test_layouts_in_turn_are_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    compiled = host(lambda x: (x * 2).cumsum(0), dynamic=True, max_captures=1)
    base = torch.randn(40, 2)
    for k in [0, 1] * 30:
        x = base.view(-1)[k : k + 20]  # another alignment
        same(compiled(x), (x * 2).cumsum(0))
    assert pgraph.report().captures == 1
    (told,) = warnings(caplog)
    assert "alignments vary" in told


def test_python_numbers_that_vary() -> None:
    """Each value is a capture of its own, and never another's result."""

    def fn(x: Tensor, n: int) -> Tensor:
        return (x * n + n).cumsum(0)

    compiled = host(fn, dynamic=True, max_captures=2)
    for n in (5, 5, 5, 6, 6, 7, 5, 6, 6, 8, 9, 10, 5, 5):
        x = torch.randn(4, 3)
        same(compiled(x, n), fn(x, n))
    assert pgraph.report().captures >= 2
    assert pgraph.report().launches >= 3


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"max_captures": 2}, [n % 6 + 2 for n in range(60)]),
        ({"max_captures": 2}, [n // 2 for n in range(4, 12)]),
        ({"capture_sizes": [3, 4]}, [2] * 4),
    ],
    ids=["in turn", "moving on", "not listed"],
)
def test_nobody_is_told_to_pad_a_number(
    options: dict[str, Any], numbers: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    compiled = host(lambda x, n: (x * n + n).cumsum(0), dynamic=True, **options)
    for n in numbers:
        compiled(torch.randn(4, 3), n)
    told = [*warnings(caplog), *(str(reason) for p in pgraph.report().partitions for reason in p.reasons)]
    assert told
    for text in told:
        assert "pass n as a float or a tensor" in text
        assert "pad to" not in text


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_numbers_as_floats_or_tensors_take_one_capture(kind: Callable[[int], Any]) -> None:
    """What the message about numbers says."""
    compiled = host(lambda x, n: (x * n + n).cumsum(0), dynamic=True)
    for n in range(2, 12):
        x = torch.randn(4, 3)
        same(compiled(x, kind(n)), (x * n + n).cumsum(0))
    assert pgraph.report().captures == 1


class Records(logging.Handler):
    """Keeps what pgraph's loggers say."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.heard: list[str] = []
        self.warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())
        self.warnings += record.levelno >= logging.WARNING


@pytest.fixture
def records() -> Iterator[Records]:
    """What pgraph's loggers say during the test."""
    handler = Records()
    logging.getLogger("pgraph").addHandler(handler)
    yield handler
    logging.getLogger("pgraph").removeHandler(handler)


def test_ten_thousand_calls_with_random_sizes(records: Records) -> None:
    """Captures, execs, what is remembered, objects, log records and memory stay within bounds."""
    compiled = host(running_sum, dynamic=True, max_captures=4)
    sizes = random.Random(0)
    x = torch.randn(2100, 2)
    for n in (3, 3, 4, 4):
        compiled(x[:n])
    (partition,) = registry.live_capturable()
    execs: weakref.WeakSet[Any] = weakref.WeakSet()

    def sweep(calls: int) -> tuple[Counter[str], int]:
        made = 0
        while made < calls:
            n = sizes.randrange(2, 2000)
            for _ in range(sizes.choice((1, 1, 1, 2, 2, 40))):
                y = compiled(x[:n])
                made += 1
            captured = [v for v in partition.specializations() if v.program is not None]
            execs.update(e for v in captured for e in v.built.execs)
            assert len(captured) <= 4
            assert torch.equal(y, running_sum(x[:n]))
            assert len(partition.specializations()) <= 4 + WAITING
        del y
        gc.collect()
        kinds = Counter(type(o).__name__ for o in gc.get_objects())
        return kinds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before, memory = sweep(2000)
    text, made, told = len(str(pgraph.report())), pgraph.report().captures, len(records.heard)
    after, grown = sweep(8000)
    report = pgraph.report()
    assert report.capturable[0].launches + report.capturable[0].uncaptured_runs >= 10_000
    assert report.captures > 100, "captures were to be made and dropped all the time"
    assert len(execs) <= 4 * len(partition.template().plan.chunks)
    assert len(registry.live_partitions()) == len(registry._partitions.all()) == 1
    assert len(str(report)) <= text + 20, "the report grows"
    assert records.warnings == 3, "new captures, evictions and crowding are told once each"
    # Information for each capture is meant; it is what TORCH_LOGS asks for.
    assert len(records.heard) - told <= 3 * (report.captures - made)
    assert after[Specialization.__name__] <= 4 + WAITING
    more = {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind] > 400}
    assert not more, f"objects pile up: {more}"
    assert grown - memory < 30_000, f"{(grown - memory) / 1024:.0f} MiB more"


def test_a_size_that_rests_gives_way_although_others_are_launched() -> None:
    """4 and 5 are captured. From then on 4 rests: 6 gets its place, for all that 5 is launched in between."""
    fn = host(lambda x: (x * 2).cumsum(0), dynamic=True, max_captures=2)
    for n in (4, 4, 4, 5, 5, 5, 4):
        fn(torch.randn(n, 3))
    for _ in range(12):
        fn(torch.randn(6, 3))
        fn(torch.randn(5, 3))
    assert kept() == [5, 6]


def test_a_size_that_was_marked_unbacked_is_told_with_its_own_fix() -> None:
    """It is known before the call: another mark captures it."""
    compiled = host(running_sum)
    for mark in (torch._dynamo.decorators.mark_unbacked, torch._dynamo.mark_dynamic):
        torch._dynamo.reset()
        for n in (2, 2, 3, 3):
            x = torch.randn(n, 3)
            mark(x, 0)
            same(compiled(x), running_sum(x))
        report = str(pgraph.report())
        unbacked = mark is not torch._dynamo.mark_dynamic
        assert ("a size of an input that was marked unbacked" in report) == unbacked
        assert ("Fix: torch._dynamo.mark_dynamic in the place of mark_unbacked" in report) == unbacked
        assert (pgraph.report().captures == 0) == unbacked


@pytest.fixture
def cutting_cumsum() -> Iterator[None]:
    mark_unsafe("aten::cumsum", "cuts the graph of a test", "none")
    yield
    unmark_unsafe("aten::cumsum")


def halves(x: Tensor) -> Tensor:
    """What follows `cumsum` takes half as many rows, and no argument tells how many there were."""
    half = x.view(-1, 2, 6).sum(1).exp().cumsum(0)
    return ((half * 2).sin() @ half.t()).relu().softmax(-1) + 1


def calls_of_halves(compiled: Any, sizes: Iterable[int]) -> Any:
    """Two calls per size, compared with eager; the report of the part behind `cumsum`."""
    for n in sizes:
        for _ in range(2):
            x = torch.randn(n, 6)
            torch._dynamo.mark_static(x, 1)
            torch.testing.assert_close(compiled(x), halves(x))
    return pgraph.report().partitions[2]


@pytest.mark.usefixtures("cutting_cumsum")
def test_sizes_made_of_others_are_sizes() -> None:
    """They are computed and listed as others are, where the partition knows nothing else of them."""
    part = calls_of_halves(host(halves, "inductor", dynamic=True), range(8, 26, 2))
    assert part.computed > 0
    pgraph.reset()
    torch._dynamo.reset()
    part = calls_of_halves(host(halves, dynamic=True, capture_sizes=(8, 12)), range(8, 18, 2))
    assert part.captures == 2
    told = str(pgraph.report())
    assert "((dimension 0 of x)//2) is 7, and option capture_sizes lists 8, 12" in told, told


@pytest.mark.usefixtures("cutting_cumsum")
def test_a_size_made_of_others_that_is_refused_says_nothing_of_its_siblings() -> None:
    compiled = host(halves, dynamic=True)
    with inject(HostFaults(fail_at="begin", fail_as="lost")):
        calls_of_halves(compiled, (6, 6, 6))
    part = calls_of_halves(compiled, (8, 10, 12, 8))
    assert part.captures == 3
    assert part.launches == 5
