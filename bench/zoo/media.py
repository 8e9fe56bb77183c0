"""Models of transformers that see or hear: few layers, real widths, every config written out."""

from __future__ import annotations

from typing import Any

from zoo.entry import Draw, Inputs
from zoo.hf import VOCAB, Feed, entry

LABELS = 10


def _images(draw: Draw, batch: int) -> Inputs:
    return draw.normal(batch, 3, 224, 224), draw.integers(0, LABELS, batch)


def _scenes(draw: Draw, batch: int) -> Inputs:
    return draw.normal(batch, 3, 224, 224), draw.integers(0, LABELS, batch, 224, 224)


def _pairs(draw: Draw, batch: int) -> Inputs:
    ids = draw.integers(4, VOCAB - 1, batch, 64)
    ids[:, -1] = VOCAB - 1  # the token at which CLIP reads the text's features
    return ids, draw.normal(batch, 3, 224, 224)


def _speech(draw: Draw, batch: int) -> Inputs:
    return draw.normal(batch, 16000), draw.integers(0, LABELS, batch)


def _heard(draw: Draw, batch: int) -> Inputs:
    ids = draw.integers(4, VOCAB, batch, 32)
    return draw.normal(batch, 80, 1000), ids, draw.integers(4, VOCAB, batch, 32)


IMAGES = Feed(("pixel_values", "labels"), _images)
SCENES = Feed(("pixel_values", "labels"), _scenes)
PAIRS = Feed(("input_ids", "pixel_values"), _pairs, targets=0, train_only={"return_loss": True})
SPEECH = Feed(("input_values", "labels"), _speech)
HEARD = Feed(("input_features", "decoder_input_ids", "labels"), _heard)

_VIT: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "image_size": 224,
    "patch_size": 16,
    "num_labels": LABELS,
}
_TOWER = {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 1536}
_TEXT_TOWER = {**_TOWER, "vocab_size": VOCAB, "max_position_embeddings": 77, "pad_token_id": 1}
_TEXT_TOWER |= {"bos_token_id": VOCAB - 2, "eos_token_id": VOCAB - 1}
_SPEECH: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "conv_dim": [256] * 7,
    "num_labels": LABELS,
    "apply_spec_augment": False,  # it masks at random
}

ENTRIES = (
    entry("vit", "ViTForImageClassification", "ViTConfig", IMAGES, _VIT),
    entry("deit", "DeiTForImageClassification", "DeiTConfig", IMAGES, _VIT),
    entry("beit", "BeitForImageClassification", "BeitConfig", IMAGES, _VIT),
    entry("dinov2", "Dinov2ForImageClassification", "Dinov2Config", IMAGES, {**_VIT, "patch_size": 14}),
    entry(
        "swin",
        *("SwinForImageClassification", "SwinConfig", IMAGES),
        {"embed_dim": 96, "depths": [2, 2], "num_heads": [3, 6], "num_labels": LABELS},
        cost=2,
    ),
    entry(
        "convnext",
        *("ConvNextForImageClassification", "ConvNextConfig", IMAGES),
        {"hidden_sizes": [96, 192], "depths": [2, 2], "num_stages": 2, "num_labels": LABELS},
        conv=True,
        cost=2,
    ),
    entry(
        "segformer",
        *("SegformerForSemanticSegmentation", "SegformerConfig", SCENES),
        {"depths": [1, 1, 1, 1], "num_labels": LABELS},
        batch=4,
        conv=True,
        cost=3,
    ),
    entry(
        "clip",
        *("CLIPModel", "CLIPConfig", PAIRS),
        {"text_config": _TEXT_TOWER, "vision_config": {**_TOWER, "image_size": 224, "patch_size": 16}},
        cost=2,
    ),
    entry(
        "siglip",
        *("SiglipModel", "SiglipConfig", PAIRS),
        {
            "text_config": {**_TEXT_TOWER, "max_position_embeddings": 64},
            "vision_config": {**_TOWER, "image_size": 224, "patch_size": 16},
        },
        cost=2,
    ),
    entry(
        "whisper",
        *("WhisperForConditionalGeneration", "WhisperConfig", HEARD),
        {
            "vocab_size": VOCAB,
            "d_model": 384,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "decoder_ffn_dim": 1536,
            "max_source_positions": 500,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        timed=True,
        cost=2,
    ),
    entry(
        "wav2vec2",
        *("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SPEECH),
        _SPEECH,
        batch=4,
        timed=True,
        cost=2,
    ),
    entry("hubert", "HubertForSequenceClassification", "HubertConfig", SPEECH, _SPEECH, batch=4, cost=2),
)
