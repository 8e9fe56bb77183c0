"""The language model of `transformers` that is measured. Not a program: the workers import it."""

from __future__ import annotations

from typing import Any

import torch


def language_model(place: Any, blocks: Any, longest: int, seed: int) -> Any:
    """A Llama with random weights that never says that it has finished.

    Args:
        place: a `Place` whose size has `hidden`, `mlp` and `vocabulary`.
        blocks: has the `layers`, and the `heads` and `kv_heads` of each.
        longest: tokens of the longest prompt and of its answer.
        seed: of the weights, and of what is drawn next.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    size = place.size
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=blocks.layers,
        num_attention_heads=blocks.heads,
        num_key_value_heads=blocks.kv_heads,
        max_position_embeddings=4 * longest,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    with torch.device(place.device):
        return LlamaForCausalLM(config).to(place.dtype).eval()
