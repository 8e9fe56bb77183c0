"""Dynamo between two tests; what a backend sees."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["as_new", "heard_by"]


def as_new() -> None:
    """Let go of compiled code, and put back the usual settings.

    ``dynamic`` of `torch.compile` is a setting of the process while code is called (torch 2.11): of two
    threads the one that comes back last may put back what it found, which was the other one's.
    """
    torch._dynamo.reset()
    torch._dynamo.config.automatic_dynamic_shapes = True
    torch._dynamo.config.assume_static_by_default = True


def heard_by(fn: Any, *args: Any, look: Any, **options: Any) -> list[Any]:
    """What `look` says of each graph of a function that Dynamo compiles."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(look(gm))
        return gm

    torch.compile(fn, backend=backend, **options)(*args)
    return found
