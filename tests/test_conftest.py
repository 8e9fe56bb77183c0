"""What keeps the suite quick: left out, every test still passes, and all of them take twice as long."""

from __future__ import annotations

import gc
import logging
import os
import pathlib

import pytest
import torch

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.mark.skipif(WORKERS == 1, reason="it is about workers side by side: -n 2")
def test_workers_share_the_cores() -> None:
    assert torch.get_num_threads() * WORKERS <= max(WORKERS, os.cpu_count() or 1)
    assert os.environ["OMP_NUM_THREADS"] == str(torch.get_num_threads())


def test_ranks_are_started_by_one_worker() -> None:
    """The tests of a file go to one worker if the file starts ranks, and only then."""
    together = pytest.importorskip("support_schedule").Together
    files = sorted(pathlib.Path(__file__).parent.rglob("test_*.py"))
    ranks = [file.name for file in files if "\nfrom support_ranks import" in file.read_text()]
    assert ranks
    for file in files:
        scopes = {
            together._split_scope(None, f"tests/{file.name}::{test}") for test in ("one", "Two::three[4]")
        }
        assert (len(scopes) == 1) == (file.name in ranks), file.name


def test_collections_leave_torch_alone() -> None:
    assert gc.get_freeze_count() > 100_000
    assert not any(thing is torch.nn.Module.__dict__["forward"] for thing in gc.get_objects())


def test_nobody_listens_to_torchs_trace() -> None:
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
    assert not logging.getLogger("torch.__trace").handlers
