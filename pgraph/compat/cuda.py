"""CUDA as PyTorch keeps it: the current stream, and whether memory is cached."""

from __future__ import annotations

import os
from typing import Final

import torch

__all__ = ["UNCACHED", "caches_memory", "current_raw_stream"]

UNCACHED: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""A variable: PyTorch asks whether it is set, not what it says."""


def current_raw_stream(index: int) -> int:
    """The handle of a device's current stream, without the object around it, which takes longer; 2.11, and in
    the sources of 2.13. A build of torch without CUDA does not have it.
    """
    return torch._C._cuda_getCurrentRawStream(index)


def caches_memory() -> bool:
    """Whether the CUDA allocator keeps what is freed. A program can switch that off, too; that is told from
    2.13 on.
    """
    asked = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    return UNCACHED not in os.environ and (asked is None or bool(asked()))
