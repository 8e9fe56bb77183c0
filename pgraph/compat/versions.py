"""The releases of PyTorch whose private interfaces are known."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

__all__ = ["untested"]

OLDEST, NEWEST = "2.11", "2.15"
"""Tested with these, and with 2.13 and 2.14 in between."""


def untested() -> str | None:
    """What is to be said of this PyTorch; None if it is one of those."""
    version = TorchVersion(torch.__version__)
    release = ".".join(str(version).split(".")[:2])
    if TorchVersion(OLDEST) <= TorchVersion(release) <= TorchVersion(NEWEST):
        return None
    return (
        f"pgraph is made for torch {OLDEST} to {NEWEST}, and this is {version}, whose private interfaces "
        f"may differ. Fix: install one of those, or run pgraph's tests with this one"
    )
