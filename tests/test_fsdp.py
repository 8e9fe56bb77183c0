"""Two ranks over gloo on the CPU: FSDP2, DDP, tensor parallel, checkpointing of both kinds, and a clean end.

A small Llama's blocks are compiled one by one, as torchtitan does. FSDP2 frees its gathered parameters after
every use and gathers them to other addresses; whatever a launch does not rebind shows as a wrong loss.
"""

from __future__ import annotations

import sys

import pytest
from support_ranks import Outcomes, RankTests, run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seen working on Linux only")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_ranks(tmp_path_factory.mktemp("ranks"), "cpu", timeout=300)


class TestGloo(RankTests):
    """pgraph's host driver against the same code without it."""
