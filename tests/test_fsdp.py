"""Two ranks over gloo on the CPU: FSDP2, DDP, tensor parallel, checkpointing of both kinds, and a clean end.

A small Llama's blocks are compiled one by one, as torchtitan does. FSDP2 frees its gathered parameters after
every use and gathers them to other addresses; whatever a launch does not rebind shows as a wrong loss.
"""

from __future__ import annotations

import sys

import pytest
from distributed_program import LAYERS, SCENARIOS
from support_ranks import (
    Outcomes,
    assert_captured_once,
    assert_moved_and_freed,
    assert_outside,
    assert_reference_run,
    run_ranks,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seen working on Linux only")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_ranks(tmp_path_factory.mktemp("ranks"), "cpu", timeout=300)


@pytest.mark.parametrize("name", SCENARIOS)
def test_losses_and_weights_are_the_reference_runs(name: str, outcomes: Outcomes) -> None:
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


def test_only_what_must_stays_outside(outcomes: Outcomes) -> None:
    assert_outside(outcomes)


def test_checkpoints_were_written_and_read(outcomes: Outcomes) -> None:
    """The run that went past its checkpoint and back launched more, and the losses did not notice."""
    runs = [outcomes[name][0]["pgraph"]["launches"] for name in ("resume", "kept-after-forward")]
    assert runs[0] - runs[1] == 2 * 2 * LAYERS
