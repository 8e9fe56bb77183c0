"""Everything in this folder needs an NVIDIA GPU and is skipped where there is none."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator

import pytest
import torch

_HERE = pathlib.Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if _HERE not in item.path.parents:
            continue
        # What torch and the CUDA libraries warn of differs from machine to machine.
        item.add_marker(pytest.mark.filterwarnings("default"), append=False)
        if skip is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled code, capture or counter of one test is left for the next.

    The tests count launches: none of them is to be lost to a trial, unless the test asks for one.
    """
    monkeypatch.setenv("PGRAPH_STEP_ASIDE", "0")
    import gpu_helpers

    import pgraph

    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    gpu_helpers.forget_older()
    yield
    torch.backends.cudnn.deterministic = deterministic
    torch._dynamo.reset()
    pgraph.reset()
    gc.collect()
