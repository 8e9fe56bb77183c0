"""Language models of transformers: few layers, real widths, every config written out."""

from __future__ import annotations

from typing import Any

import torch

from zoo.entry import Draw, Inputs
from zoo.hf import SEQ, VOCAB, Feed, entry


def _causal(draw: Draw, batch: int) -> Inputs:
    return draw.integers(4, VOCAB, batch, SEQ), draw.integers(4, VOCAB, batch, SEQ)


def _short(draw: Draw, batch: int) -> Inputs:
    return draw.integers(4, VOCAB, batch, 64), draw.integers(4, VOCAB, batch, 64)


def _masked(draw: Draw, batch: int) -> Inputs:
    ids, labels = _causal(draw, batch)
    return ids, draw.mask(batch, SEQ), labels


def _classes(draw: Draw, batch: int) -> Inputs:
    return draw.integers(4, VOCAB, batch, SEQ), draw.mask(batch, SEQ), draw.integers(0, 2, batch)


def _unmasked_classes(draw: Draw, batch: int) -> Inputs:
    return draw.integers(4, VOCAB, batch, SEQ), draw.integers(0, 2, batch)


def _sequences(draw: Draw, batch: int) -> Inputs:
    ids, labels = _causal(draw, batch)
    return ids, draw.mask(batch, SEQ), draw.integers(4, VOCAB, batch, SEQ // 2), labels[:, : SEQ // 2].clone()


def _long(draw: Draw, batch: int) -> Inputs:
    return draw.integers(4, VOCAB, batch, 512), draw.mask(batch, 512), draw.integers(4, VOCAB, batch, 512)


def _boxed(draw: Draw, batch: int) -> Inputs:
    ids, mask, labels = _masked(draw, batch)
    corners = draw.integers(0, 500, batch, SEQ, 2)
    return ids, torch.cat([corners, corners + 400], -1), mask, labels


SHORT = Feed(("input_ids", "labels"), _short)
CAUSAL = Feed(("input_ids", "labels"), _causal)
MASKED = Feed(("input_ids", "attention_mask", "labels"), _masked)
CLASSES = Feed(("input_ids", "attention_mask", "labels"), _classes)
UNMASKED = Feed(("input_ids", "labels"), _causal)
UNMASKED_CLASSES = Feed(("input_ids", "labels"), _unmasked_classes)
SEQUENCES = Feed(("input_ids", "attention_mask", "decoder_input_ids", "labels"), _sequences)
LONG = Feed(("input_ids", "attention_mask", "labels"), _long)
BOXED = Feed(("input_ids", "bbox", "attention_mask", "labels"), _boxed)

_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "max_position_embeddings": 514,
}
_LLAMA = {**_BERT, "intermediate_size": 1408, "num_key_value_heads": 4, "pad_token_id": None}
_LLAMA |= {"bos_token_id": 1, "eos_token_id": 2}
_BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 512,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 8,
    "decoder_start_token_id": 0,
}
_OLD_GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": 256, "n_embd": 512, "n_layer": 2, "n_head": 8}
_OLD_GPT |= {"bos_token_id": 1, "eos_token_id": 2}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

_ENCODERS = (
    entry("bert", "BertForMaskedLM", "BertConfig", MASKED, _BERT, timed=True),
    entry("roberta", "RobertaForMaskedLM", "RobertaConfig", MASKED, _BERT),
    entry(
        "distilbert",
        *("DistilBertForMaskedLM", "DistilBertConfig", MASKED),
        {"vocab_size": VOCAB, "dim": 512, "n_layers": 2, "n_heads": 8, "hidden_dim": 2048},
    ),
    entry("albert", "AlbertForMaskedLM", "AlbertConfig", MASKED, {**_BERT, "embedding_size": 128}),
    entry("electra", "ElectraForMaskedLM", "ElectraConfig", MASKED, {**_BERT, "embedding_size": 128}),
    entry(
        "deberta_v2",
        *("DebertaV2ForMaskedLM", "DebertaV2Config", MASKED),
        {
            **_BERT,
            "relative_attention": True,
            "position_buckets": 64,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": "p2c|c2p",
            "max_relative_positions": -1,
            "position_biased_input": False,
        },
        timed=True,
        cost=2,
    ),
    entry("mpnet", "MPNetForMaskedLM", "MPNetConfig", MASKED, _BERT),
    entry(
        "xlnet",
        *("XLNetForSequenceClassification", "XLNetConfig", CLASSES),
        {"vocab_size": VOCAB, "d_model": 512, "n_layer": 2, "n_head": 8, "d_inner": 2048},
    ),
    entry(
        "big_bird",
        *("BigBirdForMaskedLM", "BigBirdConfig", LONG),
        {**_BERT, "block_size": 32, "num_random_blocks": 2, "attention_type": "block_sparse"},
        batch=4,
        cost=3,
    ),
    entry(
        "longformer",
        *("LongformerForMaskedLM", "LongformerConfig", LONG),
        {**_BERT, "attention_window": [64, 64], "max_position_embeddings": 600, "pad_token_id": 1},
        batch=4,
        cost=3,
    ),
    entry(
        "squeezebert",
        *("SqueezeBertForMaskedLM", "SqueezeBertConfig", MASKED),
        {**_BERT, "embedding_size": 512},
    ),
    entry("layoutlm", "LayoutLMForMaskedLM", "LayoutLMConfig", BOXED, _BERT),
    # cuFFT takes no bf16.
    entry("fnet", "FNetForMaskedLM", "FNetConfig", UNMASKED, _BERT, precision="fp32"),
    entry(
        "funnel",
        *("FunnelForSequenceClassification", "FunnelConfig", CLASSES),
        {"vocab_size": VOCAB, "block_sizes": [1, 1], "d_model": 512, "n_head": 8, "d_head": 64}
        | {"d_inner": 2048, "num_labels": 2},
        cost=2,
    ),
    entry("roformer", "RoFormerForMaskedLM", "RoFormerConfig", MASKED, {**_BERT, "embedding_size": 512}),
    entry("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", MASKED, {**_BERT, **_TOKENS}),
    entry("nystromformer", "NystromformerForMaskedLM", "NystromformerConfig", MASKED, _BERT, cost=2),
)

_DECODERS = (
    entry("gpt2", "GPT2LMHeadModel", "GPT2Config", CAUSAL, _OLD_GPT, timed=True),
    entry(
        "gpt_neo",
        *("GPTNeoForCausalLM", "GPTNeoConfig", CAUSAL),
        {"vocab_size": VOCAB, "hidden_size": 512, "num_layers": 2, "num_heads": 8, "window_size": 32}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 256},
    ),
    entry("gptj", "GPTJForCausalLM", "GPTJConfig", CAUSAL, {**_OLD_GPT, "rotary_dim": 32}),
    entry("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", CAUSAL, _BERT),
    entry(
        "opt",
        *("OPTForCausalLM", "OPTConfig", CAUSAL),
        {"vocab_size": VOCAB, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
        | {"ffn_dim": 2048, "word_embed_proj_dim": 512, "max_position_embeddings": 256},
    ),
    entry(
        "bloom",
        *("BloomForCausalLM", "BloomConfig", CAUSAL),
        {"vocab_size": VOCAB, "hidden_size": 512, "n_layer": 2, "n_head": 8},
    ),
    entry("llama", "LlamaForCausalLM", "LlamaConfig", CAUSAL, _LLAMA, timed=True),
    entry("mistral", "MistralForCausalLM", "MistralConfig", CAUSAL, {**_LLAMA, "sliding_window": 64}),
    entry("qwen2", "Qwen2ForCausalLM", "Qwen2Config", CAUSAL, _LLAMA),
    entry("qwen3", "Qwen3ForCausalLM", "Qwen3Config", CAUSAL, {**_LLAMA, "head_dim": 64}, timed=True),
    entry("gemma", "GemmaForCausalLM", "GemmaConfig", CAUSAL, {**_LLAMA, **_TOKENS, "head_dim": 64}),
    entry(
        "gemma2",
        *("Gemma2ForCausalLM", "Gemma2Config", CAUSAL),
        {**_LLAMA, **_TOKENS, "head_dim": 64, "sliding_window": 64, "num_hidden_layers": 4},
    ),
    entry(
        "gemma3",
        *("Gemma3ForCausalLM", "Gemma3TextConfig", CAUSAL),
        {**_LLAMA, **_TOKENS, "head_dim": 64, "sliding_window": 64, "num_hidden_layers": 4},
    ),
    entry("phi", "PhiForCausalLM", "PhiConfig", CAUSAL, {**_LLAMA, "num_key_value_heads": 8}),
    entry("phi3", "Phi3ForCausalLM", "Phi3Config", CAUSAL, {**_LLAMA, "pad_token_id": 0}),
    entry(
        "falcon",
        *("FalconForCausalLM", "FalconConfig", CAUSAL),
        {"vocab_size": VOCAB, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    entry("stablelm", "StableLmForCausalLM", "StableLmConfig", CAUSAL, _LLAMA),
    entry("olmo2", "Olmo2ForCausalLM", "Olmo2Config", CAUSAL, _LLAMA),
    entry("granite", "GraniteForCausalLM", "GraniteConfig", CAUSAL, _LLAMA),
    entry("cohere", "CohereForCausalLM", "CohereConfig", CAUSAL, {**_LLAMA, **_TOKENS}),
    entry("codegen", "CodeGenForCausalLM", "CodeGenConfig", CAUSAL, {**_OLD_GPT, "rotary_dim": 32}),
    entry(
        "mixtral",
        *("MixtralForCausalLM", "MixtralConfig", CAUSAL),
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        timed=True,
        cost=2,
        precision="bf16 weights",  # compiled, transformers groups experts' GEMMs for these only
    ),
    entry(
        "qwen2_moe",
        *("Qwen2MoeForCausalLM", "Qwen2MoeConfig", CAUSAL),
        {**_LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        | {"shared_expert_intermediate_size": 512},
        cost=2,
        precision="bf16 weights",
    ),
    entry(
        "mamba",
        *("MambaForCausalLM", "MambaConfig", SHORT),
        {"vocab_size": VOCAB, "hidden_size": 512, "num_hidden_layers": 2, "state_size": 16} | _TOKENS,
        batch=4,
        cost=6,
    ),
)

_SEQ2SEQ = (
    entry("t5", "T5ForConditionalGeneration", "T5Config", SEQUENCES, _T5, timed=True, cost=2),
    entry("mt5", "MT5ForConditionalGeneration", "MT5Config", SEQUENCES, _T5, cost=2),
    entry("bart", "BartForConditionalGeneration", "BartConfig", SEQUENCES, _BART, timed=True, cost=2),
    entry("mbart", "MBartForConditionalGeneration", "MBartConfig", SEQUENCES, _BART, cost=2),
    entry("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", SEQUENCES, _BART, cost=2),
    entry("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", SEQUENCES, _BART, cost=2),
    entry("m2m_100", "M2M100ForConditionalGeneration", "M2M100Config", SEQUENCES, _BART, cost=2),
    entry("marian", "MarianMTModel", "MarianConfig", SEQUENCES, {**_BART, "pad_token_id": 3}, cost=2),
)

ENTRIES = (*_ENCODERS, *_DECODERS, *_SEQ2SEQ)
