"""One capture of a further size, where two of another size prove enough: Note [Proved by another size]."""

from __future__ import annotations

import dataclasses
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import MLP, host, same
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pgraph.capture import build
from pgraph.drivers.host.driver import HostDriver, HostSession
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.runtime import registry
from pgraph.template.proofs import Proofs
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording, TensorSpec
from pgraph.template.template import Slot
from pgraph.template.topology import chain, topology

GHOSTS = 0x7000_0000_0000
FRAMEWORK = RangeMap([(0x7F00_0000_0000, 1 << 20, 0)])
LASTING = RangeMap([(0x7F00_0000_0000, 256, 0)])
NOTHING = RangeMap([])


def recording(*nodes: NodeRecord, nbytes: int = 1024, **changes: Any) -> Recording:
    """An input, a temporary that is alive from the first node to the second, and a result."""
    lives: list[tuple[int, int | None]] = [(0, None), (0, 2), (1, None)]
    allocations = tuple(
        GhostAllocation(GHOSTS + i * 0x10_0000, nbytes, *life, margin=0x1000) for i, life in enumerate(lives)
    )
    result = OutputSpec(region=2, layout=TensorSpec((nbytes,), (1,), torch.uint8, 0))
    made = Recording(nodes, chain(len(nodes)), allocations, 1, (result,), (GHOSTS, GHOSTS + 0x30_0000), None)
    return dataclasses.replace(made, **changes)


def kernel(*words: int, name: str = "k", **changes: Any) -> NodeRecord:
    return NodeRecord("kernel", name, (), struct.pack(f"={len(words)}Q", *words))._replace(**changes)


def at(region: int, delta: int = 0) -> int:
    return GHOSTS + region * 0x10_0000 + delta


def small(*, third: NodeRecord | None = None, **changes: Any) -> Recording:
    nodes = kernel(at(0), at(1), 16), kernel(at(1, 8), at(2), 0, name="other"), third or kernel(at(0), at(2))
    return recording(*nodes, **changes)


def two_each(*words: tuple[int, int]) -> tuple[Slot, ...]:
    """Slots of (region, delta), two to a node."""
    return tuple(Slot(i // 2, 8 * (i % 2), *word) for i, word in enumerate(words))


SLOTS = two_each((0, 0), (1, 0), (1, 8), (2, 0), (0, 0), (2, 0))


def proofs(*more: tuple[Recording, tuple[Slot, ...]]) -> Proofs:
    known = Proofs()
    for one, slots in ((small(), SLOTS), *more):
        known.add(one, slots)
    return known


def slots_of(known: Proofs, one: Recording) -> tuple[Slot, ...] | None:
    return known.slots(one, FRAMEWORK, LASTING)


def large(*changed: NodeRecord | None, **changes: Any) -> Recording:
    """The same at another size, but for nodes that are given."""
    nodes = [kernel(at(0), at(1), 64), kernel(at(1, 4096), at(2), 7, name="other"), kernel(at(0, 64), at(2))]
    for i, node in enumerate(changed):
        nodes[i] = node or nodes[i]
    return recording(*nodes, nbytes=8192, **changes)


def test_the_same_words_are_addresses_of_the_same_regions() -> None:
    """How far into its region a word lies is read."""
    assert slots_of(proofs(), large()) == two_each((0, 0), (1, 0), (1, 4096), (2, 0), (0, 64), (2, 0))
    assert slots_of(Proofs(), large()) is None


def with_life(region: int, birth: int, death: int | None, **changes: Any) -> tuple[GhostAllocation, ...]:
    found = list(large().allocations)
    found[region] = found[region]._replace(birth=birth, death=death, **changes)
    return tuple(found)


ONE_MORE = GhostAllocation(GHOSTS + 0x20_8000, 16, 1, None)
DOUBTS: dict[str, Recording] = {
    "another kernel": large(kernel(at(0), at(1), 64, name="fast")),
    "another layout": large(kernel(at(0), at(1), 64, layout=(0, 8))),
    "another struct": large(kernel(at(0), at(1), 64, structs=((0, 24),))),
    "more parameters": large(kernel(at(0), at(1), 64, 0)),
    "another kind of node": large(kernel(at(0), at(1), 64, kind="memcpy")),
    "a proved kernel in another place": large(None, kernel(at(1), at(2), 0)),
    "another region": large(kernel(at(1), at(0), 64)),
    "past the end of its region": large(kernel(at(0, 8193), at(1), 64)),
    "before its region": large(kernel(at(0, -8), at(1), 64)),
    "no address": large(kernel(at(0), 0, 64)),
    "a region that is dead": large(allocations=with_life(0, 0, 2)),
    "an operand that was absent": large(None, kernel(at(1), at(2), at(0), name="other")),
    "between regions": large(None, kernel(at(1), at(2), at(0, 0x8000), name="other")),
    "behind all regions": large(None, kernel(at(1), at(2), at(3, 0x2000_0000), name="other")),
    "before all regions": large(None, kernel(at(1), at(2), at(0, -0x2000_0000), name="other")),
    "memory of the framework": large(kernel(at(0), at(1), 0x7F00_0000_0400)),
    "one region more": large(allocations=(*large().allocations, ONE_MORE)),
    "a region that is born later": large(allocations=with_life(2, 2, None)),
    "a region that is born earlier": large(allocations=with_life(2, 0, None)),
    "a library's memory": large(allocations=with_life(2, 1, None, library=True)),
    "another order": large(order=topology(3, [(0, 2), (1, 2)])),
    "another number of inputs": large(n_inputs=0),
    "a result from elsewhere": large(outputs=(OutputSpec(input=0),)),
    "a further result": large(outputs=(*large().outputs, OutputSpec(constant=3))),
}


@pytest.mark.parametrize("doubt", DOUBTS.values(), ids=DOUBTS)
def test_whatever_is_in_doubt_takes_a_second_capture(doubt: Recording) -> None:
    assert slots_of(proofs(), doubt) is None


@pytest.mark.parametrize(("constant", "proved"), [(3, True), (object(), False)])
def test_only_a_second_capture_shows_what_is_constant(constant: object, proved: bool) -> None:
    """A number depends on the sizes alone; an object may be another one at each call."""
    known = Proofs()
    known.add(small(outputs=(OutputSpec(constant=constant),)), SLOTS)
    assert (slots_of(known, large(outputs=(OutputSpec(constant=constant),))) is not None) == proved


def test_constants_of_the_partition_are_no_doubt() -> None:
    assert slots_of(proofs(), large(kernel(at(0), at(1), 0x7F00_0000_0010))) is not None


def test_kernels_are_proved_one_by_one() -> None:
    """A third size has one kernel of the first and one of the second."""
    fast = kernel(at(1), at(0), 64, name="fast")
    known = proofs((large(fast), (Slot(0, 0, 1, 0), Slot(0, 8, 0, 0), *SLOTS[2:])))
    third = slots_of(known, large(kernel(at(1, 16), at(0), 1, name="fast")))
    assert third == two_each((1, 16), (0, 0), (1, 4096), (2, 0), (0, 64), (2, 0))
    assert slots_of(known, large(kernel(at(0), at(1), 64))) is not None


def test_a_kernel_that_is_given_its_regions_in_several_ways() -> None:
    """A product takes its operands in either order; and with a bias, or without."""
    swapped = kernel(at(1), at(0), 64), (Slot(0, 0, 1, 0), Slot(0, 8, 0, 0))
    without = kernel(at(0), 0, 64), (Slot(0, 0, 0, 0),)
    known = proofs(*((large(one), (*slots, *SLOTS[2:])) for one, slots in (swapped, without)))
    rest = two_each((1, 4096), (2, 0), (0, 64), (2, 0))
    found = [
        slots_of(known, large(kernel(*words, 1))) for words in ((at(0), at(1)), (at(1), at(0)), (at(0), 0))
    ]
    assert [slots and slots[:-4] for slots in found] == [SLOTS[:2], swapped[1], without[1]]
    assert [slots and [s._replace(node=s.node - 1) for s in slots[-4:]] for slots in found] == [
        list(rest)
    ] * 3
    assert slots_of(known, large(kernel(at(1), at(2), 1))) is None
    many = [
        (large(kernel(at(a), at(b), 1)), (Slot(0, 0, a, 0), Slot(0, 8, b, 0), *SLOTS[2:]))
        for a, b in ((0, 0), (1, 1), (0, 1), (1, 0), (0, 0))
    ]
    known = proofs(*many)
    assert {len(ways) for nodes in known._known.values() for node in nodes for ways in node.values()} == {
        1,
        4,
    }


@pytest.mark.parametrize("delta", [-8, 1025])
def test_kernels_that_are_given_addresses_outside_of_their_regions_prove_nothing(delta: int) -> None:
    known = Proofs()
    known.add(small(), (SLOTS[0]._replace(delta=delta), *SLOTS[1:]))
    assert slots_of(known, large()) is None


def test_long_names_are_looked_through_once() -> None:
    """Kernels of templates have names of hundreds of characters, and each node's is looked at."""
    recorded = small(third=kernel(at(0), at(2), name="_ZN2at6native" + "x" * 30_000))
    start = time.perf_counter()
    Proofs().add(recorded, ())
    assert time.perf_counter() - start < 0.2, "as many steps as characters; their square takes seconds"


def test_kernels_of_cudnn_prove_nothing() -> None:
    name = "_ZN5x_cudnn6kernelE"
    known = Proofs()
    known.add(small(third=kernel(at(0), at(2), name=name)), SLOTS)
    assert slots_of(known, large(None, None, kernel(at(0), at(2), name=name))) is None


def test_few_structures_are_remembered() -> None:
    known = proofs()
    for n in range(40):
        known.add(small(outputs=(OutputSpec(constant=None),) * n), SLOTS)
    assert len(known._known) == 16
    assert slots_of(known, large()) is None, "the oldest go"


# From code to launches


def attention(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.t() / 3, -1) @ x + x[:1]


def joined(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.cat([x, x * 2])
    return y[1:].cumsum(0), y


def halves(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return (one.sigmoid() * other).sum(0, keepdim=True).expand(x.shape[0], -1).clone()


PROGRAMS: list[Callable[[Tensor], Any]] = [attention, joined, halves]


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts them."""
    count = [0]
    real = HostSession.end

    def end(session: HostSession, *told: Any) -> Any:
        count[0] += 1
        return real(session, *told)

    monkeypatch.setattr(HostSession, "end", end)
    return count


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_further_size_takes_one_capture(program: Any, recordings: list[int]) -> None:
    compiled = host(program, dynamic=True)
    for count, n in enumerate((5, 7, 12, 40)):
        for _ in range(4):
            x = torch.randn(n, 4)
            for got, wanted in zip(tree_leaves(compiled(x)), tree_leaves(program(x)), strict=True):
                same(got, wanted)
        assert recordings == [2 + count]
    (partition,) = registry.live_capturable()
    assert partition.stats.captures == 4


@given(st.lists(st.integers(2, 24), min_size=2, max_size=6, unique=True), st.sampled_from(PROGRAMS))
def test_one_capture_proves_what_two_do(sizes: list[int], program: Any) -> None:
    """The slots are the same ones."""
    alone, shelf = [], build.Shelf()
    for n in sizes:
        x = torch.randn(n, 4)

        def code(args: list[Any]) -> tuple[Any, ...]:
            results = program(args.pop())
            return results if isinstance(results, tuple) else (results,)

        twice, once = (build.build(HostDriver(), code, [x], [16], shelf=s) for s in (None, shelf))
        assert once.template.slots == twice.template.slots
        assert once.template.regions == twice.template.regions
        alone.append(once)
    assert len(alone) == len(sizes)


@pytest.mark.parametrize(
    "faults", [HostFaults(garbage=2), HostFaults(stale=True), HostFaults(moving_words=True)]
)
def test_whatever_lies_in_padding_no_size_is_wrong(faults: HostFaults) -> None:
    compiled = host(attention, dynamic=True)
    with inject(faults):
        for n in (5, 7, 12, 40, 5, 7):
            for _ in range(3):
                x = torch.randn(n, 4)
                same(compiled(x), attention(x))


def test_training_at_varying_sizes(recordings: list[int]) -> None:
    torch.manual_seed(0)
    model = MLP()
    compiled = host(model, dynamic=True)
    for n in (3, 6, 9):
        for _ in range(4):
            x = torch.randn(n, next(model.parameters()).shape[1])
            want = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
            got = torch.autograd.grad(compiled(x).pow(2).sum(), list(model.parameters()))
            for a, b in zip(got, want, strict=True):
                same(a, b, rtol=1e-4, atol=1e-5)
    assert recordings == [2 * 2 + 2 * 2], "two partitions: two captures each, then one for each size"
