"""The allocations of a capture: storages in C++ tell when they go, those in Python are asked."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pgraph import compat
from pgraph.native import ghosts, libraries, watch
from pgraph.native.timeline import AskingTimeline, Place, Seen, Timeline
from pgraph.native.watch import AskingWatch
from pgraph.ops.fx import flat_values

KINDS = ["cpp", "python"]


class Capture:
    """So many nodes, and ghost memory that begins at 0: all memory is the capture's."""

    def __init__(self) -> None:
        self.nodes, self.cursor, self.asked = 0, 0, 0

    def count(self) -> int:
        self.asked += 1
        return self.nodes

    def take(self, nbytes: int) -> int:
        self.cursor += 64
        return self.cursor

    def place(self, **changed: Any) -> Place:
        whole = Place(0, (1 << 64) - 1, -1, self.count, lambda: self.cursor, self.take, flat_values)
        return whole._replace(**changed)


@pytest.fixture
def capture() -> Capture:
    return Capture()


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Any:
    """A timeline of either kind."""
    made: list[Timeline] = []

    def one(place: Place) -> Timeline:
        made.append(AskingTimeline(place) if request.param == "python" else in_cpp(place))
        return made[-1]

    yield one
    for timeline in made:
        timeline.close()


Make = Callable[[Place], Timeline]


def in_cpp(place: Place) -> Timeline:
    if libraries.load_tensors() is None:
        pytest.skip("no C++ compiler")
    made = ghosts.calls().timeline(place)
    assert not isinstance(made, AskingTimeline)
    return made


def seen(timeline: Timeline) -> list[Seen]:
    return [Seen(*row) for row in timeline.seen()]


def dead(timeline: Timeline) -> list[int]:
    """Numbers of those that have gone."""
    timeline.boundary()
    return [number for number, one in enumerate(seen(timeline)) if one.death is not None]


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view that keeps the storage, and not the tensor."""
    return compat.reinterpret(tensor, (1,), (1,), 1)


def test_a_storage_lives_as_long_as_its_last_tensor(make: Make, capture: Capture) -> None:
    timeline = make(capture.place())
    x, y = torch.randn(6), torch.randn(3)
    expected = []
    for birth, tensor in ((3, x), (5, y)):
        timeline.adopt(tensor, birth)
        storage = tensor.untyped_storage()
        expected.append(Seen(storage.data_ptr(), storage.nbytes(), birth, None, storage._cdata))
        del storage, tensor
    assert (len(timeline), seen(timeline), timeline.living()) == (2, expected, [0, 1])
    assert [timeline.seen(first) for first in (1, 2, 3)] == [expected[1:], [], []]
    view = part_of(x)
    assert timeline.adopt([view, (x, y)], 9) == 0
    assert len(timeline) == 2, "all of these were seen"
    del x
    capture.nodes = 7
    assert timeline.boundary() == 7
    assert (seen(timeline), timeline.living()) == (expected, [0, 1]), "a view keeps it"
    del view
    assert timeline.living() == [1]
    assert timeline.boundary(8) == 8
    del y
    assert timeline.boundary(11) == 11
    assert seen(timeline) == [one._replace(death=end) for one, end in zip(expected, (8, 11), strict=True)]


def test_boundaries_tell_when_an_address_was_handed_out(make: Make, capture: Capture) -> None:
    timeline = make(capture.place())
    for nodes, cursor in ((0, 0), (0, 0), (0, 5), (1, 5), (1, 5), (2, 9)):
        capture.nodes, capture.cursor = nodes, cursor
        assert timeline.boundary() == timeline.count() == nodes
    assert capture.asked == 12
    timeline.boundary(4)
    assert capture.asked == 12, "it was told"
    assert timeline.marks() == [(0, 0), (5, 0), (5, 1), (9, 2), (9, 4)]


def test_results_of_every_kind(make: Make, capture: Capture) -> None:
    """Empty ones are given addresses; what lies elsewhere, or on another device, is not the capture's."""
    x = torch.randn(4)
    low = x.data_ptr()
    timeline = make(capture.place(low=low, high=low + 1))
    empty, far, meta = torch.empty(0), torch.randn(99), torch.empty(0, device="meta")
    timeline.adopt({"a": [None, 3, "b", empty], "c": (x, far, meta), "d": torch.randn(2, device="meta")}, 2)
    found = {(one.address, one.nbytes) for one in seen(timeline)}
    assert found == {(64, 0), (low, 16)}
    timeline.adopt(None, 2)
    timeline.adopt(empty, 2)
    assert len(timeline) == 2


def test_an_address_is_noted_once(make: Make, capture: Capture) -> None:
    """Two storages at one address are one allocation, until it has gone."""
    timeline, memory = make(capture.place()), torch.randn(8)

    def ghost() -> torch.Tensor:
        return ghosts.calls().ghost(memory.data_ptr(), 16, -1, (4,), (1,), torch.float32, 0)

    one, other = ghost(), ghost()
    timeline.adopt(one, 0)
    timeline.adopt(other, 1)
    assert len(timeline) == 1
    del one
    timeline.boundary(2)
    timeline.adopt(other, 3)
    assert [(s.birth, s.death) for s in seen(timeline)] == [(0, 2), (3, None)]


def test_storages_of_every_kind_are_watched(make: Make, capture: Capture) -> None:
    """Empty ones, parameters, ghosts, and tensors whose implementation is of another class."""
    timeline, memory = make(capture.place()), torch.randn(8)
    tensors: list[Any] = [
        torch.empty(0),
        torch.nn.Parameter(torch.randn(3)),
        ghosts.calls().ghost(memory.data_ptr(), 16, -1, (4,), (1,), torch.float32, 0),
        torch.randn(4, device="meta"),
        torch.eye(2).to_sparse().values(),
    ]
    for number, tensor in enumerate(tensors):
        timeline.track(tensor, 1000 + number, number, number)
        timeline.adopt(tensor, 77)
    assert [one[:3] for one in seen(timeline)] == [(1000 + i, i, i) for i in range(5)]
    assert timeline.living() == list(range(5))
    while tensors:
        tensors.pop()
        tensor = None
        assert dead(timeline) == list(range(len(tensors), 5))


def test_what_has_no_storage_is_an_error(make: Make, capture: Capture) -> None:
    timeline, sparse = make(capture.place()), torch.eye(2).to_sparse()
    for results in (sparse, [sparse]):
        with pytest.raises((NotImplementedError, RuntimeError)):
            timeline.adopt(results, 0)
    with pytest.raises((NotImplementedError, RuntimeError)):
        timeline.track(sparse, 0, 0, 0)
    assert timeline.living() == timeline.seen() == []


@pytest.mark.parametrize("name", ["nodes", "position", "take", "flat"])
def test_what_cannot_be_asked_is_an_error(make: Make, capture: Capture, name: str) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError(name)

    timeline = make(capture.place(**{name: fail}))
    ask = timeline.boundary if name in ("nodes", "position") else lambda: timeline.adopt([torch.empty(0)], 0)
    with pytest.raises(KeyError, match=name):
        ask()


def test_a_watched_tensor_is_as_before(make: Make, capture: Capture) -> None:
    timeline, x = make(capture.place()), torch.arange(6.0)
    address, expected = x.data_ptr(), x.clone()
    timeline.adopt(x, 0)
    assert x.data_ptr() == x.untyped_storage().data_ptr() == address
    x += 1
    assert torch.equal(x, expected + 1)
    assert torch.equal(x.view(2, 3).t().contiguous(), (expected + 1).view(2, 3).t())


def test_a_number_is_not_given_to_another_storage(make: Make, capture: Capture) -> None:
    """A new storage may lie where an old one's object was: it is not taken for that one."""
    timeline = make(capture.place())
    for number in range(200):
        x = torch.randn(4)
        timeline.adopt(x, number)
        del x
        timeline.boundary(number + 1)
    assert [(one.birth, one.death) for one in seen(timeline)] == [(i, i + 1) for i in range(200)]


@pytest.mark.parametrize("answers", [[0, 1, 2], [0, -1, 0, -1, 0, -1, 5], [-1, 0, 3]])
def test_a_counter_in_c_is_asked_first(capture: Capture, answers: list[int]) -> None:
    """Where it cannot tell, Python is asked; if there are nodes by then, it is not called again."""
    left = list(answers)
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
    function = kind(lambda place: left.pop(0) if place == 77 else -9)
    cursor = ctypes.c_uint64(5)
    address = ctypes.cast(function, ctypes.c_void_p).value
    place = capture.place(counter=address, counted=77, cursor=ctypes.addressof(cursor), position=None)
    timeline = in_cpp(place)
    for answer in answers:
        cursor.value += 1
        assert timeline.boundary() == max(answer, 0)
    assert [count for _, count in timeline.marks()] == [max(answer, 0) for answer in answers]
    assert timeline.marks()[-1][0] == cursor.value == 5 + len(answers)
    left[:], capture.nodes = [-1, 99, 99], 4
    assert timeline.count() == timeline.count() == timeline.boundary() == 4
    assert left == [99, 99], "there are nodes, and it could not tell"


def test_memory_is_held_until_it_is_let_go(capture: Capture) -> None:
    """What has gone is not handed out again; afterwards nothing is held."""
    timeline, lent_out = in_cpp(capture.place()), []

    class Owner:
        pass

    def lent() -> torch.Tensor:
        """A tensor on memory whose end is seen."""
        owner, memory = Owner(), bytearray(64)
        lent_out.append(weakref.ref(owner))
        view = memoryview(memory)
        tensor = torch.frombuffer(Lender(view, owner), dtype=torch.uint8)  # type: ignore[call-overload]
        assert timeline.adopt(tensor, 0) == 1
        assert timeline.adopt(tensor, 0) == 0
        return tensor

    first, second = lent(), lent()
    assert all(ref() is not None for ref in lent_out)
    del first
    assert (dead(timeline), timeline.living()) == ([0], [1])
    assert lent_out[0]() is not None, "held"
    timeline.let_go()
    assert lent_out[0]() is None
    del second
    assert dead(timeline) == [0, 1]
    assert lent_out[1]() is None, "held no more"


class Lender:
    """A buffer (PEP 688 is of 3.12) is a memoryview here; `frombuffer` keeps the object that it is given."""

    def __new__(cls, view: memoryview, owner: Any) -> Any:
        import numpy as np

        class Owned(np.ndarray):  # type: ignore[type-arg]
            owner: Any

        array = np.frombuffer(view, dtype=np.uint8).view(Owned)
        array.owner = owner
        return array


def test_a_timeline_that_nobody_has_any_more(capture: Capture) -> None:
    """Storages that outlive it still tell, to nobody; memory that it held is given back."""
    timeline = in_cpp(capture.place())
    x, y = torch.randn(3), torch.randn(3)
    timeline.adopt([x, y], 0)
    del x
    del timeline
    gc.collect()
    assert torch.equal(y + 0, y)
    del y


def test_a_storage_of_another_timeline_is_seen_anew(capture: Capture) -> None:
    one, other, x = in_cpp(capture.place()), in_cpp(capture.place()), torch.randn(3)
    one.adopt(x, 0)
    assert other.adopt([torch.randn(1), x], 0) == 2
    one.let_go()
    del x
    assert dead(other) == [0, 1]
    assert dead(one) == [], "the other one holds what this one watches"
    other.let_go()
    assert dead(one) == [0]


def test_a_storage_that_loses_its_memory_has_gone(capture: Capture) -> None:
    timeline, x = in_cpp(capture.place()), torch.randn(3)
    timeline.adopt(x, 0)
    x.untyped_storage().resize_(0)
    assert (dead(timeline), timeline.living()) == ([0], [])
    timeline.adopt(x, 0)
    assert timeline.living() == [1]


def test_storages_that_go_in_other_threads(make: Make, capture: Capture) -> None:
    timeline = make(capture.place())
    kept = [torch.randn(3) for _ in range(400)]
    timeline.adopt(kept, 0)
    halves = [kept[::2], kept[1::2]]
    kept.clear()
    threads = [threading.Thread(target=half.clear) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dead(timeline) == list(range(400))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("adopt", ()),
        ("adopt", (torch.zeros(1),)),
        ("adopt", (torch.zeros(1), "one")),
        ("track", (torch.zeros(1), 0, 0)),
        ("track", (torch.zeros(1), -1, 0, 0)),
        ("track", (None, 0, 0, 0)),
        ("boundary", ("one",)),
        ("seen", ("one",)),
        ("seen", (-1,)),
    ],
)
def test_wrong_arguments_are_errors(capture: Capture, method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, AttributeError, OverflowError)):
        getattr(in_cpp(capture.place()), method)(*arguments)


@pytest.mark.parametrize("arguments", [(), (3,), ((1, 2),), (tuple("abcdefghij"),)])
def test_what_is_no_place_is_an_error(capture: Capture, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        type(in_cpp(capture.place()))(*arguments)


def test_only_those_whose_tensor_is_gone_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of these at each question: views may keep their storages to the end."""
    asked: list[int] = []
    monkeypatch.setattr(watch, "storage_is_gone", lambda o: asked.append(o) or compat.storage_is_gone(o))
    watching = AskingWatch()
    kept = [torch.randn(3) for _ in range(50)]
    for number, tensor in enumerate(kept):
        watching.add(tensor, number)
    tensor = None
    assert watching.ended() == asked == []
    views = [part_of(kept.pop()), part_of(kept.pop())]
    del kept[:10]
    assert len(watching.ended()) == 10
    assert len(asked) == 12
    asked.clear()
    assert watching.ended() == []
    assert len(asked) == 2
    views.clear()
    assert sorted(watching.ended()) == [48, 49]
    watching.close()
