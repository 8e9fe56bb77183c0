"""Sizes of the Llamas that the benchmarks train. Not a program: the benchmarks import it."""

from __future__ import annotations

import dataclasses

import _paths  # noqa: F401  (puts examples/ on sys.path)
from llama import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its batch: B sequences of T tokens."""

    llama: LlamaConfig
    batch: int
    seq: int


def _workload(
    layers: int, dim: int, heads: int, kv_heads: int, batch: int, seq: int, vocab: int = 256
) -> Workload:
    llama = LlamaConfig(vocab=vocab, dim=dim, layers=layers, heads=heads, kv_heads=kv_heads, max_seq=seq)
    return Workload(llama, batch, seq)


WORKLOADS: dict[str, Workload] = {
    # Seconds on a laptop: for the host driver, and for tests of the benchmarks themselves.
    "cpu-tiny": _workload(layers=2, dim=64, heads=4, kv_heads=2, batch=2, seq=32),
    # Launch-bound: the GPU waits for the CPU.
    "4x256": _workload(layers=4, dim=256, heads=4, kv_heads=2, batch=2, seq=128),
    "16x1024": _workload(layers=16, dim=1024, heads=16, kv_heads=8, batch=4, seq=512),
    # Memory-bound: most of the memory is activations and gradients.
    "8x4096": _workload(layers=8, dim=4096, heads=32, kv_heads=8, batch=2, seq=2048),
}


def workload(name: str) -> Workload:
    """The workload called `name`."""
    if name not in WORKLOADS:
        raise ValueError(f"config {name!r} is unknown; choose from {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
