"""Two ranks over NCCL, a GPU each: FSDP2, DDP, tensor parallel, both kinds of checkpointing, a resumed run.

The scenarios of `distributed_program.py`; the reference is Inductor, with deterministic algorithms.
"""

from __future__ import annotations

import pytest
import torch
from distributed_program import SCENARIOS
from support_ranks import (
    Outcomes,
    assert_captured_once,
    assert_moved_and_freed,
    assert_outside,
    assert_reference_run,
    run_ranks,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    # One worker runs them all: the ranks run once.
    pytest.mark.xdist_group("two-gpus"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_ranks(tmp_path_factory.mktemp("ranks"), "cuda", timeout=400)


@pytest.mark.parametrize("name", SCENARIOS)
def test_losses_and_weights_are_inductors(name: str, outcomes: Outcomes) -> None:
    for found in outcomes[name]:
        assert_reference_run(found)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_captured_after_the_first_step(name: str, outcomes: Outcomes) -> None:
    for found in outcomes[name]:
        assert_captured_once(name, found)


@pytest.mark.parametrize("name", [n for n, s in SCENARIOS.items() if s.parallel == "fsdp"])
def test_parameters_moved_and_nobody_held_them(name: str, outcomes: Outcomes) -> None:
    for found in outcomes[name]:
        assert_moved_and_freed(found)


def test_only_collectives_stay_outside(outcomes: Outcomes) -> None:
    assert_outside(outcomes)
