"""What dies inside a launch is freed between its chunks, and what is held is what the plan says."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import TIGHT, host, launching, same
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import pgraph
from pgraph.drivers.host.driver import HostDriver, HostRecipe
from pgraph.launch import interpreter
from pgraph.launch.program import Program
from pgraph.runtime import holdings, registry
from pgraph.runtime.specialization import Specialization
from pgraph.template.lifetimes import GRANULE

KB = 1 << 10


@dataclasses.dataclass
class Moment:
    """What is alive when one chunk is launched.

    Args:
        inputs: of the launch's inputs, by position.
        held: bytes of living inputs and blocks, rounded as the allocator does.
    """

    inputs: list[bool]
    held: int


class Watch:
    """Watches every launch: its inputs and what it allocates, by weak references to storages."""

    def __init__(self) -> None:
        self.launches: list[list[Moment]] = []
        self.templates: list[Any] = []
        self._storages: list[tuple[StorageWeakRef, int]] = []
        self._inputs = 0

    def begin(self, inputs: list[Any]) -> None:
        self._storages = []
        self._inputs = len(inputs)
        for tensor in inputs:
            self.hold(tensor)
        self.launches.append([])

    def hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)
        twice = any(ref.cdata == other.cdata for other, _ in self._storages)
        self._storages.append((ref, 0 if twice else -(-storage.nbytes() // GRANULE) * GRANULE))

    def owned_by(self, model: nn.Module) -> set[int]:
        """The last launch's inputs in a parameter's storage: ATen code saves views of them."""
        owners = {StorageWeakRef(p.untyped_storage()).cdata for p in model.parameters()}
        return {i for i, (ref, _) in enumerate(self._storages[: self._inputs]) if ref.cdata in owners}

    def sharing(self, i: int) -> set[int]:
        """The last launch's inputs in the storage of input `i`."""
        refs = [ref for ref, _ in self._storages[: self._inputs]]
        return {j for j, ref in enumerate(refs) if ref.cdata == refs[i].cdata}

    def chunk(self) -> None:
        living = [not ref.expired() for ref, _ in self._storages]
        held = sum(n for (_, n), alive in zip(self._storages, living, strict=True) if alive)
        self.launches[-1].append(Moment(living[: self._inputs], held))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    call, launch, empty = interpreter._launch, HostRecipe.launch, HostDriver.empty_strided

    def calling(program: Program, driver: Any, args: list[Any], addresses: list[int], index: int) -> Any:
        watch.begin([args[guard.position] for guard in program.guards.tensors])
        return call(program, driver, args, addresses, index)

    def launching_chunk(self: HostRecipe, bases: list[int], stream: int) -> int:
        watch.chunk()
        return launch(self, bases, stream)

    def allocating(self: HostDriver, *args: Any) -> Tensor:
        tensor = empty(self, *args)
        watch.hold(tensor)
        return tensor

    monkeypatch.setattr(interpreter, "_launch", calling)
    monkeypatch.setattr(HostRecipe, "launch", launching_chunk)
    monkeypatch.setattr(HostDriver, "empty_strided", allocating)
    return watch


class Deep(nn.Module):
    """Layers whose gradients together are about as large as their activations."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * x.sigmoid()
        return x


def plans() -> dict[str, Any]:
    """The plan in use by kind of graph."""
    found = {}
    for partition in pgraph.runtime.registry.live_capturable():
        template = partition.template()
        assert template is not None
        found[partition.stats.facts.graph.kind] = template
    return found


def run(model: nn.Module, compiled: Any, rows: int = 128) -> list[Tensor]:
    """Gradients of one step; the compiled code alone holds the activations."""
    model.zero_grad()
    compiled(torch.randn(rows, 256)).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_saved_activations_die_between_the_chunks(
    watch: Watch, codegen: str, inductor_cache: pathlib.Path
) -> None:
    """Boxed all the way: an input of chunk k that the plan releases is gone when chunk k + 1 is launched."""
    model = Deep()
    compiled = host(model, codegen, memory_slack_mb=0)
    for _ in range(2):
        run(model, compiled)
    watch.launches.clear()
    with launching(2):
        torch.manual_seed(1)
        got = [g.clone() for g in run(model, compiled)]
    torch.manual_seed(1)
    same(got, run(model, model), **TIGHT)

    template = plans()["backward"]
    chunks, moments = template.plan.chunks, watch.launches[-1]
    assert len(moments) == len(chunks) > 2, "nothing was cut, so nothing was shown"
    released: set[int] = set()
    parameters = watch.owned_by(model)
    inside = 0
    for k, (chunk, moment) in enumerate(zip(chunks, moments, strict=True)):
        for i, alive in enumerate(moment.inputs):
            mates = watch.sharing(i)
            kept = i in parameters or any(template.regions[j].death > len(template.nodes) for j in mates)
            assert alive or i in released, f"input {i} is gone before chunk {k}, which may need it"
            assert kept or not (alive and mates <= released), f"input {i} is alive at chunk {k}"
        if k + 1 < len(chunks):
            inside += len(chunk.release)
        released |= set(chunk.release)
    assert inside >= 3, "the plan releases next to nothing between chunks"


def test_each_chunk_holds_what_the_plan_says(watch: Watch, inductor_cache: pathlib.Path) -> None:
    """Bytes in living storages when a chunk is launched: the plan's figure, and no more than eager's peak."""
    model = Deep()
    compiled = host(model, "inductor", memory_slack_mb=0)
    for _ in range(2):
        run(model, compiled)
    watch.launches.clear()
    with launching(2):
        run(model, compiled)
    found = plans()
    for kind, moments in zip(("forward", "backward"), watch.launches, strict=True):
        plan = found[kind].plan
        assert [m.held for m in moments] == [chunk.held for chunk in plan.chunks], kind
        assert max(m.held for m in moments) <= plan.eager_peak * 1.01


def test_one_launch_would_hold_all_at_once(watch: Watch) -> None:
    """The same step without a limit: what the chunks save."""
    model = Deep()
    peaks = []
    for slack in (0, 1 << 10):
        compiled = host(model, memory_slack_mb=slack)
        for _ in range(2):
            run(model, compiled)
        watch.launches.clear()
        run(model, compiled)
        peaks.append(max(m.held for m in watch.launches[-1]))
        torch._dynamo.reset()
        pgraph.runtime.registry.forget()
    assert peaks[0] < 0.9 * peaks[1], peaks


def test_an_input_that_the_caller_keeps_is_released_and_stays(watch: Watch) -> None:
    """A retained graph: the launch lets its reference go, the tensor is its owner's."""
    model = Deep()
    with torch._functorch.config.patch(donated_buffer=False):
        compiled = host(model, memory_slack_mb=0)
        for _ in range(2):
            run(model, compiled)
        loss = compiled(torch.randn(128, 256)).sum()
        with launching(2):
            first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            second = torch.autograd.grad(loss, list(model.parameters()))
    same(second, first)


def test_inputs_in_one_storage_are_planned_as_one(watch: Watch) -> None:
    """Autograd saves a tensor and its alias as two inputs; their memory is there once."""
    model = Deep()
    compiled = host(model, memory_slack_mb=0)
    for _ in range(2):
        run(model, compiled)
    run(model, compiled)
    template, first = plans()["backward"], watch.launches[-1][0]
    aliased = [i for i in range(template.n_inputs) if len(watch.sharing(i)) > 1]
    assert aliased, "no two inputs share a storage: nothing was shown"
    assert first.held == template.plan.chunks[0].held


@pytest.mark.parametrize("place", ["add", "group_of"])
def test_an_interrupt_while_a_capture_is_kept(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come at any time. What was half done is forgotten, and calls are captured anew."""
    compiled = host(lambda x: (x.sin() * 2).exp())
    compiled(torch.randn(4))
    real = getattr(holdings.Holdings, place)

    def interrupted(self: holdings.Holdings, specialization: Specialization) -> Any:
        monkeypatch.undo()
        if place == "group_of":
            real(self, specialization)
        raise KeyboardInterrupt

    monkeypatch.setattr(holdings.Holdings, place, interrupted)
    if place == "add":
        with pytest.raises(KeyboardInterrupt):
            compiled(torch.randn(4))
    else:  # while a capture is let go of
        compiled(torch.randn(4))
        (cache,) = (p._cache for p in registry.live_capturable())
        (specialization,) = cache._captured()
        with pytest.raises(KeyboardInterrupt):
            cache.release(specialization)
    pgraph.reset()
    for _ in range(3):
        x = torch.randn(4)
        same(compiled(x), (x.sin() * 2).exp())
    (told,) = (p for p in pgraph.report().partitions if p.calls)
    assert (told.captures, told.exec_bytes > 0) == (1, True)
    assert told.launches >= 2
