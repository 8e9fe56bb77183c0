"""`bench/step_memory.py`: memory over the time of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_a_line_begins_with_what_was_there_and_ends_with_what_is_left(load: Any) -> None:
    mb = 2**20
    events = [(4_000_000, -mb), (2_000_000, mb), (3_000_000, 2 * mb), (900_000, mb)]
    curve = load("step_memory").curve_of(events, began=1_000_000, before=5 * mb)
    assert curve == [(0.0, 5.0), (0.0, 6.0), (1.0, 7.0), (2.0, 9.0), (3.0, 8.0)]


def test_a_warm_step_leaves_what_it_found(load: Any) -> None:
    """All that is allocated in it is freed in it, but for the last loss; the activations show."""
    worker, program = load("worker"), load("step_memory")
    found = program.traced(worker.Spec(config="cpu-tiny", backend="pgraph", device="cpu", warmup=4))
    moments, heights = zip(*found["curve"], strict=True)
    assert list(moments) == sorted(moments)
    assert max(heights) > 0.5
    assert abs(heights[-1]) < 0.01
    assert found["reserved_mb"] is None


def test_one_command_draws_it(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load("step_memory")

    def start(spec: dict[str, Any], *args: Any) -> dict[str, Any]:
        if spec["backend"] == "inductor":
            return {"status": "RuntimeError: no compiler"}
        return {"status": "ok", "curve": [[0.0, 1.0], [2.0, 3.5], [3.0, 1.0]], "reserved_mb": None}

    monkeypatch.setattr(program, "start_worker", start)
    told = ["--config", "cpu-tiny", "--backends", "inductor", "eager", "pgraph", "--device", "cpu"]
    path = program.main([*told, "--out", str(tmp_path)])
    assert path.read_text().startswith("<?xml")
    assert set(json.loads(path.with_suffix(".json").read_text())) == {"eager", "pgraph"}
    out = capsys.readouterr().out
    assert "inductor: RuntimeError: no compiler" in out
    assert "pgraph: 1.0 MB allocated before the step, peak 3.5 MB" in out
    with pytest.raises(SystemExit, match="no backend has run"):
        program.main(["--config", "cpu-tiny", "--backends", "inductor", "--out", str(tmp_path)])
