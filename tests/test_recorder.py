"""Lifetimes that a recorder sees: a range dies with its storage, not with the tensor that it was seen in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pgraph.capture import recorder
from pgraph.capture.record import record
from pgraph.capture.recorder import GhostRange
from pgraph.drivers.host.driver import HostDriver, HostSession
from pgraph.reasons import Dispatch
from pgraph.template.recording import Recording

ATEN = torch.ops.aten


def recorded(fn: Any, like: Sequence[Dispatch] = ()) -> Recording:
    driver = HostDriver()
    with driver.capture_lock(), driver.arena(0) as arena:
        return record(driver, arena, fn, [torch.randn(8, 8)], [16], like=like)


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


def test_views_are_no_allocations() -> None:
    """Not of an argument whose storage begins before it, and not of an empty result."""

    def fn(args: list[Any]) -> list[torch.Tensor]:
        x = args.pop()
        nothing = ATEN.mul(ATEN.slice(x, 0, 0, 0), 2)
        return [ATEN.t(x), ATEN.slice(nothing, 1, 1, 3)]

    driver = HostDriver()
    with driver.capture_lock(), driver.arena(0) as arena:
        found = record(driver, arena, fn, [torch.randn(10, 8)[2:]], [16])
    assert [(a.nbytes, a.birth) for a in found.allocations] == [(256, 0), (0, 0)]
    assert [(output.input, output.region) for output in found.outputs] == [(0, None), (None, 1)]


def test_a_tensor_dies_at_the_op_that_follows() -> None:
    def fn(args: list[Any]) -> list[torch.Tensor]:
        x = args.pop()
        for _ in range(5):
            x = ATEN.sin(x)
        return [x]

    found = recorded(fn)
    assert [(a.birth, a.death) for a in found.allocations[1:-1]] == [(0, 2), (1, 3), (2, 4), (3, 5)]


def test_how_often_the_count_of_nodes_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver needs longer to tell than all else that is noted of an op: twice for each, once for a view."""
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
        return [ATEN.t(x)]

    recorded(fn)
    assert asked == [0, 1, 1, 2, 2, 3, 3, 3]


def of_all_kinds(args: list[Any]) -> list[torch.Tensor]:
    """Views of results and of arguments, empty ones, several results, ops in place and in two parts."""
    x = args.pop()
    y = ATEN.mul(x, 2)
    row = ATEN.select(y, 0, 1)
    del y
    nothing = ATEN.slice(x, 0, 0, 0)
    left, right = ATEN.split_with_sizes(ATEN.sin(x), [3, 5], 1)
    del left
    turned = ATEN.t(x)
    values, places = ATEN.topk(ATEN.cos(turned), 2)
    del places
    ATEN.add_(values, 1)
    image, weight = ATEN.view(ATEN.exp(x), [1, 1, 8, 8]), ATEN.view(ATEN.abs(row), [1, 1, 2, 4])
    shape = ([1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    grad = ATEN.convolution(image, weight, None, *shape[1:])
    gradients = ATEN.convolution_backward(grad, image, weight, *shape, [True, True, False])
    return [nothing, right, ATEN.t(values), ATEN.empty([0]), *gradients[:2], x]


def told(recording: Recording) -> Any:
    """All of a recording but its addresses."""
    low = recording.ghost_range[0]
    places = [(a.address - low, *a[1:]) for a in recording.allocations]
    nodes = [(n.kind, n.name, len(n.params)) for n in recording.nodes]
    facts = recording.outputs, recording.builtin, recording.steps, recording.ops
    return nodes, recording.order, places, recording.n_inputs, facts, recording.ghost_range[1] - low


def test_views_are_recorded_as_ops_that_might_record_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of them saves time and changes nothing."""
    known = told(recorded(of_all_kinds))
    monkeypatch.setattr(recorder, "VIEWS", frozenset())
    assert told(recorded(of_all_kinds)) == known
    assert len(known[0]) > 10


def test_the_ops_of_an_earlier_capture_are_not_described_again(monkeypatch: pytest.MonkeyPatch) -> None:
    described = []
    real = recorder.arguments_of
    monkeypatch.setattr(recorder, "arguments_of", lambda op, *rest: described.append(op) or real(op, *rest))
    first = recorded(of_all_kinds)
    assert len(described) == len(first.ops)
    described.clear()
    second = recorded(of_all_kinds, first.ops)
    assert described == []
    assert second.ops == first.ops
    other = (
        first.ops[0],
        first.ops[1]._replace(op="aten::cos"),
        first.ops[2]._replace(end=9),
        *first.ops[3:],
    )
    assert recorded(of_all_kinds, other).ops == first.ops
    assert [op.overloadpacket for op in described] == [ATEN.sin, ATEN.cos]
    assert recorded(of_all_kinds, first.ops[:2]).ops == first.ops


def test_dynamo_is_off_while_code_is_recorded() -> None:
    """Or it would look at each frame that a dispatch makes, and compile pgraph itself."""
    eval_frame = torch._C._dynamo.eval_frame
    seen = []

    def fn(args: list[Any]) -> list[torch.Tensor]:
        seen.append(eval_frame.get_eval_frame_callback())
        return [ATEN.sin(args.pop())]

    before = eval_frame.set_eval_frame(False)  # what compiled code that calls further functions leaves
    try:
        recorded(fn)
        after = eval_frame.get_eval_frame_callback()
    finally:
        eval_frame.set_eval_frame(before)
    assert (seen, after) == ([None], False)


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
