"""Which storages still live: those in C++ tell when they go, those in Python are asked."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from pgraph import compat
from pgraph.native import ghosts, libraries, watch
from pgraph.native.watch import AskingWatch, Watch

KINDS = ["cpp", "python"]


@pytest.fixture(params=KINDS)
def watching(request: pytest.FixtureRequest) -> Any:
    made = AskingWatch() if request.param == "python" else in_cpp()
    yield made
    made.close()


def in_cpp() -> Watch:
    if libraries.load_tensors() is None:
        pytest.skip("no C++ compiler")
    made = ghosts.calls().watch()
    assert made.holds
    return made


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view that keeps the storage, and not the tensor."""
    return compat.reinterpret(tensor, (1,), (1,), 1)


def test_a_storage_ends_with_its_last_tensor(watching: Watch) -> None:
    x, y = torch.randn(6), torch.randn(3)
    for number, tensor in enumerate((x, y)):
        storage = tensor.untyped_storage()
        assert watching.first_seen(tensor) == (storage.data_ptr(), storage.nbytes())
        assert watching.add(tensor, number) == storage._cdata
        del storage, tensor
    view = part_of(x)
    assert watching.first_seen(view) is watching.first_seen(x) is watching.first_seen(y) is None
    assert (watching.ended(), watching.living()) == ([], [0, 1])
    del x
    assert (watching.ended(), watching.living()) == ([], [0, 1]), "a view keeps it"
    del view, y
    assert watching.living() == []
    assert sorted(watching.ended()) == [0, 1]
    assert watching.ended() == []


def test_storages_of_every_kind_are_watched(watching: Watch) -> None:
    """Empty ones, parameters, ghosts, and tensors whose implementation is of another class."""
    memory = torch.randn(8)
    tensors: list[Any] = [
        torch.empty(0),
        torch.nn.Parameter(torch.randn(3)),
        ghosts.calls().ghost(memory.data_ptr(), 16, -1, (4,), (1,), torch.float32, 0),
        torch.randn(4, device="meta"),
        torch.eye(2).to_sparse().values(),
    ]
    for number, tensor in enumerate(tensors):
        assert watching.first_seen(tensor) is not None
        watching.add(tensor, number)
        assert watching.first_seen(tensor) is None
    assert watching.living() == list(range(5))
    while tensors:
        tensors.pop()
        tensor = None
        assert len(watching.ended()) == 1


def test_what_has_no_storage_is_an_error(watching: Watch) -> None:
    sparse = torch.eye(2).to_sparse()
    with pytest.raises((NotImplementedError, RuntimeError)):
        watching.first_seen(sparse)
    with pytest.raises((NotImplementedError, RuntimeError)):
        watching.add(sparse, 0)
    assert watching.living() == watching.ended() == []


def test_a_watched_tensor_is_as_before(watching: Watch) -> None:
    x = torch.arange(6.0)
    address, expected = x.data_ptr(), x.clone()
    watching.add(x, 7)
    assert x.data_ptr() == x.untyped_storage().data_ptr() == address
    x += 1
    assert torch.equal(x, expected + 1)
    assert torch.equal(x.view(2, 3).t().contiguous(), (expected + 1).view(2, 3).t())


def test_a_number_is_not_given_to_another_storage(watching: Watch) -> None:
    """A new storage may lie where an old one's object was: it is not taken for that one."""
    for number in range(200):
        x = torch.randn(4)
        assert watching.first_seen(x) is not None
        watching.add(x, number)
        del x
    assert sorted(watching.ended()) == list(range(200))


def test_memory_is_held_until_it_is_let_go() -> None:
    """What has gone is not handed out again; afterwards nothing is held."""
    watching, seen = in_cpp(), []

    class Owner:
        pass

    def lent(number: int) -> torch.Tensor:
        """A tensor on memory whose end is seen."""
        owner, memory = Owner(), bytearray(64)
        seen.append(weakref.ref(owner))
        view = memoryview(memory)
        tensor = torch.frombuffer(Lender(view, owner), dtype=torch.uint8)  # type: ignore[call-overload]
        watching.add(tensor, number)
        return tensor

    first, second = lent(0), lent(1)
    assert all(ref() is not None for ref in seen)
    del first
    assert (watching.ended(), watching.living()) == ([0], [1])
    assert seen[0]() is not None, "held"
    watching.let_go()
    assert seen[0]() is None
    del second
    assert watching.ended() == [1]
    assert seen[1]() is None, "held no more"


class Lender:
    """A buffer (PEP 688 is of 3.12) is a memoryview here; `frombuffer` keeps the object that it is given."""

    def __new__(cls, view: memoryview, owner: Any) -> Any:
        import numpy as np

        class Owned(np.ndarray):  # type: ignore[type-arg]
            owner: Any

        array = np.frombuffer(view, dtype=np.uint8).view(Owned)
        array.owner = owner
        return array


def test_a_watch_that_nobody_has_any_more() -> None:
    """Storages that outlive it still tell, to nobody; memory that it held is given back."""
    watching = in_cpp()
    x, y = torch.randn(3), torch.randn(3)
    watching.add(x, 0)
    watching.add(y, 1)
    del x
    del watching
    gc.collect()
    assert torch.equal(y + 0, y)
    del y


def test_a_storage_of_another_watch_is_seen_anew() -> None:
    one, other, x = in_cpp(), in_cpp(), torch.randn(3)
    one.add(x, 0)
    assert other.first_seen(x) is not None
    other.add(x, 5)
    one.let_go()
    del x
    assert other.ended() == [5]
    assert one.ended() == [], "the other one holds what this one watches"
    other.let_go()
    assert one.ended() == [0]


def test_a_storage_that_loses_its_memory_has_gone() -> None:
    watching, x = in_cpp(), torch.randn(3)
    watching.add(x, 0)
    x.untyped_storage().resize_(0)
    assert (watching.ended(), watching.living()) == ([0], [])
    assert watching.first_seen(x) is not None


def test_storages_that_go_in_other_threads(watching: Watch) -> None:
    kept = [torch.randn(3) for _ in range(400)]
    for number, tensor in enumerate(kept):
        watching.add(tensor, number)
    tensor = None
    halves = [kept[::2], kept[1::2]]
    kept.clear()
    threads = [threading.Thread(target=half.clear) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(watching.ended()) == list(range(400))


@pytest.mark.parametrize("arguments", [(), (torch.zeros(1),), (torch.zeros(1), "one"), (None, 0)])
def test_what_cannot_be_watched_is_an_error(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        in_cpp().add(*arguments)


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
