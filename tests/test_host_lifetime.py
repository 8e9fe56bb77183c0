"""Who keeps what alive: results for ever, arguments not at all, captures until a reset."""

from __future__ import annotations

import copy
import gc
import pathlib
import threading
import weakref
from typing import Any

import pytest
import torch
from support import MLP, TIGHT, host, launching, same, train
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import pgraph
from pgraph.backend import backend


def chain(x: Tensor) -> Tensor:
    return (x * 2 + 1).cumsum(0)


def warm(compiled: Any, *inputs: Tensor) -> Any:
    for _ in range(2):
        compiled(*inputs)
    return compiled


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_results_stay_valid_for_ever(codegen: str, inductor_cache: pathlib.Path) -> None:
    """No launch writes into memory that an earlier one returned."""
    compiled = warm(host(chain, codegen), torch.randn(50))
    inputs = [torch.randn(50) for _ in range(20)]
    with launching(20):
        outs = [compiled(x) for x in inputs]
        for out, x in zip(outs, inputs, strict=True):
            same(out, chain(x), **TIGHT)
    assert len({o.data_ptr() for o in outs}) == 20


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_nothing_is_kept_after_a_launch(codegen: str, inductor_cache: pathlib.Path) -> None:
    """Neither arguments nor results nor temporaries have another owner than the caller."""
    compiled = warm(host(chain, codegen), torch.randn(50))
    with launching(1):
        x = torch.randn(50)
        out = compiled(x)
    storages = [StorageWeakRef(t.untyped_storage()) for t in (x, out)]
    assert not any(s.expired() for s in storages)
    del x, out
    assert all(s.expired() for s in storages)


def test_nothing_is_kept_after_a_capture() -> None:
    """The call that was captured and the one that ran uncaptured leave nothing either."""
    compiled = host(chain)
    for expected in (0, 1, 1):
        x = torch.randn(50)
        storage = StorageWeakRef(x.untyped_storage())
        out = StorageWeakRef(compiled(x).untyped_storage())
        assert pgraph.report().captures == expected
        del x
        assert storage.expired()
        assert out.expired()


def test_the_last_result_of_a_part_dies_with_its_last_use() -> None:
    """Not with the end of the part that uses it."""
    storages: list[StorageWeakRef] = []
    alive: list[bool] = []

    @torch.library.custom_op("pgraph_lifetime::use", mutates_args=())
    def use(x: Tensor) -> Tensor:
        storages.append(StorageWeakRef(x.untyped_storage()))
        return x.sum()

    @torch.library.custom_op("pgraph_lifetime::look", mutates_args=())
    def look(x: Tensor) -> Tensor:
        alive.append(not storages[-1].expired())
        return x + 1

    use.register_fake(lambda x: x.new_empty(()))
    look.register_fake(torch.empty_like)
    for op in ("pgraph_lifetime::use", "pgraph_lifetime::look"):
        pgraph.mark_unsafe(op, reason="it is", fix="none")
    try:
        compiled = host(lambda x: look(use(x * 2)), min_ops=1)
        for _ in range(4):
            compiled(torch.randn(500))
    finally:
        for op in ("pgraph_lifetime::use", "pgraph_lifetime::look"):
            pgraph.unmark_unsafe(op)
    assert pgraph.report().launches == 3
    assert alive == [False] * 4


def test_saved_activations_die_with_the_backward() -> None:
    """The backward's arguments are boxed all the way down to the launch."""
    model = MLP()
    compiled = host(model)
    for _ in range(2):
        train(model, compiled, torch.randn(3, 8))
    x = torch.randn(3, 8, requires_grad=True)
    with launching(2):
        out = compiled(x)
        saved = [t for t in out.grad_fn.saved_tensors if t.shape == (3, 16)]
        assert saved
        storages = [StorageWeakRef(t.untyped_storage()) for t in saved]
        del saved
        assert not any(s.expired() for s in storages)
        out.sum().backward()
    assert all(s.expired() for s in storages)


def test_no_capture_after_warming_up() -> None:
    model = MLP()
    compiled = host(model)
    for _ in range(2):
        train(model, compiled, torch.randn(3, 8))
    captures = pgraph.report().captures
    with launching(20):
        for _ in range(10):
            train(model, compiled, torch.randn(3, 8))
    assert pgraph.report().captures == captures == 2


@pytest.mark.parametrize("warmup", [1, 3])
def test_warm_up_runs_come_before_the_capture(warmup: int) -> None:
    compiled = host(chain, warmup=warmup)
    captures = []
    for _ in range(5):
        x = torch.randn(50)
        same(compiled(x), chain(x))
        captures.append(pgraph.report().captures)
    assert captures == [0] * warmup + [1] * (5 - warmup)


def test_reset_frees_and_captures_anew() -> None:
    """Compiled code stays usable after `pgraph.reset()`."""
    compiled = warm(host(chain), torch.randn(50))
    runner = pgraph.runtime.registry.live_capturable()[0]
    (specialization,) = runner.specializations()
    execs = [weakref.ref(e) for e in specialization.built.execs]
    assert execs
    del specialization
    pgraph.reset()
    assert runner.specializations() == []
    assert all(e() is None for e in execs)
    x = torch.randn(50)
    plain = pgraph.report().capturable[0].uncaptured_runs
    same(compiled(x), chain(x))
    assert pgraph.report().capturable[0].uncaptured_runs == plain + 1, "it warms up again"
    with launching():
        same(compiled(x), chain(x))
    assert len(runner.specializations()) == 1


def test_reset_forgives_a_refusal() -> None:
    """What was refused once is tried again."""
    from pgraph.drivers.host.faults import HostFaults, inject

    compiled = host(chain)
    with inject(HostFaults(fail_at="end", fail_as="lost")):
        warm(compiled, torch.randn(50))
    assert pgraph.report().refused == 1
    pgraph.reset()
    with launching():
        warm(compiled, torch.randn(50))


def test_dynamo_reset_frees_too() -> None:
    compiled = warm(host(chain), torch.randn(50))
    (runner,) = pgraph.runtime.registry.live_capturable()
    torch._dynamo.reset()
    assert runner.specializations() == []
    del runner
    gc.collect()
    assert pgraph.report().capturable == ()
    with launching():
        warm(compiled, torch.randn(50))


def test_a_runner_dies_with_its_code() -> None:
    """Nothing in pgraph holds compiled code that Dynamo has let go: called here without Dynamo."""
    graph = torch.fx.symbolic_trace(lambda x: (chain(x),))
    compiled = backend(graph, [torch.randn(50)], options={"driver": "host", "codegen": "aten", "min_ops": 1})
    for _ in range(3):
        compiled(torch.randn(50))
    assert pgraph.report().launches == 2
    del compiled
    gc.collect()
    assert pgraph.report().capturable == ()


def test_a_copied_module_has_its_own_parameters() -> None:
    """One template may serve both: parameters are arguments like any other."""
    model = MLP()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.a.weight.mul_(2)
    for module in (model, other):
        compiled = host(module)
        for _ in range(2):
            train(module, compiled, torch.randn(3, 8))
        with launching(2):
            x = torch.randn(3, 8)
            same(train(module, compiled, x), train(module, module, x))


@pytest.mark.parametrize("warm_first", [True, False])
def test_two_threads_call_one_function(warm_first: bool) -> None:
    """Also while the first of them still captures."""
    compiled = host(chain)
    if warm_first:
        warm(compiled, torch.randn(50))
    else:
        compiled(torch.randn(50))
    errors: list[BaseException] = []
    gate = threading.Barrier(2)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            gate.wait()
            for _ in range(50):
                x = torch.randn(50, generator=generator)
                same(compiled(x), chain(x))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    with launching(90):
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert errors == []
    assert pgraph.report().captures == 1


def test_a_launch_does_not_touch_the_random_state() -> None:
    compiled = warm(host(chain), torch.randn(50))
    x = torch.randn(50)
    before = torch.get_rng_state()
    with launching():
        compiled(x)
    same(torch.get_rng_state(), before)
