"""Which specializations get an exec for each set of addresses that takes turns, or of their own.

See Note [An exec for each layer] in `pgraph.drivers.turns`. A replica takes memory of the device, and gains
nothing where the device sets the pace. So what launches find is watched for a while, and there are replicas
if all of these hold:

* launches have set several nodes each (`FEW`, and one in `PART` at least), again and again;
* most of the last launches found addresses that were nearly all an earlier one's, and there are not too many
  such sets (`MOST`): small tensors wander about in the allocator's memory, and an input may be new each time;
* at most of these launches the device had done all that was asked of it before;
* the execs of all partitions take no more than a part of what captures may take (`SHARE`), these included.

A size that shares its execs with others gets its own once it was launched fifteen times, whatever its
launches found, and leaves the shared ones to the others. Grids differ from size to size, and functions: to
set those of all nodes takes a launch 0.23 ms longer for 85 nodes, and 0.38 ms for 165 (H200). A replica takes
0.7 to 0.9 ms, as much as three such launches, but memory of the device as well: in 3,000 steps on 241 random
lengths 120 MB after fifteen launches of a size, and 340 MB after three, for a tenth of the time. Where few
sizes are expected (`pgraph.runtime.economy`), a size gets its own as soon as it comes again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from pgraph.drivers.execs import Recipe
from pgraph.drivers.interface import Driver, Passed
from pgraph.drivers.turns import SIMILAR
from pgraph.errors import DriverError
from pgraph.runtime.budget import EXEC_BYTES, NODE_BYTES
from pgraph.text import amount

__all__ = ["FEW", "MOST", "PART", "SHARE", "Replication"]

log = logging.getLogger(__name__)

FEW: Final = 4
"""Nodes: a launch that sets fewer is left alone."""

PART: Final = 8
"""A launch that sets fewer than one in so many of its nodes spends its time elsewhere."""

MOST: Final = 128
"""Sets of addresses that may take turns."""

SHARE: Final = 1 / 2
"""Of the memory that captures may take."""

_WINDOWS = (24, 72, 216, 512)  # so many of the last ones: earlier ones may have found what never comes again
_REPEATED = 3 / 4  # of the launches that found what others did, nearly
_FLUX = 72  # of so many, most found a new set: it goes on like this
_ROUNDS = 3  # for each set: of more sets than were found in fewer, some may not have come twice yet


class _WatchSchedule(NamedTuple):
    """When launches are watched.

    Args:
        begin: so many that set several nodes come before.
        look: watched ones after which it is decided, again and again.
        last: and after which no more are watched.
    """

    begin: int
    look: int
    last: int


_ALONE: Final = _WatchSchedule(8, 24, 512)
_OF_SEVERAL: Final = _WatchSchedule(12, 3, 36)
_OF_FEW: Final = _WatchSchedule(1, 1, 36)  # a server of 32 sizes has nearly all of them after some 250 calls


class Replication:
    """Of one specialization. Called by one thread at a time.

    Args:
        name: of the partition.
        recipes: of its chunks, with the number of each one's nodes.
        driver: makes replicas.
        shared: whether other sizes use the same execs.
        few: whether few sizes are expected.

    Attributes:
        worth: nodes that a launch must set to count.
        over: it was decided.
        nbytes: of the device's memory that replicas count for.
        exec_bytes: as it was measured.
        recipe_bytes: of the host's memory.
    """

    def __init__(
        self,
        name: str,
        recipes: Sequence[tuple[Recipe, int]],
        driver: Driver,
        shared: bool = False,
        few: bool = False,
    ) -> None:
        self._name, self._shared = name, shared
        self._pace = (_OF_FEW if few else _OF_SEVERAL) if shared else _ALONE
        self._recipes = tuple(recipes)
        self._driver = driver
        self.worth = max(FEW, -(-sum(nodes for _, nodes in recipes) // PART))
        self._launches = self._waited = 0
        self._sets = [_Sets(self._pace.last) for _ in recipes]
        self._passed: Passed | None = None
        self.over = False
        self.nbytes = self.exec_bytes = self.recipe_bytes = 0

    def moved(self, room: Callable[[], int]) -> None:
        """A launch has set as many nodes as count. It has its results: whatever goes wrong here is only told.

        Args:
            room: tells how many bytes of the device's memory replicas may take now.
        """
        try:
            self._moved(room)
        except Exception as e:
            log.warning("%s gets no further execs: %s: %s", self._name, type(e).__name__, e)
            self.over = True
        if self.over:
            self._recipes, self._sets, self._passed = (), [], None

    def _moved(self, room: Callable[[], int]) -> None:
        self._launches += 1
        watched, pace = self._launches - self._pace.begin, self._pace
        if watched > 0:
            # What was asked for before this launch is done by now: the device waits for the host.
            self._waited += self._passed is None or self._passed()
        if watched >= 0:
            self._passed = self._driver.mark()
        if watched > 0 and watched % pace.look == 0:
            self._decide(self._wanted(), room)
            self.over |= watched >= pace.last or any(sets.too_many() for sets in self._sets)
            self._waited = 0
        if watched >= 0 and watched % pace.look == 0 and not self.over and not self._shared:
            for recipe, _ in self._recipes:
                recipe.watch(pace.last)

    def _wanted(self) -> list[int]:
        """Further execs for each recipe, if the device waits for the host."""
        if self._shared:
            return [1 for _ in self._recipes]
        for sets, (recipe, _) in zip(self._sets, self._recipes, strict=True):
            sets.found(recipe.watched())
        return [max(found.in_turn() - 1, 0) for found in self._sets]

    def _decide(self, wanted: Sequence[int], room: Callable[[], int]) -> None:
        planned = sum(
            count * (NODE_BYTES * nodes + EXEC_BYTES)
            for count, (_, nodes) in zip(wanted, self._recipes, strict=True)
        )
        host_sets_pace = 2 * self._waited > self._pace.look
        if planned and host_sets_pace and planned <= room():
            self._replicate(wanted)
            self.over = True

    def _replicate(self, wanted: Sequence[int]) -> None:
        for count, (recipe, nodes) in zip(wanted, self._recipes, strict=True):
            if count < 1:
                continue
            try:
                others = [self._driver.replica(recipe) for _ in range(count)]
            except DriverError as e:
                log.info("%s: no further execs: %s", self._name, e)
                return
            recipe.take_turns(others, itself=not self._shared)
            self.nbytes += len(others) * (NODE_BYTES * nodes + EXEC_BYTES)
            self.exec_bytes += sum(other.exec.nbytes for other in others)
            self.recipe_bytes += sum(other.nbytes for other in others)
        log.info("%s: %s take turns", self._name, amount(max(wanted) + (not self._shared), "exec"))


class _Sets:
    """The sets of addresses that launches of one exec found: each belongs to the one that it is most like, as
    it would be if each had an exec (`SIMILAR`), and what it found stands there from then on.

    Args:
        room: sets that there is place for at first.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._words = torch.empty(0, 0, dtype=torch.int64, device="cpu")
        self._count = 0
        self._of: list[int] = []  # the set that each launch found

    def found(self, rows: Sequence[bytes]) -> None:
        """These launches, the words of all slots each, come next."""
        for row in rows:
            words = torch.frombuffer(bytearray(row), dtype=torch.int64)
            if not self._count:
                self._words = words.new_empty(self._room, len(words))
            self._of.append(self._like(words))

    def too_many(self) -> bool:
        """Whether more sets came than may take turns, and new ones come all the time. Each launch is compared
        with all of them, which takes longer than what replicas save once there are hundreds.
        """
        latest, before = self._of[-_FLUX:], max(self._of[:-_FLUX], default=-1)
        return self._count > MOST and 2 * sum(number > before for number in set(latest)) > _FLUX

    def _like(self, words: torch.Tensor) -> int:
        if self._count:
            differing = (self._words[: self._count] != words).sum(1)
            nearest = int(differing.argmin())
            if int(differing[nearest]) * SIMILAR <= len(words):
                self._words[nearest] = words
                return nearest
        if self._count == len(self._words):  # launches that set little are watched, but not counted
            self._words = torch.cat([self._words, torch.empty_like(self._words)])
        self._words[self._count] = words
        self._count += 1
        return self._count - 1

    def in_turn(self) -> int:
        """How many execs would serve the sets that take turns; 1 if there is one, 0 if no number is known.

        One more serves the launches that find what is new each time: else these would take another's exec
        in its turn, that one the next one's, and so on.
        """
        for window in _WINDOWS:
            latest = self._of[-window:]
            again = {number: count for number, count in Counter(latest).items() if count > 1}
            many = sum(again.values()) >= _REPEATED * len(latest)
            if many and len(again) <= MOST and len(latest) >= _ROUNDS * len(again):
                still = any(number not in again for number in latest[len(latest) // 2 :])
                return len(again) + still
        return 0
