"""`generate()` of transformers with a static cache: batch 1 and 8, greedy and sampled.

    python examples/ecosystem/generate.py

What to paste: the name, and no mode (the default is Inductor's `reduce-overhead`).

    config = CompileConfig(backend="pgraph", mode=None)
    model.generate(ids, cache_implementation="static", compile_config=config)

- transformers compiles the decoding step only, and only on accelerators, unless told as below. The prompt is
  processed uncompiled, since its length varies.
- One capture for each batch size and cache length. A cache of the same size may lie anywhere: each request
  may bring its own, and nothing is copied or captured again.
- Let all requests have one cache length: `StaticCache(config, max_cache_len=...)`, as here. Otherwise it
  follows the prompt's length, and each length is compiled and captured.
"""

from __future__ import annotations

from typing import Any

import torch
from _places import DEVICE, captures, fresh, pgraph_options
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

import pgraph

CACHE, NEW = 48, 16


def small_llama() -> LlamaForCausalLM:
    """Three layers, random weights, the same each time; it never says that it has finished."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval().to(DEVICE)


def compile_config(**arguments: Any) -> CompileConfig:
    """transformers' settings of `torch.compile`; on a CPU it compiles only if it is told to."""
    config = CompileConfig(**arguments)
    config._compile_all_devices = True
    return config


def generated(model: LlamaForCausalLM, batch: int, prompt: int, **arguments: Any) -> Tensor:
    """Tokens of one request with a cache of its own, (batch, prompt + NEW)."""
    torch.manual_seed(batch)
    ids = torch.randint(1, 256, (batch, prompt), device=DEVICE)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=StaticCache(config=model.config, max_cache_len=CACHE),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        **arguments,
    )


def main() -> dict[str, Any]:
    """Some requests without and with pgraph; returns how many tokens differ, and captures."""
    fresh()
    model = small_llama()
    config = compile_config(backend="pgraph", mode=None, options=pgraph_options())
    different, counts = 0, []
    for batch in (1, 8):
        for prompt, how in ((8, {"do_sample": False}), (12, {"do_sample": False}), (8, {"do_sample": True})):
            expected = generated(model, batch, prompt, disable_compile=True, **how)
            found = generated(model, batch, prompt, compile_config=config, **how)
            different += int((found != expected).sum())
        counts.append(captures())
        print(f"batch {batch}: {different} tokens differ so far, {counts[-1]} captures")
    print(pgraph.report())
    return {"different": different, "captures": counts, "refused": pgraph.report().refused}


if __name__ == "__main__":
    main()
