"""The catalogue of capture failures, as far as the host driver can show it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support_catalogue import FOLDER, catalogue, check_fixed, check_program, check_same, load, names

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", names())
def test_entry(name: str) -> None:
    entry = load(name)
    try:
        program = check_program(entry, CPU)
        fixed = check_fixed(entry, CPU)
    finally:
        entry.finish()
    if program is not None:
        check_same(entry, program, fixed)


def test_a_claim_that_does_not_hold_fails() -> None:
    """The checks above look at what happened, not at what the entry says of itself."""
    import dataclasses

    entry = load("host_read")
    for claim in ("bool-index", "captured"):
        with pytest.raises(AssertionError):
            check_program(dataclasses.replace(entry, on_cpu=claim), CPU)
    import pgraph

    with pytest.raises(pgraph.FullCaptureError, match="graph-break"):
        check_fixed(dataclasses.replace(entry, fixed=entry.program), CPU)


def test_the_readme_has_the_catalogue() -> None:
    assert catalogue() in (FOLDER / "README.md").read_text(encoding="utf-8")


def _run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_entry_runs_alone_and_the_process_ends() -> None:
    """The one about hanging: its recordings are alive when the process group goes."""
    out = _run(str(FOLDER / "hang_at_exit.py"), "--device", "cpu")
    assert "1. Under plain CUDA graphs" in out
    assert "[collective] _c10d_functional::all_reduce" in out.split("2. With pgraph")[1]
    assert "all that is compiled is captured" in out.split("3. Fixed")[1]


def test_run_all_prints_a_table() -> None:
    out = _run(str(FOLDER / "run_all.py"), "--device", "cpu", "mask_assignment")
    row = [cell.strip() for cell in out.splitlines()[-1].strip("|").split("|")]
    assert row == ["mask_assignment.py", "not shown", "bool-index; right", "captured; right"]
