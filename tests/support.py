"""Shared by the host-driver tests: compile, compare with eager, and make sure that a launch happened."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_flatten

import pgraph
from pgraph.drivers.execs import Recipe
from pgraph.launch.program import Program

TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def host(fn: Any, codegen: str = "aten", *, dynamic: bool | None = False, **options: Any) -> Any:
    """`fn` compiled by pgraph on the host driver; every safe run of ops is captured, however small."""
    chosen = {"driver": "host", "codegen": codegen, "min_ops": 1, **options}
    return torch.compile(fn, backend="pgraph", dynamic=dynamic, options=chosen)


@contextlib.contextmanager
def launching(at_least: int = 1) -> Iterator[None]:
    """The block was served by launches, and no partition fell back."""
    before = pgraph.report().launches
    yield
    after = pgraph.report()
    assert after.launches >= before + at_least, f"only {after.launches - before} launches\n{after}"
    assert after.refused == 0, str(after)


def same(got: Any, want: Any, **tolerance: float) -> None:
    """Equal in structure, layout and value; exactly, unless a tolerance is given."""
    got_leaves, got_spec = tree_flatten(got)
    want_leaves, want_spec = tree_flatten(want)
    assert got_spec == want_spec
    for g, w in zip(got_leaves, want_leaves, strict=True):
        if isinstance(w, Tensor):
            assert g.shape == w.shape
            assert g.dtype == w.dtype
            assert g.requires_grad == w.requires_grad
            torch.testing.assert_close(g, w, **(tolerance or {"rtol": 0, "atol": 0}), equal_nan=True)
        else:
            assert g == w


def agree(
    fn: Callable[..., Any], compiled: Callable[..., Any], inputs: Callable[[], Sequence[Any]], calls: int = 4
) -> None:
    """Function and compiled function agree exactly, on new inputs at each call, by launches."""
    compiled(*inputs())
    with launching(calls - 1):
        for _ in range(calls):
            given = inputs()
            twin = copies(given)
            same(compiled(*given), fn(*twin))
            same(list(given), list(twin))  # what it mutated


def copies(values: Sequence[Any]) -> list[Any]:
    """Independent tensors of the same values; the same tensor twice stays so."""
    made: dict[int, Any] = {}
    return [
        made.setdefault(id(v), v.detach().clone().requires_grad_(v.requires_grad))
        if isinstance(v, Tensor)
        else v
        for v in values
    ]


def train(module: nn.Module, call: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers after one forward and backward."""
    module.zero_grad()
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = call(*given)
    out.sum().backward()
    found = {"out": out.detach()}
    found |= {f"input {i}": x.grad for i, x in enumerate(given) if x.grad is not None}
    found |= {f"grad {k}": p.grad.clone() for k, p in module.named_parameters() if p.grad is not None}
    return found | {f"buffer {k}": b.clone() for k, b in module.named_buffers()}


BEFORE_2_13 = TorchVersion(torch.__version__) < "2.13"
"""Up to 2.12 compiled code of PyTorch's own, whatever the backend, hands a view of an argument to a custom op
that writes into it as if the argument began where the first one did."""

BEFORE_2_14 = TorchVersion(torch.__version__) < "2.14"
"""From 2.14 on AOTAutograd traces programs into fewer ops, and Dynamo compiles modules of torch in place."""

BEFORE_2_15 = TorchVersion(torch.__version__) < "2.15"
"""From 2.15 on Dynamo goes on around an LSTM, and strides that AOTAutograd is told of keep their symbols."""


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(8, 16), nn.Linear(16, 4), p

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(self.a(x).relu(), self.p, self.training))


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down, self.heads = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(B, T, D))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


# A hazard's test runs twice: as it is, and with the cure taken out, when its check must fail.
with_and_without = pytest.mark.parametrize("cured", [True, False], ids=["cured", "uncured"])


def shows(check: Callable[[], None], cured: bool) -> None:
    """The check holds with the cure, and fails without it; not because the sabotage itself broke."""
    if cured:
        check()
    else:
        with pytest.raises(AssertionError) as failure:
            check()
        assert "internal-error" not in f"{failure.value}\n{pgraph.report()}"


def check_lazy_gradients(
    compiled: Any, fn: Callable[[Tensor], Tensor], pair: Callable[[], tuple[Tensor, Tensor]]
) -> None:
    """Eight backwards of a compiled `fn`; the gradient of every other one is a lazy conjugate.

    Args:
        pair: makes an input and a gradient, both complex.
    """
    for call in range(8):
        x, grad = pair()
        if call % 2 == 0:
            grad = grad.conj()
        mine, theirs = (x.detach().clone().requires_grad_() for _ in range(2))
        compiled(mine).backward(grad)
        fn(theirs).backward(grad)
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)


class RecipeOf(Recipe):
    """A recipe whose launches are this function's."""

    def __init__(self, launch: Callable[[list[int], int], int]) -> None:
        self._launch = launch

    def launch(self, bases: list[int], stream: int) -> int:
        return self._launch(bases, stream)

    def fits(self) -> bool:
        return True

    def today(self, bases: Sequence[int]) -> list[int]:
        return []

    def misses(self, today: Sequence[int]) -> int | None:
        return None


def change_program(partition: Any, **changes: Any) -> Program:
    """Have the partition's one specialization launched by a changed program; returns the one it had."""
    (specialization,) = partition.specializations()
    before: Program = specialization.program
    specialization.program = dataclasses.replace(before, **changes)
    partition._cache._renew()
    return before
