"""What callers may do with arguments and results: mutate, alias, offset, reshape. Against eager."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import BEFORE_2_13, agree, host, launching, same
from torch import Tensor, nn

import pgraph
from pgraph.backend import backend
from pgraph.ops.safety import mark_unsafe, unmark_unsafe


def test_mutation_of_inputs() -> None:
    """The launch writes into today's input, not into the one that was captured."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        y[1:].mul_(2)
        return x * y

    agree(fn, host(fn), lambda: (torch.randn(4, 4), torch.randn(4, 4)))


def test_mutation_of_buffers() -> None:
    """A buffer that was replaced between calls is mutated where it is now."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x.sum(0))
            return x - self.total

    module, twin = Counter(), Counter()
    compiled = host(module)
    for _ in range(2):
        x = torch.randn(3, 4)
        same(compiled(x), twin(x))
    with launching(4):
        for call in range(4):
            if call == 2:
                module.total, twin.total = module.total.clone(), twin.total.clone()
            x = torch.randn(3, 4)
            same(compiled(x), twin(x))
            same(module.total, twin.total)


def test_views_go_in_and_come_out() -> None:
    """Transposed, strided and offset inputs; results that are views of inputs and of one another."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = (x + 1).contiguous()
        return y, y[1:], y[1:].view(-1), x[0], x

    big = torch.randn(10, 64)
    compiled = host(fn)
    agree(fn, compiled, lambda: (torch.randn(64).as_strided((4, 4), (8, 2)),))
    compiled(big[:4, 16:32:4])
    with launching(3):
        for row in (0, 1, 5):
            x = big[row : row + 4, 16:32:4]
            y, tail, flat, first, itself = compiled(x)
            assert itself is x
            assert first.data_ptr() == x.data_ptr()
            assert tail.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
            tail.zero_()
            same(flat, torch.zeros(12))
            same(y[1:], tail)
            same(y[0], x[0] + 1)


def test_an_input_may_be_returned() -> None:
    """The very tensor comes back, also from a launch."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + y

    compiled = host(fn)
    compiled(torch.randn(4), torch.randn(4))
    with launching(2):
        for _ in range(2):
            x, y = torch.randn(4), torch.randn(4)
            out = compiled(x, y)
            assert out[0] is x
            same(out[1], x + y)


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    s = ((x * 2).sin() * 3).cos()
    return s, s.contiguous()


def test_one_tensor_returned_twice_stays_one() -> None:
    """Its block had an earlier tenant, so that each result would be a view by itself."""
    compiled = host(both)
    compiled(torch.randn(4, requires_grad=True))[1].sum().backward()
    for _ in range(3):
        x = torch.randn(4, requires_grad=True)
        z = x.detach().clone().requires_grad_()
        with launching(2):
            (p, q), (r, s) = compiled(x), both(z)
            assert (p is q) == (r is s) is True
            p.mul_(2)
            r.mul_(2)
            q.sum().backward()
            s.sum().backward()
        same(x.grad, z.grad)


@pytest.mark.parametrize("last", [torch.exp, torch.tanh])
def test_a_saved_result_that_was_written_into_is_an_error(last: Any) -> None:
    """As in eager: the gradient would be wrong."""
    compiled = host(lambda x: last((x * 2).sin() * 3))
    compiled(torch.randn(4, requires_grad=True)).sum().backward()
    for _ in range(3):
        y = compiled(torch.randn(4, requires_grad=True))
        with torch.no_grad():
            y.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert pgraph.report().launches >= 3


def test_one_tensor_twice() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    def twice() -> tuple[Tensor, Tensor]:
        x = torch.randn(4)
        return x, x

    compiled = host(fn)
    agree(fn, compiled, twice)
    agree(fn, compiled, lambda: (torch.randn(4), torch.randn(4)))
    agree(fn, compiled, twice)


@pytest.mark.parametrize("first", ["one", "two"])
def test_two_inputs_in_one_storage_then_in_two(first: str) -> None:
    """Hazard 9, and the reverse. Neither order of meeting them matters."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x @ y, x.sum(0) - y

    def one() -> tuple[Tensor, Tensor]:
        both = torch.randn(2, 4, 4)
        return both[0], both[1]

    def overlapping() -> tuple[Tensor, Tensor]:
        row = torch.randn(32)
        return row[:16].view(4, 4), row[8:24].view(4, 4)

    def two() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 4), torch.randn(4, 4)

    compiled = host(fn)
    kinds: list[Any] = [one, two, overlapping] if first == "one" else [two, overlapping, one]
    for kind in kinds * 2:
        agree(fn, compiled, kind, calls=2)


def test_offset_and_misaligned_inputs() -> None:
    """Hazard 10: a less aligned address needs a capture of its own, which serves better ones too."""

    def fn(x: Tensor) -> Tensor:
        return (x * 2).cumsum(0)

    compiled = host(fn)
    buffer = torch.randn(64)
    start = (-buffer.data_ptr() // 4) % 4  # elements up to the next 16 bytes
    for shift, captures in ((0, 1), (4, 1), (1, 2), (8, 2), (5, 2), (2, 2)):
        x = buffer[start + shift : start + shift + 16]
        compiled(x)
        compiled(x)
        with launching():
            same(compiled(x), fn(x))
        assert pgraph.report().captures == captures, f"shift {shift}"


def test_as_strided_counts_from_the_storage() -> None:
    """Where the tensor begins in its storage is part of what was captured."""

    def first_four(x: Tensor) -> Tensor:
        return torch.as_strided(x, (4,), (1,), 0) + 1

    compiled = host(first_four)
    for call in range(6):
        base = torch.arange(16.0) + 100 * call
        x = base[4 : 8 + 4 * (call % 2)][-4:]  # begins at 4 and at 8 in turn
        same(compiled(x), base[:4] + 1)
    report = pgraph.report()
    assert (report.captures, report.launches, report.refused) == (2, 4, 0), str(report)


def of_a_part(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.as_strided(x[2:], (2,), (1,)) * 2, x + 1


def of_a_transposed_view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(2, 3).t().as_strided((2,), (3,)) * 2, x + 1


def of_what_counts_itself(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.as_strided(torch.as_strided(x, (4,), (1,), 1)[1:], (2,), (1,)) * 2, x + 1


@torch.library.custom_op("contract::add_", mutates_args={"to"}, tags=(torch.Tag.cudagraph_unsafe,))
def add_(to: Tensor, x: Tensor) -> None:
    """Adds in place, and is never captured."""
    to.add_(x)


@add_.register_fake
def _(to: Tensor, x: Tensor) -> None:
    return None


def by_a_custom_op(x: Tensor) -> tuple[Tensor, Tensor]:
    add_(x, x * 2)
    add_(x, x * 3)
    return x * 2, x + 1


def by_a_custom_op_in_every_other_column(x: Tensor) -> tuple[Tensor, Tensor]:
    columns = x.view(2, 3)[:, ::2]
    add_(columns, columns * 2)
    return columns * 2, x + 1


@pytest.mark.parametrize("starts", [(0, 1, 3), (1, 0, 2)], ids=["at-first-0", "at-first-1"])
@pytest.mark.parametrize(
    "fn",
    [
        of_a_part,
        of_a_transposed_view,
        of_what_counts_itself,
        by_a_custom_op,
        pytest.param(
            by_a_custom_op_in_every_other_column,
            marks=pytest.mark.skipif(BEFORE_2_13, reason="PyTorch's own compiled code is wrong there"),
        ),
    ],
)
def test_inputs_begin_anywhere_in_their_storage(
    fn: Callable[[Tensor], tuple[Tensor, Tensor]], starts: tuple[int, ...]
) -> None:
    """Dynamo guards no storage offset, and neither does code that pgraph does not capture."""
    for warmup in (1, 100):
        torch._dynamo.reset()
        compiled = host(fn, warmup=warmup)
        for start in starts:
            for _ in range(3):
                base = torch.randn(start + 6)  # nothing comes after it
                twin = base.clone()
                same(compiled(base[start : start + 6]), fn(twin[start : start + 6]))
                same(base, twin)


@pytest.mark.parametrize("starts", [(0, 1, 3), (1, 0, 2)], ids=["at-first-0", "at-first-1"])
def test_inputs_of_any_size_begin_anywhere(starts: tuple[int, ...]) -> None:
    compiled = host(by_a_custom_op, dynamic=True)
    for start in starts:
        for size in (5, 6, 9):
            base = torch.randn(20)
            twin = base.clone()
            same(compiled(base[start : start + size]), by_a_custom_op(twin[start : start + size]))
            same(base, twin)


def test_ops_that_count_from_the_storages_start() -> None:
    """At a launch, too: the tensors that kernels get begin where the captured ones did."""

    def fn(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        scattered = torch.as_strided_scatter(x, s, (2,), (2,), 3)
        return scattered, torch.as_strided_copy(x, (2,), (2,), 3), x.as_strided((2,), (2,), 3).add_(1)

    compiled = host(fn)
    for _ in range(5):
        base, s = torch.randn(40), torch.randn(2)
        twin = base.clone()
        same(compiled(base[1:7], s), fn(twin[1:7], s))
        same(base, twin)
    assert pgraph.report().launches == 4


def test_empty_tensors() -> None:
    """Nothing to compute, and nothing to point to."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x * 2, torch.cat([x, y]), (x @ x.t()).sum(), y + 1

    agree(fn, host(fn), lambda: (torch.randn(0, 3), torch.randn(2, 3)))
    agree(fn, host(fn), lambda: (torch.randn(0, 3), torch.randn(0, 3)))


def test_a_new_shape_is_a_new_capture() -> None:
    """Static shapes: Dynamo compiles anew."""

    def fn(x: Tensor) -> Tensor:
        return (x + 1).sum(-1)

    compiled = host(fn)
    for n in (2, 3, 4):
        agree(fn, compiled, lambda n=n: (torch.randn(n, 5),), calls=2)
    assert pgraph.report().captures == 3


def test_one_graph_for_many_shapes() -> None:
    """dynamic=True: one compilation, a template per set of sizes."""

    def fn(x: Tensor) -> Tensor:
        return (x + x.shape[0]).cumsum(0)

    compiled = host(fn, dynamic=True)
    for n in (2, 3, 7, 3, 2):
        agree(fn, compiled, lambda n=n: (torch.randn(n, 5),), calls=2)
    assert len(pgraph.report().capturable) == 1
    assert pgraph.report().captures == 3


def test_captures_are_bounded_least_recently_used_first() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.cumsum(0) * 2

    compiled = host(fn, dynamic=True, max_captures=2)

    def captures_after(n: int) -> int:
        for _ in range(3):
            x = torch.randn(n, 5)
            same(compiled(x), fn(x))
        kept = [
            v for v in pgraph.runtime.registry.live_capturable()[0].specializations() if v.program is not None
        ]
        assert len(kept) <= 2
        return pgraph.report().captures

    assert [captures_after(n) for n in (2, 3, 2, 4, 2, 3)] == [1, 2, 2, 3, 3, 4]


def test_one_capture_at_a_time() -> None:
    """A shape seen once does not push the only capture out, one that is seen again does."""

    def fn(x: Tensor) -> Tensor:
        return x.cumsum(0) * 2

    compiled = host(fn, dynamic=True, max_captures=1)
    for n in (2, 3, 4, 4, 5, 6, 7, 7, 4):
        x = torch.randn(n, 5)
        same(compiled(x), fn(x))
        for partition in pgraph.runtime.registry.live_capturable():
            assert sum(v.program is not None for v in partition.specializations()) <= 1
    assert pgraph.report().captures == 2


@pytest.fixture
def marked() -> Any:
    mark_unsafe("aten::sin", "is marked by a test", "unmark it")
    yield
    unmark_unsafe("aten::sin")


@pytest.mark.usefixtures("marked")
def test_a_marked_op_in_the_middle() -> None:
    """What stands around it is captured, and mutation keeps its place in the program."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        a = x * 2
        y.add_(a)
        b = torch.sin(y) + torch.sin(a)
        y.mul_(b)
        return y - x

    agree(fn, host(fn), lambda: (torch.randn(4), torch.randn(4)))
    (outside,) = pgraph.report().outside
    assert [r.code for r in outside[1]] == ["marked"]
    assert outside[1][0].where
    assert len(pgraph.report().capturable) == 2


def test_a_marked_op_that_is_taken_apart(inductor_cache: pathlib.Path) -> None:
    """Inductor's front end makes a dozen ops of gelu: each still counts as the marked one."""
    mark_unsafe("aten::gelu", "is under suspicion", "compare without it")
    try:
        compiled = host(lambda x: torch.nn.functional.gelu(x @ x) @ x, "inductor")
        for _ in range(3):
            compiled(torch.randn(4, 4))
    finally:
        unmark_unsafe("aten::gelu")
    (outside,) = pgraph.report().outside
    assert {(r.code, r.sentence) for r in outside[1]} == {
        ("marked", "aten::gelu is marked unsafe: is under suspicion")
    }


@pytest.mark.usefixtures("marked")
def test_a_marked_op_in_the_backward() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cos(x * 2) * 3

    compiled = host(fn)
    for _ in range(2):
        compiled(torch.randn(4, requires_grad=True)).sum().backward()
    with launching(3):
        x = torch.randn(4, requires_grad=True)
        got = torch.autograd.grad(compiled(x).sum(), x)
    same(got, torch.autograd.grad(fn(x).sum(), x))


def test_a_size_that_depends_on_data_in_the_middle() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x * 2 + 1
        found = torch.nonzero(a > 0)
        return found * 3, a.cumsum(0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        agree(fn, host(fn), lambda: (torch.randn(6),))
    assert any("dynamic-shape" in str(p) for p in pgraph.report().outside)


def test_a_number_read_on_the_host_in_the_middle() -> None:
    def fn(x: Tensor) -> Tensor:
        a = (x * 2).cumsum(0)
        n = a.argmax().item()  # a float would be turned back into a tensor
        return (a + 1).cumsum(0) * n

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        agree(fn, host(fn), lambda: (torch.randn(6),), calls=3)
    assert any("host" in str(p) for p in pgraph.report().outside)


def test_a_constant_tensor_is_returned() -> None:
    """One that the code holds: no launch makes it, each call returns it."""
    held = torch.arange(3.0)

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", held)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2 + 1, self.held

    compiled = backend(
        torch.fx.symbolic_trace(Holds()),
        [torch.randn(4)],
        options={"driver": "host", "codegen": "aten", "min_ops": 1},
    )
    compiled(torch.randn(4))
    with launching(2):
        for _ in range(2):
            x = torch.randn(4)
            got = compiled(x)
            same(got[0], x * 2 + 1)
            assert got[1].data_ptr() == held.data_ptr()


def test_unknown_settings_of_inductor_are_named() -> None:
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match="'inductor' sets 'nope', which Inductor"
    ):
        host(lambda x: x * 2, inductor={"nope": 1})(torch.randn(3))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="did you mean 'max_autotune'"):
        host(lambda x: x * 2, inductor={"max_autotunee": True})(torch.randn(3))


def test_settings_of_inductor_without_inductor_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pgraph.backend._tell_of_unused.cache_clear()
    for add in (1, 2):
        host(lambda x, add=add: x * add, inductor={"max_autotune": True})(torch.randn(3))
    (said,) = [message for message in caplog.messages if "codegen" in message]
    assert "'max_autotune'" in said


def test_values_of_inductors_settings_have_its_types() -> None:
    """As torch.compile judges them: the text would be true."""
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed,
        match="'inductor' sets 'max_autotune' to 'False'; it must be of type bool",
    ):
        host(lambda x: x * 2, inductor={"max_autotune": "False"})(torch.randn(3))
    host(lambda x: x * 2, inductor={"max_autotune": False})(torch.randn(3))
    host(lambda x: x * 2, inductor={"max-autotune": False})(torch.randn(3))


def test_the_wrapper_in_cpp_is_off_whatever_the_configuration_says(inductor_cache: pathlib.Path) -> None:
    with torch._inductor.config.patch(cpp_wrapper=True):
        agree(lambda x: x * 2 + 1, host(lambda x: x * 2 + 1, "inductor"), lambda: (torch.randn(4),))
