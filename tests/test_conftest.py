"""What keeps the suite quick: left out, every test still passes, and all of them take twice as long."""

from __future__ import annotations

import gc
import os

import pytest
import torch

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.mark.skipif(WORKERS == 1, reason="it is about workers side by side: -n 2")
def test_workers_share_the_cores() -> None:
    assert torch.get_num_threads() * WORKERS <= max(WORKERS, os.cpu_count() or 1)
    assert os.environ["OMP_NUM_THREADS"] == str(torch.get_num_threads())


def test_collections_leave_torch_alone() -> None:
    assert gc.get_freeze_count() > 100_000
    assert not any(thing is torch.nn.Module.__dict__["forward"] for thing in gc.get_objects())
