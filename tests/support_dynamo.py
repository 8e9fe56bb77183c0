"""Dynamo between two tests."""

from __future__ import annotations

import torch

__all__ = ["as_new"]


def as_new() -> None:
    """Let go of compiled code, and put back the usual settings.

    ``dynamic`` of `torch.compile` is a setting of the process while code is called (torch 2.11): of two
    threads the one that comes back last may put back what it found, which was the other one's.
    """
    torch._dynamo.reset()
    torch._dynamo.config.automatic_dynamic_shapes = True
    torch._dynamo.config.assume_static_by_default = True
