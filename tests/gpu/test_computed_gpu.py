"""Recordings of new sizes, computed: byte for byte those that captures make, right, and cheaper."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, assert_same, compile_pgraph, explain, randn
from support_sizes import tables, turned
from torch import Tensor, nn

import pgraph
from pgraph import compat
from pgraph.compute.computer import Computer
from pgraph.compute.script import LaunchKernel
from pgraph.runtime import registry

pytestmark = pytest.mark.gpu

WARM = (24, 24, 40, 40, 96, 96, 136, 136, 130, 130, 50, 50, 70, 70, 90, 90)
"""Three captures are compared. For flash attention Dynamo compiles multiples of 8
by themselves, and others by themselves."""
NEW = (33, 17, 64, 257, 512, 100, 8, 48)
WIDE = 256


class Layers(nn.Module):
    """Attention and products, three times over: layers of one size share recordings of library calls."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(WIDE) for _ in range(6))
        self.qkv = nn.ModuleList(nn.Linear(WIDE, 3 * WIDE) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(WIDE, 4 * WIDE) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(4 * WIDE, WIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        for i in range(3):
            shape = (1, x.shape[1], 3, self.heads, WIDE // self.heads)
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(shape).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out[i](seen.transpose(1, 2).reshape(x.shape))
            x = x + self.down[i](nn.functional.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return x[0]


class Products(nn.Module):
    """Norms and products alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(4))
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x).softmax(-1)


class OneRow(nn.Module):
    """Products of one row, as where text is generated: on an H200 their kernels begin early."""

    def __init__(self) -> None:
        super().__init__()
        wide, gelu = 8 * WIDE, nn.GELU()
        self.layers = nn.Sequential(nn.Linear(WIDE, wide), gelu, nn.Linear(wide, wide), nn.Linear(wide, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x.mean(0, keepdim=True))


class Grouped(nn.Module):
    """Convolutions of groups of channels. cuDNN runs their backward on several streams."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1, groups=4)
        self.second = nn.Conv2d(32, 16, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.view(-1, 16, 4, 4)).relu()).flatten(1)


class Convolutions(nn.Module):
    """A batch of images whose number varies."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, :, None].expand(-1, WIDE, 3).reshape(-1, 3, 16, 16)).mean((2, 3))


class Turned(nn.Module):
    """Positions turn complex numbers, as in Meta's Llama. Inductor leaves those, and their views, to ATen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        angles = torch.outer(torch.arange(1024.0), 1e4 ** -torch.linspace(0, 1, WIDE // 2))
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()], -1))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.first(x).view(x.shape[0], WIDE // 2, 2))
        turned = pairs * torch.view_as_complex(self.turns[: x.shape[0]])
        return x + self.last(torch.view_as_real(turned).flatten(1))


MODELS = {
    "attention, bf16": (Layers, torch.bfloat16),
    "flash attention, bf16": (Layers, torch.bfloat16),
    "attention, fp32": (Layers, torch.float32),
    "products, bf16": (Products, torch.bfloat16),
    "one row, bf16": (OneRow, torch.bfloat16),
    "convolutions, fp32": (Convolutions, torch.float32),
    "grouped convolutions, fp32": (Grouped, torch.float32),
    "complex numbers, fp32": (Turned, torch.float32),
}


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without cuDNN's attention where flash attention is meant."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and "flash" not in request.node.name)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def computers() -> list[Computer]:
    found = [partition._cache.shelf.computer for partition in registry.live_capturable()]
    return [computer for computer in found if isinstance(computer, Computer)]


def step(model: Any, x: Tensor, *, train: bool) -> list[Tensor]:
    """The result, and all gradients in training."""
    if not train:
        with torch.no_grad():
            return [model(x)]
    model.zero_grad()
    x = x.requires_grad_()
    y = model(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def _full() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("_full")
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_new_sizes_are_right(name: str, train: bool) -> None:
    """Sizes that were never run uncaptured give what Inductor gives, but for what eager differs by: gradients
    of a key's bias, for one, are nothing but rounding."""
    make, dtype = MODELS[name]
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype).train(train)
    plain = torch.compile(model, dynamic=True)
    compiled = compile_pgraph(model, dynamic=True, step_aside=False)
    for n in (*WARM, *NEW):
        x = randn(n, WIDE, dtype=dtype)
        got = step(compiled, x.clone(), train=train)
        want = step(plain, x.clone(), train=train)
        eager = step(model, x.clone(), train=train)
        assert_same(f"{name}, {n} rows", got, want, eager, exact=False)
    reasons = [computer.reason for computer in computers()]
    assert reasons
    assert set(reasons) == {None}, f"{reasons}{explain()}"
    assert pgraph.report().computed >= len(NEW) // 2, explain()  # Dynamo may compile some sizes anew


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_execs_of_graphs_made_by_hand(name: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No size finds an exec of another one: each computed recording needs a graph."""
    monkeypatch.setattr("pgraph.capture.build.sharing_key", lambda *_: None)
    make, dtype = MODELS[name]
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype).train(train)
    plain = torch.compile(model, dynamic=True)
    compiled = compile_pgraph(model, dynamic=True, step_aside=False)
    for n in (*WARM, *(n for n in NEW for _ in range(2))):
        x = randn(n, WIDE, dtype=dtype)
        got = step(compiled, x.clone(), train=train)
        want = step(plain, x.clone(), train=train)
        eager = step(model, x.clone(), train=train)
        assert_same(f"{name}, {n} rows", got, want, eager, exact=False)
    assert pgraph.report().computed >= len(NEW) // 2, explain()


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_computed_and_captured_are_the_same(name: str, train: bool) -> None:
    """All sizes are captured, and compared byte for byte."""
    make, dtype = MODELS[name]
    model = make().to(DEVICE, dtype).train(train)
    compiled = compile_pgraph(model, dynamic=True, step_aside=False, compute_sizes="check")
    for n in (*WARM, *(n for n in NEW for _ in range(2))):
        step(compiled, randn(n, WIDE, dtype=dtype), train=train)
    assert [c.reason for c in computers()] == [None] * len(computers()), explain()
    assert computers()
    compared = [c._compared for c in computers()]
    assert sum(compared) >= len(NEW) * (2 if train else 1), compared


def tuned_otherwise() -> int:
    """Have generated kernels launched in blocks of another size, where there is one; how many there are."""
    count = 0
    namespaces = [
        space for partition in registry.live_capturable() for space in partition.admission.code.namespaces
    ]
    for kernel in (
        value for space in namespaces for value in space.values() if compat.is_triton_kernel(value)
    ):
        if len(kernel.launchers) != 1:
            continue
        (before,) = kernel.launchers
        config = copy.deepcopy(before.config)
        if "XBLOCK" in config.kwargs:
            config.kwargs["XBLOCK"] = config.kwargs["XBLOCK"] // 2 or 2
            if kernel.fn.fn is None:  # it was compiled by another process
                kernel.fn = kernel._reload_kernel().fn
            kernel.launchers = [kernel._precompile_config(config).make_launcher()]
            count += 1
    return count


@pytest.mark.usefixtures("_full")
@pytest.mark.parametrize("name", ["products, bf16", "attention, fp32"])
def test_kernels_that_are_tuned_anew(name: str) -> None:
    """As when somebody compiles kernels of the same source, and other blocks are measured to be faster: the
    grid goes with the function."""
    make, dtype = MODELS[name]
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype)
    plain = torch.compile(model, dynamic=True)
    compiled = compile_pgraph(model, dynamic=True, step_aside=False)
    for sizes in ((*WARM, 33), NEW, (*NEW, 49, 65)):
        for n in sizes:
            x = randn(n, WIDE, dtype=dtype)
            got, want, eager = (step(each, x.clone(), train=False) for each in (compiled, plain, model))
            assert_same(f"{name}, {n} rows", got, want, eager, exact=False)
        assert tuned_otherwise() > 0
    assert [computer.reason for computer in computers()] == [None] * len(computers()), explain()


def test_captured_functions_have_the_handles_that_launchers_tell() -> None:
    """What a node was captured with is what the kernel's code says that it was loaded as."""
    model = Products().to(DEVICE, torch.bfloat16)
    compiled = compile_pgraph(model, dynamic=True, step_aside=False)
    for n in WARM:
        step(compiled, randn(n, WIDE, dtype=torch.bfloat16), train=True)
    handles = []
    for computer in computers():
        assert computer._script is not None, explain()
        for event in computer._script.events:
            if isinstance(event, LaunchKernel):
                launcher = compat.launcher_of(event.kernel)
                assert launcher is not None
                handles.append((compat.handle_of(launcher.code), computer._samples[event.number].header[0]))
    assert handles
    assert all(told == captured for told, captured in handles), handles


@pytest.mark.usefixtures("_full")
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_sizes_that_are_computed_ahead_are_right(name: str, train: bool) -> None:
    """From the third size on, those between the smallest and the largest are launched at their first call."""
    make, dtype = MODELS[name]
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype).train(train)
    plain = torch.compile(model, dynamic=True)
    compiled = compile_pgraph(model, dynamic=True, step_aside=True)
    for n in (137, 25, 61, 136, 24, 72, *range(33, 101, 4), *range(32, 136, 8)):
        x = randn(n, WIDE, dtype=dtype)
        got = step(compiled, x.clone(), train=train)
        want = step(plain, x.clone(), train=train)
        eager = step(model, x.clone(), train=train)
        assert_same(f"{name}, {n} rows", got, want, eager, exact=False)
    if "attention" in name:  # others may be too small to pay
        told = [partition.stats for partition in registry.live_capturable() if partition.stats.launches]
        assert any(stats.ahead > 0 for stats in told), explain()


def test_a_custom_op_that_keeps_a_table_for_each_size() -> None:
    """Tables have memory, whoever calls the op next with a size: nothing is recorded before a run. (After one
    the op reads what is no argument of it, and is refused.)"""
    tables.clear()
    weight = randn(64, 64)

    def fn(x: Tensor) -> Tensor:
        return (turned((x @ weight).relu()) @ weight).sin()

    plain, compiled = torch.compile(fn, dynamic=True), compile_pgraph(fn, dynamic=True, step_aside=False)
    for n in (24, 24, 40, 40, 96, 96, 33, 17, 33, 17, 257, 257):
        x = randn(n, 64)
        with torch.no_grad():
            got = compiled(x)
            assert_same(f"{n} rows", [got], [plain(x)], [fn(x)], exact=False)
    assert set(tables) == {24, 40, 96, 33, 17, 257}
