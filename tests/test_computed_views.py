"""Views that a library gives, as of numbers taken for complex ones: computed at new sizes, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import host, same
from support_compute import F32, kernel_node, library, script_of
from torch import Tensor, nn

import pgraph
from pgraph import compat
from pgraph.compute.errors import NotComputableError
from pgraph.compute.evaluate import evaluate
from pgraph.compute.pieces import Tools
from pgraph.compute.script import CallView
from pgraph.drivers.host import nodes as host_nodes
from pgraph.drivers.operands import Operand
from pgraph.template.recording import NodeRecord, OutputSpec, TensorSpec

C64 = torch.complex64


def test_a_view_lies_in_the_memory_of_what_it_is_a_view_of() -> None:
    """It has the memory for as long as it lives, and no node of its own."""
    script = script_of(
        """
        n, x = args
        args.clear()
        buf0 = empty_strided_cuda((n, 4, 2), (8, 2, 1), torch.float32)
        buf3 = empty_strided_cuda((n, ), (1, ), torch.float32)
        kernel.run(x, buf0, n, stream=0)
        del x
        buf1 = torch.ops.aten.view_as_complex.default(buf0)
        del buf0
        assert_size_stride(buf1, (n, 4), (4, 1))
        buf2 = torch.ops.aten.slice.Tensor(buf1, 0, 2, n)
        kernel.run(reinterpret_tensor(buf2, (2, 2), (4, 1), 3), buf3, stream=0)
        del buf1
        kernel.run(buf3, stream=0)
        return (buf2, buf3)
        """,
        6,
        torch.ones(6),
    )
    assert [event.look for event in script.events if isinstance(event, CallView)] == [0, 1]
    for n in (6, 10):
        recording, slots = evaluate(script, [n, torch.ones(n)], [16], Tools(kernel_node, library, {}))
        assert [node.name for node in recording.nodes] == ["kernel"] * 3
        assert [(a.nbytes, a.birth, a.death) for a in recording.allocations] == [
            *((4 * n, 0, 1), (32 * n, 0, None), (4 * n, 0, None))  # a recorder looks where a view is made
        ]
        told = [(s.node, s.region, s.delta) for s in slots]
        assert told == [(0, 0, 0), (0, 1, 0), (1, 1, 2 * 32 + 3 * 8), (1, 2, 0), (2, 2, 0)]
        view, _ = recording.outputs
        assert view == OutputSpec(region=1, layout=TensorSpec((n - 2, 4), (4, 1), C64, 64))


def test_views_of_inputs_and_of_lazy_ones() -> None:
    script = script_of(
        """
        n, x = args
        a = torch.ops.aten._conj.default(x)
        b = torch.ops.aten.select.int(a, 0, n - 1)
        c = reinterpret_tensor(a, (2, n), (8, 1), 4)
        return (a, b, torch.ops.aten._conj.default(b), torch.ops.aten.view_as_real.default(x), c)
        """,
        6,
        torch.ones(6, 4, dtype=C64),
    )
    recording, slots = evaluate(
        script, [10, torch.ones(10, 4, dtype=C64)], [16], Tools(kernel_node, library, {})
    )
    assert (recording.nodes, slots) == ((), ())
    assert recording.outputs == (
        OutputSpec(input=0, layout=TensorSpec((10, 4), (4, 1), C64, 0, conj=True)),
        OutputSpec(input=0, layout=TensorSpec((4,), (1,), C64, 9 * 32, conj=True)),
        OutputSpec(input=0, layout=TensorSpec((4,), (1,), C64, 9 * 32)),
        OutputSpec(input=0, layout=TensorSpec((10, 4, 2), (8, 2, 1), F32, 0)),
        OutputSpec(input=0, layout=TensorSpec((2, 10), (8, 1), C64, 32, conj=True)),
    )


def test_calls_of_views_are_recorded_together() -> None:
    """What the code says of a view it does not say of the result that the view is of."""
    script = script_of(
        """
        n, x = args
        a = torch.ops.aten.relu.default(x)
        b = torch.ops.aten.view.dtype(a, torch.int32)
        assert_size_stride(b, (n, 2), (2, 1))
        c = torch.ops.aten.relu.default(torch.ops.aten.view_as_complex.default(x))
        return (b, c)
        """,
        6,
        torch.ones(6, 2),
    )
    assert script.layouts == {}
    asked: list[Any] = []
    rounds: list[int] = []

    def site(event: Any, arguments: Sequence[Any]) -> None:
        asked.append((event, arguments))

    def record() -> list[Any]:
        rounds.append(len(asked))
        found = [library(*one) for one in asked]
        asked.clear()
        return found

    recording, _ = evaluate(script, [8, torch.ones(8, 2)], [16], Tools(kernel_node, site, {}, record=record))
    assert rounds == [2]
    assert [output.layout for output in recording.outputs] == [
        TensorSpec((8, 2), (2, 1), torch.int32, 16),  # as far into its memory as the result
        TensorSpec((8,), (1,), F32, 16),
    ]


def test_what_cannot_be_a_view_is_captured() -> None:
    """`reshape` copies some layouts, at some sizes."""
    body = "return (torch.ops.aten.reshape.default(args[1], [-1]), )"
    script = script_of(body, 6, torch.ones(6, 2))
    tools = Tools(kernel_node, library, {})
    recording, _ = evaluate(script, [8, torch.ones(8, 2)], [16], tools)
    assert recording.outputs == (OutputSpec(input=0, layout=TensorSpec((16,), (1,), F32, 0)),)
    with pytest.raises(NotComputableError, match="copies what it cannot give as a view"):
        evaluate(script, [8, torch.ones(2, 8).t()], [16], tools)


def test_what_a_library_is_given_of_layers() -> None:
    """Two layers with a product of complex views each: their events are alike, and each has its memory."""
    script = script_of(
        """
        n, x, y = args
        a = torch.ops.aten.mm.default(torch.ops.aten.view_as_complex.default(x), y)
        b = torch.ops.aten.mm.default(torch.ops.aten.view_as_complex.default(x), y)
        return (a, b)
        """,
        6,
        torch.ones(6, 3, 2),
        torch.ones(3, 3, dtype=C64),
    )
    seen: list[list[Operand]] = []

    def site(event: Any, arguments: Sequence[Any]) -> Any:
        seen.append([a for a in arguments if isinstance(a, Operand)])
        return library(event, arguments)

    tools = Tools(kernel_node, site, {}, sample=lambda event: (), offsets=False)
    recording, slots = evaluate(
        script, [8, torch.ones(8, 3, 2), torch.ones(3, 3, dtype=C64)], [16, 16], tools
    )
    assert [(a.size, a.stride, a.dtype) for a in seen[0]] == [((8, 3), (3, 1), C64), ((3, 3), (3, 1), C64)]
    assert len(seen) == 1, "of two layers"
    assert {slot.region for slot in slots} >= {0, 1}
    assert len(recording.nodes) == 4


def test_a_generated_kernel_of_lazy_numbers_is_none_of_plain_ones() -> None:
    kernel, lazy = object(), torch.ones(3, dtype=C64).conj()
    codes, words = host_nodes.encode([lazy])
    sample = NodeRecord("kernel", "k", (host_nodes.KernelCall(kernel), codes), host_nodes.packed(words))
    operand = Operand(64, (3,), (1,), C64, 0, compat.lazy_bits(lazy))
    assert host_nodes.kernel_node(kernel, sample, [operand]) is not None
    assert host_nodes.kernel_node(kernel, sample, [operand._replace(lazy=(False, False))]) is None


class Rotary(nn.Module):
    """Attention whose positions turn complex numbers, as in Meta's Llama."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        angles = torch.outer(torch.arange(64.0), 1e4 ** -torch.linspace(0, 1, dim // heads // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (self.turned(q), self.turned(k), v))
        return self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(x.shape)
        )


class Mixing(nn.Module):
    """As in FNet: Inductor copies the complex numbers by a method of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(x + torch.fft.fftn(x, dim=(1, 2)).real))
        return y


def spectrum(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A convolution by way of spectra: its backward is given lazy conjugates."""

    def fn(x: Tensor) -> Tensor:
        n = x.shape[0]
        return torch.fft.irfft(torch.fft.rfft(x, n=2 * n) * torch.fft.rfft(weight, n=2 * n), n=2 * n)[:n]

    return fn


@pytest.mark.usefixtures("no_lessons")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("what", ["rotary", "mixing", "spectrum"])
def test_complex_numbers_at_sizes_that_never_came(what: str, train: bool) -> None:
    torch.manual_seed(0)
    model, weight = Rotary() if what == "rotary" else Mixing(), nn.Parameter(torch.randn(8))
    fn = model if what != "spectrum" else spectrum(weight)
    parameters = list(model.parameters()) if what != "spectrum" else [weight]
    compiled = host(fn, dynamic=True, codegen="inductor", step_aside=False)

    def of(call: Any, n: int) -> list[Tensor]:
        x = torch.randn(
            (2, n, 16) if what != "spectrum" else (n,), generator=torch.Generator().manual_seed(n)
        )
        for parameter in parameters:
            parameter.grad = None
        with torch.set_grad_enabled(train):
            y = call(x)
        if not train:
            return [y]
        y.square().sum().backward()
        return [y.detach(), *[p.grad.clone() for p in parameters if p.grad is not None]]

    for n in (12, 20, 28, 12, 20, 28, 36, 36):
        same(of(compiled, n), of(fn, n), rtol=1e-4, atol=1e-5)
    computed = pgraph.report().computed
    for n in (13, 40, 22, 13, 40, 22):
        same(of(compiled, n), of(fn, n), rtol=1e-4, atol=1e-5)
    report = pgraph.report()
    assert report.computed - computed == 3 * (1 + train), [str(p.sizes) for p in report.partitions]
    assert report.refused == 0
