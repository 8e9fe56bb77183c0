"""Lifetimes that a recorder sees: a range dies with its storage, not with the tensor that it was seen in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pgraph.capture import recorder
from pgraph.capture.record import record
from pgraph.capture.recorder import GhostRange, Recorder
from pgraph.drivers.host.driver import HostDriver, HostSession
from pgraph.template.recording import Recording

ATEN = torch.ops.aten


def recorded(fn: Any) -> Recording:
    driver = HostDriver()
    with driver.capture_lock(), driver.arena(0) as arena:
        return record(driver, arena, fn, [torch.randn(8, 8)], [16])


def test_a_view_keeps_its_storage() -> None:
    def fn(args: list[Any]) -> list[torch.Tensor]:
        x = args.pop()
        y = ATEN.mul(x, 2)  # node 0
        row = ATEN.select(y, 0, 1)
        del y
        z = ATEN.sin(x)  # node 1
        w = ATEN.add(row, z)  # node 2, the last to read the row
        del row, x
        return [ATEN.cos(w)]  # node 3

    found = recorded(fn)
    lives = {(a.birth, a.death) for a in found.allocations}
    assert (0, 3) in lives, f"y, by its view: {lives}"
    assert (1, None) in lives or (1, 4) in lives, f"z is held by nobody else: {lives}"


def test_a_tensor_dies_at_the_op_that_follows() -> None:
    def fn(args: list[Any]) -> list[torch.Tensor]:
        x = args.pop()
        for _ in range(5):
            x = ATEN.sin(x)
        return [x]

    found = recorded(fn)
    assert [(a.birth, a.death) for a in found.allocations[1:-1]] == [(0, 2), (1, 3), (2, 4), (3, 5)]


def test_only_those_whose_tensor_is_gone_are_asked() -> None:
    asked: list[GhostRange] = []

    class Watched(list[GhostRange]):
        def __iter__(self) -> Any:
            found = list(super().__iter__())
            asked.extend(found)
            return iter(found)

    real = Recorder.__init__

    def init(self: Recorder, session: Any) -> None:
        real(self, session)
        self._orphans = Watched()

    def fn(args: list[Any]) -> list[torch.Tensor]:
        x = args.pop()
        kept = [ATEN.sin(x) for _ in range(50)]
        return [*kept, ATEN.cos(x)]

    Recorder.__init__ = init  # type: ignore[method-assign]
    try:
        recorded(fn)
    finally:
        Recorder.__init__ = real  # type: ignore[method-assign]
    assert len(asked) < 200, f"{len(asked)} ranges were asked for 51 ops"


def test_each_op_asks_twice_for_the_count_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver needs longer to tell than all else that is noted of an op."""
    asked = []
    real = HostSession.node_count

    def node_count(self: HostSession) -> int:
        asked.append(real(self))
        return asked[-1]

    monkeypatch.setattr(HostSession, "node_count", node_count)

    def fn(args: list[Any]) -> list[torch.Tensor]:
        x = args.pop()
        for _ in range(3):
            x = ATEN.sin(x)
        return [x]

    recorded(fn)
    assert asked == [0, 1, 1, 2, 2, 3, 3]


def test_results_are_found_by_a_look_at_each_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a look at all of them for each result."""
    looked = []

    class Looked(GhostRange):
        @property
        def owner(self) -> Any:
            looked.append(self)
            return self.kept

        @owner.setter
        def owner(self, value: Any) -> None:
            self.kept = value

    monkeypatch.setattr(recorder, "GhostRange", Looked)

    def fn(args: list[Any]) -> list[torch.Tensor]:
        x = args.pop()
        return [x, *(ATEN.sin(x) for _ in range(50))]

    found = recorded(fn)
    assert [output.region for output in found.outputs] == [None, *range(1, 51)]
    assert len(looked) < 50 * 10
