"""Convolutions as models have them: cuDNN's kernels point behind their workspaces, and some use streams.

Each is a training step under bf16 autocast, in both memory formats, on new tensors at new addresses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from gpu_helpers import DEVICE, Shaker, assert_launched, compile_pgraph, explain, report
from torch import Tensor, nn

from pgraph.runtime import registry

pytestmark = pytest.mark.gpu

BATCH, CALLS = 8, 6
# Relative to the largest magnitude: sums in bfloat16, which two algorithms of cuDNN's add up differently.
TOLERANCE = 2**-6


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution of square images; `learned` is whether the images are something's results, too."""

    name: str
    channels: tuple[int, int]
    kernel: int
    side: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    learned: bool = True

    def module(self) -> nn.Conv2d:
        return nn.Conv2d(
            *self.channels, self.kernel, stride=self.stride, padding=self.padding, groups=self.groups
        ).to(DEVICE)

    def images(self) -> Tensor:
        return torch.randn(BATCH, self.channels[0], self.side, self.side, device=DEVICE)


TABLE = [
    # cuDNN computes the address of an optional operand behind its workspace.
    Case("64-64", (64, 64), 3, 56, padding=1),
    Case("128-32", (128, 32), 3, 56, padding=1),
    Case("64-18", (64, 18), 3, 56, padding=1),
    Case("18-36-stride-2", (18, 36), 3, 56, stride=2),
    Case("256-256-groups-32", (256, 256), 3, 14, groups=32),
    Case("stem", (3, 64), 7, 224, stride=2, learned=False),
    # cuDNN runs these on several streams of its own.
    Case("64-128-groups-8", (64, 128), 3, 28, groups=8),
    Case("512-512-groups-4-of-one-pixel", (512, 512), 1, 1, groups=4),
]


@pytest.fixture(autouse=True)
def as_models_run() -> Iterator[None]:
    """All of cuDNN's kernels are allowed, as by default."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = False
    yield
    torch.backends.cudnn.deterministic = before


def step(module: nn.Module, call: nn.Module, images: Tensor, learned: bool) -> dict[str, Tensor]:
    """The result and all gradients of one training step."""
    images = images.detach().requires_grad_(learned)
    module.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        out = call(images)
    out.backward(torch.linspace(-1, 1, out.numel(), device=DEVICE).to(out.dtype).view(out.shape))
    found = {"result": out.detach(), **{f"gradient of {k}": p.grad for k, p in module.named_parameters()}}
    return {**found, "gradient of the images": images.grad} if learned else found


def agree(what: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, reference in want.items():
        mine = got[name]
        assert (mine.shape, mine.dtype) == (reference.shape, reference.dtype), f"{what}, {name}"
        difference = (mine.double() - reference.double()).abs().max().item()
        allowed = TOLERANCE * reference.double().abs().max().item()
        assert difference <= allowed, f"{what}, {name} differs by {difference:.3g}{explain()}"


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_convolutions_are_captured(case: Case, memory_format: torch.memory_format) -> None:
    """Forward and backward, with no fallback and nothing left outside, right at every address."""
    module = case.module().to(memory_format=memory_format)
    twin = copy.deepcopy(module)
    compiled = compile_pgraph(module, min_ops=1)
    shaker, seen, launches = Shaker(), set(), []
    for call in range(CALLS):
        images = case.images().contiguous(memory_format=memory_format)
        want = step(twin, twin, images, case.learned)
        agree(f"{case.name}, call {call}", step(module, compiled, images, case.learned), want)
        seen.add(images.data_ptr())
        launches.append(report().launches)
        del want  # the images stay until the next ones are made, which so lie elsewhere
        shaker.shake()
    assert len(seen) > 1, "the inputs never moved"
    assert report().refused == 0, explain()
    assert not report().outside, explain()
    assert len(report().capturable) >= 2, f"not a forward and a backward{explain()}"
    assert_launched(2)
    assert launches[-1] >= launches[-2] + 2, f"launches after each call: {launches}{explain()}"


class SqueezeExcite(nn.Module):
    """Each channel of the images, weighed by two convolutions of an image of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.squeeze, self.excite = (nn.Conv2d(a, b, 1) for a, b in ((16, 96), (96, 8), (8, 96)))

    def forward(self, images: Tensor) -> Tensor:
        images = self.first(images)
        mean = images.mean((2, 3), keepdim=True)
        return images * torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(mean))))


def test_gradients_of_one_pixel_are_copied_once_at_most() -> None:
    """ATen copies a gradient whose last two strides, which mean nothing, are others than the input's.

    Inductor's code without graphs is what it is compared with: eager rounds each product to bfloat16, and the
    gradient of the first bias sums up 1,568 of them.
    """
    module = SqueezeExcite().to(DEVICE, memory_format=torch.channels_last)
    twin = copy.deepcopy(module)
    inductor = torch.compile(twin)
    compiled = compile_pgraph(module, min_ops=1)
    for call in range(CALLS):
        images = torch.randn(BATCH, 16, 14, 14, device=DEVICE).contiguous(memory_format=torch.channels_last)
        want = step(twin, inductor, images, True)
        agree(f"call {call}", step(module, compiled, images, True), want)
    assert report().refused == 0, explain()
    (backward,) = (p for p in registry.live_capturable() if p.stats.facts.graph.kind == "backward")
    copies = [node for node in backward.template().nodes if node.kind == "memcpy"]
    assert len(copies) <= 2, copies
