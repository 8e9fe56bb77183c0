"""A bar at the terminal while many partitions are captured, and only then."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import host

import pgraph
from pgraph.runtime import progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def look(patch: pytest.MonkeyPatch) -> Screen:
    """From now on stderr is a terminal, and three captures are many. (Before a test pytest sets its own.)"""
    found = Screen()
    patch.setattr(sys, "stderr", found)
    patch.setattr(progress, "MANY", 3)
    return found


def compiled(n: int) -> list[Callable[[torch.Tensor], Any]]:
    return [host(lambda x, k=k: torch.relu(x * k).sum(0)) for k in range(2, n + 2)]


def step(functions: list[Callable[[torch.Tensor], Any]]) -> None:
    for function in functions:
        function(torch.randn(4, 4))


def test_many_captures_show_a_bar_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = look(monkeypatch)
    functions = compiled(5)
    step(functions)
    assert screen.getvalue() == ""
    step(functions)
    assert "pgraph captures" in screen.getvalue()
    assert "/5 " in screen.getvalue()
    assert screen.getvalue().endswith("\r"), "it is wiped out"
    assert progress._bar is None
    before = screen.getvalue()
    step(functions)
    assert screen.getvalue() == before


def test_few_captures_show_none(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = look(monkeypatch)
    functions = compiled(3)
    for _ in range(3):
        step(functions)
    assert screen.getvalue() == ""


def test_no_bar_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = look(monkeypatch)
    monkeypatch.setattr(screen, "isatty", lambda: False)
    functions = compiled(5)
    step(functions)
    step(functions)
    assert screen.getvalue() == ""


@pytest.mark.parametrize("how", ["settled", "reset"])
def test_captures_that_never_come_leave_no_bar(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch)
    functions = compiled(6)
    step(functions)
    step(functions[:4])
    assert progress._bar is not None
    if how == "reset":
        pgraph.reset()
    for _ in range(3 if how == "settled" else 0):
        step(functions[:4])
    assert progress._bar is None


def test_without_tqdm_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    screen = look(monkeypatch)
    functions = compiled(5)
    step(functions)
    step(functions)
    assert screen.getvalue() == ""
    assert pgraph.report().captures == 5
