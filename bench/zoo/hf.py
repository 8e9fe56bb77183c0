"""How models of transformers are built from a config by hand and fed. `text.py` and `media.py` list them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from zoo.entry import Draw, Entry, Inputs, floats

VOCAB = 16384
SEQ = 128

Named = dict[str, Tensor]
"""Arguments of a model by name; those of training alone last."""


class Hf(nn.Module):
    """A model of transformers whose arguments come in one order, with the loss that it computes itself.

    Args:
        model: any that takes ``labels`` (or ``return_loss``) and gives ``loss``.
        names: of the positional inputs of `forward`; in eval mode the last ones are missing.
        train_only: further arguments of training.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], train_only: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.train_only = model, names, train_only

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        named = dict(zip(self.names, inputs, strict=False))
        if self.training:
            return self.model(**named, **self.train_only).loss
        return floats(dict(self.model(**named)))


def build(
    model: str, config: str, names: tuple[str, ...], train_only: dict[str, Any], settings: dict[str, Any]
) -> nn.Module:
    """`model` (a class of transformers) from a `config` class and its arguments."""
    import transformers

    made = getattr(transformers, config)(**settings)
    # A cache of keys is for generation; without one the graph is that of scoring a batch.
    for one in (made, getattr(made, "text_config", None)):
        if one is not None and hasattr(one, "use_cache"):
            one.use_cache = False
    return Hf(getattr(transformers, model)(made), names, train_only)


@dataclasses.dataclass(frozen=True)
class Feed:
    """What a kind of model is fed.

    Args:
        names: arguments in order; the last `targets` of them in training only.
        make: makes them all.
        targets: how many are targets.
        train_only: further arguments of training, no tensors.
    """

    names: tuple[str, ...]
    make: Callable[[Draw, int], Inputs]
    targets: int = 1
    train_only: dict[str, Any] = dataclasses.field(default_factory=dict)

    def inputs(self, draw: Draw, batch: int, train: bool) -> Inputs:
        """All of them in training, without the targets in eval mode."""
        made = self.make(draw, batch)
        return made if train else made[: len(made) - self.targets]


def entry(
    name: str,
    model: str,
    config: str,
    feed: Feed,
    settings: dict[str, Any],
    batch: int = 8,
    timed: bool = False,
    conv: bool = False,
    cost: float = 1.0,
    precision: str = "bf16 autocast",
) -> Entry:
    """One model of transformers."""
    program = partial(build, model, config, feed.names, feed.train_only, settings)
    return Entry(f"hf/{name}", program, feed.inputs, batch, conv, timed, cost, precision)
