"""What every measurement of `sizes.py` shares: settings, the device, the clock, and when a result is right.

Not a program: `sizes_worker.py` imports it.

Note [Right against Inductor]: wrong numbers of a backend that rebinds addresses come when sizes change. So
some calls of the timed sequence itself are looked at: what they were given and what they gave is kept on the
host, the clock stopped. At the end all compiled code is dropped, and the reference computes the same again.
It is Inductor; for Inductor's own rows, and on a CPU, it is the uncompiled model, in training in float32.
Gradients that are little else than rounding (keys', where attention is even) may be twice as far off as the
uncompiled model's; Inductor's own four times: in one of 800 steps a tensor of it was 0.258 of its size off.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Iterable
from typing import Any

import torch
import uses_place
from backends import compile_kwargs
from llama import LlamaConfig
from torch import Tensor
from torch._dynamo.utils import counters

Figures = dict[str, Any]
# The root mean square of the difference, over the reference's: bf16 has 8 bits, and six blocks add up. Eager
# rounds at other places than Inductor, and small gradients are differences of large numbers.
TOLERANCE = {
    torch.bfloat16: {"inductor": 5e-2, "eager": 2e-1},
    torch.float32: {"inductor": 1e-3, "eager": 1e-3},
}
# What a backend compiles by, where that is not its name.
COMPILER = {"replay": "inductor", "pgraph-static": "pgraph"}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Of the language model that generates."""

    layers: int
    heads: int
    kv_heads: int


@dataclasses.dataclass(frozen=True)
class Size:
    """How large everything is.

    Args:
        model: of the server and of training.
        batches: smallest and largest batch of the server.
        tokens: of a request to it.
        calls: of the server.
        lengths: shortest and longest in training.
        batch: sequences in a training step.
        steps: of training.
        seen: how many lengths come again and again.
        warm: how often each of these comes before time is taken; pgraph may wait long until a capture pays.
        again: steps with these.
        mark: calls or steps between two totals.
        checked: how many of them are compared with the reference.
        kept: sizes of one model whose memory is measured.
        hidden, mlp, vocabulary, blocks: of the language model that generates.
        prompts: shortest and longest prompt.
        new: tokens that are generated.
        requests: how many are timed.
    """

    model: LlamaConfig
    batches: tuple[int, int]
    tokens: int
    calls: int
    lengths: tuple[int, int]
    batch: int
    steps: int
    seen: int
    warm: int
    again: int
    mark: int
    checked: int
    kept: int
    hidden: int
    mlp: int
    vocabulary: int
    blocks: Blocks
    prompts: tuple[int, int]
    new: int
    requests: int


SIZES = {
    "full": Size(
        model=LlamaConfig(vocab=256, dim=512, layers=6, heads=8, kv_heads=8, max_seq=1024),
        batches=(1, 32),
        tokens=64,
        calls=600,
        lengths=(16, 256),
        batch=8,
        steps=3000,
        seen=16,
        warm=20,
        again=800,
        mark=100,
        checked=6,
        kept=64,
        hidden=2048,  # with these 1.2 billion parameters
        mlp=8192,
        vocabulary=128256,
        blocks=Blocks(layers=16, heads=32, kv_heads=8),
        prompts=(16, 128),
        new=256,
        requests=8,
    ),
    "tiny": Size(
        model=LlamaConfig(vocab=16, dim=16, layers=1, heads=2, kv_heads=2, max_seq=64),
        batches=(1, 4),
        tokens=6,
        calls=24,
        lengths=(4, 9),
        batch=2,
        steps=20,
        seen=3,
        warm=3,
        again=12,
        mark=5,
        checked=3,
        kept=4,
        hidden=32,
        mlp=48,
        vocabulary=64,
        blocks=Blocks(layers=1, heads=2, kv_heads=2),
        prompts=(3, 6),
        new=5,
        requests=3,
    ),
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to measure.

    Args:
        config: one of `sizes_worker.MEASURES`.
        backend: one of the benchmarks' backends.
        size: name of a size.
        device: ``"auto"``, ``"cuda"`` or ``"cpu"``.
        driver, codegen: pgraph's options.
        steps, calls: in the place of the size's.
        seed: of weights, inputs and sizes.
    """

    config: str
    backend: str
    size: str = "full"
    device: str = "auto"
    driver: str = "auto"
    codegen: str = "auto"
    steps: int | None = None
    calls: int | None = None
    seed: int = 0


class Place(uses_place.Place):
    """A device, its dtype and its clock; how a backend compiles, and what is right."""

    sizes = SIZES
    size: Size

    def __init__(self, spec: Spec) -> None:
        self.backend = spec.backend
        compiler = COMPILER.get(spec.backend, spec.backend)
        super().__init__(dataclasses.replace(spec, backend=compiler))
        self.worst, self.compared = 0.0, 0
        self._graphs = int(counters["stats"]["unique_graphs"])

    def graphs(self) -> int:
        """How many graphs Dynamo has compiled so far."""
        return int(counters["stats"]["unique_graphs"]) - self._graphs

    def arguments(self, dynamic: bool = True, **options: Any) -> dict[str, Any] | None:
        """For `torch.compile`; None for eager.

        Args:
            options: pgraph's, beside those that the spec has.
        """
        found = self.compile_arguments()
        if found is None:
            return None
        if options and self.spec.backend == "pgraph":
            found["options"] |= options
        return found | {"dynamic": dynamic}

    def forget(self) -> None:
        """Have everything go that pgraph has captured so far."""
        if self.spec.backend == "pgraph":
            import pgraph

            gc.collect()
            pgraph.reset()

    @property
    def reference(self) -> str:
        """The backend that is right by definition."""
        return "inductor" if self.on_gpu and self.spec.backend != "inductor" else "eager"

    def by_reference(self, function: Any) -> Any:
        """The same function compiled by the reference; nothing else may be compiled any more."""
        arguments = compile_kwargs(self.reference, self.device)
        return function if arguments is None else torch.compile(function, **arguments | {"dynamic": True})

    def near(self, mine: Tensor, theirs: Tensor, eager: Tensor | None = None) -> float:
        """The root mean square of the difference, over that of `theirs`.

        Args:
            eager: what the uncompiled model gave.

        Raises:
            ArithmeticError: it is too large.
        """
        wide = theirs.double().to(mine.device)
        scale = wide.square().mean().sqrt().item()

        def off(tensor: Tensor) -> float:
            found: float = (tensor.double().to(mine.device) - wide).square().mean().sqrt().item()
            return found / scale if scale else found

        found, allowed = off(mine), TOLERANCE[self.dtype][self.reference]
        if not found <= allowed and eager is not None:
            allowed = (4 if self.spec.backend == "inductor" else 2) * off(eager)
        if not found <= allowed:
            raise ArithmeticError(f"results differ by {found:.3g} of their size")
        self.worst, self.compared = max(self.worst, found), self.compared + 1
        return found

    def all_near(
        self, what: str, mine: Iterable[Tensor], theirs: Iterable[Tensor], eager: Iterable[Tensor] = ()
    ) -> None:
        """Compare tensor by tensor; `what` names the call in the message."""
        for number, (a, b, c) in enumerate(itertools.zip_longest(mine, theirs, eager)):
            try:
                self.near(a, b, c)
            except ArithmeticError as error:
                raise ArithmeticError(f"{what}, tensor {number}: {error}") from None


def on_host(tensor: Tensor) -> Tensor:
    """A copy out of reach of whatever runs next."""
    return tensor.detach().to("cpu", copy=True)
