"""When memory is taken and let go, as behaviour: seen at each launch of a chunk, by weak references."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import same
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pgraph.capture.build import build
from pgraph.drivers.host.driver import HostDriver, HostRecipe
from pgraph.errors import DriverError
from pgraph.options import Options
from pgraph.partition.facts import GraphFacts, PartitionFacts
from pgraph.runtime.partition_runner import PartitionRunner
from pgraph.template.lifetimes import GRANULE

N = 5
SIZE = 8 * GRANULE  # bytes of each tensor


def tensors(n: int = N) -> list[Tensor]:
    return [torch.randn(SIZE // 4) for _ in range(n)]


def backward(args: list[Any]) -> list[Any]:
    """`N` inputs die one by one, and each leaves a result: in one piece all of them would be held at once."""
    given = args[::-1]
    args.clear()
    results = []
    while given:
        x = given.pop()
        y = x.sin()
        del x
        results.append(y.exp())
        del y
    return results


def early(args: list[Any]) -> list[Any]:
    """A temporary as large as all results, dead before any of them is born."""
    (x,) = args
    args.clear()
    wide = x.repeat(N)
    total = wide.sum()
    del wide
    return [total, *(x + k for k in range(N))]


def storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def alive(storages: list[StorageWeakRef]) -> list[bool]:
    return [not s.expired() for s in storages]


class Watch:
    """What is alive at each launch of a chunk, and at each uncaptured run."""

    def __init__(self) -> None:
        self.inputs: list[StorageWeakRef] = []
        self.blocks: list[tuple[StorageWeakRef, int]] = []
        self.at_launch: list[tuple[list[bool], int]] = []
        self.at_plain: list[int] = []
        self.fail: Callable[[str, int], None] = lambda what, count: None

    def held(self) -> int:
        """Bytes of the blocks that are alive."""
        return sum(nbytes for s, nbytes in self.blocks if not s.expired())


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Follows what the host driver allocates and launches. No cycle of references is ever broken up."""
    seen = Watch()
    launch, empty = HostRecipe.launch, HostDriver.empty_strided

    def launching(self: HostRecipe, bases: list[int], stream: int) -> int:
        seen.at_launch.append((alive(seen.inputs), seen.held()))
        seen.fail("launch", len(seen.at_launch))
        return launch(self, bases, stream)

    def allocating(self: HostDriver, size: Any, stride: Any, dtype: Any) -> Tensor:
        seen.fail("allocate", len(seen.blocks) + 1)
        tensor = empty(self, size, stride, dtype)
        seen.blocks.append((storage(tensor), tensor.untyped_storage().nbytes()))
        return tensor

    monkeypatch.setattr(HostRecipe, "launch", launching)
    monkeypatch.setattr(HostDriver, "empty_strided", allocating)
    gc.disable()
    yield seen
    gc.enable()


@pytest.fixture
def captured(watch: Watch) -> Callable[..., PartitionRunner]:
    """Captures a program: its next call is the first launch that is watched."""

    def capture(fn: Callable[[list[Any]], list[Any]], make: Callable[[], list[Tensor]]) -> PartitionRunner:
        def plain(args: list[Any]) -> list[Any]:
            watch.at_plain.append(watch.held())
            return fn(args)

        facts = PartitionFacts(GraphFacts("backward", 1, 1), None, True)
        options = Options(driver="host", codegen="aten", memory_slack_mb=0)
        runner = PartitionRunner(facts, plain, HostDriver(), options)
        for _ in range(2):
            runner(make())
        assert runner.stats.launches == 1
        for told in (watch.blocks, watch.at_launch, watch.at_plain):
            told.clear()
        return runner

    return capture


def firsts(runner: PartitionRunner) -> list[int]:
    """The first node of each chunk."""
    template = runner.template()
    assert template is not None
    return [chunk.first for chunk in template.plan.chunks]


Captured = Callable[..., PartitionRunner]


def test_arguments_die_between_the_chunks(watch: Watch, captured: Captured) -> None:
    """Each at the end of the chunk that reads it last: nobody in pgraph has another reference."""
    runner = captured(backward, tensors)
    args = tensors()
    watch.inputs = [storage(x) for x in args]
    results = runner(args)
    assert alive(watch.inputs) == [False] * N
    # Input k is read by node 2k alone.
    want = [[2 * k >= first for k in range(N)] for first in firsts(runner)]
    assert [inputs for inputs, _ in watch.at_launch] == want
    assert len({*map(tuple, want)}) >= 3, "too few chunks to show anything"
    assert len(results) == N


def test_a_launch_in_chunks_holds_no_more_than_eager(watch: Watch, captured: Captured) -> None:
    """While a node runs, the inputs to come, the results so far, and one temporary."""
    runner = captured(backward, tensors)
    args = tensors()
    watch.inputs = [storage(x) for x in args]
    results = runner(args)
    held = [sum(inputs) * SIZE + blocks for inputs, blocks in watch.at_launch]
    assert max(held) == (N + 1) * SIZE, held
    assert watch.held() == N * SIZE, "only the results are left"
    del results
    assert watch.held() == 0


def test_temporaries_die_with_their_chunk(watch: Watch, captured: Captured) -> None:
    """The results take the room of the temporary that came before them."""
    runner = captured(early, lambda: tensors(1))
    results = runner(tensors(1))
    wide, nbytes = watch.blocks[0]
    assert nbytes == N * SIZE
    assert wide.expired()
    held = [blocks for _, blocks in watch.at_launch]
    assert len(held) >= 2
    assert N * SIZE <= max(held) <= N * SIZE + 2 * GRANULE, held
    assert N * SIZE < watch.held() <= N * SIZE + GRANULE
    del results
    assert watch.held() == 0


@pytest.mark.parametrize(("fn", "n"), [(backward, N), (early, 1)])
def test_results_keep_their_values_through_later_launches(
    fn: Callable[[list[Any]], list[Any]], n: int, watch: Watch, captured: Captured
) -> None:
    """They are the caller's: later launches neither write into them nor hand them out again."""
    runner = captured(fn, lambda: tensors(n))
    before = runner.stats.launches
    given = [tensors(n) for _ in range(4)]
    found = [runner(list(args)) for args in given]
    assert runner.stats.launches == before + 4
    for got, args in zip(found, given, strict=True):
        same(got, fn(list(args)))
    places = [x.untyped_storage().data_ptr() for results in found for x in results]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("what", "nth"),
    [("launch", 1), ("launch", 2), ("launch", -1), ("allocate", 1), ("allocate", 2), ("allocate", -1)],
)
def test_nothing_of_a_failed_launch_is_kept(what: str, nth: int, watch: Watch, captured: Captured) -> None:
    """Neither by the uncaptured run that stands in for it, where nothing had run yet, nor after the error."""
    runner = captured(backward, tensors)
    if nth < 0:
        runner(tensors())
        nth += 1 + (len(watch.at_launch) if what == "launch" else len(watch.blocks))
        watch.blocks.clear()
        watch.at_launch.clear()

    def fail(step: str, count: int) -> None:
        if (step, count) == (what, nth):
            raise DriverError("no") if what == "launch" else torch.OutOfMemoryError("no")

    watch.fail = fail
    args = tensors()
    watch.inputs = [storage(x) for x in args]
    want = backward(list(args))
    if nth == 1:
        same(runner(args), want)
        assert watch.at_plain == [0]
    else:
        try:
            runner(args)
        except (DriverError, torch.OutOfMemoryError):
            failed = True
        else:
            failed = False
        assert failed
        assert watch.at_plain == []
    assert watch.blocks or what == "allocate"
    assert watch.held() == 0
    del args
    assert alive(watch.inputs) == [False] * N


# -- inputs that share a storage -----------------------------------------------------------------


@pytest.mark.parametrize("both", [False, True], ids=["one is dead", "both are alive"])
@pytest.mark.parametrize("late", [0, 1], ids=["the first lives on", "the second lives on"])
@pytest.mark.parametrize("part", [None, 0, 1], ids=["whole", "part of the first", "part of the second"])
def test_a_shared_storage_counts_once_until_its_last_tensor_dies(
    part: int | None, late: int, both: bool
) -> None:
    """Autograd saves a tensor and its alias as two: eager's peak has their memory once, for as long."""
    n = 16 * SIZE

    def fn(args: list[Any]) -> list[Any]:
        short, long = args[1 - late], args[late]
        args.clear()
        total = short.sum()
        if not both:
            del short
        total = total + long.new_zeros(4 * n).sum()  # the peak
        if both:
            total = total + short.sum()
        return [total + long.sum()]

    whole = torch.randn(n)
    inputs = [whole, whole.view(-1)]
    if part is not None:
        inputs[part] = whole[: n // 2]
    template = build(HostDriver(), fn, inputs, [16, 16], slack_bytes=0).template
    if part is not None:
        assert template.regions[part].nbytes == 2 * n, "eager holds all of the storage all the same"
    # The numbers that are summed up take a few bytes more.
    assert 20 * n <= template.plan.eager_peak <= 20 * n + 8 * GRANULE, template.render()
