"""Free memory of the caching allocator in one piece (Note [One piece]), against an allocator of numbers."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from pgraph.drivers.cuda import snapshot
from pgraph.drivers.cuda.cache import empty_into_one_piece

MB = 1 << 20


@dataclasses.dataclass
class Allocator:
    """What the module asks of `torch.cuda`.

    Args:
        reserved, live: bytes of this stream, before and after the cache is emptied.
        others: bytes of another stream.
        limit: ``max_split_size``.
        grows: whether segments are expandable.
        full: whether the device has no memory left.
        taken: sizes that were allocated.
        free: numbers of those that were given back.
    """

    reserved: int = 1000 * MB
    live: int = 200 * MB
    others: int = 0
    limit: int = -1
    grows: bool = False
    full: bool = False
    backend: str = "native"
    taken: list[int] = dataclasses.field(default_factory=list)
    free: list[int] = dataclasses.field(default_factory=list)

    def segments(self) -> list[dict[str, Any]]:
        common = {"device": 0, "is_expandable": self.grows}
        return [
            common | {"segment_pool_id": (0, 0), "stream": 7, "total_size": self.reserved},
            common | {"segment_pool_id": (0, 0), "stream": 8, "total_size": self.others},
            common | {"segment_pool_id": (0, 3), "stream": 7, "total_size": 5000 * MB},
            common | {"segment_pool_id": (0, 0), "stream": 7, "total_size": 5000 * MB, "device": 1},
        ]

    def empty_cache(self) -> None:
        self.reserved = self.live

    def allocate(self, size: int, device: torch.device, stream: int) -> int:
        assert (device, stream) == (torch.device("cuda", 0), 7)
        if self.full:
            raise torch.OutOfMemoryError("no memory")
        self.taken.append(size)
        self.reserved += size
        return len(self.taken)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    answers: dict[str, Any] = {
        "current_stream": lambda: types.SimpleNamespace(cuda_stream=7),
        "current_device": lambda: 0,
        "empty_cache": made.empty_cache,
        "get_allocator_backend": lambda: made.backend,
        "memory_stats": lambda: {"max_split_size": made.limit},
        "caching_allocator_alloc": made.allocate,
        "caching_allocator_delete": made.free.append,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(snapshot, "segments", made.segments)
    return made


def test_what_is_asked_for_is_taken_in_one_piece(allocator: Allocator) -> None:
    assert empty_into_one_piece(380 * MB + 5) == 380 * MB
    assert (allocator.taken, allocator.free) == ([380 * MB], [1])


def test_no_more_is_taken_than_was_given_back(allocator: Allocator) -> None:
    assert empty_into_one_piece(2000 * MB) == 800 * MB
    assert allocator.taken == [800 * MB]


@pytest.mark.parametrize(
    "changes",
    [
        {"limit": 200 * MB},
        {"limit": 0},
        {"grows": True},
        {"backend": "cudaMallocAsync"},
        {"full": True},
        {"others": 64 * MB},
    ],
    ids=["blocks not divided", "limit unknown", "expandable", "other allocator", "device full", "streams"],
)
def test_where_it_would_do_harm_the_cache_is_only_emptied(
    allocator: Allocator, changes: dict[str, Any]
) -> None:
    for name, value in changes.items():
        setattr(allocator, name, value)
    assert empty_into_one_piece(400 * MB) == 0
    assert allocator.taken == []
    assert allocator.reserved == allocator.live


def test_no_piece_may_be_asked_for(allocator: Allocator) -> None:
    assert empty_into_one_piece(0) == 0
    assert allocator.taken == []
    assert allocator.reserved == allocator.live
