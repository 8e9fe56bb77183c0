"""Weights that come and go: a model sleeps, its memory is free for others, it wakes, and launches go on.

    python examples/ecosystem/sleep_and_wake.py

What to paste: nothing of pgraph's. Weights may lie anywhere when the model wakes:

    state = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    release(model)                                       # asleep
    torch.cuda.empty_cache()
    ...
    model.load_state_dict(state, assign=True)            # awake, with new parameters

- All that a capture knows of a weight is its size, its layout and how it is aligned. So no way to bring
  weights back needs a new capture: `model.to("cpu")` and back, storages that shrink and grow,
  `load_state_dict(assign=True)`, or new parameters.
- What stays on the device is the driver's memory for graphs, `pgraph.report().exec_bytes`.
- Buffers that no state dict holds (`persistent=False`) are the program's to keep.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _places import DEVICE, ON_GPU, captures, difference, fresh, options
from llama import Llama, LlamaConfig, compile_blocks
from torch import Tensor, nn

import pgraph

CONFIG = LlamaConfig(dim=64, layers=3, heads=4, kv_heads=2, max_seq=32)
State = dict[str, Tensor]


def release(model: nn.Module) -> None:
    """Let the model's weights go; its parameters keep their shapes, without memory."""
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)


def moved(model: nn.Module) -> Callable[[], None]:
    """`model.to("cpu")` and back: other storages under the same parameters. On a CPU nothing would move."""
    if ON_GPU:
        model.to("cpu")
        return lambda: model.to(DEVICE) and None
    copies = [parameter.data.clone() for parameter in model.parameters()]
    release(model)

    def wake() -> None:
        for parameter, copy in zip(model.parameters(), copies, strict=True):
            parameter.data = copy

    return wake


def resized(model: nn.Module) -> Callable[[], None]:
    """The storages shrink to nothing and grow again, in another place: the same tensors throughout."""
    copies = [parameter.data.to("cpu", copy=True) for parameter in model.parameters()]
    release(model)

    def wake() -> None:
        for parameter, copy in zip(model.parameters(), copies, strict=True):
            parameter.untyped_storage().resize_(copy.nbytes)
            parameter.data.copy_(copy)

    return wake


def assigned(model: nn.Module) -> Callable[[], None]:
    """`load_state_dict(assign=True)`: the parameters become other objects."""
    state = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    release(model)

    def wake() -> None:
        # On a GPU weights would rather come from a file or from another process, straight to the device.
        model.load_state_dict({name: tensor.to(DEVICE) for name, tensor in state.items()}, assign=True)

    return wake


def replaced(model: nn.Module) -> Callable[[], None]:
    """Parameters made anew, one by one, module by module."""
    state = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    release(model)

    def wake() -> None:
        for prefix, module in model.named_modules():
            for name, old in list(module.named_parameters(recurse=False)):
                tensor = state[f"{prefix}.{name}" if prefix else name].to(DEVICE)
                setattr(module, name, nn.Parameter(tensor, requires_grad=old.requires_grad))

    return wake


WAYS = (moved, resized, assigned, replaced)


def held() -> int | None:
    """Bytes that the allocator holds on the device, its cache emptied; None on a CPU, which does not say."""
    if not ON_GPU:
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def first_step_ms(step: Callable[[], Any]) -> float:
    """How long a step takes until the device is through with it."""
    began = time.perf_counter()
    step()
    if ON_GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def step(model: Llama, number: int) -> list[Tensor]:
    """Loss and gradients of one training step on tokens of its own."""
    random = torch.Generator().manual_seed(number)
    tokens, targets = (torch.randint(256, (2, 16), generator=random).to(DEVICE) for _ in range(2))
    loss = model(tokens, targets)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Sleep and wake again and again; returns differences from a model that never slept, and captures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cycles", type=int, default=100)
    args = parser.parse_args(argv)
    fresh()
    models = [Llama(CONFIG).to(DEVICE) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    model, reference = models
    for one, backend in ((model, "pgraph"), (reference, "inductor" if ON_GPU else "aot_eager")):
        compile_blocks(one, "block", **options(backend))
        for number in range(3):
            step(one, number)
    before, worst, addresses = captures(), 0.0, set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for cycle in range(args.cycles):
            wake = WAYS[cycle % len(WAYS)](model)
            asleep = held()
            wake()
            addresses.add(next(model.parameters()).data_ptr())
            worst = max(worst, difference(step(model, cycle), step(reference, cycle)))
    report = pgraph.report()
    found = {
        "captures": before,
        "captures afterwards": report.captures,
        "difference": worst,
        "addresses": len(addresses),
        "refused": report.refused,
        "asleep bytes": asleep,
        "graph bytes": report.exec_bytes,
    }
    print(f"{args.cycles} cycles by {len(WAYS)} ways: captures {before}, afterwards {report.captures}")
    print(f"largest difference of losses and gradients from a model that never slept: {worst:.3g}")
    print("held while asleep:", "" if asleep is None else f"by the allocator {asleep:,} B,", end=" ")
    print(f"by graphs {report.exec_bytes:,} B")
    print(f"a step just after waking: {first_step_ms(lambda: step(model, 0)):.2f} ms")
    return found


if __name__ == "__main__":
    main()
