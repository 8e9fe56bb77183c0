"""The allocations of a capture and how long each lives, counted in nodes.

Note [Storages that tell]
In C++ a watched storage owns a token that owns its memory. When the storage goes, the token notes that, and
hands the memory on: it is held until the capture is over. So nobody asks, and the allocator cannot hand out
again what ops returned (Note [One pool per op] in `pgraph.drivers.cuda.session`). A storage whose memory is
replaced or taken away (``resize_``) counts as gone from then on. Without C++ storages are asked
(`pgraph.native.watch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from pgraph.native.watch import AskingWatch

__all__ = ["AskingTimeline", "Place", "Seen", "Timeline"]


class Place(NamedTuple):
    """Where a capture allocates, and how it is learnt how far it is.

    Attributes:
        low, high: ghost addresses; what lies elsewhere is not the capture's.
        device: the index of the GPU that ghosts claim to be on (-1: the CPU).
        nodes: how many are recorded so far.
        position: every ghost address handed out so far lies below it.
        take: bytes -> a fresh ghost address.
        flat: all values within a result that is no plain tensor.
        counter, counted: a C function and its argument that tell what `nodes` does. A number below 0 says
            that `nodes` has to be asked; if that tells of nodes then, the function is not called again. 0:
            there is none.
        cursor: the address of eight bytes that hold `position`. 0: there are none.
    """

    low: int
    high: int
    device: int
    nodes: Callable[[], int]
    position: Callable[[], int]
    take: Callable[[int], int]
    flat: Callable[[Any], list[Any]]
    counter: int = 0
    counted: int = 0
    cursor: int = 0


class Seen(NamedTuple):
    """An allocation: where, and between which counts of nodes it lived.

    Attributes:
        owner: the storage: what PyTorch calls it (`_cdata`) while it lives.
        death: None while it lives.
    """

    address: int
    nbytes: int
    birth: int
    death: int | None
    owner: int


class Timeline(Protocol):
    """Of one capture. Allocations are numbered as they are seen."""

    def __len__(self) -> int:
        """How many there are."""

    def count(self) -> int:
        """The number of nodes recorded so far."""

    def boundary(self, count: int | None = None) -> int:
        """Note deaths up to now; returns the number of nodes recorded.

        Args:
            count: that number, where it was just asked for: a driver needs longer to tell than all else here.
        """

    def adopt(self, results: Any, birth: int) -> int:
        """Note the allocations that an op returned tensors in, as far as they were not seen before.

        Returns:
            Of how many the memory is held until `let_go`.
        """

    def track(self, tensor: torch.Tensor, address: int, nbytes: int, birth: int) -> None:
        """Note one of which all is known, and which was not seen before."""

    def seen(self, first: int = 0) -> list[tuple[int, int, int, int | None, int]]:
        """A `Seen` for each from that number on."""

    def marks(self) -> list[tuple[int, int]]:
        """(position, count) at each boundary: tells when an address was handed out."""

    def living(self) -> list[int]:
        """Numbers of those that have not gone, ascending."""

    def let_go(self) -> None:
        """Give back memory that is held, and hold none from now on."""

    def close(self) -> None:
        """As `let_go`, and watch nothing any more. To be called last."""


class AskingTimeline(Timeline):
    """The reference, and what serves without C++."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._watch = AskingWatch()
        self._seen: list[Seen] = []
        self._known: set[int] = set()  # addresses of those that live
        self._marks: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._seen)

    def count(self) -> int:
        return self._place.nodes()

    def boundary(self, count: int | None = None) -> int:
        if count is None:
            count = self._place.nodes()
        mark = self._place.position(), count
        if not self._marks or self._marks[-1] != mark:
            self._marks.append(mark)
        for number in self._watch.ended():
            self._seen[number] = self._seen[number]._replace(death=count)
            self._known.discard(self._seen[number].address)
        return count

    def adopt(self, results: Any, birth: int) -> int:
        if type(results) is torch.Tensor:
            self._adopt(results, birth)
            return 0
        for leaf in self._place.flat(results):
            if isinstance(leaf, torch.Tensor):
                self._adopt(leaf, birth)
        return 0

    def _adopt(self, tensor: torch.Tensor, birth: int) -> None:
        found = self._watch.first_seen(tensor)
        if found is None:
            return  # a view, an argument, an alias of an input: its storage may begin before its range
        (address, nbytes), place = found, self._place
        if nbytes == 0:
            device = tensor.device
            if (
                device.index if device.type == "cuda" else -1 if device.type == "cpu" else None
            ) == place.device:
                self.track(tensor, place.take(0), 0, birth)  # allocators give no address
        elif place.low <= address < place.high and address not in self._known:
            self.track(tensor, address, nbytes, birth)

    def track(self, tensor: torch.Tensor, address: int, nbytes: int, birth: int) -> None:
        owner = self._watch.add(tensor, len(self._seen))
        self._seen.append(Seen(address, nbytes, birth, None, owner))
        self._known.add(address)

    def seen(self, first: int = 0) -> list[tuple[int, int, int, int | None, int]]:
        return list(self._seen[first:])

    def marks(self) -> list[tuple[int, int]]:
        return self._marks

    def living(self) -> list[int]:
        return self._watch.living()

    def let_go(self) -> None:
        return None

    def close(self) -> None:
        self._watch.close()
