"""CUDA as PyTorch keeps it: the current stream."""

from __future__ import annotations

import torch

__all__ = ["current_raw_stream"]


def current_raw_stream(index: int) -> int:
    """The handle of a device's current stream, without the object around it, which takes longer; 2.11, and in
    the sources of 2.13. A build of torch without CUDA does not have it.
    """
    return torch._C._cuda_getCurrentRawStream(index)
