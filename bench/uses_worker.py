"""One measurement of `uses.py` in one process: settings from the command line, JSON on the last line.

    python bench/uses_worker.py '{"use": "sleep", "backend": "pgraph", "size": "tiny", "device": "cpu"}'

Every use is compared with the same calls uncompiled, in the same process, before anything is timed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import _paths
import torch
import worker
from backends import register_pgraph, reset_compiled
from host_speed import fast_core
from language_model import language_model
from torch import Tensor, nn
from uses_memory import Asked
from uses_place import Figures, Place, Spec, first, spread
from uses_replay import Guarded, Replaying, graphed

sys.path.insert(0, str(_paths.REPO / "examples" / "ecosystem"))

MB = worker.MB
ASKING = 20
"""Further cycles of `sleep`, with and without the step's memory there, in turn."""


# -- a request of a language model ---------------------------------------------------------------------


def model_of(place: Place) -> Any:
    """The language model, as large as the size says."""
    return language_model(place, place.size, place.size.prompt + place.size.new, seed=0)


def generate(place: Place) -> Figures:
    """Greedy requests with a static cache, timed with all new tokens and with one: the rest is decoding."""
    from transformers import CompileConfig, StaticCache

    spec, size, model = place.spec, place.size, model_of(place)
    ids = torch.randint(1, size.vocabulary, (spec.batch, size.prompt), device=place.device)
    settings: dict[str, dict[str, Any]] = {
        "aot_eager": {"backend": "aot_eager", "mode": None},
        "inductor": {"backend": "inductor", "mode": "default"},
        "reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
        "replay": {"backend": "inductor", "mode": "default"},
        "guarded": {"backend": Guarded(model), "mode": None},
    }
    compiled: dict[str, Any] = {"disable_compile": True}
    if spec.backend != "eager":
        if spec.backend == "pgraph":
            register_pgraph()
            chosen = place.compile_arguments()
            assert chosen is not None
            settings["pgraph"] = {"backend": "pgraph", "mode": None, "options": chosen["options"]}
        config = CompileConfig(**settings[spec.backend])
        config._compile_all_devices = True
        compiled = {"compile_config": config}
    if spec.backend == "replay":
        replaying = Replaying(model.get_compiled_call(config))
        model.get_compiled_call = lambda _: replaying

    kept = StaticCache(config=model.config, max_cache_len=size.prompt + size.new)

    def request(new: int, **arguments: Any) -> Any:
        cache: dict[str, Any] = {"cache_implementation": "static"}
        if spec.backend in ("guarded", "replay"):  # their graphs write where they wrote
            kept.reset()
            cache = {"past_key_values": kept}
        elif spec.fresh:
            cache = {
                "past_key_values": StaticCache(config=model.config, max_cache_len=size.prompt + size.new)
            }
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            **cache,
            **(arguments or compiled),
        )

    said = {"return_dict_in_generate": True, "output_logits": True}
    theirs = request(size.new, disable_compile=True, **said)
    mine = request(size.new, **compiled, **said)
    worst = agreement(place, mine, theirs, size.prompt)
    for _ in range(3):
        request(size.new)
    warm = place.recordings()
    del mine, theirs
    place.clock.reset_peak()
    whole = place.times(lambda: request(size.new), size.rounds)
    short = statistics.median(place.times(lambda: request(1), size.rounds))
    per_token = [(ms - short) / (size.new - 1) for ms in whole]
    return {
        **spread(per_token),
        "tokens_per_s": spec.batch * size.new / statistics.median(whole) * 1e3,
        "captures_warm": warm,
        "max_diff": worst,
    }


def agreement(place: Place, mine: Any, theirs: Any, prompt: int) -> float:
    """Logits of two requests, sequence by sequence, as long as their tokens are the same.

    Greedy decoding goes another way for ever where two logits are nearly equal.
    """
    worst = 0.0
    for row in range(len(theirs.sequences)):
        for step, (a, b) in enumerate(zip(mine.logits, theirs.logits, strict=True)):
            worst = max(worst, place.near(a[row], b[row]))
            if mine.sequences[row, prompt + step] != theirs.sequences[row, prompt + step]:
                break
    return worst


# -- adapters ------------------------------------------------------------------------------------------


@torch.no_grad()
def adapters(place: Place) -> Figures:
    """Each call with another adapter: first those after a switch, then some with the same one."""
    from adapters import point
    from peft import LoraConfig, get_peft_model

    size = place.size
    lora = LoraConfig(
        r=size.rank,
        lora_alpha=size.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        init_lora_weights=False,
    )
    base = model_of(place)
    base.config.use_cache = False
    model = get_peft_model(base, lora, adapter_name="slot").eval()
    names = [f"customer-{number}" for number in range(size.adapters)]
    for name in names:
        model.add_adapter(name, lora)
    model.to(place.dtype)
    for layer in model.modules():  # `point` copies the scale, which is to be a tensor for that
        if hasattr(layer, "lora_A"):
            layer.scaling = {name: torch.tensor(s, device=place.device) for name, s in layer.scaling.items()}
    ids = torch.randint(size.vocabulary, (1, size.prompt), device=place.device)

    def call() -> Tensor:
        place.begin()
        return model.base_model.model.model(ids).last_hidden_state

    expected = []
    for name in names:
        point(model, "slot", name)
        expected.append(call().clone())
    arguments = place.compile_arguments()
    inner = model.base_model.model.model
    if arguments is not None:
        for part in inner.layers if place.spec.scope == "block" else [inner]:
            part.compile(**arguments)
    for _ in range(4):
        call()
    warm = place.recordings()
    place.clock.reset_peak()
    switched, same, worst = [], [], 0.0
    with fast_core(place.on_gpu) as look:
        for _ in range(2):
            for name, theirs in zip(names, expected, strict=True):
                point(model, "slot", name)
                look()
                switched.append(place.ms(call))
                worst = max(worst, place.near(call(), theirs))
        for _ in range(4 * size.rounds):
            look()
            same.append(place.ms(call))
    return {**spread(same), **first(switched), "captures_warm": warm, "max_diff": worst}


# -- weights that come and go ----------------------------------------------------------------------------


@torch.no_grad()
def sleep(place: Place) -> Figures:
    """Inference, asleep, inference: with weights that lie elsewhere each time.

    ``replay`` keeps its weights, since its graph can read them nowhere else: they are written anew, from the
    CPU as well. ``guarded`` captures anew on those that came, before the clock starts.
    """
    from llama import Llama, LlamaConfig, compile_blocks
    from sleep_and_wake import release

    size, stays = place.size, place.spec.backend == "replay"
    config = LlamaConfig(
        vocab=size.vocabulary,
        dim=size.hidden,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
        max_seq=size.prompt,
    )
    torch.manual_seed(0)
    with torch.device(place.device):
        model: nn.Module = Llama(config).to(place.dtype).eval()
    tokens = torch.randint(size.vocabulary, (1, size.prompt), device=place.device)

    def call() -> Tensor:
        place.begin()
        return model(tokens)

    expected = call().clone()
    guarded = Guarded(model) if place.spec.backend == "guarded" else None
    arguments = {"backend": guarded, "dynamic": False} if guarded else place.compile_arguments()
    if arguments is not None:
        compile_blocks(model, place.spec.scope, **arguments)
    for _ in range(4):
        worst = place.near(call(), expected)
    if stays:
        call = graphed(call)
    warm = place.recordings()
    place.clock.reset_peak()
    state = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    same, woken, asleep, asked = [], [], [], Asked()
    with fast_core(place.on_gpu) as look:
        for _ in range(4 * size.rounds):
            look()
            same.append(place.ms(call))
        for cycle in range(size.cycles + (ASKING if place.on_gpu else 0)):
            if not stays:
                release(model)
            if guarded is not None:
                guarded.forget()
            asleep.append(held(place))
            gap = torch.empty(MB, device=place.device)  # what others do meanwhile moves what comes back
            if stays:
                model.load_state_dict(state)
            else:
                awake = {name: tensor.to(place.device, copy=True) for name, tensor in state.items()}
                model.load_state_dict(awake, assign=True)
                del awake
            if guarded is not None:
                guarded.anew()
            look()
            if cycle < size.cycles:
                woken.append(place.ms(call))
            elif cycle % 2:
                asked.taken()
                asked.ready(place.ms(call))
            else:
                asked.segments_of(call)
            worst = max(worst, place.near(call(), expected))
            del gap
    reserved, used = asleep[size.cycles - 1]
    return {
        **spread(same),
        **first(woken),
        **asked.figures(),
        "captures_warm": warm,
        "asleep_mb": reserved,
        "asleep_device_mb": used,
        "max_diff": worst,
    }


def held(place: Place) -> tuple[float | None, float | None]:
    """MB that the allocator holds with its cache emptied, and MB of the device that are in use."""
    if not place.on_gpu:
        return None, None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_reserved() / MB, (total - free) / MB


# -- a denoising loop --------------------------------------------------------------------------------------


@torch.no_grad()
def diffusion(place: Place) -> Figures:
    """Samples of a video transformer, its repeated blocks compiled."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

    size = place.size
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=size.block_heads,
        attention_head_dim=size.block_head,
        in_channels=16,
        out_channels=16,
        text_dim=2 * size.block_head,
        freq_dim=2 * size.block_head,
        ffn_dim=size.block_mlp,
        num_layers=size.blocks,
        rope_max_seq_len=64,
    )
    model = model.eval().to(place.device, place.dtype)
    noise = torch.randn(1, 16, *size.latents, device=place.device, dtype=place.dtype)
    text = torch.randn(1, 16, 2 * size.block_head, device=place.device, dtype=place.dtype)

    def sample() -> Tensor:
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(size.steps, device=place.device)
        latents = noise
        for moment in scheduler.timesteps:
            place.begin()
            found = model(latents, moment.expand(1), text, return_dict=False)[0]
            latents = scheduler.step(found, moment, latents, return_dict=False)[0]
        return latents

    expected = sample().clone()
    arguments = place.compile_arguments()
    if arguments is not None:
        model.compile_repeated_blocks(**arguments)
    for _ in range(3):
        worst = place.near(sample(), expected)
    warm = place.recordings()
    place.clock.reset_peak()
    times = [ms / size.steps for ms in place.times(sample, size.rounds)]
    return {**spread(times), "captures_warm": warm, "max_diff": worst}


MEASURES: dict[str, Callable[[Place], Figures]] = {
    "generate": generate,
    "adapters": adapters,
    "sleep": sleep,
    "diffusion": diffusion,
}


def measure(spec: Spec) -> Figures:
    """All figures of one row."""
    reset_compiled()
    place = Place(spec)
    figures = MEASURES[spec.use](place)
    found = {**figures, **place.clock.memory(), "captures_end": place.recordings()}
    if spec.backend == "pgraph":
        import pgraph

        report = pgraph.report()
        found |= {
            "exec_mb": report.exec_bytes / MB,
            "refused": report.refused,
            "launches": report.launches,
            "summary": report.summary(),
        }
    return found


def main() -> None:
    """Measure what the first argument says; print one JSON line last."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        sys.exit(__doc__)
    figures = measure(Spec(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
