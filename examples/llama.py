"""A byte-level Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU, and a cross-entropy loss in fp32.

Shared by `train_llama.py` and the programs in ``bench/``. Shapes: B batch, T sequence, D model width,
H query heads, K key/value heads, E = D / H head width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a `Llama`.

    Args:
        vocab: number of tokens; 256 for bytes.
        dim: model width D.
        layers: number of blocks.
        heads: query heads H; divides `dim` into even head widths.
        kv_heads: key/value heads K; divides `heads`.
        hidden: SwiGLU width; None gives 8/3 of `dim`, rounded up to a multiple of 32.
        max_seq: longest sequence that the RoPE table serves.
        rope_base: RoPE's base wavelength.
        norm_eps: added to the mean square in RMSNorm.
        tied: share the embedding's weight with the head.
    """

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int | None = None
    max_seq: int = 2048
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"dim={self.dim} over heads={self.heads} gives no even head width; use a multiple of 2*heads"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; choose a divisor")

    @property
    def head_dim(self) -> int:
        """Width E of one head."""
        return self.dim // self.heads

    @property
    def mlp_dim(self) -> int:
        """Width of the SwiGLU's hidden layer."""
        return self.hidden if self.hidden is not None else math.ceil(self.dim * 8 / 3 / 32) * 32


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and returned in the input's type."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def rope_table(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE, each (max_seq, E / 2), fp32."""
    exponent = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angle = torch.outer(torch.arange(config.max_seq).float(), config.rope_base**-exponent)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head of `x` (B, heads, T, E) by the angles of its positions."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """Repeat each key/value head of `x` (B, K, T, E) for its `groups` query heads: (B, H, T, E)."""
    batch, heads, seq, width = x.shape
    return x[:, :, None].expand(batch, heads, groups, seq, width).reshape(batch, heads * groups, seq, width)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Explicit repeats: every SDPA kernel takes them, `enable_gqa` is refused by some.
        groups = self.heads // self.kv_heads
        if groups > 1:
            k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.up = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The whole model; call it with targets for the loss, without for the logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's scheme: normal with deviation 0.02, residual projections shrunk by the depth."""
        shrink = 0.02 / math.sqrt(2 * self.config.layers)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=shrink if name.endswith(("wo.weight", "down.weight")) else 0.02)

    def to_training(self, device: torch.device) -> Llama:
        """Move to `device`: bf16 parameters on a GPU, fp32 on a CPU; the RoPE table stays fp32."""
        cos, sin = self.cos, self.sin
        self.to(device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.cos, self.sin = cos.to(device), sin.to(device)
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None, collect: bool = False) -> Any:
        """Run the model.

        Args:
            tokens: (B, T) int64.
            targets: (B, T) int64, or None.
            collect: also return every block's output, for comparisons.

        Returns:
            The mean loss (fp32 scalar) with targets, the logits (B, T, V) without; with `collect` and
            targets, the tuple (loss, logits, output of block 0, output of block 1, ...).
        """
        seq = tokens.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.embed(tokens)
        hidden = []
        for block in self.blocks:
            x = block(x, cos, sin)
            if collect:
                hidden.append(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return (loss, logits, *hidden) if collect else loss


def count_parameters(model: nn.Module) -> int:
    """Number of parameters; a shared one counts once."""
    return sum(weight.numel() for weight in model.parameters())


def compile_blocks(model: Llama, scope: str = "block", **kwargs: Any) -> Llama:
    """Compile `model` in place and return it.

    Args:
        model: the model.
        scope: ``"block"`` compiles each layer on its own; all layers share one compiled code, since their
            parameters are its inputs. ``"model"`` compiles the whole forward, loss included.
        kwargs: handed to `torch.compile`.
    """
    if scope == "model":
        model.compile(**kwargs)
    elif scope == "block":
        for block in model.blocks:
            block.compile(**kwargs)
    else:
        raise ValueError(f"scope={scope!r} is unknown; choose 'block' or 'model'")
    return model
