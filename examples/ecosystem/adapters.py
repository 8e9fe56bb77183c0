"""LoRA adapters of PEFT, switched and hot-swapped between calls: one capture for all adapters of one shape.

    python examples/ecosystem/adapters.py

What to paste: one adapter's name stays active, and `point` lets its tensors be those of another adapter.

    for layer in model.base_model.model.model.layers:
        layer.compile(backend="pgraph")
    point(model, "slot", "customer-7")

- Nothing is copied: the weights of all adapters stay where they are, and a launch writes their addresses.
- `hotswap_adapter` of PEFT copies another adapter's weights into the active one, which works as well.
- `model.set_adapter(name)` is another matter: PEFT's code branches on the name, so Dynamo compiles the layers
  for each name, and stops at `recompile_limit` (8). That is so with every backend.
- Adapters whose `lora_alpha / r` differ: `prepare_model_for_compiled_hotswap(model)` before compiling makes
  the scale a tensor, which `point` copies. It also pads ranks to one shape (`target_rank=`).
- Merged and unmerged are two programs, so two captures, however often one goes back and forth.
"""

from __future__ import annotations

from typing import Any

import torch
from _places import DEVICE, captures, difference, fresh, options
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import hotswap_adapter_from_state_dict, prepare_model_for_compiled_hotswap
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pgraph

ADAPTERS = 8


def point(model: PeftModel, slot: str, name: str) -> None:
    """Let the adapter `slot` be `name` from now on: its tensors are the other's, nothing is copied."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for weights in (layer.lora_A, layer.lora_B):
                weights[slot].weight.data = weights[name].weight.data
            layer.scaling[slot].copy_(layer.scaling[name])


def small_llama() -> PeftModel:
    """Three layers with a slot and 8 adapters, each of its own weights and scale, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **sizes)
    model: Any = None
    for name in ("slot", *(f"customer-{i}" for i in range(ADAPTERS))):
        alpha = 4 + int(name.rpartition("-")[2]) if name != "slot" else 4
        lora = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        if model is None:
            model = get_peft_model(LlamaForCausalLM(config), lora, adapter_name=name)
        else:
            model.add_adapter(name, lora)
    return model.eval().to(DEVICE)


def hotswap(model: PeftModel, other: PeftModel, name: str) -> None:
    """PEFT's own way: copy an adapter of another model, as one would come from a file, into the slot."""
    state = get_peft_model_state_dict(other, adapter_name=name)
    state = {key.replace(".weight", ".slot.weight"): value for key, value in state.items()}
    hotswap_adapter_from_state_dict(model, state, "slot", other.peft_config[name])


@torch.no_grad()
def main() -> dict[str, Any]:
    """Every adapter by both ways, merged and unmerged; returns differences and captures."""
    fresh()
    model, reference = small_llama(), small_llama()
    prepare_model_for_compiled_hotswap(model)
    for layer in model.base_model.model.model.layers:
        layer.compile(**options("pgraph"))
    ids = torch.randint(256, (2, 16), device=DEVICE)
    distinct: set[float] = set()

    def differs(name: str) -> float:
        reference.set_adapter(name)
        mine: Tensor = model(ids).logits
        distinct.add(mine.sum().item())
        return difference([mine], [reference(ids).logits])

    names = [f"customer-{i}" for i in range(ADAPTERS)]
    found: dict[str, Any] = {}
    for name in names[:2]:
        point(model, "slot", name)
        model(ids)
    found["captures"] = [captures()]
    worst = 0.0
    for name in names * 2:
        point(model, "slot", name)
        worst = max(worst, differs(name))
    found["captures"].append(captures())
    # The slot gets memory of its own again, for otherwise the copies would go into the last adapter.
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for weights in (layer.lora_A, layer.lora_B):
                weights["slot"].weight.data = weights["slot"].weight.data.clone()
    for name in names:
        hotswap(model, reference, name)
        worst = max(worst, differs(name))
    found["captures"].append(captures())
    for _ in range(3):
        model.merge_adapter(["slot"])
        model(ids)
        model.unmerge_adapter()
        model(ids)
    found |= {"merged captures": captures(), "difference": worst, "distinct": len(distinct)}
    found["refused"] = pgraph.report().refused
    print(f"captures warm, after {ADAPTERS} adapters twice, and hot-swapped: {found['captures']}")
    print(f"after going between merged and unmerged: {captures()}")
    print(f"largest difference from set_adapter without compilation: {worst:.3g}")
    print(pgraph.report())
    return found


if __name__ == "__main__":
    main()
