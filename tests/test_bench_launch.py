"""`bench/launch.py`, `launch_rows.py`, `captures.py` on the host driver: figures of each phase, or part."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[1] / "bench"


def test_phases_and_partitions() -> None:
    command = [sys.executable, str(BENCH / "launch.py"), "--config", "cpu-tiny", "--backends", "pgraph"]
    done = subprocess.run(
        [*command, "--steps", "2", "--warmup", "3"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:-1] for line in done.stdout.splitlines() if "|" in line
    }
    forward, backward, optimizer, total = (float(cell) for cell in rows["pgraph"])
    assert min(forward, backward, optimizer) > 0
    assert abs(forward + backward + optimizer - total) < 0.05
    partitions = [name for name in rows if re.fullmatch(r"(forward|backward) \d+", name)]
    assert len(partitions) == 2, done.stdout
    for name in partitions:
        launches, call = (float(cell) for cell in rows[name][5:7])
        assert launches == 2, "one partition serves both layers"
        assert call > 0


def test_a_failing_backend_is_told() -> None:
    command = [sys.executable, str(BENCH / "launch.py"), "--config", "cpu-tiny", "--backends", "no-such"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "no-such failed" in done.stderr
    assert "'no-such' is unknown" in done.stderr


def test_rows_and_growth(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(BENCH / "launch_rows.py"), "--sizes", "4,3,6", "--growth", "5"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "launch-cpu.json").read_text())["rows"]
    found = {row["config"]: row for row in rows}
    assert list(found) == [
        "4-3-6-changed-0",
        "4-3-6-changed-10",
        "4-3-6-changed-100",
        "10-5-5-changed-0",
    ]
    assert all(0 < row["least"] <= row["us"] <= row["most"] for row in rows)
    assert found["4-3-6-changed-100"]["rewritten"] == 6
    floor, least = (
        {row["config"]: row["us"] for row in rows if row["backend"] == name}
        for name in ("nothing", "results")
    )
    assert all(floor[config] < row["us"] for config, row in found.items()), "the least that torch takes"
    assert all(0 < least[config] < row["us"] for config, row in found.items()), "what new results take"
    assert (tmp_path / "launch-cpu.svg").exists()


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_blocks_beside_nothing(tmp_path: pathlib.Path, mode: str) -> None:
    command = [sys.executable, str(BENCH / "launch_blocks.py"), "--mode", mode, "--rounds", "3"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "launch-blocks-cpu.json").read_text())["rows"]
    found = {row["backend"]: row for row in rows}
    assert [(row["mode"], row["config"]) for row in rows] == [(mode, "cpu-tiny")] * 2
    assert 0 < found["nothing"]["us"] < found["pgraph"]["us"], "the least that torch takes"
    assert all(0 < row["issue_us"] <= row["us"] <= row["most"] for row in rows)


def test_captures_by_part(tmp_path: pathlib.Path) -> None:
    command = [
        sys.executable,
        str(BENCH / "captures.py"),
        "--nodes",
        "10",
        "30",
        "--rounds",
        "1",
        "--profile",
        "--models",
        "own/mlp",
        "--codegen",
        "aten",
    ]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "captures-cpu.json").read_text())["rows"]
    chains, models = rows[:2], rows[2:]
    assert [(row["config"], row["nodes"]) for row in chains] == [("chain of 10", 10), ("chain of 30", 30)]
    assert [row["config"] for row in models] == ["own/mlp train 0", "own/mlp train 1"]
    assert all(row["nodes"] > 5 for row in models), "forward and backward"
    assert all(row["uncaptured_ms"] > 0 for row in chains)
    for row in chains:
        assert 0 < row["code_ms"] < row["record_ms"], "it is a part of what recording takes"
        assert abs(row["net_ms"] + row["code_ms"] - row["own_ms"]) < 1e-6
    parts = ("record", "read", "match", "plan", "instantiate", "memory", "rest")
    for row in rows:
        assert all(row[f"{part}_ms"] > 0 for part in (*parts, "ops"))
        own = sum(row[f"{part}_ms"] for part in parts)
        assert abs(own - row["own_ms"]) < 1e-6, "one capture: its parts are all of it"
        assert row["least_ms"] == row["own_ms"] == row["most_ms"]
    assert "__torch_dispatch__" in done.stdout, "the profile"
