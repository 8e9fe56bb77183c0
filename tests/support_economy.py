"""A program whose calls have certain sizes and times, and what the economy has it capture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pgraph.runtime.economy import Economy
from pgraph.runtime.purse import Purse


class Program:
    """Calls of a partition, with the times of each kind of call; captures whatever pays, seen once before.

    Args:
        computing: what it costs to compute a recording, which needs no run before; None where that cannot be
            done. It can after three captures.
        purse: shared with other partitions.
        set_up: what libraries take for each size, when it is first run or computed.
        first: times as long as another one the first takes to compute.
        ops: of the partition.
        device: what a call keeps the device, which the host need not wait for.
    """

    def __init__(
        self,
        own: float,
        launch: float,
        cost: float,
        computing: float | None = None,
        purse: Purse | None = None,
        set_up: float = 0.0,
        ops: int = 0,
        first: float = 1.0,
        device: float = 0.0,
    ) -> None:
        self.own, self.launch, self.cost, self.computing = own, launch, cost, computing
        self.set_up, self.first = set_up, first
        self.device, self.done = device, 0.0  # when the device will have done all that was asked of it
        self.economy = Economy(lambda: self.launches, purse or Purse(0.0), ops, self.rare)
        self.now = self.spent = 0.0
        self.calls = self.launches = self.looks = self.glimpses = 0
        self.runs: dict[int, int] = {}
        self.glimpsed: dict[int, int] = {}
        self.launched: Counter[int] = Counter()
        self.captured: set[int] = set()
        self.rested: set[int] = set()

    def rare(self) -> tuple[int, int]:
        """As `pgraph.runtime.glimpses` tells it."""
        came = Counter(self.runs)
        came.update(self.glimpsed)
        came.update(self.launched)
        times = Counter(came.values())
        return times[1], times[2]

    def run(self, seconds: float) -> bool:
        """Run the partition's own code; whether the device had not begun when the host was through."""
        begins = max(self.done, self.now)
        self.now += seconds
        self.done = max(begins + self.device, self.now)
        return begins > self.now

    def drain(self) -> None:
        """Wait for the device."""
        self.now = max(self.now, self.done)

    @property
    def computes(self) -> bool:
        return self.computing is not None and len(self.captured) >= 3

    def enough(self, size: int, new: bool, learning: bool) -> bool:
        """Whether it need not be looked at more closely."""
        economy = self.economy
        if economy.unaffordable(self.calls, self.now, new, self.computes, learning):
            return True
        if not self.computes or (not new and economy.sizes == 1):
            return False
        runs = self.runs.get(size, 0) + self.glimpsed.get(size, 0)
        return not economy.pays(runs, self.calls, self.now, computed=True)

    def glimpse(self, size: int) -> bool:
        """Whether that is all, as `pgraph.runtime.glimpses` has it."""
        new = size not in self.runs and size not in self.glimpsed
        learning = self.computing is not None and not self.computes
        known = bool(self.runs) and size not in self.captured
        if not known or not self.enough(size, new, learning):
            return False
        self.glimpses += 1
        if new:
            self.economy.met(self.calls, self.now)
        self.glimpsed[size] = self.glimpsed.get(size, 0) + 1
        seconds = self.own + (self.set_up if new else 0.0)
        self.economy.ran(seconds, self.run(seconds), new)
        self.calls += 1
        return True

    def call(self, size: int) -> None:
        if size not in self.captured and self.now < self.economy.rests_until:
            met = size in self.runs or size in self.glimpsed or size in self.rested
            self.run(self.own if met else self.own + self.set_up)
            self.rested.add(size)  # nobody looks at it: pgraph does not know that it came
            self.calls += 1
            return
        if self.glimpse(size):
            return
        self.looks += size not in self.captured
        new = size not in self.runs
        if new:
            self.runs[size] = int(size in self.glimpsed)
            if size not in self.glimpsed:
                self.economy.met(self.calls, self.now)
        computes = self.computes
        due = size not in self.captured and (computes or self.runs[size] > 0)
        if due and (
            len(self.runs.keys() | self.glimpsed.keys()) == 1
            or self.economy.pays(
                self.runs[size] + self.glimpsed.get(size, 0),
                self.calls,
                self.now,
                computes,
                learning=self.computing is not None and not computes,
            )
        ):
            cost = self.computing if computes and self.computing is not None else self.cost
            cost *= self.first if computes and len(self.captured) == 3 else 1.0
            cost += self.set_up if new and size not in self.glimpsed else 0.0
            self.captured.add(size)
            self.now += cost
            self.spent += cost
            self.economy.captured(cost, computes, first=not self.runs[size])
        if size in self.captured:
            self.now += self.launch
            self.done = max(self.done, self.now) + self.device
            self.launches += 1
            self.launched[size] += 1
            self.economy.launched(self.launch)
        else:
            self.runs[size] += 1
            first = self.runs[size] == 1
            seconds = self.own + (self.set_up if first else 0.0)
            self.economy.ran(seconds, self.run(seconds), first)
        self.calls += 1

    def calls_of(self, sizes: Iterable[int]) -> None:
        for size in sizes:
            self.call(size)
