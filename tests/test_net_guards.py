"""What keeps a launch from arguments that are not its own, and a partition from running twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support import RecipeOf, change_program, host, launching, same
from support_native import BOTH, CASE, SIDE, FakeDevice, in_c, made
from torch import Tensor, nn

import pgraph
from pgraph.capture import build
from pgraph.drivers.host.driver import HostDriver
from pgraph.errors import DriverError, MatchError
from pgraph.launch.guards import Guards, TensorGuard, ValueGuard
from pgraph.launch.native import native_addresses
from pgraph.native import libraries
from pgraph.template.match import match
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording
from pgraph.template.template import Slot
from pgraph.template.topology import chain


@pytest.fixture
def native_path() -> None:
    if libraries.load_call() is None:
        pytest.skip("no C compiler or no Python headers, or PGRAPH_NATIVE=0")


# -- numbers -------------------------------------------------------------------------------------

NUMBERS = (0, False, 0.0, -0.0, 1, True, 1.0, 2.5, -1)


@BOTH
@pytest.mark.usefixtures("native_path")
@pytest.mark.parametrize("known", range(len(NUMBERS)))
def test_a_specialization_takes_its_own_numbers_only(path: Any, known: int) -> None:
    """Equal ones of another type or sign are others: x / 0.0 is not x / -0.0."""
    program = made(FakeDevice(), {**CASE, "inputs": [(True, 0)]})
    guard = ValueGuard(0, NUMBERS[known])
    call = path(dataclasses.replace(program, guards=dataclasses.replace(program.guards, values=(guard,))))
    for i, number in enumerate(NUMBERS):
        assert (call([number, torch.randn(SIDE, SIDE)]) is not None) == (i == known)
        assert (guard == ValueGuard(0, number)) == (i == known)


# -- strides -------------------------------------------------------------------------------------

STRIDES = [
    ((SIDE, SIDE), (SIDE, 1), True),
    ((SIDE, SIDE), (SIDE, 2), False),
    ((SIDE, SIDE), (SIDE, 0), False),
    ((SIDE, SIDE), (2 * SIDE, 1), False),
    ((SIDE, SIDE), (0, 1), False),
    ((SIDE, SIDE), (1, SIDE), False),
    ((SIDE, SIDE - 1), (SIDE, 1), False),
    ((SIDE - 1, SIDE), (SIDE, 1), False),
    ((SIDE, SIDE, 1), (SIDE, 1, 1), False),
    ((0, SIDE), (SIDE, 1), False),  # no element of it is anywhere
    ((SIDE, 0), (SIDE, 1), False),
]


@pytest.mark.parametrize(("size", "stride", "right"), STRIDES)
def test_a_specialization_takes_its_own_sizes_and_strides_only(size: Any, stride: Any, right: bool) -> None:
    """Each dimension's, the last one's too."""
    guards = made(FakeDevice(), {**CASE, "inputs": [(True, 0)]}).guards
    x = torch.randn(4 * SIDE * SIDE).as_strided(size, stride)
    assert guards.addresses([42, x]) == ([x.data_ptr()] if right else None)


@pytest.mark.usefixtures("native_path")
@pytest.mark.parametrize(("size", "stride", "right"), STRIDES)
def test_c_takes_its_own_sizes_and_strides_only(size: Any, stride: Any, right: bool) -> None:
    """As the specialization in Python does."""
    device = FakeDevice()
    call = in_c(made(device, {**CASE, "inputs": [(True, 0)]}))
    args = [42, torch.randn(4 * SIDE * SIDE).as_strided(size, stride)]
    launched = call(args) is not None
    assert launched == right
    assert bool(device.events) == right


@pytest.mark.usefixtures("native_path")
@pytest.mark.parametrize(
    ("stride", "right"),
    [((SIDE, 1, 1), True), ((SIDE, 1, 99), True), ((SIDE, 2, 1), False), ((1, 0, 1), False)],
)
def test_strides_of_a_tensor_without_elements_count(stride: Any, right: bool) -> None:
    """What is made of it has strides like its own. It lies nowhere, and is not taken for one that is gone."""
    guards = Guards((TensorGuard(0, (0, SIDE, 1), (SIDE, 1, 1), 15),))
    x = torch.empty(0).as_strided((0, SIDE, 1), stride)
    native: Any = native_addresses(FakeDevice())(guards)  # type: ignore[arg-type]
    found = [read([x]) for read in (guards.addresses, native)]
    assert found == [[0] if right else None] * 2


@pytest.mark.parametrize("native", [True, False], ids=["C", "Python"])
@pytest.mark.parametrize("warm", [0, 3], ids=["not captured", "captured"])
def test_a_tensor_whose_memory_is_gone_is_not_launched(
    warm: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage was shrunk, and kernels would read address 0: the ops themselves say what is wrong."""
    if not native:
        monkeypatch.setattr(libraries, "load_call", lambda: None)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
    compiled, x, weights = host(model), torch.randn(4, 8), model[0].weight.clone()
    for _ in range(warm):
        compiled(x)
    storage = model[0].weight.untyped_storage()
    storage.resize_(0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="storage of size 0"):
            compiled(x)
    storage.resize_(weights.nbytes)
    model[0].weight.copy_(weights)
    compiled(x)
    with launching(3):
        for _ in range(3):
            same(compiled(x), model(x))
    assert pgraph.report().captures == 1


def test_a_hook_gives_a_backward_another_layout_than_was_saved() -> None:
    """Nobody guards that: same shape, same type, other strides."""

    def fn(x: Tensor) -> Tensor:
        return (x.sin() * x).cos().cumsum(0)

    def transposed(t: Tensor) -> Tensor:
        return t.t().contiguous().t() if t.dim() == 2 else t

    def gradient(f: Any, x: Tensor, *, hooked: bool) -> Tensor:
        x = x.detach().clone().requires_grad_()
        unpack = transposed if hooked else lambda t: t
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = f(x)
        (grad,) = torch.autograd.grad(out, x, torch.arange(16.0).view(4, 4))
        return grad

    compiled = host(fn)
    for hooked in (False, False, False, True, True, True, False):
        x = torch.randn(4, 4)
        same(gradient(compiled, x, hooked=hooked), gradient(fn, x, hooked=hooked))
    with launching(2):
        x = torch.randn(4, 4)
        same(gradient(compiled, x, hooked=True), gradient(fn, x, hooked=True))
    assert max(p.captures for p in pgraph.report().capturable) == 2, "the backward saw one layout only"


# -- once only -----------------------------------------------------------------------------------


def mutating(x: Tensor, y: Tensor) -> Tensor:
    y.add_(x)
    inner = (x[:, None] * y).cumsum(0).sum(0)  # large, and gone before the result is there
    return (inner + x) * y  # both arguments are alive to the end


@pytest.mark.usefixtures("native_path")
@pytest.mark.parametrize("wants", ["memory", "launch"])
@pytest.mark.parametrize("ran", [False, True])
@BOTH
def test_arguments_are_handed_back_only_where_nothing_has_run(path: Any, wants: str, ran: bool) -> None:
    """Whoever gets them back runs the partition again."""
    device = FakeDevice()
    program = made(device, {**CASE, "inputs": [(True, 0)] * 3})
    call = path(program)
    assert len(program.chunks) > 1

    def short_of_memory() -> None:
        device.refuse_all = device.refuse_raw = True

    if wants == "launch":
        device.fail_launch = 2 if ran else 1
    elif ran:
        device.at_launch = short_of_memory
    else:
        short_of_memory()
    args = [42, *(torch.randn(SIDE, SIDE) for _ in program.guards.tensors)]
    before = list(args)
    with pytest.raises((DriverError, torch.OutOfMemoryError)) as caught:
        call(args)
    assert device.launches == ran + (wants == "launch")
    if ran:
        assert [a is None for a in args] == [False, True, True, True]
    else:
        assert all(a is b for a, b in zip(args, before, strict=True))
    assert caught.value.pgraph_launch == (0, ran)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["device", "memory"])
@pytest.mark.parametrize("at", ["launch", "allocate"])
def test_a_partition_that_has_begun_is_not_begun_again(
    at: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second chunk fails: the error is the user's own, and nothing is written by an uncaptured run."""
    compiled = host(mutating, memory_slack_mb=0)

    def arguments() -> tuple[Tensor, Tensor]:
        return torch.randn(64), torch.randn(64)

    for _ in range(2):
        compiled(*arguments())
    (runner,) = pgraph.runtime.registry.live_capturable()
    (specialization,) = runner.specializations()
    assert specialization.program is not None
    chunks, ran = list(specialization.program.chunks), []
    launched = [i for i, chunk in enumerate(chunks) if chunk.recipe is not None]
    assert len(launched) > 1, "one chunk: nothing comes after it"
    error = DriverError("injected later") if kind == "device" else torch.OutOfMemoryError("injected later")

    def fails(*rest: Any) -> Any:
        raise error

    def noting(launch: Any) -> Any:
        def run(bases: list[int], stream: int) -> int:
            ran.append(1)
            return int(launch(bases, stream))

        return run

    for i in launched:
        chunks[i] = dataclasses.replace(chunks[i], recipe=RecipeOf(noting(chunks[i].recipe.launch)))
    if at == "launch":
        chunks[launched[1]] = dataclasses.replace(chunks[launched[1]], recipe=RecipeOf(fails))
    else:
        real = HostDriver.empty_strided
        allocate = lambda self, *layout: fails() if ran else real(self, *layout)  # noqa: E731
        monkeypatch.setattr(HostDriver, "empty_strided", allocate)
    change_program(runner, chunks=tuple(chunks))
    plain = runner.stats.uncaptured_runs
    x, y = arguments()
    kept = y.clone()
    with pytest.raises(type(error), match="injected later"):
        compiled(x, y)
    assert ran == [1]
    assert runner.stats.uncaptured_runs == plain
    same(y, kept)  # the chunk that failed comes before the write


# -- dead memory ---------------------------------------------------------------------------------

A, B = 0x7000_0000_0000, 0x7100_0000_0000


def recorded(base: int, at: tuple[int, ...], word: int, *, dead: int | None, own: bool) -> Recording:
    """One kernel with one word, on regions of 64 bytes at these offsets; `dead` is freed before it."""
    allocations = tuple(
        GhostAllocation(base + x, 64, 0, 0 if i == dead else None, 256) for i, x in enumerate(at)
    )
    node = NodeRecord("kernel", "k", (), (base + word).to_bytes(8, "little"))
    return Recording(
        (node,), chain(1), allocations, 1, (), (base, base + (1 << 20)), None, frozenset({0} if own else ())
    )


@pytest.mark.parametrize("dead", ["neither", "first", "second", "both"])
def test_a_word_in_memory_that_one_capture_has_freed_is_no_padding(dead: str) -> None:
    """Row 8: in one region here, in another there. Only where both are dead can it be left over."""
    a = recorded(A, (0x1000, 0x2000), 0x1000, dead=0 if dead in ("first", "both") else None, own=True)
    b = recorded(B, (0x1000, 0x2200), 0x2200, dead=1 if dead in ("second", "both") else None, own=True)
    if dead == "both":
        assert match(a, b) == ()
    else:
        with pytest.raises(MatchError, match=r"ambiguous-word.*region 0\+0 in one.*region 1\+0 in another"):
            match(a, b)


@pytest.mark.parametrize("dead", ["neither", "first", "second", "both"])
def test_regions_used_in_turn_of_which_one_capture_has_freed_one(dead: str) -> None:
    """Row 4: they lie as far apart as a third one moved. Only where both are dead is the third one meant."""
    a = recorded(
        A, (0x1000, 0x2000, 0x4000), 0x1000, dead=0 if dead in ("first", "both") else None, own=False
    )
    b = recorded(
        B, (0x1000, 0x3000, 0x6000), 0x3000, dead=1 if dead in ("second", "both") else None, own=False
    )
    if dead == "both":
        assert match(a, b) == (Slot(0, 0, 2, -0x3000),)
    else:
        with pytest.raises(MatchError, match=r"ambiguous-word.*region 0\+0 in one.*region 1\+0 in another"):
            match(a, b)


@pytest.mark.parametrize("dead", ["first", "second", "both"])
@pytest.mark.parametrize("beyond", [0, 0x900])
def test_a_word_of_a_region_that_one_capture_has_freed_is_a_slot(dead: str, beyond: int) -> None:
    """Row 3: were it taken for padding, launches would use an address of the capture."""
    word = 0x2000 + beyond
    a = recorded(A, (0x1000, 0x2000), word, dead=1 if dead in ("first", "both") else None, own=True)
    b = recorded(B, (0x1000, 0x2200), word + 0x200, dead=1 if dead in ("second", "both") else None, own=True)
    assert match(a, b) == (() if dead == "both" else (Slot(0, 0, 1, beyond),))


@pytest.mark.parametrize(("deaths", "lives"), [((1, 2), 2), ((2, 1), 2), ((1, None), 3), ((None, 1), 3)])
def test_a_region_lives_as_long_as_in_the_capture_that_keeps_it_longer(
    deaths: tuple[int | None, ...], lives: int
) -> None:
    """Freed earlier, its memory would be another tensor's while a node may still read it."""
    nodes = tuple(NodeRecord("kernel", f"k{i}", (), bytes(8)) for i in range(3))
    recordings = []
    for base, death in zip((A, B), deaths, strict=True):
        allocations = (
            GhostAllocation(base, 64, 0, 3),
            GhostAllocation(base + 0x1000, 64, 0, death),
            GhostAllocation(base + 0x2000, 64, 2, None),
        )
        ghosts = (base, base + (1 << 20))
        recordings.append(Recording(nodes, chain(3), allocations, 1, (OutputSpec(region=2),), ghosts, None))
    slots = tuple(Slot(node, 0, node, 0) for node in range(3))
    template = build._template(HostDriver(), *recordings, slots, frozenset(), [(0, 0)], 0)
    assert template.regions[1].death == lives
