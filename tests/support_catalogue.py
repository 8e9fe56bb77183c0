"""Shared by the tests of the catalogue of capture failures: its entries, and what must hold of each."""

from __future__ import annotations

import pathlib
import sys

import torch

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples" / "capture_failures"
for _folder in (FOLDER.parent, FOLDER):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from _harness import CAPTURED, UNSHOWN, Entry, Outcome, judge  # noqa: E402
from run_all import catalogue, load, names  # noqa: E402

__all__ = [
    "CAPTURED",
    "FOLDER",
    "UNSHOWN",
    "Entry",
    "Outcome",
    "catalogue",
    "check_fixed",
    "check_program",
    "check_same",
    "load",
    "names",
]


def check_program(entry: Entry, device: torch.device) -> Outcome | None:
    """What people write: the results are eager's, and pgraph says what the entry claims."""
    expected = entry.expected(device)
    if expected == UNSHOWN:
        return None
    outcome = judge(entry.program, device, steps=3)
    text = str(outcome.explanation)
    assert outcome.difference <= entry.tolerance, f"off by {outcome.difference:.3g}\n{text}"
    if expected == CAPTURED:
        assert outcome.explanation.complete, text
        assert outcome.launches, text
        return outcome
    assert not outcome.explanation.complete, text
    reasons = [*outcome.explanation.breaks, *(r for p in outcome.explanation.partitions for r in p.reasons)]
    found = [r for r in reasons if r.code == expected]
    assert found, f"no reason {expected!r}\n{text}"
    assert all(r.sentence and r.fix for r in found), text
    assert any(entry.file.name in str(r.where) for r in found), f"the user's line is missing\n{text}"
    return outcome


def check_fixed(entry: Entry, device: torch.device) -> Outcome:
    """The fixed version: captured as a whole, launched, and equal to eager."""
    outcome = judge(entry.fixed, device, full=True, steps=3)
    text = str(outcome.explanation)
    assert outcome.explanation.complete, text
    assert outcome.launches, text
    assert outcome.difference <= entry.tolerance, f"off by {outcome.difference:.3g}\n{text}"
    return outcome


def check_same(entry: Entry, program: Outcome, fixed: Outcome) -> None:
    """The fix computes what the program did."""
    for number, (before, after) in enumerate(zip(program.results, fixed.results, strict=True)):
        for b, a in zip(before, after, strict=True):
            scale = max(b.abs().max().item(), 1e-6)
            off = (a.double() - b.double()).abs().max().item() / scale
            assert off <= entry.tolerance, f"step {number}: the fix is off by {off:.3g}"
