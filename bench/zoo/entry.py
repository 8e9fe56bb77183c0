"""What the zoo is made of: a program (a model with its loss) and what it is fed. Not a program itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]
PRECISIONS = ("bf16 autocast", "fp16 autocast", "bf16 weights", "fp32")
OPTIMIZERS = ("none", "sgd", "adamw")


class Draw:
    """Random tensors on a device, the same ones for the same seed.

    They are drawn on the CPU, so that every process and every device is fed the same numbers.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.random = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """fp32 of mean 0 and variance 1."""
        return torch.randn(shape, generator=self.random).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.random).to(self.device)

    def size(self, low: int, high: int) -> int:
        """A number in [low, high), such as a length."""
        return int(torch.randint(low, high, (), generator=self.random))

    def mask(self, batch: int, length: int) -> Tensor:
        """int64 (batch, length) of ones, with padding behind the last quarter or less of some rows."""
        ends = torch.randint(3 * length // 4, length + 1, (batch, 1), generator=self.random)
        return (torch.arange(length) < ends).long().to(self.device)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One architecture.

    Args:
        name: ``"<collection>/<model>"``, e.g. ``"timm/resnet50"``.
        program: makes the module with random weights on the CPU; nothing is downloaded. Its
            ``forward(*inputs)`` gives the loss (0-dim) in training and a tuple of outputs in eval mode.
        inputs: ``(draw, batch, train)`` to its inputs; targets come last, and only in training.
        batch: rows of a step on a GPU.
        conv: whether convolutions do most of the work.
        timed: whether all backends are timed on it.
        cost: how long it takes to compile, in rough units; the longest start first.
        precision: one of `PRECISIONS`. With fp16 a loss is scaled before its backward; with bf16 weights
            floating inputs are bf16, too.
        modes: ``"train"`` and ``"infer"``, or one of them.
        package: that it needs; empty: its collection's.
        optimizer: one of `OPTIMIZERS`: what ends a timed training step. Checks compare gradients instead.
        regions: the parts of the program that are compiled, each by itself; None: the program as a whole.
        dynamic: sizes differ from step to step, and torch.compile is left to find that out.
        served: inputs come from the host's memory, and outputs go back there, at each timed step.
        input_sets: sets of inputs that timed steps take in turn.
        check_batch: rows of a checked step; None: as `batch`; 0: not checked, since another entry is the
            same model.
        counted: whether launches are counted.
    """

    name: str
    program: Callable[[], nn.Module]
    inputs: Callable[[Draw, int, bool], Inputs]
    batch: int = 8
    conv: bool = False
    timed: bool = False
    cost: float = 1.0
    precision: str = "bf16 autocast"
    modes: tuple[str, ...] = ("train", "infer")
    package: str = ""
    optimizer: str = "none"
    regions: Callable[[Any], Sequence[nn.Module]] | None = None
    dynamic: bool = False
    served: bool = False
    input_sets: int = 4
    check_batch: int | None = None
    counted: bool = False

    def __post_init__(self) -> None:
        for value, known in ((self.precision, PRECISIONS), (self.optimizer, OPTIMIZERS)):
            if value not in known:
                raise ValueError(f"{self.name}: {value!r} is unknown; choose one of {', '.join(known)}")


def without_chance(module: nn.Module) -> nn.Module:
    """Turn off dropout, stochastic depth and the like in place, so that losses can be compared.

    Covers modules (``p``) and the plain numbers that models hand to functions: ``dropout``, ``drop_prob``,
    ``attention_dropout``, ``layerdrop``...
    """
    for inner in module.modules():
        quieten(inner)
        if "Dropout" in type(inner).__name__ or type(inner).__name__ == "StochasticDepth":
            inner.p = 0.0
        config = getattr(inner, "config", None)
        if config is not None and not isinstance(config, dict):
            quieten(config)
    return module


def lively(module: nn.Module) -> nn.Module:
    """Give parameters that start at (nearly) zero other values, in place.

    Heads of zeros, residual branches scaled by 0 or 1e-6: at the start of training much of such a model has
    no effect on its outputs, and a wrong value there would not show in them.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.numel() or parameter.abs().max() > 1e-3:
                continue
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0.0, 0.02)
            else:
                parameter.uniform_(0.2, 0.6)
    return module


def calibrated(module: nn.Module, inputs: Inputs) -> nn.Module:
    """Let batch norms take their running statistics from one batch, in place.

    With the statistics that they are made with, a deep model's outputs in eval mode grow beyond all bounds.

    Args:
        module: in training mode.
        inputs: of a training step.
    """
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            module(*inputs)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    return module


def quieten(holder: Any) -> None:
    """Set every float attribute whose name speaks of dropping to 0."""
    for name, value in list(vars(holder).items()):
        if "drop" in name and isinstance(value, float):
            setattr(holder, name, 0.0)


def floats(outputs: Any) -> tuple[Tensor, ...]:
    """The floating tensors among the values of `outputs`: a tensor, a tuple or list, a dict of such."""
    if isinstance(outputs, Tensor):
        return (outputs,) if outputs.is_floating_point() else ()
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    if isinstance(outputs, tuple | list):
        return tuple(tensor for one in outputs for tensor in floats(one))
    return ()
