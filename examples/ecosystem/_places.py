"""What the programs of this folder share: where they run, and what pgraph is compared with.

On a CPU pgraph's host driver applies the same rules as a GPU, and `aot_eager` runs the same ops without
graphs; on a GPU, Inductor generates the same code for both.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from backends import compile_kwargs, register_pgraph
from torch import Tensor

import pgraph

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
REFERENCE = "inductor" if ON_GPU else "aot_eager"


def options(backend: str) -> dict[str, Any]:
    """Arguments of `torch.compile` for ``"pgraph"``, `REFERENCE` or ``"reduce-overhead"`` on this machine."""
    chosen = compile_kwargs(backend, DEVICE)
    assert chosen is not None
    return chosen


def pgraph_options() -> dict[str, Any]:
    """pgraph's own options alone, for interfaces that take the backend's name elsewhere."""
    register_pgraph()
    return options("pgraph")["options"]


def captures() -> int:
    """Captures of all that lives."""
    return pgraph.report().captures


def difference(mine: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest difference of any two elements; NaN where either has one."""
    found = [(a.double() - b.double()).abs().max().item() for a, b in zip(mine, theirs, strict=True)]
    return max(found, key=lambda d: (d != d, d))


def fresh() -> None:
    """Forget what was compiled before."""
    torch._dynamo.reset()
    gc.collect()
    pgraph.reset()
    torch.manual_seed(0)
