"""Small functions of many op families, as ATen ops: what a launch gives is what eager gives.

Each runs on fresh tensors at fresh addresses among poisoned junk, and must really be launched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from gpu_helpers import DEVICE, check, index, randn, whole
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Case:
    """A function and what makes its arguments; `grad` runs its backward too."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[], Any]
    grad: bool = False
    exact: bool = True


def _fp8(*size: int) -> torch.Tensor:
    return randn(*size).to(torch.float8_e4m3fn)


def _scale() -> torch.Tensor:
    return torch.rand(1, device=DEVICE) + 0.5


def _offsets() -> torch.Tensor:
    return torch.tensor([64, 96, 192, 256], dtype=torch.int32, device=DEVICE)


PRODUCTS = [
    Case("mm-fp32", lambda a, b: a @ b, lambda: (randn(96, 80), randn(80, 112)), grad=False),
    Case("mm-bf16", lambda a, b: a @ b, lambda: (randn(512, 256, dtype=BF16), randn(256, 512, dtype=BF16))),
    Case("mm-fp16", lambda a, b: a @ b, lambda: (randn(256, 512, dtype=FP16), randn(512, 128, dtype=FP16))),
    Case(
        "linear-bf16",
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda: (
            randn(4, 64, 128, dtype=BF16, grad=True),
            randn(256, 128, dtype=BF16, grad=True),
            randn(256, dtype=BF16, grad=True),
        ),
        grad=True,
    ),
    Case(
        "bmm-bf16",
        lambda a, b: torch.bmm(a, b).relu(),
        lambda: (randn(8, 64, 96, dtype=BF16, grad=True), randn(8, 96, 64, dtype=BF16, grad=True)),
        grad=True,
    ),
    Case(
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5),
        lambda: (randn(4, 32, 32), randn(4, 32, 48), randn(4, 48, 32)),
    ),
    Case(
        "split-k",
        lambda a, b: (a @ b) + 1,
        lambda: (randn(64, 65536, dtype=BF16), randn(65536, 64, dtype=BF16)),
    ),
    Case("mv-dot", lambda a, v: (a @ v, v @ v), lambda: (randn(300, 200), randn(200))),
    Case(
        "einsum",
        lambda a, b: torch.einsum("bik,bjk->bij", a, b),
        lambda: (randn(3, 20, 32), randn(3, 24, 32)),
    ),
    Case(
        "scaled-mm-fp8",
        lambda a, b, s: torch._scaled_mm(a, b.t(), s, s, out_dtype=BF16),
        lambda: (_fp8(128, 256), _fp8(64, 256), _scale()),
    ),
    Case(
        "grouped-mm",
        lambda a, b, offs: torch._grouped_mm(a, b.transpose(-2, -1), offs=offs) * 2,
        lambda: (randn(256, 128, dtype=BF16), randn(4, 64, 128, dtype=BF16), _offsets()),
    ),
]

CONVOLUTIONS = [
    Case(
        "conv2d",
        lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(),
        lambda: (randn(4, 16, 20, 20, grad=True), randn(24, 16, 3, 3, grad=True), randn(24, grad=True)),
        grad=True,
    ),
    Case(
        "conv2d-channels-last-fp16",
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        lambda: tuple(
            t.contiguous(memory_format=torch.channels_last)
            for t in (randn(4, 32, 16, 16, dtype=FP16), randn(64, 32, 3, 3, dtype=FP16))
        ),
    ),
    Case(
        "conv2d-depthwise",
        lambda x, w: F.conv2d(x, w, padding=1, groups=32),
        lambda: (randn(2, 32, 16, 16), randn(32, 1, 3, 3)),
    ),
    Case("conv1d", lambda x, w: F.conv1d(x, w), lambda: (randn(4, 8, 100), randn(12, 8, 5))),
    Case(
        "conv-transpose2d",
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        lambda: (randn(2, 8, 9, 9), randn(8, 6, 3, 3)),
    ),
    Case(
        "batch-norm-train",
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, training=True),
        lambda: (randn(8, 16, 12, 12), randn(16), randn(16), randn(16), torch.rand(16, device=DEVICE)),
        exact=False,  # eager calls cuDNN, the decomposed graph does not
    ),
    Case(
        "group-norm",
        lambda x, w, b: F.group_norm(x, 4, w, b),
        lambda: (randn(4, 16, 10, 10, grad=True), randn(16, grad=True), randn(16, grad=True)),
        grad=True,
        exact=False,
    ),
    Case(
        "layer-norm",
        lambda x, w, b: F.layer_norm(x, (64,), w, b),
        lambda: (randn(32, 64, grad=True), randn(64, grad=True), randn(64, grad=True)),
        grad=True,
    ),
    Case("max-pool2d", lambda x: F.max_pool2d(x, 2, return_indices=True), lambda: (randn(4, 8, 16, 16),)),
    Case("avg-pool2d", lambda x: F.avg_pool2d(x, 3, stride=2), lambda: (randn(4, 8, 17, 17),)),
    Case(
        "interpolate",
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        lambda: (randn(2, 4, 9, 9),),
        exact=False,  # AOTAutograd traces a decomposition, which rounds in another order
    ),
]

REDUCTIONS = [
    Case("sum-mean-var", lambda x: (x.sum(), x.mean(1), x.var(0), x.norm()), lambda: (randn(300, 700),)),
    Case("amax-argmax", lambda x: (x.amax(1), x.argmax(0), x.max()), lambda: (randn(200, 500),)),
    Case("softmax", lambda x: F.softmax(x, -1), lambda: (randn(64, 300, grad=True),), grad=True),
    Case(
        "cross-entropy",
        lambda x, y: F.cross_entropy(x, y),
        lambda: (randn(128, 1000, grad=True), index(128, high=1000)),
        grad=True,
    ),
    Case("logsumexp", lambda x: x.logsumexp(-1), lambda: (randn(64, 100),)),
    Case("cumsum-long", lambda x: x.cumsum(0), lambda: (whole(200_000),)),
    Case("cumsum-rows", lambda x: (x.cumsum(1), x.cummax(1)), lambda: (whole(40, 300),)),
    Case("sort-long", lambda x: torch.sort(x), lambda: (randn(100_000),)),
    Case(
        "sort-rows", lambda x: torch.sort(x, dim=1, descending=True, stable=True), lambda: (randn(16, 5000),)
    ),
    Case("topk-long", lambda x: torch.topk(x, 50), lambda: (randn(200_000),)),
    Case("topk-rows", lambda x: torch.topk(x, 8, dim=-1), lambda: (randn(64, 500),)),
    Case("kthvalue-median", lambda x: (x.kthvalue(5, 1), x.median(1)), lambda: (randn(32, 101),)),
    Case(
        "searchsorted",
        lambda s, x: torch.searchsorted(s, x),
        lambda: (randn(100).sort().values, randn(500)),
    ),
    Case("histc", lambda x: torch.histc(x, 20, -3, 3), lambda: (randn(5000),)),
]

INDEXING = [
    Case("gather", lambda x, i: x.gather(1, i), lambda: (randn(40, 60), index(40, 20, high=60))),
    Case(
        "scatter",
        lambda x, i, s: x.scatter(1, i, s),
        lambda: (randn(40, 60), index(40, 1, high=60), randn(40, 1)),
    ),
    Case(
        "scatter-add",
        lambda x, i, s: x.scatter_add(0, i, s),
        lambda: (whole(50, 30), index(90, 30, high=50), whole(90, 30)),
    ),
    Case(
        "index-add",
        lambda x, i, s: x.index_add(0, i, s),
        lambda: (whole(50, 30), index(200, high=50), whole(200, 30)),
    ),
    Case(
        "index-put-accumulate",
        lambda x, i, v: torch.ops.aten.index_put(x, [i], v, True),
        lambda: (whole(50, 30), index(200, high=50), whole(200, 30)),
    ),
    Case(
        "index",
        lambda x, i, j: x[i, j] + x[:, 0][i],
        lambda: (randn(40, 60), index(90, high=40), index(90, high=60)),
    ),
    Case(
        "embedding",
        lambda i, w: F.embedding(i, w) * 2,
        lambda: (index(8, 500, high=1000), whole(1000, 64, grad=True)),
        grad=True,
        exact=False,
    ),
    Case(
        "where-masked-fill",
        lambda x, y: (torch.where(x > 0, x, y), x.masked_fill(y > 0, 7.0)),
        lambda: (randn(100, 90), randn(100, 90)),
    ),
    Case("nonzero-static", lambda x: torch.nonzero_static(x > 0, size=64), lambda: (randn(20, 30),)),
    Case("flip-roll-tril", lambda x: (x.flip(0), x.roll(3, 1), x.tril()), lambda: (randn(70, 70),)),
]

SHAPING = [
    Case("cat-20", lambda *xs: torch.cat(xs) * 2, lambda: tuple(randn(3 + i, 40) for i in range(20))),
    Case(
        "stack-split",
        lambda a, b: [t * 2 for t in torch.stack((a, b)).chunk(3, 2)],
        lambda: (randn(20, 31), randn(20, 31)),
    ),
    Case(
        "makers",
        lambda x: (
            torch.zeros_like(x) + x,
            torch.ones_like(x),
            torch.arange(99, device=x.device),
            torch.full((7,), 3.0, device=x.device),
        ),
        lambda: (randn(1000),),
    ),
    Case(
        "clone-cast",
        lambda x: (x.clone(), x.to(BF16), x.double(), x.t().contiguous()),
        lambda: (randn(300, 200),),
    ),
    Case(
        "pad-reflect",
        lambda x: (F.pad(x, (1, 2), mode="reflect"), F.pad(x, (3, 3))),
        lambda: (randn(4, 5, 60),),
    ),
    Case("fft", lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2), lambda: (randn(16, 256),)),
    Case(
        "complex",
        lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.complex(y, x)),
        lambda: (randn(90), randn(90)),
    ),
    Case("cdist", lambda a, b: torch.cdist(a, b), lambda: (randn(40, 16), randn(50, 16))),
    Case(
        "foreach",
        lambda xs, ys: (
            torch._foreach_add(xs, ys, alpha=2),
            torch._foreach_mul(xs, 3.0),
            torch._foreach_lerp(xs, ys, 0.25),
            torch._foreach_norm(xs),
        ),
        lambda: ([randn(30 + i, 50) for i in range(40)], [randn(30 + i, 50) for i in range(40)]),
    ),
    Case(
        "foreach-in-place",
        lambda xs, ys: torch._foreach_addcmul_(xs, ys, ys, 0.5),
        lambda: ([randn(33) for _ in range(9)], [randn(33) for _ in range(9)]),
    ),
]

TABLE = PRODUCTS + CONVOLUTIONS + REDUCTIONS + INDEXING + SHAPING


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_ops_equal_eager_at_fresh_addresses(case: Case) -> None:
    check(case.fn, case.make, label=case.name, grad=case.grad, exact=case.exact, launched=2)


@pytest.mark.parametrize("kind", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_attention_of_every_kind(kind: str) -> None:
    """Forward and backward; their gradients may add up in another order, their results may not."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    def qkv(grad: bool) -> Any:
        return tuple(randn(2, 4, 128, 64, dtype=BF16, grad=grad) for _ in range(3))

    with sdpa_kernel(getattr(SDPBackend, kind)):
        try:
            attention(*qkv(False))
        except RuntimeError as e:
            pytest.skip(f"{kind} does not run here: {str(e).splitlines()[0]}")
        check(attention, lambda: qkv(False), label=f"{kind} forward")
        check(attention, lambda: qkv(True), label=f"{kind} backward", grad=True, exact=False)
