"""What a library keeps for all its calls is lent to each launch, or becomes a temporary for each op."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pgraph.capture import build
from pgraph.drivers.cuda import workspaces
from pgraph.drivers.execs import Shelf
from pgraph.drivers.host.driver import HostDriver
from pgraph.errors import PlanError
from pgraph.launch.guards import Guards, TensorGuard
from pgraph.launch.interpreter import launch_first
from pgraph.launch.lookup import numbered
from pgraph.launch.program import program_of
from pgraph.native import libraries
from pgraph.template.lifetimes import survives
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording, TensorSpec
from pgraph.template.template import Slot
from pgraph.template.topology import chain

SIZE = 1 << 20


def recording(base: int, steps: tuple[int, ...]) -> Recording:
    """Five nodes; an input, an output, and a workspace that nothing but its library let go."""
    nodes = tuple(NodeRecord("kernel", f"k{i}", (), bytes(16)) for i in range(5))
    allocations = (
        GhostAllocation(base, 64, 0, 4),
        GhostAllocation(base + 4096, SIZE, 0, None, library=True),
        GhostAllocation(base + (4 << 20), 64, 4, None),
    )
    outputs = (OutputSpec(region=2),)
    return Recording(
        nodes, chain(5), allocations, 1, outputs, (base, base + (8 << 20)), None, frozenset(), steps
    )


SLOTS = (Slot(0, 0, 0, 0), Slot(0, 8, 1, 64), Slot(1, 0, 1, 0), Slot(4, 0, 1, 0), Slot(4, 8, 2, 0))


def test_each_op_has_a_workspace_of_its_own() -> None:
    """Nodes 0 and 1 are one op, a reduction that reads what the product left; node 4 is another."""
    steps = (0, 2, 3, 4, 5)
    made = build._template(
        HostDriver(), recording(0, steps), recording(1 << 40, steps), SLOTS, frozenset(), [(0, 0)], 0
    )
    assert [(r.index, r.kind, r.birth, r.death) for r in made.regions[3:]] == [
        (3, "temp", 0, 2),
        (4, "temp", 4, 5),
    ]
    assert made.slots == (SLOTS[0], Slot(0, 8, 3, 64), Slot(1, 0, 3, 0), Slot(4, 0, 4, 0), SLOTS[4])
    assert [r.nbytes for r in made.regions[3:]] == [SIZE, SIZE]
    assert made.outputs == (OutputSpec(region=2),)
    assert made.regions[2].death == survives(5)
    places = [made.plan.location(region) for region in (3, 4)]
    assert places[0] == places[1], "they are never needed at once"


class Lender(HostDriver):
    """Lends workspaces of up to `SIZE` bytes."""

    def lends_workspace(self, nbytes: int) -> bool:
        return nbytes <= SIZE


def test_the_one_that_is_kept_is_lent() -> None:
    steps = (0, 2, 3, 4, 5)
    made = build._template(
        Lender(), recording(0, steps), recording(1 << 40, steps), SLOTS, frozenset(), [(0, 0)], 0
    )
    assert [(r.kind, r.nbytes) for r in made.regions] == [("input", 64), ("workspace", SIZE), ("output", 64)]
    assert made.slots == SLOTS
    assert made.plan.peak < SIZE, "the plan counts no workspace"
    with pytest.raises(PlanError, match="region 1 has no block"):
        made.plan.location(1)


@pytest.mark.parametrize("size", [4096, SIZE])
def test_the_allocator_is_asked_once_how_large_a_workspace_is(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask it takes long in a large program. What is larger than was seen is asked again."""
    asked, address = [], 1 << 30

    def segments() -> list[dict[str, Any]]:
        asked.append(address)
        return [{"blocks": [{"address": address - 512, "size": 512}, {"address": address, "size": size}]}]

    found = SimpleNamespace(pg_current_workspace=lambda stream, nbytes: address)
    monkeypatch.setattr(workspaces.libraries, "load_workspaces", lambda: found)
    monkeypatch.setattr(workspaces.snapshot, "segments", segments)
    monkeypatch.setattr(workspaces, "_seen", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert [workspaces.lends(7, nbytes) for nbytes in (4096, 64, 4096)] == [True] * 3
    assert len(asked) == 1
    assert workspaces.lends(7, SIZE) is (size == SIZE)
    assert len(asked) == (1 if size == SIZE else 2)
    address = 0
    assert not workspaces.lends(7, 64)


def with_another(nbytes: int) -> list[Recording]:
    """Both captures, with a second workspace, of so many bytes."""
    found = [recording(base, (0, 5)) for base in (0, 1 << 40)]
    return [
        dataclasses.replace(
            r,
            allocations=(
                *r.allocations,
                GhostAllocation(r.allocations[0].address + (6 << 20), nbytes, 0, None, library=True),
            ),
        )
        for r in found
    ]


@pytest.mark.parametrize("nbytes", [64, SIZE, SIZE + 512], ids=["smaller", "as-large", "larger-than-is-lent"])
def test_of_several_the_largest_is_lent(nbytes: int) -> None:
    """Product and bias by cuBLASLt, a bare product by cuBLAS; two may be in use at once, so one is lent."""
    slots = (*SLOTS, Slot(4, 16, 3, 0))
    made = build._template(Lender(), *with_another(nbytes), slots, frozenset(), [(0, 0)], 0)
    assert [(r.index, r.nbytes) for r in made.regions if r.kind == "workspace"] == [(1, SIZE)]
    (other,) = made.regions[4:]
    assert (other.kind, other.nbytes) == ("temp", nbytes)
    assert made.slots == (*SLOTS, Slot(4, 16, other.index, 0))
    assert made.plan.location(other.index)


def test_of_several_none_is_lent_where_none_is_kept() -> None:
    slots = (*SLOTS, Slot(4, 16, 3, 0))
    made = build._template(HostDriver(), *with_another(64), slots, frozenset(), [(0, 0)], 0)
    assert [r.kind for r in made.regions[4:]] == ["temp", "temp"]
    assert "workspace" not in {r.kind for r in made.regions}


class Skeleton:
    """What recordings of one form have in common."""


@pytest.mark.parametrize("seed", range(20))
def test_sizes_of_one_skeleton_have_the_templates_that_they_would_have_alone(seed: int) -> None:
    """Bytes, distances, names and layouts differ, what is lent and what callers keep may do so."""
    rng, shelf, skeleton = random.Random(seed), Shelf(), Skeleton()
    drivers, frames = (HostDriver(), Lender()), []
    for _ in range(12):
        allocations = [
            GhostAllocation(i << 40, nbytes, 0 if i < 2 else 4, 4 if i == 0 else None, library=i in (1, 3))
            for i, nbytes in enumerate([rng.choice([64, 4096]), SIZE, rng.choice([64, 9000]), 64])
        ]
        layout = TensorSpec((rng.choice([4, 8]),), (1,), torch.float32, 0)
        one = dataclasses.replace(
            recording(0, (0, 2, 3, 4, 5)),
            nodes=tuple(
                NodeRecord("kernel", f"k{i}{rng.choice('ab')}", (), bytes(rng.choice([16, 24])))
                for i in range(5)
            ),
            allocations=tuple(allocations),
            outputs=(OutputSpec(region=2, layout=layout),),
            skeleton=skeleton,
        )
        slots = tuple(
            slot._replace(delta=rng.choice([0, 8]) if slot.offset == 8 else 0)
            for slot in (*SLOTS, Slot(4, 16, 3, 0))
        )
        kept, driver = rng.choice([frozenset[int](), frozenset([0])]), rng.choice(drivers)
        told = driver, one, one, slots, kept, [(0, rng.choice([0, 64]))], 1 << 40
        made, alone = build._template(*told, shelf), build._template(*told)
        assert made == alone
        assert made.plan._where == alone.plan._where
        assert len(shelf.frames) == 1
        frames.append(shelf.frames[skeleton])
    assert any(frame is not frames[0] for frame in frames), "something else was lent, or kept"
    del one, told, skeleton  # the last recordings of it
    gc.collect()
    assert not shelf.frames


@pytest.mark.parametrize("told", [(False, True), (True, False), (False, False)])
def test_what_one_capture_only_calls_a_librarys_is_none(told: tuple[bool, bool]) -> None:
    """It may hold something from one op to the next: so it is one region, in the plan, and never lent."""
    steps = (0, 2, 3, 4, 5)
    both = [
        dataclasses.replace(
            found,
            allocations=tuple(a._replace(library=library and a.library) for a in found.allocations),
        )
        for found, library in zip((recording(0, steps), recording(1 << 40, steps)), told, strict=True)
    ]
    for driver in (HostDriver(), Lender()):
        made = build._template(driver, *both, SLOTS, frozenset(), [(0, 0)], 0)
        assert [(r.kind, r.birth, r.death) for r in made.regions] == [
            *(("input", 0, 4), ("temp", 0, 5), ("output", 4, survives(5)))
        ]
        assert made.slots == SLOTS
        assert made.plan.peak > SIZE


def test_the_helper_is_built_where_torch_has_cuda() -> None:
    if not (pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").exists():
        assert libraries.load_workspaces() is None
        pytest.skip("this torch has no CUDA")
    library = libraries.load_workspaces()
    if library is None:
        pytest.skip("no C++ compiler, or PGRAPH_NATIVE=0")
    assert library.pg_drop_workspaces(0x1234, 0, 0) == 0
    assert workspaces.kept() == frozenset()


def test_a_tensor_in_a_cycle_is_no_workspace() -> None:
    """The collector is off during a capture, so such a tensor, too, outlives both of them."""

    def code(args: list[Any]) -> list[torch.Tensor]:
        x = args.pop()
        y = torch.ops.aten.add(x, 1)

        def walk(n: int) -> int:  # refers to itself, and to y
            return y.dim() if n == 0 else walk(n - 1)

        walk(2)
        return [torch.ops.aten.neg(torch.ops.aten.mul(x, 2)) + y]

    built = build.build(HostDriver(), code, [torch.randn(1000)], [16])
    program = program_of(built, Guards((TensorGuard(0, (1000,), (1,), 15),)))
    for _ in range(3):
        x = torch.randn(1000)
        done = launch_first([program], numbered([program.guards]), [x])
        assert done is not None
        ((result,), *_) = done
        torch.testing.assert_close(result, (x + 1) - 2 * x)
