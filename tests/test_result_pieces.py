"""Small tensors that a forward saves for its backward share memory, and small gradients of parameters do
(Note [Results in one piece])."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pgraph
from pgraph import compat
from pgraph.compiler import assemble, compile_graph
from pgraph.compiler.context import Memory
from pgraph.launch import allocations
from pgraph.launch.allocations import ALIKE, FEW_MOST
from pgraph.runtime import registry
from pgraph.runtime.code import Code
from pgraph.template.plan import GRANULE

OPTIONS = {"driver": "host", "step_aside": False}
CALLS = 5


class Normalized(nn.Module):
    """Linear layers with batch norms, whose statistics are saved."""

    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.norm = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for linear, norm in zip(self.linear, self.norm, strict=True):
            x = torch.nn.functional.gelu(norm(linear(x)))
        return x, x.mean(0)


def shared() -> dict[str, int]:
    """How many results share memory, by the kind of graph."""
    found: dict[str, int] = {}
    for partition in registry.live_capturable():
        for program in partition._cache.captured.programs:
            kind = partition.stats.facts.graph.kind
            found[kind] = found.get(kind, 0) + len(program.shared)
    return found


def steps(
    model: nn.Module,
    call: Callable[..., Any],
    *,
    rows: int = 32,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[list[Tensor]]:
    """Outputs, gradients and buffers of some training steps."""
    torch.manual_seed(2)
    found = []
    for _ in range(CALLS):
        model.zero_grad(set_to_none=True)
        x = torch.randn(rows, 16, requires_grad=True)
        with around():
            out = call(x)
        (out[0].square().sum() + out[1].sum()).backward()
        assert x.grad is not None
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([*(t.detach() for t in out), x.grad, *gradients, *(b.clone() for b in model.buffers())])
    return found


def compared(model: nn.Module, **settings: Any) -> None:
    """pgraph's steps are Inductor's, bit for bit."""
    twin = copy.deepcopy(model)
    want = steps(twin, torch.compile(twin, backend="inductor"), **settings)
    got = steps(model, torch.compile(model, backend="pgraph", options=OPTIONS), **settings)
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), f"step {step}"
    assert pgraph.report().launches > CALLS, "the steps were launched"


def test_small_results_that_are_saved_share_memory() -> None:
    compared(Normalized())
    found = shared()
    assert found["forward"] >= 6, "mean and deviation of three norms"
    assert found["backward"] == 9, "gradients of three weights, and of three norms' weights and biases"


def test_those_share_a_piece_that_the_backward_needs_last_at_about_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many pieces one at most is kept for some of its tenants alone. Most backwards need them in the
    reverse of the order in which they are made, so this one is told another."""
    monkeypatch.setattr(allocations, "PIECE_MOST", 2048)
    monkeypatch.setattr(allocations, "RESULTS_MOST", 2048)
    told: list[dict[int, int]] = []
    real = Code.sharing

    def sharing(self: Code) -> dict[int, int]:
        told.append({position: 7 * death % 1009 for position, death in real(self).items()})
        return told[-1]

    monkeypatch.setattr(Code, "sharing", sharing)
    compared(Normalized(layers=6), rows=4)
    (forward,) = (p for p in registry.live_capturable() if p.stats.facts.graph.kind == "forward")
    (program,) = forward._cache.captured.programs
    deaths = next(found for found in told if found)
    pieces: dict[int, list[int]] = {}
    for position in program.shared:
        pieces.setdefault(program.results[position].index, []).append(deaths[position])
    assert len(pieces) >= 3, pieces
    spans = sorted((min(deaths), max(deaths)) for deaths in pieces.values())
    assert all(last <= first for (_, last), (first, _) in itertools.pairwise(spans)), spans


def test_a_backwards_inputs_die_at_their_last_use() -> None:
    graph = torch.fx.Graph()
    a, b, _ = (graph.placeholder(name) for name in "abc")
    first = graph.call_function(torch.add, (a, b))
    graph.output((graph.call_function(torch.mul, (first, a)),))
    gm = torch.fx.GraphModule({}, graph)
    assert compile_graph._deaths(gm) == {"a": 4, "b": 3, "c": -1}


def test_what_the_program_gets_has_memory_of_its_own() -> None:
    model = Normalized()
    compiled = torch.compile(model, backend="pgraph", options=OPTIONS)
    for _ in range(CALLS):
        out = compiled(torch.randn(32, 16))
        out[0].sum().backward()
    assert shared()["forward"] > 0
    assert all(in_memory_of_its_own(tensor) for tensor in out)


def in_memory_of_its_own(tensor: Tensor) -> bool:
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and tensor.storage_offset() == 0


def test_eager_gradients_may_share_memory_too() -> None:
    """What the sharing of gradients rests on: programs cannot count on storages of their own."""
    first, second = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    (torch.cat([first, second]) @ torch.randn(4, 3)).square().sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.untyped_storage().data_ptr() == second.grad.untyped_storage().data_ptr()
    assert second.grad.storage_offset() > 0


def test_gradients_of_parameters_share_memory_and_are_not_copied() -> None:
    model = Normalized()
    compiled = torch.compile(model, backend="pgraph", options=OPTIONS)
    x = torch.randn(32, 16, requires_grad=True)
    for _ in range(CALLS):
        x.grad = None
        model.zero_grad(set_to_none=True)
        compiled(x)[0].sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 9
    assert len({g.data_ptr() for g in gradients}) == 9
    pieces = {g.untyped_storage().data_ptr() for g in gradients}
    assert len(pieces) == 2, "six of 512 bytes, as the allocator counts, and one of 1,024; and two more"
    offsets = {g.data_ptr() - g.untyped_storage().data_ptr() for g in gradients}
    assert not any(offset % GRANULE for offset in offsets), "as aligned as the allocator's own"
    assert x.grad is not None
    assert in_memory_of_its_own(x.grad), "the program's own tensor may have any owner"


def test_a_gradient_that_is_kept_holds_at_most_a_few_times_its_memory() -> None:
    """One for each sample, or for a log: the others, which are larger or many, are not kept with it."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for width in (64,) * 20]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    compiled = torch.compile(model, backend="pgraph", options=OPTIONS)
    held = {name: 0 for name, _ in model.named_parameters()}
    for _ in range(CALLS):
        loss = compiled(torch.randn(32, 64)).square().mean()
        for (name, p), gradient in zip(
            model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            held[name] = gradient.untyped_storage().nbytes()
            assert held[name] <= ALIKE * -(-p.nbytes // GRANULE) * GRANULE
    assert shared()["backward"] > 30
    assert len(set(held.values())) > 1


def test_shared_gradients_accumulate_and_update_as_others_do() -> None:
    """Over several backwards, by two optimizers, and with hooks that change and drop gradients."""
    for optimizer, clear in itertools.product((torch.optim.SGD, torch.optim.AdamW), (True, False)):
        model = Normalized()
        twin = copy.deepcopy(model)
        found = []
        for net, backend in ((model, "pgraph"), (twin, "inductor")):
            options = OPTIONS if backend == "pgraph" else None
            call = torch.compile(net, backend=backend, options=options)
            update = optimizer(net.parameters(), lr=1e-2)
            dropped: list[Tensor] = []
            for i, parameter in enumerate(net.parameters()):
                if i % 3 == 0:
                    parameter.register_hook(lambda gradient: gradient.mul_(0.5))
                elif i % 3 == 1:

                    def drop(parameter: Tensor, dropped: list[Tensor] = dropped) -> None:
                        assert parameter.grad is not None
                        dropped.append(parameter.grad.clone())
                        parameter.grad = None

                    parameter.register_post_accumulate_grad_hook(drop)
            torch.manual_seed(3)
            for _ in range(CALLS):
                for _ in range(2):
                    call(torch.randn(32, 16))[0].square().sum().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                update.step()
                update.zero_grad(set_to_none=clear)
            found.append([*net.parameters(), *dropped])
        assert shared()["backward"] == 9
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
        pgraph.reset()
        torch._dynamo.reset()


def test_a_gradient_of_two_parameters_and_a_large_one_have_memory_of_their_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Parameter(torch.randn(16)) for _ in range(3))
            self.large = nn.Parameter(torch.randn(16, FEW_MOST // 64 + 16))

        def forward(self, x: Tensor) -> Tensor:
            return ((x + self.first + self.second) * self.third) @ self.large

    model = Model()
    compiled = torch.compile(model, backend="pgraph", options=OPTIONS)
    reference = Model()
    reference.load_state_dict(model.state_dict())
    for _ in range(CALLS):
        x = torch.randn(4, 16)
        for net in (model, reference):
            net.zero_grad(set_to_none=True)
        compiled(x).square().sum().backward()
        reference(x).square().sum().backward()
    assert model.large.grad is not None
    assert in_memory_of_its_own(model.large.grad)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_part_shares_what_no_other_part_and_no_result_is() -> None:
    """Of five values that two parts make, which of those that are saved go nowhere else."""
    calls = (SimpleNamespace(inputs=(0,), outputs=(1, 2, 3)), SimpleNamespace(inputs=(0, 2), outputs=(4, 5)))
    # Results: 1 for the program; 1, 2, 3, 4 and 5 for the backward, and 5 once more.
    split = SimpleNamespace(calls=calls, input_slots=(0,), output_slots=(1, 1, 2, 3, 4, 5, 5))
    given = Memory(frozenset(), frozenset(), (), {i: f"saved {i}" for i in range(1, 7)}, frozenset(range(7)))
    first, second = assemble._memory_of(split, given)  # type: ignore[arg-type]
    assert first.saved == {2: "saved 3"}
    assert second.saved == {0: "saved 4"}
    assert (first.kept, second.kept) == (frozenset({2}), frozenset({0}))


def test_what_is_returned_and_saved_shares_nothing() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.sigmoid(x @ w)  # its backward needs the result itself
        return first, torch.tanh(first @ w)

    compiled = torch.compile(fn, backend="pgraph", options=OPTIONS)
    for _ in range(CALLS):
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        out = compiled(x, w)
        (out[0].sum() + out[1].sum()).backward()
        assert all(t.untyped_storage().nbytes() == 256 for t in out)


def test_large_results_share_nothing() -> None:
    model = Normalized(layers=2)
    rows = FEW_MOST // (16 * 4) + 1  # activations are larger, statistics are not
    assert rows > 4096
    compared(model, rows=rows)
    for partition in registry.live_capturable():
        for program in partition._cache.captured.programs:
            layouts = [program.built.template.outputs[position].layout for position in program.shared]
            assert all(layout is not None and rows not in layout.size for layout in layouts)


class _StridedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(y, x.cos())
        return y + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y, cos = ctx.saved_tensors
        return grad * cos + y.as_strided((16,), (1,), 4).sum()


def test_nothing_is_shared_where_the_backward_counts_from_the_start_of_a_storage() -> None:
    class Model(Normalized):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = super().forward(x)
            return _StridedBackward.apply(first), second

    compared(Model())
    assert shared()["forward"] == 0


class _HandsOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        saved = x.t() @ x  # which is not computed again
        ctx.save_for_backward(saved, scale)
        return x @ scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        saved, scale = ctx.saved_tensors
        return grad @ scale.t(), saved.view(saved.shape)


def test_nothing_is_shared_where_the_backward_hands_on_what_was_saved() -> None:
    class Model(Normalized):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.eye(16))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = super().forward(x)
            return _HandsOn.apply(first, self.scale), second

    compared(Model())
    assert shared()["forward"] == 0


def test_nothing_is_shared_where_a_sparse_gradient_may_consist_of_what_was_saved() -> None:
    """The program would get the rows that were looked up as a part of the piece."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = Normalized()
            self.table = nn.Embedding(20, 16, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            first, _ = self.rest(x)
            return first + self.table((x.sum(1) > 0).long() + 3)

    model = Model()
    compiled = torch.compile(model, backend="pgraph", options=OPTIONS)
    for _ in range(CALLS):
        model.zero_grad(set_to_none=True)
        compiled(torch.randn(32, 16)).square().sum().backward()
        gradient = model.table.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        assert in_memory_of_its_own(gradient._indices().flatten())
    assert shared()["forward"] == 0
    assert pgraph.report().launches


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Positions of the inputs that each backward may overwrite, of each one that is compiled."""
    found: list[list[int]] = []
    real = compat.donating

    def seen(positions: Sequence[int]) -> Any:
        found.append(list(positions))
        return real(positions)

    monkeypatch.setattr(compat, "donating", seen)
    return found


def test_small_tensors_that_are_saved_are_not_overwritten(given: list[list[int]]) -> None:
    """A gradient in the place of a saved tensor would lie in its piece."""
    compared(Normalized(layers=2), rows=8192)
    small = Normalized(layers=2)
    compiled = torch.compile(small, backend="pgraph", options=OPTIONS)
    donated = [positions for positions in given if positions]
    assert len(donated) == 1, "of the backward, whose activations are large"
    assert len(donated[0]) < 6, "but not the statistics"
    given.clear()
    compiled(torch.randn(8, 16))[0].sum().backward()
    assert not any(given)


def test_where_much_memory_is_needed_larger_tensors_share_it(
    given: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And these are not overwritten either: the forward's limit is the backward's."""
    compared(Normalized(layers=4), rows=8192)
    before = shared()["forward"]
    assert any(given)
    pgraph.reset()
    torch._dynamo.reset()
    monkeypatch.setattr(allocations, "LARGE_PEAK", 1 << 20)
    given.clear()
    compared(Normalized(layers=4), rows=8192)
    assert shared()["forward"] > before, "activations of 512 KB are among them"
    assert not any(given)


@pytest.mark.parametrize(("total", "small"), [(1 << 20, allocations.FEW_MOST), (128 << 20, 1 << 20)])
def test_how_large_a_small_tensor_is_follows_from_all_that_is_saved(total: int, small: int) -> None:
    with torch._subclasses.FakeTensorMode():
        saved = [torch.empty(total // 8), torch.empty(total // 8), None]
    assert allocations.small_of(saved) == small
    assert allocations.may_share(torch.empty(small // 4), small)
    assert not allocations.may_share(torch.empty(small // 4 + 1), small)
    assert not allocations.may_share(7, small)


def test_nothing_is_shared_before_the_backward_is_known() -> None:
    model = Normalized()
    compiled = torch.compile(model, backend="pgraph", options=OPTIONS)
    for _ in range(CALLS):
        compiled(torch.randn(32, 16))
    assert pgraph.report().captures == 1
    assert shared() == {"forward": 0}


@contextlib.contextmanager
def freeing() -> Any:
    """Hooks that take the memory of what they get away, as offloading does."""

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.clone()
        if tensor.storage_offset() or tensor.untyped_storage().nbytes() > tensor.numel() * 4:
            shared.append(tensor.shape)
        elif tensor.numel() == 16 and not isinstance(tensor, nn.Parameter):
            tensor.untyped_storage().resize_(0)
            freed.append(tensor.shape)
        return kept

    shared: list[torch.Size] = []
    freed: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    assert not shared, "a result within a piece was seen"
    assert freed, "statistics were seen"


def test_hooks_of_others_get_tensors_with_memory_of_their_own() -> None:
    """Captured without hooks, launched with some."""
    model = Normalized()
    call = torch.compile(model, backend="pgraph", options=OPTIONS)
    twin = copy.deepcopy(model)
    reference = torch.compile(twin, backend="inductor")
    steps(twin, reference)
    steps(model, call)
    assert shared()["forward"] > 0
    want, got = steps(twin, reference, around=freeing), steps(model, call, around=freeing)
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_capture_under_hooks_of_others_shares_nothing() -> None:
    compared(Normalized(), around=freeing)
    assert shared()["forward"] == 0


def test_hooks_of_others_get_what_the_launched_capture_made() -> None:
    """Of three captures of one forward, two share nothing, since hooks were about when they were made."""
    model = Normalized()
    call = torch.compile(model, backend="pgraph", options=OPTIONS, dynamic=True)
    twin = copy.deepcopy(model)

    def compared_at(rows: int, around: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        want, got = steps(twin, twin, rows=rows), steps(model, call, rows=rows, around=around)
        for a, b in zip(got, want, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)

    compared_at(32, freeing)
    compared_at(48, contextlib.nullcontext)
    compared_at(64, freeing)
    (forward,) = (p for p in registry.live_capturable() if p.stats.facts.graph.kind == "forward")
    assert [bool(program.shared) for program in forward._cache.captured.programs] == [False, True, False]
    for rows in (48, 32):
        launches = forward.stats.launches
        compared_at(rows, freeing)
        assert forward.stats.launches == launches + CALLS


def test_gradients_are_not_copied_for_hooks_on_saved_tensors() -> None:
    """Which never get any."""
    model = Normalized()
    compiled = torch.compile(model, backend="pgraph", options=OPTIONS)
    for _ in range(CALLS):
        model.zero_grad(set_to_none=True)
        loss = compiled(torch.randn(32, 16))[0].sum()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            loss.backward()
    assert shared()["backward"] == 9
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}) == 2


def test_checkpointing_and_offloading_of_pytorch_may_share() -> None:
    compared(Normalized(), around=lambda: torch.autograd.graph.save_on_cpu())
    assert shared()["forward"] > 0


@pytest.mark.parametrize("min_ops", [1, 3])
def test_parts_of_a_forward_share_what_only_the_backward_gets(min_ops: int) -> None:
    """A result that a later part reads stays apart."""

    class Model(Normalized):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, _ = super().forward(x)
            kept = first[torch.nonzero(first.sum(1) > -1e9).flatten()]  # cannot be captured
            return super().forward(kept)

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        model = Model()
        options = {**OPTIONS, "min_ops": min_ops}
        twin = copy.deepcopy(model)
        want = steps(twin, twin)
        got = steps(model, torch.compile(model, backend="pgraph", options=options))
        for a, b in zip(got, want, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False
    assert pgraph.report().launches > 0
    pgraph.reset()
