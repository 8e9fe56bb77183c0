"""Shared by the GPU tests: compile with pgraph, move addresses about, compare bit for bit, explain."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pgraph.backend import backend
from pgraph.runtime import registry, statistics

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda", 0)
sys.path.append(str(ROOT / "examples"))

# Relative to the reference's largest magnitude, for results that differ between two eager runs too.
_TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9}


def compile_pgraph(fn: Any, *, dynamic: bool | None = False, **options: Any) -> Any:
    """`torch.compile` with pgraph, installed or not."""
    return torch.compile(fn, backend=backend, dynamic=dynamic, options=options or None)


def pools() -> set[tuple[int, ...]]:
    """Ids of the allocator's pools that hold memory. Graphs of other tests in this process may have some."""
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}


def randn(*size: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """Normal numbers on the GPU."""
    return torch.randn(size, device=DEVICE).to(dtype).requires_grad_(grad)


def whole(*size: int, high: int = 5, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """Small whole numbers: their sums are exact in any order, so atomic additions are too."""
    return torch.randint(-high, high, size, device=DEVICE).to(dtype).requires_grad_(grad)


def index(*size: int, high: int) -> Tensor:
    """Indices in [0, high)."""
    return torch.randint(0, high, size, device=DEVICE)


def random_ops() -> list[Tensor]:
    """A hundred ordinary random ops of several kinds under one seed."""
    torch.manual_seed(11)
    x = torch.ones(50, 40, device=DEVICE)
    q = torch.ones(1, 2, 64, 32, device=DEVICE, dtype=torch.bfloat16)
    results = []
    for _ in range(10):
        results += [
            torch.rand(33, device=DEVICE),
            torch.randn(1000, device=DEVICE),
            torch.randint(0, 99, (77,), device=DEVICE),
            torch.randperm(200, device=DEVICE),
            torch.bernoulli(x * 0.3),
            F.dropout(x, 0.4),
            torch.empty(60, device=DEVICE).exponential_(),
            torch.multinomial(x[0], 5),
            torch.normal(x, 2.0),
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.1),
        ]
    return results


# -- what pgraph did ------------------------------------------------------------------------------


_older: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_older() -> None:
    """What is alive now belongs to earlier tests (a failed one's traceback may hold on to it)."""
    _older.update(registry.live_partitions())


def partitions() -> list[Any]:
    """The safe partitions that this test has made."""
    return [p for p in registry.live_capturable() if p not in _older]


def report() -> statistics.Report:
    """`pgraph.report()`, of this test only."""
    return statistics.Report(tuple(p.stats for p in registry.live_partitions() if p not in _older))


def built() -> list[Any]:
    """Everything captured so far: templates with their execs."""
    return [v.built for p in partitions() for v in p.specializations() if v.built is not None]


def templates() -> list[Any]:
    """Templates of all partitions captured so far."""
    return [b.template for b in built()]


def explain() -> str:
    """The report, for assertion messages."""
    return f"\n{report()}"


def assert_launched(at_least: int = 1) -> None:
    """Every safe partition was launched at least so often and none fell back."""
    counters = report().capturable
    assert counters, f"pgraph saw nothing to capture{explain()}"
    bad = [p.name for p in counters if p.launches < at_least or p.reason is not None]
    assert not bad, f"not launched {at_least} times: {', '.join(bad)}{explain()}"


def outside_codes() -> set[str]:
    """Codes of the reasons why parts run uncaptured."""
    return {reason.code for _, reasons in report().outside for reason in reasons}


# -- comparing ------------------------------------------------------------------------------------


def as_bytes(x: Tensor) -> Tensor:
    """The elements of `x` as bytes."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaNs too."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; infinite where only one is finite."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.nan_to_num((a.to(wide) - b.to(wide)).abs(), nan=float("inf")).max().item()


def assert_same(
    label: str, got: Sequence[Tensor], reference: Sequence[Tensor], twin: Sequence[Tensor], exact: bool = True
) -> None:
    """`got` equals `reference` bit for bit; where the twin does not, it is as near as the twin.

    Args:
        exact: False where equal twins may be luck (atomic additions).
    """
    assert len(got) == len(reference), f"{label}: {len(got)} results, not {len(reference)}{explain()}"
    for i, (g, r, t) in enumerate(zip(got, reference, twin, strict=True)):
        if same_bits(g, r):
            continue
        what = f"{label}, result {i} ({tuple(r.shape)}, {r.dtype})"
        diff = difference(g, r)
        assert not (exact and same_bits(r, t)), f"{what} differs by {diff:.3g}{explain()}"
        scale = r.double().abs().max().item()
        allowed = max(4 * difference(r, t), _TOLERANCE.get(r.dtype, 2**-16) * scale)
        assert diff <= allowed, f"{what} differs by {diff:.3g}, allowed {allowed:.3g}{explain()}"


# -- moving addresses -----------------------------------------------------------------------------


def poison(tensors: Sequence[Tensor]) -> None:
    """Fill the storages with 0xFF bytes: NaN for floats, -1 for whole numbers."""
    for t in tensors:
        storage = t.untyped_storage()
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage, 0, (storage.nbytes(),)).fill_(0xFF)


class Shaker:
    """Poisoned junk of random size and lifetime, so that the allocator hands out other addresses."""

    def __init__(self, seed: int = 0, largest: int = 8 << 20) -> None:
        self._random = random.Random(seed)
        self._largest = largest
        self._junk: list[Tensor] = []

    def shake(self) -> None:
        self._junk = [t for t in self._junk if self._random.random() < 0.6]
        for _ in range(self._random.randint(1, 4)):
            size = int(512 * (self._largest / 512) ** self._random.random())
            self._junk.append(torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(0xFF))


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a nested value."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def run_once(fn: Callable[..., Any], args: Any, grad: bool = False) -> list[Tensor]:
    """Results of one call on copies of the arguments, followed by the gradients or the arguments."""
    mine = tree_map(_copy, args)
    results = tensors_of(fn(*mine))
    inputs = tensors_of(mine)
    if grad:
        heads = [r for r in results if r.requires_grad]
        tangents = [
            torch.linspace(-2, 2, h.numel(), device=h.device).to(h.dtype).view(h.shape) for h in heads
        ]
        wanted = [t for t in inputs if t.requires_grad]
        grads = list(torch.autograd.grad(heads, wanted, tangents))
        results = [r.detach() for r in results]
    else:
        grads = [t.clone() for t in inputs]  # shows what was written into them
    held = {t.untyped_storage().data_ptr() for t in (*results, *grads)}
    poison([t for t in inputs if t.untyped_storage().data_ptr() not in held])
    return results + grads


def check(
    fn: Callable[..., Any],
    make: Callable[[], Any],
    *,
    label: str = "",
    calls: int = 6,
    grad: bool = False,
    exact: bool = True,
    launched: int = 2,
    **options: Any,
) -> None:
    """`fn` compiled by pgraph equals eager, on fresh values at fresh addresses in each call.

    All results are kept and compared once more at the end: they belong to the caller for ever.
    """
    compiled = compile_pgraph(fn, **{"codegen": "aten", **options})
    shaker, kept = Shaker(), []
    for i in range(calls):
        torch.manual_seed(i)
        args = make()
        reference, twin = run_once(fn, args, grad), run_once(fn, args, grad)
        got = run_once(compiled, args, grad)
        assert_same(f"{label} call {i}", got, reference, twin, exact)
        kept.append((got, [g.clone() for g in got]))
        del args, reference, twin, got
        shaker.shake()
    for i, (got, before) in enumerate(kept):
        for g, b in zip(got, before, strict=True):
            assert same_bits(g, b), f"{label}: a result of call {i} changed afterwards{explain()}"
    if launched:
        assert_launched(launched)


# -- other processes ------------------------------------------------------------------------------


def python(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `code` with `arguments` in a process of its own, which can import pgraph and these helpers."""
    path = os.pathsep.join([str(ROOT), str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def finish(process: subprocess.Popen[str], timeout: float = 180) -> str:
    """What the process printed; it has to end by itself and with status 0."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the process did not end within {timeout} s:\n{output[-4000:]}") from None
    assert process.returncode == 0, f"status {process.returncode}:\n{output[-4000:]}"
    return output
