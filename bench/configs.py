"""Names and sizes of what the benchmarks train. Not a program: the benchmarks import it.

Fixed Llamas are in `WORKLOADS`. Other names are made of parts:

* ``70b-N`` and ``70b-N-ac``: N layers with the dimensions of Llama 70B, without and with activation
  checkpointing; ``70b-fit`` and ``70b-fit-ac`` take as many layers as fit on the GPU (`fitting_layers`);
* ``vit-b16-B``: ViT-B/16 on B images, each block checkpointed;
* ``gpt2-B``: GPT-2 small on B sequences, gradients accumulated over four such batches;
* ``NAME@tT``: any Llama above with sequences of T tokens; ``NAME@bB``: any of all these with batch B, e.g.
  ``16x1024@t64@b8``.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

import _paths  # noqa: F401  (puts examples/ on sys.path)
from llama import LlamaConfig

Family = Literal["llama", "vit", "gpt2"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its batch: B sequences of T tokens.

    Args:
        llama: sizes of the Llama; of the other families only `family` tells the model.
        batch: sequences or images in one forward.
        seq: tokens in a sequence; 0 for images.
        family: which model.
        checkpoint: recompute each block's activations in the backward.
        accumulate: forwards and backwards for one step of the optimizer.
    """

    llama: LlamaConfig
    batch: int
    seq: int
    family: Family = "llama"
    checkpoint: bool = False
    accumulate: int = 1


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
    # 48 tiny blocks: each takes the host longer than the device.
    "48x256": _workload(layers=48, dim=256, heads=4, kv_heads=2, batch=1, seq=16),
    "16x1024": _workload(layers=16, dim=1024, heads=16, kv_heads=8, batch=4, seq=512),
    # Memory-bound: most of the memory is activations and gradients.
    "8x4096": _workload(layers=8, dim=4096, heads=32, kv_heads=8, batch=2, seq=2048),
}
PATTERNS = "70b-N[-ac], 70b-fit[-ac], vit-b16-B, gpt2-B, NAME[@tT][@bB]"
_SEQ_70B = 2048
_LAYER_PARAMETERS_70B = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
_SMALL = LlamaConfig()  # stands where a family has no Llama

GIB = 2**30


def workload(name: str) -> Workload:
    """The workload called `name`.

    Raises:
        ValueError: no such name; the message lists what there is.
    """
    base, at, size = name.partition("@b")
    if at and size.isdigit() and int(size):
        return dataclasses.replace(workload(base), batch=int(size))
    base, at, size = name.partition("@t")
    if at and size.isdigit() and int(size) and (found := workload(base)).family == "llama":
        llama = dataclasses.replace(found.llama, max_seq=int(size))
        return dataclasses.replace(found, seq=int(size), llama=llama)
    if name in WORKLOADS:
        return WORKLOADS[name]
    if found := re.fullmatch(r"70b-([1-9]\d*)(-ac)?", name):
        return _llama_70b(int(found[1]), bool(found[2]))
    if found := re.fullmatch(r"vit-b16-([1-9]\d*)", name):
        return Workload(_SMALL, int(found[1]), 0, family="vit", checkpoint=True)
    if found := re.fullmatch(r"gpt2-([1-9]\d*)", name):
        return Workload(_SMALL, int(found[1]), 1024, family="gpt2", accumulate=4)
    raise ValueError(f"config {name!r} is unknown; choose from {', '.join(WORKLOADS)}, or {PATTERNS}")


def without_batch(name: str) -> str:
    """`name` without its ``@bB``."""
    return name.partition("@b")[0]


def _llama_70b(layers: int, checkpoint: bool) -> Workload:
    llama = LlamaConfig(dim=8192, layers=layers, heads=64, kv_heads=8, hidden=28672, max_seq=_SEQ_70B)
    return Workload(llama, batch=1, seq=_SEQ_70B, checkpoint=checkpoint)


def fitting_layers(device_bytes: int, checkpoint: bool) -> int:
    """Layers of ``70b-N`` that train in `device_bytes`, with a margin for what is counted roughly.

    A parameter takes 8 bytes (bf16: itself, its gradient, two states of AdamW). A layer keeps its input
    if it is checkpointed; if not, about 26 tensors as wide as the model (norms and rotations in fp32
    among them: eager keeps the most, and every backend is to train the same model) and 5 as wide as the
    feed-forward. Beside the layers: one layer's working memory twice, the context, the libraries.
    """
    wide, inner = _SEQ_70B * 8192 * 2, _SEQ_70B * 28672 * 2
    activations = 26 * wide + 5 * inner
    layer = 8 * _LAYER_PARAMETERS_70B + (wide if checkpoint else activations)
    beside = 2 * activations + 4 * GIB
    return max(1, (device_bytes - beside) // layer)


def scopes_of(name: str) -> tuple[str, ...]:
    """What of a config is compiled as one piece, if nobody says otherwise."""
    if name.startswith("70b-"):
        return ("block",)
    return ("model",) if name.startswith(("vit-", "gpt2-")) else ("block", "model")


def resolve(name: str, device_bytes: int | None) -> str:
    """`name` with ``fit`` replaced by a number of layers.

    Raises:
        ValueError: the size of the device is needed and not known.
    """
    found = re.fullmatch(r"70b-fit(-ac)?(@b\d+)?", name)
    if found is None:
        return name
    if device_bytes is None:
        raise ValueError(f"config {name!r} needs a GPU to fit into; say how many layers, as in 70b-2")
    return f"70b-{fitting_layers(device_bytes, bool(found[1]))}{found[1] or ''}{found[2] or ''}"


def prepared_by(name: str, scope: str) -> str:
    """A config whose compiled code serves `name` too, and which needs less memory to compile.

    Blocks compiled one by one share their code, so two of them have all that any number has.
    """
    found = re.fullmatch(r"70b-(\d+)(.*)", name)
    if found and scope == "block" and int(found[1]) > 2:
        return f"70b-2{found[2]}"
    return name
