"""A diffusion transformer of diffusers, its repeated blocks compiled: one recording for all blocks and steps.

    python examples/ecosystem/diffusion.py

What to paste is one line:

    transformer.compile_repeated_blocks(backend="pgraph")      # pipe.transformer in a pipeline

- Regional compilation compiles each class of blocks once, and pgraph records it once: every block of every
  denoising step is a launch of that recording, with its own weights.
- Classes that do not name their blocks (`_repeated_blocks`), such as `DiTTransformer2DModel`: do the same by
  hand, `for block in transformer.transformer_blocks: block.compile(backend="pgraph")`.
- Flux has two kinds of blocks, so two recordings. A third is of the first single block, whose input is laid
  out differently (a slice).
- Pictures of other sizes are other recordings.
"""

from __future__ import annotations

from typing import Any

import torch
from _places import DEVICE, REFERENCE, captures, difference, fresh, options
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel, WanTransformer3DModel
from torch import Tensor

import pgraph

STEPS = 6


def wan() -> WanTransformer3DModel:
    """Four blocks of one kind, random weights; for videos of (4, 2, 8, 8)."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=4,
        rope_max_seq_len=32,
    )


def flux() -> FluxTransformer2DModel:
    """Two blocks of one kind and four of another, random weights."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def noise_of(model: torch.nn.Module, latents: Tensor, time: Tensor, text: Tensor) -> Tensor:
    """What the model takes for noise in the latents."""
    if isinstance(model, WanTransformer3DModel):
        return model(latents, time.expand(1), text, return_dict=False)[0]
    places = {"img_ids": latents.new_zeros(latents.shape[1], 3), "txt_ids": latents.new_zeros(5, 3)}
    pooled = text.mean(1)
    return model(latents, text, pooled, time.expand(1) / 1000, **places, return_dict=False)[0]


@torch.no_grad()
def denoise(model: torch.nn.Module, seed: int) -> Tensor:
    """From noise to a sample, in `STEPS` steps of Euler's method."""
    random = torch.Generator().manual_seed(seed)
    shape = (1, 4, 2, 8, 8) if isinstance(model, WanTransformer3DModel) else (1, 16, 4)
    latents = torch.randn(shape, generator=random).to(DEVICE)
    text = torch.randn(1, 5, 32, generator=random).to(DEVICE)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS, device=DEVICE)
    for time in scheduler.timesteps:
        latents = scheduler.step(noise_of(model, latents, time, text), time, latents, return_dict=False)[0]
    return latents


def main() -> dict[str, Any]:
    """Samples of both models by the reference and by pgraph; returns differences and captures."""
    found: dict[str, Any] = {}
    for make in (wan, flux):
        fresh()
        models = [make().eval().to(DEVICE) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        for model, backend in zip(models, ("pgraph", REFERENCE), strict=True):
            model.compile_repeated_blocks(**options(backend))
        first = difference([denoise(models[0], 0)], [denoise(models[1], 0)])
        before = captures()
        worst = max([first, *(difference([denoise(models[0], i)], [denoise(models[1], i)]) for i in (1, 2))])
        report = pgraph.report()
        found[make.__name__] = {
            "difference": worst,
            "captures": before,
            "later captures": report.captures - before,
            "launches": report.launches,
            "refused": report.refused,
        }
        print(f"{make.__name__}: largest difference from {REFERENCE} {worst:.3g}; {report.summary()}")
    return found


if __name__ == "__main__":
    main()
