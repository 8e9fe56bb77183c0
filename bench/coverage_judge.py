"""When a tensor that a compiled model gave is right. Not a program: `coverage_check.py` asks it.

Note [Right against eager]: eager under autocast is no truth, it rounds as well. So each step is run by eager
twice and once more in fp32 without autocast or TF32, from the same weights and inputs. Of every tensor (the
loss, each output, each gradient, each buffer) the error is its distance from the fp32 run. The compiled
model's error may be `FACTOR` times eager's: eager's own error of that tensor, or the relative error that
eager stays below in nine of ten tensors of the same group (a tensor of few elements may be exact by luck),
plus what two eager runs differ by, plus one rounding of bf16 (`ROUNDING`) of the tensor. A gradient whose
true value is zero (a bias before a norm) is all rounding: for it a part `NOISE` of the group's typical size
is granted. Both the root mean square and the largest element must pass: the first sees an error everywhere,
the second one in a few elements. NaN never passes; freed memory and old weights are filled with NaN, so one
stale address shows.

Inductor orders operations anew and may leave these bounds with no graph at all. A step with a tensor outside
them is run by plain Inductor too: where Inductor's error of that tensor is at least half of pgraph's, the
graph is not to blame, and the row says ``inductor_differs``. Some of Inductor's kernels read what they have
not written (a reduction that stores in one loop and loads in the next without a barrier, in torch 2.11): what
comes of it depends on what the memory held before. So Inductor runs the step once more with everything that
its code allocates full of NaN, and where it leaves the bounds then, the graph is not to blame either.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FACTOR = 3.0
ROUNDING = 2.0**-7
NOISE = 2.0**-9

Tensors = Mapping[str, Tensor]
Sizes = tuple[float, float]
"""Root mean square and largest magnitude."""


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A tensor outside the bounds.

    Args:
        name: which.
        error: its distance from the fp32 run (root mean square, largest).
        allowed: what was allowed.
    """

    name: str
    error: Sizes
    allowed: Sizes

    def __str__(self) -> str:
        over = max((0, 1), key=lambda i: self.error[i] / self.allowed[i] if self.allowed[i] else float("inf"))
        measure = ("root mean square", "largest")[over]
        return f"{self.name} is off by {self.error[over]:.3g} ({measure}), allowed {self.allowed[over]:.3g}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One step.

    Args:
        compared: how many tensors.
        mismatches: those outside the bounds.
        error: median relative error (root mean square) of the compiled model.
        eager_error: eager's.
    """

    compared: int
    mismatches: tuple[Mismatch, ...]
    error: float
    eager_error: float


def judge(truth: Tensors, eager: Tensors, again: Tensors, mine: Tensors) -> Verdict:
    """Compare one step's tensors by Note [Right against eager].

    Args:
        truth: of the fp32 run.
        eager, again: of two eager runs.
        mine: of the compiled model.

    Raises:
        ValueError: the fp32 run or eager gave NaN or infinity: the model itself is unfit.
    """
    names = [name for name in truth if truth[name].numel()]
    given = [name for name in names if name in mine and mine[name].shape == truth[name].shape]
    sizes = dict(zip(names, sizes_of([truth[name] for name in names]), strict=True))
    errors, spreads = distances(names, eager, truth), distances(names, again, eager)
    mine_errors = distances(given, mine, truth)
    for name in names:
        if not all(map(finite, (*sizes[name], *errors[name]))):
            raise ValueError(f"eager's {name} is not finite")
    typical = _typical(names, sizes, errors)
    found, mine_relative, eager_relative = [], [], []
    for name in names:
        if name not in mine_errors:
            found.append(Mismatch(name, (float("inf"),) * 2, (0.0, 0.0)))
            continue
        spread, error = spreads[name], mine_errors[name]
        group = typical[group_of(name)]
        allowed = tuple(
            FACTOR * max(errors[name][i], group.relative[i] * sizes[name][i])
            + spread[i]
            + ROUNDING * sizes[name][i]
            + NOISE * group.size[i]
            for i in (0, 1)
        )
        if not all(e <= a for e, a in zip(error, allowed, strict=True)):
            found.append(Mismatch(name, error, (allowed[0], allowed[1])))
        if sizes[name][0]:
            mine_relative.append(error[0] / sizes[name][0])
            eager_relative.append(errors[name][0] / sizes[name][0])
    found += [
        Mismatch(f"{name} (new)", (float("inf"),) * 2, (0.0, 0.0)) for name in mine if name not in truth
    ]
    return Verdict(len(names), tuple(found), _median(mine_relative), _median(eager_relative))


def shared(mismatch: Mismatch, truth: Tensors, inductor: Tensors) -> bool:
    """Whether plain Inductor is about as far off as pgraph: at least half as far in both measures."""
    if mismatch.name not in truth or mismatch.name not in inductor:
        return False
    if not all(map(finite, mismatch.error)):
        return False
    theirs = distances([mismatch.name], inductor, truth)[mismatch.name]
    return all(2 * t >= e or e <= a for t, e, a in zip(theirs, mismatch.error, mismatch.allowed, strict=True))


def outside(mismatch: Mismatch, truth: Tensors, inductor: Tensors) -> bool:
    """Whether plain Inductor leaves the bounds of that tensor, by however much."""
    if mismatch.name not in truth or mismatch.name not in inductor:
        return False
    theirs = distances([mismatch.name], inductor, truth)[mismatch.name]
    return not all(t <= a for t, a in zip(theirs, mismatch.allowed, strict=True))


def sizes_of(tensors: Sequence[Tensor]) -> list[Sizes]:
    """Root mean square and largest magnitude of each, computed in fp64.

    All are asked for before any is waited for: where processes take turns on a GPU, each wait is a turn.
    """
    doubles = (x.detach().double() for x in tensors)
    return [(mean, most) for mean, most in numbers_of([_size(x) for x in doubles])]


def distances(names: Sequence[str], a: Tensors, b: Tensors) -> dict[str, Sizes]:
    """By name, the sizes of the differences; infinite where shapes differ."""
    alike = [name for name in names if a[name].shape == b[name].shape]
    asked = [_size(a[name].detach().double() - b[name].detach().double()) for name in alike]
    found = {name: (mean, most) for name, (mean, most) in zip(alike, numbers_of(asked), strict=True)}
    return {name: found.get(name, (float("inf"),) * 2) for name in names}


def _size(x: Tensor) -> Tensor:
    return torch.stack((x.square().mean().sqrt(), x.abs().max()))


def numbers_of(asked: Sequence[Tensor]) -> list[Any]:
    """`tolist` of each tensor; all have one shape and dtype, and those of a device are read at once."""
    found: list[Any] = [None] * len(asked)
    for device in {x.device for x in asked}:
        places = [i for i, x in enumerate(asked) if x.device == device]
        for place, numbers in zip(places, torch.stack([asked[i] for i in places]).tolist(), strict=True):
            found[place] = numbers
    return found


def finite(value: float) -> bool:
    """Neither NaN nor infinite."""
    return value - value == 0


def group_of(name: str) -> str:
    """Gradients are judged among gradients, buffers among buffers, outputs among outputs."""
    return name.split(" ", 1)[0]


@dataclasses.dataclass(frozen=True)
class _Group:
    relative: Sizes
    size: Sizes


def _typical(names: list[str], sizes: dict[str, Sizes], errors: dict[str, Sizes]) -> dict[str, _Group]:
    """For each group eager's relative error that nine of ten tensors keep, and the median size."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    found = {}
    for group, members in groups.items():
        pairs = []
        for i in (0, 1):
            relative = sorted(errors[m][i] / sizes[m][i] for m in members if sizes[m][i])
            # A gradient that is all rounding has a relative error of 1 and more: it is not typical.
            relative = [min(one, 0.5) for one in relative]
            at = relative[int(0.9 * (len(relative) - 1))] if relative else 0.0
            pairs.append((at, statistics.median(sizes[m][i] for m in members)))
        found[group] = _Group((pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1]))
    return found


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def detached(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that nothing writes to any more."""
    with torch.no_grad():
        return {name: tensor.detach().clone() for name, tensor in named.items()}
