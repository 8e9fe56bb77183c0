"""Starts the ranks of `distributed_program.py`, and says what each of its scenarios must have done."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed_program import LAYERS, SCENARIOS, STEPS

PROGRAM = Path(__file__).with_name("distributed_program.py")
RANKS = 2

Outcomes = dict[str, list[dict[str, Any]]]


def run_ranks(out: Path, place: str, timeout: float) -> Outcomes:
    """What each rank wrote, by scenario; the ranks ended by themselves and without an error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic products
        "PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(PROGRAM), str(out), place, *SCENARIOS]
    logs = [(out / f"{rank}.log").open("w") for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment | {"RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        for log in logs:
            log.close()
    ends = [(out / f"{rank}.log").read_text()[-3000:] for rank in range(RANKS)]
    assert codes == [0] * RANKS, "\n".join(ends)
    return {
        name: [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]
        for name in SCENARIOS
    }


class RankTests:
    """What each scenario must have done; a subclass runs it for the `outcomes` of its module."""

    @pytest.mark.parametrize("name", SCENARIOS)
    def test_losses_norms_and_weights_are_the_reference_runs(self, name: str, outcomes: Outcomes) -> None:
        """To the last bit."""
        for found in outcomes[name]:
            mine, reference = found["pgraph"], found["reference"]
            assert len(mine["losses"]) == STEPS
            assert mine["losses"] == reference["losses"]
            assert mine["norms"] == reference["norms"]
            assert mine["weights"] == reference["weights"]
            assert len(set(mine["losses"])) == STEPS, "it trains"

    @pytest.mark.parametrize("name", SCENARIOS)
    def test_nothing_is_captured_after_the_first_step(self, name: str, outcomes: Outcomes) -> None:
        """Layers share one recording for forward and one for backward, whatever moves."""
        for found in outcomes[name]:
            mine = found["pgraph"]
            assert mine["refused"] == 0
            assert len(set(mine["captures"])) == 1, mine["captures"]
            if not mine["outside"]:
                assert mine["captures"][0] == 2
                calls = 2 * LAYERS * STEPS * SCENARIOS[name].accumulate
                assert mine["launches"] >= calls - 2

    @pytest.mark.parametrize("name", [n for n, s in SCENARIOS.items() if s.parallel == "fsdp"])
    def test_parameters_moved_and_nobody_held_them(self, name: str, outcomes: Outcomes) -> None:
        for found in outcomes[name]:
            mine = found["pgraph"]
            assert mine["addresses"] > LAYERS, "no parameter ever moved: the test shows nothing"
            assert mine["nodes_per_launch"] > 10
            assert mine["freed"]

    def test_only_collectives_stay_outside(self, outcomes: Outcomes) -> None:
        outside = {name: set(outcomes[name][0]["pgraph"]["outside"]) for name in SCENARIOS}
        assert outside.pop("tensor-parallel") == {"collective"}
        assert all(not codes for codes in outside.values()), outside

    def test_checkpoints_were_written_and_read(self, outcomes: Outcomes) -> None:
        """The run that went past its checkpoint and back launched more, and the losses did not notice."""
        runs = [outcomes[name][0]["pgraph"]["launches"] for name in ("resume", "kept-after-forward")]
        assert runs[0] - runs[1] == 2 * 2 * LAYERS
