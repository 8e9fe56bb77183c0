"""What all measurements of `uses.py` share: settings, sizes, the device and its clock, and how near is right.

Not a program: `uses_worker.py` imports it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import worker
from backends import compile_kwargs
from host_speed import on_fast_cores
from torch import Tensor

Figures = dict[str, Any]
USES = ("generate", "adapters", "sleep", "diffusion")
NEEDS = {
    "generate": ("transformers",),
    "adapters": ("transformers", "peft"),
    "sleep": (),
    "diffusion": ("diffusers",),
}
# Largest difference from the uncompiled calls, over the largest value: bf16 has 8 bits.
TOLERANCE = {torch.bfloat16: 6e-2, torch.float32: 1e-3}


@dataclasses.dataclass(frozen=True)
class Size:
    """How large everything is.

    Args:
        hidden, layers, heads, kv_heads, mlp, vocabulary: of the language model.
        prompt, new: tokens of a request, and those that are generated.
        adapters, rank: how many LoRA adapters, and their rank.
        cycles: of sleep and wake.
        blocks, block_heads, block_mlp: of the diffusion transformer, each head of 128 (16 if tiny).
        latents: frames, height and width.
        steps: of denoising.
        rounds: how often a request or a sample is timed.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    prompt: int
    new: int
    adapters: int
    rank: int
    cycles: int
    blocks: int
    block_heads: int
    block_head: int
    block_mlp: int
    latents: tuple[int, int, int]
    steps: int
    rounds: int


SIZES = {
    # A Llama of 1.2 billion parameters; a video transformer of 1.3 billion (Wan 2.1's smallest) on one frame.
    "1b": Size(
        *(2048, 16, 32, 8, 8192, 128256, 128, 128, 8, 16, 100, 30, 12, 128, 8960, (1, 32, 32), 20, 5),
    ),
    "tiny": Size(*(64, 2, 4, 2, 128, 256, 6, 5, 3, 4, 4, 2, 2, 16, 64, (1, 4, 4), 3, 2)),
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to measure.

    Args:
        use: one of `USES`.
        backend: one of the benchmarks' backends.
        size: name of a size.
        device: ``"auto"``, ``"cuda"`` or ``"cpu"``.
        driver, codegen: pgraph's options.
        scope: what is compiled as one piece; `generate` compiles the model, `diffusion` its blocks.
        batch: of `generate`.
        fresh: whether each request of `generate` brings its own cache.
    """

    use: str
    backend: str
    size: str = "1b"
    device: str = "auto"
    driver: str = "auto"
    codegen: str = "auto"
    scope: str = "model"
    batch: int = 1
    fresh: bool = False


class Place:
    """A device with its dtype, and the recordings that CUDA graphs of either kind have made."""

    sizes: Mapping[str, Any] = SIZES

    def __init__(self, spec: Any) -> None:
        self.spec, self.size = spec, self.sizes[spec.size]
        self.clock = worker.Device(spec.device)
        self.device, self.on_gpu = self.clock.torch, self.clock.on_gpu
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self._recorded = 0
        if spec.backend == "reduce-overhead":
            from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

            record = CUDAGraphTreeManager.record_function

            def counted(manager: Any, *args: Any, **kwargs: Any) -> Any:
                self._recorded += 1
                return record(manager, *args, **kwargs)

            CUDAGraphTreeManager.record_function = counted

    def recordings(self) -> int | None:
        """Made so far; None for a backend without graphs."""
        if self.spec.backend == "pgraph":
            import pgraph

            return int(pgraph.report().captures)
        return self._recorded if self.spec.backend == "reduce-overhead" else None

    def compile_arguments(self) -> dict[str, Any] | None:
        """For `torch.compile`; None for eager."""
        backend = "inductor" if self.spec.backend == "replay" else self.spec.backend
        return compile_kwargs(backend, self.device, self.spec.driver, self.spec.codegen)

    def begin(self) -> None:
        """A step begins: its results may take the place of those of the last one."""
        if self.spec.backend == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()

    def ms(self, call: Callable[[], Any]) -> float:
        """Host ms of a call until the device is through with it."""
        self.clock.drain()
        began = time.perf_counter()
        call()
        self.clock.drain()
        return (time.perf_counter() - began) * 1e3

    def times(self, call: Callable[[], Any], count: int) -> list[float]:
        """Host ms of so many long calls; beside a GPU each on a core that is fast then."""
        if not self.on_gpu:
            return [self.ms(call) for _ in range(count)]
        return on_fast_cores(lambda: self.ms(call), count)

    def near(self, mine: Tensor, theirs: Tensor) -> float:
        """The largest difference over the largest value.

        Raises:
            ArithmeticError: it is too large.
        """
        scale = theirs.float().abs().max().item()
        found = (mine.float() - theirs.float()).abs().max().item() / scale
        if not found <= TOLERANCE[self.dtype]:
            raise ArithmeticError(f"results differ by {found:.3g} of the largest value")
        return found


def spread(times: Sequence[float]) -> Figures:
    """Median and tails."""
    times = list(times)
    return {
        "ms_per_step": statistics.median(times),
        "ms_p10": worker.quantile(times, 0.1),
        "ms_p90": worker.quantile(times, 0.9),
    }


def first(times: Sequence[float]) -> Figures:
    """Of steps just after something has moved."""
    times = list(times)
    return {
        "first_ms": statistics.median(times),
        "first_p90": worker.quantile(times, 0.9),
        "changes": len(times),
    }
