"""Which versions of PyTorch are known, and that each private interface has a test (see `test_compat`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pgraph import backend, compat


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.11.0+cu130", True),
        ("2.13.0+cpu", True),
        ("2.15.3", True),
        ("2.10.1", False),
        ("2.16.0a0+gitabc", False),
        ("3.0.0", False),
    ],
)
def test_versions_that_are_known(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    told = compat.untested()
    assert (told is None) == known
    if told is not None:
        assert told.startswith(f"pgraph is made for torch 2.11 to 2.15, and this is {version}, whose")


def test_an_unknown_version_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend._tell_of_version.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    for size in (3, 4):
        torch.compile(lambda x: x + 1, backend="pgraph", dynamic=False)(torch.ones(size))
    backend._tell_of_version.cache_clear()
    assert sum("this is 2.16.0" in record.getMessage() for record in caplog.records) == 1


TRITONS = ("awaits_tuning", "handle_of", "launcher_of")
ELSEWHERE = dict.fromkeys(TRITONS, "test_cuda_triton.py")  # of Inductor's own code

RECORDS = {"Compilation", "Joint", "Launcher", "Strides", "Tracing"}  # what functions return


@pytest.mark.parametrize("name", sorted(set(compat.__all__) - RECORDS))
def test_each_private_interface_has_a_test(name: str) -> None:
    here = Path(__file__).parent
    files = [here / ELSEWHERE[name]] if name in ELSEWHERE else sorted(here.glob("test_compat*.py"))
    text = "\n".join(file.read_text() for file in files)
    assert re.search(rf"\bcompat\.{name}\b", text)
