"""Rows of two checkouts side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

REPO = Path(__file__).resolve().parents[1]

# A benchmark of a checkout: notes where it ran, and takes as long a step as the file says.
STAND_IN = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parents[1]
config, out = sys.argv[sys.argv.index("--configs") + 1], pathlib.Path(sys.argv[-1])
out.mkdir(parents=True, exist_ok=True)
row = {"bench": "memory", "config": config, "scope": "block", "ms_per_step": float((here / "ms").read_text())}
row |= {"told": os.environ.get("PGRAPH_COMMIT")}
row |= {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "first": os.environ["PYTHONPATH"].split(os.pathsep)[0]}
(out / f"{config}.json").write_text(json.dumps({"rows": [row]}))
"""


def checkout(folder: Path, ms: float, program: str = STAND_IN) -> Path:
    (folder / "bench").mkdir(parents=True)
    (folder / "bench" / "memory.py").write_text(program)
    (folder / "ms").write_text(str(ms))
    return folder


def test_both_checkouts_are_run_and_compared(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = load("beside")
    other, this = checkout(tmp_path / "a", 4.0), checkout(tmp_path / "b", 2.0)
    monkeypatch.setattr(program, "REPO", this)
    monkeypatch.setenv("PGRAPH_COMMIT", "feed")
    arguments = ["--other", str(other), "--rounds", "2", "--only", "memory", "--out", str(tmp_path / "out")]
    program.main(arguments)
    last = capfd.readouterr().out.strip().split("\n")[-4:]
    assert [[cell.strip() for cell in line.split("|")[1:6]] for line in last[2:]] == [
        [f"memory {config}, block", "ms", "4.00", "2.00", "0.500"] for config in ("16x1024", "4x256")
    ], last
    for name, folder in (("other", other), ("this", this)):
        for number in (1, 2):
            (row,) = json.loads(
                (tmp_path / "out" / "beside" / f"{name}-{number}" / "4x256.json").read_text()
            )["rows"]
            assert (row["first"], row["gpu"]) == (str(folder), "0")
            assert row["told"] == ("feed" if name == "this" else None), "it names one of them only"


def test_checkouts_change_places(load: Any) -> None:
    places = load("beside").places
    assert places(1, range(8), 1) == [("0", range(8))] * 2
    assert places(2, range(8), 1) == [("0", range(4)), ("1", range(4, 8))]
    assert places(2, range(8), 2) == [("1", range(4, 8)), ("0", range(4))]
    assert places(2, range(2), 1) == [("0", range(2))] * 2


def test_the_table_has_medians_and_their_spread(load: Any) -> None:
    def row(config: str, ms: float | None, reserved: float = 10.0) -> dict[str, Any]:
        return {
            "bench": "memory",
            "config": config,
            "scope": "block",
            "ms_per_step": ms,
            "device_used_mb": reserved,
        }

    other = [row("4x256", ms) for ms in (4.0, 9.0, 5.0)]
    this = [row("4x256", 4.5, 11.0), row("4x256", 5.5, 9.0), row("16x1024", 8.0)]
    assert_expected_inline(
        load("beside").compared({"other": other, "this": this}) + "\n",
        """\
| row                 | figure    | other   | this   | ratio   | other, range   | this, range   | rounds   |
|---------------------|-----------|---------|--------|---------|----------------|---------------|----------|
| memory 4x256, block | ms        | 5.00    | 5.00   | 1.000   | 4.00 to 9.00   | 4.50 to 5.50  | 2        |
| memory 4x256, block | device MB | 10.00   | 10.00  | 1.000   | 10.00 to 10.00 | 9.00 to 11.00 | 2        |
""",
    )


def test_a_benchmark_that_fails_ends_it(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load("beside")
    other = checkout(tmp_path / "a", 4.0, "raise SystemExit(3)")
    monkeypatch.setattr(program, "REPO", checkout(tmp_path / "b", 2.0))
    with pytest.raises(SystemExit, match=r"bench/memory.py of .*a ended with 3"):
        program.main(["--other", str(other), "--only", "memory", "--out", str(tmp_path / "out")])


def test_the_other_checkout_has_to_be_one(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "bench" / "beside.py"), "--other", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no bench/memory.py in it" in done.stderr
