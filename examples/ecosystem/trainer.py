"""transformers' `Trainer`: accumulation, activation checkpointing, bf16, resumed from a checkpoint.

    python examples/ecosystem/trainer.py

What to paste is one line before the Trainer is made:

    for layer in model.model.layers:
        layer.compile(backend="pgraph")

- `TrainingArguments(torch_compile_backend="pgraph")` cannot work: Accelerate keeps a list of backends
  (`DynamoBackend`) and refuses every other name. `layer.compile` needs no list. It compiles in place: names
  of parameters, checkpoints and `save_pretrained` stay as they were.
- The layers share one recording for forward and one for backward, also those of a second Trainer.
  `model.compile(backend="pgraph")` compiles all of it, which takes longer and needs a recording of all.
- Do not give the Trainer `torch.compile(model)`: it looks at the signature of `forward`, which the wrapper
  hides, and drops all columns of the data set.
- `use_cache=False`: a cache that grows is another size at each call, and training needs none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _places import DEVICE, REFERENCE, captures, fresh, options
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import pgraph

STEPS, SAVED = 6, 3


class Tokens(torch.utils.data.Dataset):
    """Random sequences of 32 tokens, the same in each run."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Losses(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def small_llama() -> LlamaForCausalLM:
    """Four layers, random weights, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **sizes))


def checkpointing() -> str:
    """What the argument is called: transformers has renamed it."""
    known = TrainingArguments.__dataclass_fields__
    return "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"


def train(compile_layer: Callable[[nn.Module], None], folder: Path, resume: bool = False) -> list[float]:
    """Losses of the steps; a checkpoint is written on the way, or the run goes on from it."""
    model = small_llama()
    for layer in model.model.layers:
        compile_layer(layer)
    kept = Losses()
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        bf16=True,
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE.type == "cpu",
        **{checkpointing(): True},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[kept])
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    return kept.losses


def main() -> dict[str, Any]:
    """Train with the reference, with pgraph, and with pgraph from the checkpoint; returns what they did."""
    fresh()
    with tempfile.TemporaryDirectory() as folder:
        reference = train(lambda layer: layer.compile(**options(REFERENCE)), Path(folder) / "reference")
        mine = train(lambda layer: layer.compile(**options("pgraph")), Path(folder) / "pgraph")
        before = captures()
        resumed = train(
            lambda layer: layer.compile(**options("pgraph")), Path(folder) / "pgraph", resume=True
        )
    found = {
        "difference": max(abs(a - b) for a, b in zip(mine, reference, strict=True)),
        "resumed difference": max(abs(a - b) for a, b in zip(resumed, reference[SAVED:], strict=True)),
        "captures": before,
        "captures of the resumed run": captures() - before,
        "losses": mine,
    }
    print(f"{STEPS} steps, losses " + " ".join(f"{loss:.4f}" for loss in mine))
    print(f"largest difference from {REFERENCE}: {found['difference']:.3g}")
    print(f"the same, resumed from step {SAVED}: {found['resumed difference']:.3g}")
    print(pgraph.report().summary())
    return found


if __name__ == "__main__":
    main()
