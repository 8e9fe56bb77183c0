"""Numbers that a program counts in Python, and that no op reads: one recording serves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import TIGHT, host, same
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import pgraph
from pgraph.rewrites import idle_numbers
from pgraph.rewrites.idle_numbers import take_out

CODEGENS = pytest.mark.parametrize("codegen", ["aten", "inductor"])


class Cache:
    """Counts its calls, as one with a sliding window does."""

    def __init__(self) -> None:
        self.calls = 0
        self.kept = torch.zeros(4)


def counting(x: Tensor, cache: Cache) -> Tensor:
    cache.calls += 1
    cache.kept.mul_(0.5).add_(x)
    return cache.kept.cumsum(0) * 2


@CODEGENS
def test_a_counter_needs_no_recording_of_its_own(codegen: str) -> None:
    mine, theirs = Cache(), Cache()
    run = host(counting, codegen, dynamic=None)
    for call in range(12):
        x = torch.randn(4)
        same(run(x, mine), counting(x, theirs), **TIGHT)
        assert mine.calls == theirs.calls == call + 1
        same(mine.kept, theirs.kept, **TIGHT)
    report = pgraph.report()
    assert report.captures <= 2, "one for the first call's number, one for all others"
    assert report.launches >= 8


@CODEGENS
def test_a_counter_in_training(codegen: str) -> None:
    def step(x: Tensor, w: Tensor, cache: Cache) -> Tensor:
        cache.calls += 2
        return ((x @ w).tanh() @ w).sum()

    mine, theirs = Cache(), Cache()
    run = host(step, codegen, dynamic=None)
    for call in range(10):
        x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
        (got,) = torch.autograd.grad(run(x, w, mine), w)
        (want,) = torch.autograd.grad(step(x, w, theirs), w)
        same(got, want, **TIGHT)
        assert mine.calls == theirs.calls == 2 * (call + 1)
    assert pgraph.report().captures <= 4
    assert pgraph.report().launches >= 12


@CODEGENS
@pytest.mark.parametrize(
    ("program", "calls"),
    [
        (lambda x: (x.cumsum(0) * 2, x.size(0) + 1), [(n,) for n in (5, 6, 7, 5, 6, 9, 9)]),
        (lambda x, n: (x.cumsum(0)[:n] * 2, n + 1), [(5, n) for n in (4, 3, 2, 4, 3, 3)]),
        (lambda x, n, m: ((x * m).cumsum(0), n + m, n // 3), [(5, n, n + 2) for n in (4, 9, 7, 9, 9)]),
        (lambda x, n: (x.sin().cumsum(0), max(n, x.size(0)), -n), [(5, n) for n in (4, 9, 7, 9, 9)]),
        (
            lambda x, n, m: (x.cumsum(0)[n % m], n),
            [(9, n, m) for n, m in ((5, 4), (9, 4), (9, 8), (5, 8), (5, 4))],
        ),
        (lambda x, n: ((x * (1 / n)).cumsum(0), n + 1), [(5, n) for n in (4, 9, 7, 9, 4, 9)]),
        (lambda x, n: (x.cumsum(0)[: min(n, 3)], n > 5), [(5, n) for n in (2, 9, 7, 2, 4, 9)]),
    ],
    ids=[
        "a size",
        "what an op reads",
        "made of both",
        "a size and a counter",
        "of two",
        "a float",
        "at most",
    ],
)
def test_what_is_read_is_as_it_was_given(
    codegen: str, program: Callable[..., Any], calls: Sequence[Sequence[int]]
) -> None:
    run = host(program, codegen, dynamic=True, step_aside=False)
    for rows, *numbers in calls:
        x = torch.randn(rows, 3)
        got, want = run(x, *numbers), program(x, *numbers)
        same(got[0], want[0], **TIGHT)
        assert got[1:] == want[1:]


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_sliding_window_generates_with_one_recording() -> None:
    """Each of its layers counts the tokens. The prompt fills windows of 8 in part, and tokens run over."""
    transformers = pytest.importorskip("transformers", reason="bash .ci/setup test ecosystem")
    config = transformers.MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    options = {"driver": "host", "codegen": "aten", "step_aside": False}
    compiled = transformers.CompileConfig(backend="pgraph", mode=None, options=options)
    compiled._compile_all_devices = True

    def tokens(ids: Tensor, **arguments: Any) -> Tensor:
        asked = {
            "cache_implementation": "static",
            "max_new_tokens": 16,
            "min_new_tokens": 16,
            "do_sample": False,
        }
        return model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **arguments)  # type: ignore[no-any-return]

    for _ in range(3):
        ids = torch.randint(3, 64, (1, 5))
        theirs = tokens(ids, disable_compile=True)
        torch.testing.assert_close(tokens(ids, compile_config=compiled), theirs)
    report = pgraph.report()
    assert report.captures <= 3, (
        "one before the window is full, one after it; the first number is another one"
    )
    assert report.launches >= 36


def test_what_is_left_out_of_a_graph() -> None:
    def program(x: Tensor, n: int, m: int) -> tuple[Any, ...]:
        return x * m, n + 1, (n + m) * 2, m + 1, x.size(0) + 1, n

    gm = make_fx(program, tracing_mode="symbolic")(torch.randn(5, 3), 7, 11)
    counted = take_out(gm)
    assert counted is not None
    assert (counted.counters, counted.others, counted.results) == ((1,), (2,), (1, 2, 5))
    made, read = counted.make(20, 30)
    assert (tuple(made), tuple(read)) == ((21, 100, 20), ())
    results: Any = counted.module.graph.output_node().args[0]
    assert [i for i, value in enumerate(results) if value is None] == [1, 2, 5]
    assert len(gm.graph.output_node().all_input_nodes) == 6, "the graph itself is as it was"
    assert not any("n_1" in map(str, node.all_input_nodes) for node in counted.module.graph.nodes)


def test_code_is_given_the_first_number_of_which_ops_read_the_same() -> None:
    def program(x: Tensor, n: int, m: int) -> tuple[Any, ...]:
        return x[: n % m] * m, n + 1

    gm = make_fx(program, tracing_mode="symbolic")(torch.randn(50, 3), 15, 4)
    counted = take_out(gm)
    assert counted is not None
    assert (counted.counters, counted.others, counted.results) == ((1,), (2,), (1,))
    seen: list[tuple[int, int]] = []

    def code(args: list[Any]) -> tuple[Any, ...]:
        seen.append((args[1], args[2]))
        return gm(*args)[0], None

    run, x = counted.around(code), torch.randn(50, 3)
    for n, m in ((5, 4), (9, 4), (6, 4), (9, 8), (13, 8), (17, 8), (13, 4)):
        got, number = run([x, n, m])
        same(got, x[: n % m] * m)
        assert number == n + 1
    # Of 9 and 8 it reads 1, as of 5 and 4: but of 5 and 8 it would read 5.
    assert seen == [(5, 4), (5, 4), (6, 4), (9, 8), (13, 8), (9, 8), (5, 4)]


def test_numbers_that_never_read_the_same_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_numbers, "_MOST", 4)
    gm = make_fx(lambda x, n: (x * (1 / n), n + 1), tracing_mode="symbolic")(torch.randn(3), 7)
    counted = take_out(gm)
    assert counted is not None
    run, x = counted.around(lambda args: (x * (1 / args[1]), None)), torch.randn(3)
    for n in (*range(1, 40), *range(1, 40)):
        same(run([x, n])[0], x * (1 / n))
    assert 1 <= len(counted.first) <= 4


class Ring:
    """Writes each row behind the last one, and begins anew when it is full."""

    def __init__(self) -> None:
        self.rows, self.at = torch.zeros(4, 3), 0


def turning(x: Tensor, ring: Ring) -> Tensor:
    place = ring.at % 4
    ring.at += 1
    ring.rows[place] = x
    return ring.rows.cumsum(0) * 2


@CODEGENS
def test_a_ring_needs_a_recording_for_each_place(codegen: str) -> None:
    mine, theirs = Ring(), Ring()
    run = host(turning, codegen, dynamic=None, step_aside=False)
    for _ in range(24):
        x = torch.randn(3)
        same(run(x, mine), turning(x, theirs), **TIGHT)
        same(mine.rows, theirs.rows)
        assert mine.at == theirs.at
    report = pgraph.report()
    assert report.captures <= 5
    assert report.launches >= 16


@CODEGENS
def test_a_backward_is_told_a_ring_by_its_place(codegen: str) -> None:
    """It is given the number, which nothing in it reads, beside what was made of it."""

    def step(x: Tensor, w: Tensor, ring: Ring) -> Tensor:
        place = ring.at % 4
        ring.at += 1
        return ((x @ w).tanh()[:, place : place + 2] * (1 + place)).sum()

    mine, theirs = Ring(), Ring()
    run = host(step, codegen, dynamic=None, step_aside=False)
    for _ in range(28):
        x, w = torch.randn(3, 8), torch.randn(8, 8, requires_grad=True)
        (got,) = torch.autograd.grad(run(x, w, mine), w)
        (want,) = torch.autograd.grad(step(x, w, theirs), w)
        same(got, want, **TIGHT)
        assert mine.at == theirs.at
    for partition in pgraph.report().capturable:
        assert partition.captures <= 4
        assert partition.launches >= 16 or partition.uncaptured_runs == 1, str(pgraph.report())


def test_a_graph_without_such_numbers_is_left_alone() -> None:
    x = torch.randn(5, 3)
    assert take_out(make_fx(lambda x, n: (x[:n] * 2, n + 1), tracing_mode="symbolic")(x, 4)) is None
    assert take_out(make_fx(lambda x: (x * 2, x.size(0) + 1), tracing_mode="symbolic")(x)) is None
    assert take_out(make_fx(lambda x: (x * 2,))(x)) is None
