"""Sets of what lives, used by several threads at once."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from pgraph.runtime import holdings
from pgraph.runtime.budget import Budget
from pgraph.runtime.members import Members
from pgraph.runtime.purse import Purse


class One:
    """A member; what a purse asks of one as well."""

    debt = 0.0


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_another_thread_may_add_while_all_are_looked_at() -> None:
    """A `WeakSet` raises then, in nearly each of these rounds."""
    members, purse, done = Members[One](), Purse(), threading.Event()
    kept = [One() for _ in range(300)]
    for one in kept:
        members.add(one)

    def more() -> None:
        while not done.is_set():
            new = [One() for _ in range(50)]
            for one in new:
                members.add(one)
                purse.join(one)
                members.discard(one)

    thread = threading.Thread(target=more)
    thread.start()
    try:
        for k in range(300):
            assert set(kept) <= set(members.all())
            assert purse.debts(float(k)) == 0.0
    finally:
        done.set()
        thread.join()


def test_members_are_not_kept_alive() -> None:
    members = Members[One]()
    one = One()
    gone, seen = One(), list[int]()
    members.add(one)
    members.add(gone)
    # What is freed may ask for all members, and be freed while they are listed.
    weakref.finalize(gone, lambda: seen.append(len(members.all())))
    with members._lock:
        del gone
        gc.collect()
    assert (members.all(), seen) == ([one], [1])
    members.clear()
    assert members.all() == []


def test_one_budget_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads ask for it first."""
    monkeypatch.setattr(holdings, "_budgets", {})
    device, real = torch.device("cpu"), holdings.Budget

    others: list[object] = []

    def slow(*given: object) -> Budget[holdings.Unit]:
        monkeypatch.setattr(holdings, "Budget", real)
        others.append(holdings.budgets_of(device))  # as another thread would, in between
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(holdings, "Budget", slow)
    assert holdings.budgets_of(device) is others[0] is holdings._budgets[device]
