"""What a worker trains: a model, its batches and its loss under one set of names. Not a program.

`Llama` comes from ``examples/``; ViT-B/16 needs timm or torchvision, GPT-2 needs transformers. Those two are
imported only when they are asked for, and nothing is downloaded: weights are random.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import _paths  # noqa: F401  (puts examples/ on sys.path)
import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from configs import Workload
from llama import Llama, compile_blocks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """A module whose activations are recomputed in the backward."""

    inner: nn.Module

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Any:
        # Nothing here draws random numbers, so their state need not be saved.
        return checkpoint(self.inner, *args, use_reentrant=False, preserve_rng_state=False)


class Task(abc.ABC):
    """A model on a device, what it is fed, and what it is to minimize.

    Args:
        load: sizes.
        device: where; parameters are bf16 on a GPU and fp32 on a CPU.
        seed: of the data.
    """

    model: nn.Module
    recent = 3
    """Batches kept alive, so that the allocator cannot hand out one address for ever."""

    def __init__(self, load: Workload, device: torch.device, seed: int) -> None:
        self.load, self.device = load, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.random = torch.Generator(device).manual_seed(seed)

    @abc.abstractmethod
    def compile(self, scope: str, **kwargs: Any) -> None:
        """Compile the model in place: ``"block"`` each layer by itself, ``"model"`` as a whole."""

    @abc.abstractmethod
    def batch(self) -> tuple[Tensor, ...]:
        """Inputs and targets at fresh addresses."""

    @abc.abstractmethod
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch."""

    @abc.abstractmethod
    def predict(self, inputs: Tensor) -> Tensor:
        """The logits of a batch."""

    def _integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.random, device=self.device, dtype=torch.int64)


class LlamaTask(Task):
    """Random tokens through the example's Llama."""

    model: Llama

    def __init__(self, load: Workload, device: torch.device, seed: int) -> None:
        super().__init__(load, device, seed)
        with born(device, self.dtype):
            self.model = Llama(load.llama).to_training(device)
        if load.checkpoint:
            self.model.blocks = nn.ModuleList(Checkpointed(block) for block in self.model.blocks)

    def compile(self, scope: str, **kwargs: Any) -> None:
        if scope == "block" and self.load.checkpoint:
            # The checkpoint goes around the compiled block, as the results in the README were measured.
            for block in self.model.blocks:
                block.inner.compile(**kwargs)
        else:
            compile_blocks(self.model, scope, **kwargs)

    def batch(self) -> tuple[Tensor, Tensor]:
        both = self._integers(self.load.llama.vocab, 2, self.load.batch, self.load.seq)
        return both[0], both[1]

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model(inputs, targets)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


class VitTask(Task):
    """Random images through ViT-B/16, every block checkpointed."""

    recent = 1  # a batch of images is large
    classes, pixels = 1000, 224

    def __init__(self, load: Workload, device: torch.device, seed: int) -> None:
        super().__init__(load, device, seed)
        with born(device, self.dtype):
            self.model, self.blocks = _vit_b16(load.checkpoint)
        self.model.to(device=device, dtype=self.dtype)

    def compile(self, scope: str, **kwargs: Any) -> None:
        for module in [self.model] if scope == "model" else self.blocks:
            (module.inner if isinstance(module, Checkpointed) else module).compile(**kwargs)

    def batch(self) -> tuple[Tensor, Tensor]:
        shape = (self.load.batch, 3, self.pixels, self.pixels)
        images = torch.randn(shape, generator=self.random, device=self.device, dtype=self.dtype)
        return images, self._integers(self.classes, self.load.batch)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).float(), targets)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


class Gpt2Task(Task):
    """Random tokens through GPT-2 small, the loss compiled with it."""

    def __init__(self, load: Workload, device: torch.device, seed: int) -> None:
        super().__init__(load, device, seed)
        with born(device, self.dtype):
            self.model = _Gpt2(load.seq)
        self.model.to(device=device, dtype=self.dtype)

    def compile(self, scope: str, **kwargs: Any) -> None:
        for module in [self.model] if scope == "model" else list(self.model.inner.transformer.h):
            module.compile(**kwargs)

    def batch(self) -> tuple[Tensor, Tensor]:
        both = self._integers(self.model.vocab, 2, self.load.batch, self.load.seq)
        return both[0], both[1]

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model(inputs, targets)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


class _Gpt2(nn.Module):
    inner: Any

    def __init__(self, seq: int) -> None:
        super().__init__()
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise RuntimeError("gpt2 needs the package transformers: pip install transformers") from error
        # No dropout, as when it is trained from scratch: the same graph for every backend.
        config = GPT2Config(
            n_positions=seq, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa"
        )
        self.inner = GPT2LMHeadModel(config)
        self.vocab = config.vocab_size

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.inner(input_ids=tokens, use_cache=False).logits
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _vit_b16(checkpointing: bool) -> tuple[nn.Module, list[nn.Module]]:
    """The model, and its blocks as they are to be compiled one by one."""
    wrap: Callable[[nn.Module], nn.Module] = Checkpointed if checkpointing else lambda block: block
    try:
        from timm import create_model
    except ImportError:
        try:
            from torchvision.models import vit_b_16
        except ImportError as error:
            raise RuntimeError("vit-b16 needs the package timm or torchvision: pip install timm") from error
        model = vit_b_16(weights=None)
        model.encoder.layers = nn.Sequential(*map(wrap, model.encoder.layers))
        return model, list(model.encoder.layers)
    model = create_model("vit_base_patch16_224", pretrained=False)
    model.blocks = nn.Sequential(*map(wrap, model.blocks))
    return model, list(model.blocks)


@contextlib.contextmanager
def born(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside are made on the device: the largest do not fit into the host's memory twice."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def task(load: Workload, device: torch.device, seed: int) -> Task:
    """The task of a workload's family."""
    families: dict[str, type[Task]] = {"llama": LlamaTask, "vit": VitTask, "gpt2": Gpt2Task}
    return families[load.family](load, device, seed)
