"""The catalogue of capture failures on a GPU: each fails under plain CUDA graphs as it says, and not here."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest
from gpu_helpers import DEVICE

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from support_catalogue import check_fixed, check_program, load, names

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", names())
def test_fails_under_plain_cuda_graphs(name: str) -> None:
    """In a process of its own: what happens there stays there."""
    from _harness import symptom

    entry = load(name)
    output = symptom(entry)
    if output is None:
        pytest.skip(f"needs {entry.gpus} GPUs")
    assert re.search(entry.shows, output), f"{entry.shows!r} is not in what it printed:\n{output}"


@pytest.mark.parametrize("name", names())
def test_pgraph_is_right_and_says_why(name: str) -> None:
    entry = load(name)
    try:
        check_program(entry, DEVICE)
    finally:
        entry.finish()


@pytest.mark.parametrize("name", names())
def test_the_fix_is_captured_as_a_whole(name: str) -> None:
    entry = load(name)
    try:
        check_fixed(entry, DEVICE)
    finally:
        entry.finish()
