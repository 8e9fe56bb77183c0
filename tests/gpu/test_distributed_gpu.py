"""Two ranks over NCCL, a GPU each: FSDP2, DDP, tensor parallel, both kinds of checkpointing, a resumed run.

The scenarios of `distributed_program.py`; the reference is Inductor, with deterministic algorithms.
"""

from __future__ import annotations

import pytest
import torch
from support_ranks import Outcomes, RankTests, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_ranks(tmp_path_factory.mktemp("ranks"), "cuda", timeout=400)


class TestNccl(RankTests):
    """pgraph against Inductor."""
