"""Nodes of a capture under way, counted over stand-ins for the driver's functions."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pgraph.capture import build
from pgraph.drivers.host.driver import HostDriver, HostSession
from pgraph.errors import CaptureError, DriverError, RecountError
from pgraph.native import libraries
from pgraph.reasons import Reason
from pgraph.template.topology import Topology, in_order, topology

cuda_counts = pytest.importorskip("pgraph.drivers.cuda.counts", reason="needs cuda-bindings")

P, INT, SIZE, N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, 100
native = pytest.mark.skipif(libraries.load() is None, reason="no C compiler, or PGRAPH_NATIVE=0")


class Capture:
    """A capture of stream 5 into graph 9, in which two further streams may take part.

    Attributes:
        waits: of each node, those that it waits for. The i-th has the handle 100 + i.
        ends: of each stream, what its next node waits for.
        reduced: whether a stream that is joined is all that is waited for, where it has waited for the rest.
    """

    def __init__(self, reduced: bool = False) -> None:
        self.waits: list[set[int]] = []
        self.ends: list[set[int]] = [set(), set(), set()]
        self.reduced, self.walked, self.counted, self.status, self.code = reduced, 0, 0, 1, 0
        self.made = [
            ctypes.CFUNCTYPE(INT, P, P, P, P, P, P)(self._info),
            ctypes.CFUNCTYPE(INT, P, P, P, P)(self._before),
            ctypes.CFUNCTYPE(INT, P, P, P, P)(self._behind),
        ]

    def in_place(self, patch: pytest.MonkeyPatch) -> None:
        """Have the driver's functions told by it."""
        addresses = tuple(ctypes.cast(f, P).value for f in self.made)
        patch.setattr(cuda_counts, "_functions", lambda: addresses)
        patch.setattr(cuda_counts, "_whole", lambda: self._all)

    def launch(self, stream: int) -> None:
        self.waits.append(set(self.ends[stream]))
        self.ends[stream] = {len(self.waits) - 1}

    def wait(self, stream: int, other: int) -> None:
        ends = self.ends[stream] | self.ends[other]
        if self.reduced:
            ends -= set().union(*map(self._earlier, ends))
        self.ends[stream] = ends

    def _earlier(self, node: int) -> set[int]:
        return self.waits[node].union(*map(self._earlier, self.waits[node]))

    def order(self) -> Topology:
        edges = [(a, b) for b, waits in enumerate(self.waits) for a in waits]
        found = in_order(len(self.waits), edges)
        assert found is not None
        place = {node: i for i, node in enumerate(found)}
        return topology(len(self.waits), [(place[a], place[b]) for a, b in edges])

    def _info(self, stream: int, status: int, number: int, graph: int, ends: int, count: int) -> int:
        assert stream == 5
        INT.from_address(status).value = self.status
        self.table = (P * 8)(*(N + i for i in sorted(self.ends[0])))
        P.from_address(ends).value = ctypes.addressof(self.table)
        SIZE.from_address(count).value = len(self.ends[0])
        return 0

    def _before(self, node: int, found: int, data: int, count: int) -> int:
        self.walked += 1
        room = SIZE.from_address(count)
        waits = sorted(self.waits[node - N])[: room.value]
        (P * room.value).from_address(found)[: len(waits)] = [N + i for i in waits]
        assert data, "without it the driver refuses to tell of edges that are no plain ones"
        room.value = len(waits)
        return 0

    def _behind(self, node: int, found: None, data: None, count: int) -> int:
        assert found is None
        SIZE.from_address(count).value = sum(node - N in waits for waits in self.waits)
        return 0

    def _all(self, graph: int, found: None, count: int) -> int:
        assert (graph, found) == (9, None)
        self.counted += 1
        SIZE.from_address(count).value = len(self.waits)
        return self.code


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), st.sampled_from((0, 0, 0, 1, 2))),
        st.tuples(st.just("wait"), st.sampled_from(((0, 1), (1, 0), (2, 0), (0, 2), (1, 2)))),
        st.just(("count", None)),
    ),
    max_size=16,
)


@native
@given(steps=STEPS, reduced=st.booleans(), whole=st.booleans())
@settings(max_examples=1500, deadline=None)
def test_counts_are_right_or_known_to_be_wrong(
    steps: list[tuple[str, Any]], reduced: bool, whole: bool
) -> None:
    """Whatever other streams record, and whether or not the driver leaves edges out that say nothing new."""
    capture = Capture(reduced)
    with pytest.MonkeyPatch.context() as patch:
        capture.in_place(patch)
        count, right = cuda_counts.NodeCount(5, 9, cuda_counts.Counting(whole)), True
        for what, which in steps:
            if what == "launch":
                capture.launch(which)
            elif what == "wait":
                capture.wait(*which)
            else:
                right &= count.now() == len(capture.waits)
        order = capture.order()
    if count.was_right(order):
        assert right
    assert count.was_right(order) == (whole or order.is_chain)


@native
def test_each_node_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked; the driver counts all nodes before the first only."""
    capture = Capture()
    capture.in_place(monkeypatch)
    count = cuda_counts.NodeCount(5, 9, cuda_counts.Counting())
    assert count.now() == 0
    for n in range(1, 60):
        capture.launch(0)
        assert [count.now() for _ in range(1 + n % 2)] == [n] * (1 + n % 2)
        if n % 7 == 0:
            capture.launch(0)
            capture.launch(0)
            assert count.checked() == len(capture.waits)
            break
    before = capture.counted
    for n in range(len(capture.waits) + 1, 90):
        capture.launch(0)
        assert count.now() == n
    assert (capture.walked, capture.counted) == (len(capture.waits), before)
    assert count.was_right(capture.order())


@native
def test_a_chain_with_a_node_of_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the graph alone nobody could tell when it was recorded; the node at the end of the path tells."""
    capture = Capture(reduced=True)
    capture.in_place(monkeypatch)
    count = cuda_counts.NodeCount(5, 9, cuda_counts.Counting())
    capture.launch(0)
    assert count.now() == 1
    capture.wait(1, 0)
    capture.launch(1)
    assert count.now() == 2
    capture.wait(0, 1)
    capture.launch(0)
    assert count.now() == 3
    assert capture.order().is_chain
    assert count.was_right(capture.order())


@native
def test_what_a_check_finds_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node waits for an earlier one than the path's end: only to count all of them shows that."""
    capture = Capture()
    capture.in_place(monkeypatch)
    count = cuda_counts.NodeCount(5, 9, cuda_counts.Counting())
    capture.launch(0)
    capture.wait(1, 0)
    capture.launch(0)
    capture.launch(1)
    assert (count.now(), count.checked()) == (2, 3)
    assert not count.was_right(topology(3, [(0, 1), (1, 2)]))


@native
def test_after_a_fork_all_nodes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the capture that is made again, and by all later ones."""
    counting = cuda_counts.Counting()
    for right in (False, True, True):
        capture = Capture()
        capture.in_place(monkeypatch)
        count = cuda_counts.NodeCount(5, 9, counting)
        capture.launch(0)
        capture.wait(1, 0)
        capture.launch(0)
        capture.launch(1)
        assert count.now() == (3 if right else 2)
        capture.wait(0, 1)
        capture.launch(0)
        assert count.now() == 4
        assert count.was_right(capture.order()) == right


@pytest.mark.parametrize("lost", ["status", "code"])
def test_a_lost_capture_is_told(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream says that it captures no more; then, and without the helper, the graph is asked."""
    capture = Capture()
    capture.in_place(monkeypatch)
    if lost == "code":
        monkeypatch.setattr(cuda_counts.libraries, "load", lambda: None)
    count = cuda_counts.NodeCount(5, 9, cuda_counts.Counting())
    capture.launch(0)
    assert count.now() == 1
    capture.status, capture.code = 2, 901
    with pytest.raises(CaptureError, match="the capture was lost: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        count.now()
    capture.code = 2
    with pytest.raises(DriverError, match="the capture was lost: CUDA_ERROR_OUT_OF_MEMORY"):
        count.now()


@pytest.mark.parametrize("at", [0, 1])
def test_a_miscounted_capture_is_made_again(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both recordings, on arenas of their own; whoever asked for them does not see it."""
    ends: list[Any] = []
    real = HostSession.end

    def end(self: HostSession, with_kept: bool, *tracked: Any) -> Any:
        ends.append(self.arena)
        if len(ends) == at + 1:
            raise RecountError("nodes were counted along one path, and there are several")
        return real(self, with_kept, *tracked)

    monkeypatch.setattr(HostSession, "end", end)
    built = build.build(HostDriver(), lambda args: [args.pop() + 1], [torch.ones(4)], [16])
    assert len(built.template.nodes) == 1
    assert len(ends) == len({id(arena) for arena in ends}) == at + 3


@torch.library.custom_op("pgraph_counts::aside", mutates_args=())
def aside(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@aside.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("found", [0, 1])
def test_an_op_is_accused_of_recording_nothing_when_all_is_counted(
    found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node may be another stream's, which the path does not lead to yet."""
    monkeypatch.setattr(HostSession, "node_count", lambda self: 0)
    monkeypatch.setattr(HostSession, "checked_count", lambda self: found)
    stopped = CaptureError(Reason("capture-lost", "it came to the end"))

    def end(self: HostSession, with_kept: bool, *tracked: Any) -> Any:
        raise stopped

    monkeypatch.setattr(HostSession, "end", end)
    with pytest.raises(CaptureError) as e:
        build.build(HostDriver(), lambda args: [aside(args.pop())], [torch.ones(4)], [16])
    assert e.value.reason.code == ("capture-lost" if found else "not-recorded")
