"""The allocator's state, of a PyTorch that drops what it does not hold (Note [Borrowed references])."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import torch

from pgraph.drivers.cuda import snapshot

STATE = {"segments": [{"address": 4096}], "device_traces": [[], [{"action": "alloc"}]]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each call's argument as text. The call drops a reference to each item, as PyTorch does."""
    calls: list[str] = []

    def give_back(which: tuple[Any, ...]) -> dict[str, Any]:
        calls.append(repr(which))
        for item in which:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(item))
        return STATE

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", give_back, raising=False)
    return calls


def test_a_pools_id_is_still_there_afterwards(asked: list[str]) -> None:
    number = int("1000007")  # an object of its own, not one that the interpreter keeps
    before = sys.getrefcount(number)
    assert snapshot.log(1, (0, number)) == [{"action": "alloc"}]
    assert asked == ["(0, 1000007, True)"]
    assert sys.getrefcount(number) == before


def test_small_numbers_are_not_used_up(asked: list[str]) -> None:
    """Before Python 3.12 each of them is an ordinary object, and the interpreter stops when one is freed."""
    before = [sys.getrefcount(0), sys.getrefcount(False)]
    for _ in range(200):
        assert snapshot.segments() == STATE["segments"]
    after = [sys.getrefcount(0), sys.getrefcount(False)]
    assert asked[-1] == "(0, 0, False)"
    assert all(abs(then - now) < 100 for then, now in zip(before, after, strict=True))
