"""Workloads for which others have published what CUDA graphs gain or cost: whole models of known sizes.

`ENTRIES` are for a GPU. `TINY` are the same programs, cut down to seconds on a CPU; their names begin with
``tiny/``. Collections are imported only when a model of theirs is built.

A dynamic loss (`Gpt2`) is one whose course and whose sizes depend on the batch: it counts the tokens that
are not ignored, and smooths labels in every other batch, told by the data. It depends on integers alone, so
that every backend takes the same course.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.entry import Draw, Entry, Inputs
from zoo.hf import build
from zoo.own import Classifier

CLASSES = 1000
IGNORED = -100
Shape = tuple[int, ...]
Settings = dict[str, Any]


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        # Dropout is off, so the generator's state need not be kept.
        return checkpoint(self.inner, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class Gpt2(nn.Module):
    """GPT-2 with a dynamic loss (see above). Its attention layers are what is compiled."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(**settings, use_cache=False))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor]:
        logits = self.model(input_ids=ids, use_cache=False).logits
        if labels is None:
            return (logits,)
        counted = labels != IGNORED
        smoothing = 0.1 if int(counted.sum()) % 2 else 0.0
        return F.cross_entropy(logits[counted].float(), labels[counted], label_smoothing=smoothing)

    def attentions(self) -> list[nn.Module]:
        """The attention layers."""
        return [block.attn for block in self.model.transformer.h]


class Lengths(nn.Module):
    """A two-layer LSTM over sequences of any length, with its cross-entropy.

    Dynamo takes no LSTM, and would leave the whole module to eager. So the LSTM is marked as outside, and
    what is compiled lies before and behind it.
    """

    def __init__(self, vocab: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.before = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.behind = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor | tuple[Tensor]:
        states = self.recurrent(self.before(self.embedding(ids)))
        logits = self.head(self.behind(states).mean(1))
        return (logits,) if target is None else F.cross_entropy(logits.float(), target)

    @torch.compiler.disable
    def recurrent(self, x: Tensor) -> Tensor:
        """The LSTM's states (batch, length, width)."""
        return self.lstm(x)[0]


def _mlp(width: int, layers: int, classes: int) -> nn.Module:
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return Classifier(nn.Sequential(*hidden, nn.Linear(width, classes)))


def _timm(name: str, checkpointed: bool = False, **settings: Any) -> nn.Module:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)
    if checkpointed:
        model.blocks = nn.Sequential(*map(Checkpointed, model.blocks))
    return Classifier(model)


def _images(pixels: int, classes: int, draw: Draw, batch: int, train: bool) -> Inputs:
    x = draw.normal(batch, 3, pixels, pixels)
    return (x, draw.integers(0, classes, batch)) if train else (x,)


def _vectors(width: int, classes: int, draw: Draw, batch: int, train: bool) -> Inputs:
    x = draw.normal(batch, width)
    return (x, draw.integers(0, classes, batch)) if train else (x,)


def _masked(vocab: int, length: int, draw: Draw, batch: int, train: bool) -> Inputs:
    ids, mask = draw.integers(4, vocab, batch, length), draw.mask(batch, length)
    return (ids, mask, draw.integers(4, vocab, batch, length)) if train else (ids, mask)


def _partly_ignored(vocab: int, length: int, draw: Draw, batch: int, train: bool) -> Inputs:
    ids = draw.integers(4, vocab, batch, length)
    if not train:
        return (ids,)
    labels = draw.integers(4, vocab, batch, length)
    return ids, labels.masked_fill(draw.mask(batch, length) == 0, IGNORED)


def _sequences(vocab: int, lengths: Shape, classes: int, draw: Draw, batch: int, train: bool) -> Inputs:
    ids = draw.integers(0, vocab, batch, draw.size(*lengths))
    return (ids, draw.integers(0, classes, batch)) if train else (ids,)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What differs between the two sets of workloads.

    Args:
        resnet, efficientnet, vit: timm's names.
        vit_settings: its arguments.
        pixels: height and width of images.
        image_batch: of the first two.
        bert, server, gpt2: arguments of transformers' configs.
        bert_lengths: tokens of a sequence, short and long.
        server_length: tokens of a request.
        vit_batch: images with checkpointing, in a timed and in a checked step.
        gpt2_batch: sequences, each as long as the model takes.
        mlp: width, layers, classes, batch.
        lstm: vocabulary, width, classes, batch, [first, end) of the lengths, sets of inputs.
    """

    resnet: str
    efficientnet: str
    vit: str
    vit_settings: dict[str, Any]
    pixels: int
    image_batch: int
    bert: dict[str, Any]
    bert_lengths: Shape
    server: dict[str, Any]
    server_length: int
    vit_batch: Shape
    gpt2: dict[str, Any]
    gpt2_batch: int
    mlp: tuple[int, int, int, int]
    lstm: tuple[int, int, int, int, Shape, int]


def _bert(hidden: int, layers: int, heads: int, length: int, vocab: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": length,
    }


def _distilled(dim: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {"vocab_size": vocab, "dim": dim, "n_layers": layers, "n_heads": heads, "hidden_dim": 4 * dim}


_REAL = Sizes(
    resnet="resnet50",
    efficientnet="efficientnet_b0",
    vit="vit_base_patch16_224",
    vit_settings={},
    pixels=224,
    image_batch=32,
    bert=_bert(1024, 24, 16, 512, 30522),
    bert_lengths=(128, 512),
    server=_distilled(768, 6, 12, 30522),
    server_length=128,
    vit_batch=(2048, 64),
    gpt2={"n_positions": 1024},
    gpt2_batch=8,
    mlp=(256, 4, 10, 64),
    lstm=(10000, 512, 10, 32, (16, 257), 64),
)
_TINY = Sizes(
    resnet="test_resnet",
    efficientnet="test_efficientnet",
    vit="vit_base_patch16_224",
    vit_settings={"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 4},
    pixels=32,
    image_batch=8,
    bert=_bert(32, 2, 4, 32, 128),
    bert_lengths=(8, 16),
    server=_distilled(32, 2, 4, 128),
    server_length=8,
    vit_batch=(4, 2),
    gpt2={"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    gpt2_batch=2,
    mlp=(32, 2, 10, 8),
    lstm=(64, 16, 10, 4, (4, 21), 24),
)


def entries(family: str, s: Sizes) -> tuple[Entry, ...]:
    """All workloads, in the order of the tables.

    Args:
        family: how their names begin.
    """
    images = partial(_images, s.pixels, CLASSES)
    resnet, efficient = partial(_timm, s.resnet), partial(_timm, s.efficientnet)
    step: Settings = {"modes": ("train",), "timed": True}
    answer: Settings = {"modes": ("infer",), "timed": True, "batch": 1, "precision": "bf16 weights"}
    conv: Settings = {"package": "timm", "conv": True, "optimizer": "sgd", "counted": True}
    hf: Settings = {"package": "transformers", "optimizer": "adamw"}
    alone: Settings = {"precision": "fp32", "counted": True}

    def one(name: str, program: Any, inputs: Any, *kinds: Settings, **more: Any) -> Entry:
        settings = {key: value for kind in (*kinds, more) for key, value in kind.items()}
        return Entry(f"{family}/{name}", program, inputs, **settings)

    def bert(batch: int, length: int, *kinds: Settings, **more: Any) -> Entry:
        names = ("input_ids", "attention_mask", "labels")
        program = partial(build, "BertForMaskedLM", "BertConfig", names, {}, s.bert)
        feed = partial(_masked, s.bert["vocab_size"], length)
        return one(f"bert-large-b{batch}-t{length}", program, feed, hf, *kinds, batch=batch, cost=10, **more)

    distilled = ("DistilBertForSequenceClassification", "DistilBertConfig", ("input_ids", "attention_mask"))
    width, layers, classes, mlp_batch = s.mlp
    vocab, lstm_width, lstm_classes, lstm_batch, lengths, sets = s.lstm
    gpt2_feed = partial(_partly_ignored, s.gpt2.get("vocab_size", 50257), s.gpt2["n_positions"])
    short, long = s.bert_lengths
    vit = partial(_timm, s.vit, checkpointed=True, **s.vit_settings)
    return (
        one("resnet50-amp", resnet, images, step, conv, batch=s.image_batch, cost=5),
        one(
            *("resnet50-fp16", resnet, images, step, conv),
            batch=s.image_batch,
            cost=5,
            precision="fp16 autocast",
        ),
        one("efficientnet-b0", efficient, images, step, conv, batch=s.image_batch, cost=7),
        one("efficientnet-b0-b1", efficient, images, conv, answer, cost=7),
        bert(8, short, step),
        bert(32, short, step, check_batch=0),
        bert(8, long, step, check_batch=0),
        bert(32, long, step, check_batch=0),
        bert(1, short, answer, counted=True),
        one(
            *("vit-b16-checkpointed", vit, images, step),
            batch=s.vit_batch[0],
            check_batch=s.vit_batch[1],
            input_sets=2,
            package="timm",
            optimizer="adamw",
            cost=5,
        ),
        one(
            *("gpt2-attention", partial(Gpt2, s.gpt2), gpt2_feed, step, hf),
            batch=s.gpt2_batch,
            regions=Gpt2.attentions,
            counted=True,
        ),
        one(
            *("mlp-loop", partial(_mlp, width, layers, classes), partial(_vectors, width, classes)),
            *(step, alone),
            batch=mlp_batch,
            optimizer="sgd",
            cost=0.2,
        ),
        one(
            *("server-b1", partial(build, *distilled, {}, s.server)),
            *(partial(_masked, s.server["vocab_size"], s.server_length), hf, answer),
            served=True,
            counted=True,
            cost=2,
        ),
        one(
            *("lstm-lengths", partial(Lengths, vocab, lstm_width, lstm_classes)),
            *(partial(_sequences, vocab, lengths, lstm_classes), step, alone),
            batch=lstm_batch,
            optimizer="adamw",
            dynamic=True,
            input_sets=sets,
            cost=0.5,
        ),
    )


ENTRIES = entries("seeds", _REAL)
TINY = entries("tiny", _TINY)
