"""`bench/equality.py` over sizes that are drawn at random, on the host driver."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[1] / "bench"


def compared(out: pathlib.Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and row of a run."""
    chosen = ["--sizes", "--driver", "host", "--scope", "model", "--config", "cpu-tiny", *arguments]
    command = [sys.executable, str(BENCH / "equality.py"), *chosen, "--out", str(out)]
    # Inductor's code for CPUs adds to an embedding's gradient in whatever order threads come.
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=alone)
    (row,) = json.loads((out / "equality-cpu.json").read_text())["rows"]
    return done.returncode, row


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_random_sizes_are_equal(tmp_path: pathlib.Path, inductor_cache: object, mode: str) -> None:
    status, row = compared(tmp_path, "--codegen", "inductor", "--steps", "40", "--mode", mode)
    assert (status, row["status"], row["config"], row["mode"]) == (0, "equal", "cpu-tiny-sizes", mode)
    assert row["tensors_bit_equal"] == row["tensors_compared"]
    assert row["sizes"] > 15
    assert row["names_compared"] == (25 if mode == "train" else 4), "gradients only in training"


def test_a_run_without_launches_proves_nothing(tmp_path: pathlib.Path) -> None:
    status, row = compared(tmp_path, "--codegen", "aten", "--steps", "3", "--warmup", "1")
    assert status == 1
    assert row["status"] == "0 launches and 6 uncaptured runs prove little"
