"""The training example runs as a person would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_llama.py"


def run_example(*flags: str) -> str:
    """Run the example small, on the CPU, and return what it prints; nothing warns."""
    small = ["--device", "cpu", "--dim", "32", "--layers", "2", "--batch", "2", "--seq", "16"]
    command = [sys.executable, str(EXAMPLE), *small, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_eager_run_shows_the_summary() -> None:
    out = run_example("--backend", "eager", "--steps", "3")
    assert "parameters on cpu" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("eager"))
    first, final, ms = map(float, row[1:4])
    assert 4.5 < final < first < 6.5
    assert ms > 0


def test_compare_shows_both_runs_and_their_difference() -> None:
    out = run_example("--backend", "aot_eager", "--steps", "3", "--compare", "--scope", "model")
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("eager", "aot_eager"))] == [
        "eager",
        "aot_eager",
    ]
    assert "aot_eager against eager, over all steps: 0\n" in out


def test_unknown_settings_are_refused() -> None:
    command = [sys.executable, str(EXAMPLE), "--driver", "host", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--driver host runs on the CPU" in done.stderr


def test_pgraph_run_matches_eager() -> None:
    out = run_example(
        "--backend", "pgraph", "--driver", "host", "--codegen", "aten", "--steps", "12", "--compare"
    )
    line = next(line for line in out.splitlines() if "largest loss difference" in line)
    assert float(line.rsplit(" ", 1)[1]) <= 1e-5
    assert "captur" in out.splitlines()[-1]


def test_the_transcript_of_explain_ends_in_full_capture_and_is_on_its_page() -> None:
    script = EXAMPLE.with_name("explain_transcript.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(">>> print(pgraph.explain(") == 4
    assert "all that is compiled is captured" in done.stdout.split(">>>")[-1]
    if torch.__version__.startswith("2.13.") and not torch.cuda.is_available():
        shown = script.with_name("explain.md").read_text(encoding="utf-8")
        assert f"```text\n{done.stdout.rstrip()}\n```\n" in shown, "run explain_transcript.py --write"
