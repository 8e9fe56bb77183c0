"""Whether one more capture pays, where a partition's sizes vary.

A capture costs as much as hundreds of launches save. That is nothing for a program that runs a few sizes for
hours, and too much for one whose sizes hardly ever come back. So once a partition has met a second size, a
size is captured if both of these hold:

* what it is expected to save is more than its capture costs: ``saved per launch * launches >= cost``.
  Expected are as many launches as the size is thought to have had calls (not all of them are looked at),
  or as many as there are calls between two new sizes, whichever is more. Where launches have not yet
  saved as much, less is expected: of these calls each size gets its part, and the program goes on for as
  long as it has run. (Of 240 lengths each comes a dozen times in 3,000 steps);
* with it, all captures of the partition together have cost no more than its launches have saved; or what the
  captures of all such partitions have cost beyond that (their *debts*) is no more than `CREDIT` of the time
  that the program has run, with this one. So the most that a program can lose, whatever its sizes do, is
  that, and a capture of each partition, from before it met a second size.

There is one exception: where all sizes that are to be expected can be captured, or computed, for `START_S`,
and launches pay for that soon, these seconds may be spent at once. A server of 32 batch sizes is at graph
speed after some hundred calls, and would be after minutes. How many sizes there are is told by how often new
ones came of late, and by how many came but once or twice (A. Chao's estimate, 1984): where most calls have
one size, and each of the others another one, hardly a new one comes, and there are hundreds. Soon is after
a thousand launches, and after `_SOON_S` of the program: code that a program seldom calls, such as Inductor's
for lengths that are multiples of eight, may have few sizes, and saves next to nothing of the whole. Training
on hundreds of lengths goes by the rule.

How long a program has run, but for when it waited or compiled, and how often it calls a partition, is told by
`pgraph.runtime.pace`.

To ask at each call would take longer than small partitions can save. So when the answer is no, it holds for
a while (`REST_S`, or a small part of the time till there is credit, or of the time that the program has
run): calls that no capture serves run uncaptured without a further look, and those that are looked at stand
for them all. And where no capture could be had, whatever the size is, that is asked first
(`Economy.unaffordable`), before a size is looked at more closely (`pgraph.runtime.glimpses`).

A recording that is computed (`pgraph.compute`) costs less, and this very call is launched in the place of a
run. If that alone pays for it, nothing can be lost. Where that is a size's first call, libraries set things
up for it that its first run would have set up (cuDNN's attention plans for 45 ms on an H200). How long that
takes is told by other sizes' first runs, and does not count. The few captures from which computing is learned
serve all sizes, not their own alone: it is enough that computing is expected to pay. And what launches have
saved may be spent on computing, but for a part (`_SPENDS`), as long as sizes come back.

What a capture costs is all that is done for it: to look at its size, and what execs of its own take later on.

What a launch saves is told by `pgraph.runtime.gain`.

Sizes stand for all that a specialization is about: layouts and alignments, too.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Final

from pgraph.compute.compare import ENOUGH
from pgraph.reasons import Reason
from pgraph.runtime.gain import Gain
from pgraph.runtime.novelty import Novelty
from pgraph.runtime.pace import Pace
from pgraph.runtime.purse import Purse

__all__ = ["CREDIT", "REST_S", "Economy", "not_worth"]

CREDIT: Final = 0.01
"""Share of the program's time that captures may cost beyond what they save."""

_SPENDS: Final = 0.8
"""Of what launches have saved, what may be spent on computing in the long run. Each recording earns further
ones: of all that was saved nothing would be left at first. And not all is told: caches are cold after
computing, and for code that is run between launches."""

_FIRST_ONES: Final = 50
"""Launches after which it is half as much. What one saves is told by few runs by then, and at each count a
program is to be no slower than its own code: with 0.8 from the first launch on, the first 100 of 1,600
training steps took 0.97 to 1.03 of their time (H200)."""

_LEARNED: Final = 0.33
"""What it costs to compute a recording, of what a capture costs, as long as it was not done."""

_FIRST_FEW: Final = 3
"""Recordings computed before which none tells alone what the next one costs."""

_SOON: Final = 1000.0
"""Launches that are to pay for what is spent at the start."""

_SOON_S: Final = 5.0
"""And seconds of the program, in which they are to do it. Like `START_S` it is for hosts of half the speed,
too, where a server gains as much."""

_DOZENS: Final = 64
"""Sizes. Where more are to be expected, as in training on hundreds of lengths, what they cost at once would
be some per cent of hundreds of steps."""

_FEW: Final = 48
"""Sizes. If no more are known, once some were computed ahead, each may have execs of its own at once."""

_NEARLY_ALL: Final = 0.75
"""Where so many of the calls that are looked at bring new sizes, what one saves is not spent on others."""

_REPEATED: Final = 3
"""Calls with a size that had come before, from which on it is told how many sizes are to be expected."""

_MANY: Final = 0.5
"""Where so many of the latest calls bring new sizes, it is not told how many there are."""

_OP_S: Final = 2e-4
"""Seconds that a capture takes for each op, as long as there was none. Inductor's code makes one node of some
three ops, and 45 to 60 ms for 86 nodes were seen on an H200."""

REST_S: Final = 0.05
"""Seconds for which a no holds at least. To look at every call made each 0.6 ms slower (60 inputs, H200)."""

_REST_SHARE: Final = 0.1
"""Of the time till there is credit, for which a no holds where that is longer than `REST_S`."""

_REST_RAN: Final = 0.02
"""Of the time of the program, for which a no holds where a capture could be had, and is not worth it."""

_REST_MOST_S: Final = 1.0
"""But never longer than this."""

_LOOKS: Final = 64  # calls that are looked at, one by one, whatever they have
_LOOKS_NEW: Final = 24  # so many, where hardly any size came again: of 32 sizes some seven would have
_SAMPLES: Final = 9  # of what each kind of capture costs


class Economy:
    """Of one partition. Called with its lock held, but for `debt`. All times are seconds of the host.

    Args:
        launches: tells how many launches of the partition there were.
        purse: which it shares with other partitions.
        ops: on the device, in what is captured.
        rare: tells how many sizes came once, and how many twice.

    Attributes:
        rests_until: until then no capture pays, whatever comes.
        sizes: how many came.
    """

    def __init__(
        self,
        launches: Callable[[], int],
        purse: Purse,
        ops: int = 0,
        rare: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._launches_so_far = launches
        self._purse = purse
        self._rare = rare
        self._guess = _OP_S * ops
        self._gain = Gain()
        self._costs: deque[float] = deque(maxlen=_SAMPLES)
        self._computed: deque[float] = deque(maxlen=_SAMPLES)
        self._pace = Pace()
        self._spent = 0.0
        self._novelty = Novelty()
        self.sizes = self._made = self._again = self._calls = self._foreseen = 0
        self.rests_until = float("-inf")
        self._start_pays = self._learning = False  # the latter as it was told last

    def met(self, calls: int, now: float) -> None:
        """A size came for the first time.

        Args:
            calls: of the partition before this one.
            now: by the clock that all other times are taken from.
        """
        self._passed(calls, now)
        self._novelty.came()
        self.sizes += 1
        if self.sizes == 2:
            self._purse.join(self)

    def ran(self, seconds: float, behind: bool = False, first: bool = False) -> None:
        """The partition's own code was run.

        Args:
            behind: when the host was through with it, the device had not begun.
            first: with a size that it had never been run with.
        """
        self._novelty.ran(first)
        self._again += not first
        if first:
            self._pace.set_up()
        self._gain.ran(seconds, behind, first)

    def launched(self, seconds: float) -> None:
        """A capture was launched. Not all launches need be told."""
        self._gain.launched(seconds)

    def captured(self, seconds: float, computed: bool = False, first: bool = False) -> None:
        """A capture was made, or computed.

        Args:
            first: the size has never run.
        """
        cost = self._gain.beside_set_up(seconds) if first else seconds
        (self._computed if computed else self._costs).append(cost)
        self._spent += cost
        self._made += 1
        if first:
            self._novelty.launched_first()
        self._purse.spent()
        self._pace.set_up()

    def foreseen(self, seconds: float) -> None:
        """A recording was computed before its size came: part of the compilation (Note [Computed ahead])."""
        self._computed.append(seconds)
        self._foreseen += 1

    def replicated(self, seconds: float) -> None:
        """A size got execs of its own (Note [An exec for each layer] in `pgraph.drivers.turns`)."""
        self._spent += seconds
        self._purse.spent()

    def wasted(self, seconds: float) -> None:
        """Time was spent on a size that has never run, and no capture came of it."""
        self._spent += self._gain.beside_set_up(seconds)
        self._purse.spent()
        self._pace.set_up()

    @property
    def few(self) -> bool:
        """Whether few sizes are to be expected: all were found to pay, and soon, or were computed ahead."""
        return self._start_pays or 0 < self._foreseen <= _FEW - self.sizes

    @property
    def debt(self) -> float:
        """Seconds that captures have cost beyond what launches have saved. Any thread may ask."""
        return max(self._spent - self._gain.seconds * self._launches_so_far(), 0.0)

    def pays(self, runs: int, calls: int, now: float, computed: bool = False, learning: bool = False) -> bool:
        """Whether to capture a size, or to compute its recording.

        Args:
            runs: uncaptured runs of this size.
            calls: of the partition so far.
            now: as for `met`.
            learning: how recordings are computed is learned from such a capture.
        """
        self._passed(calls, now)
        self._learning = learning
        if not self._gain.known:
            return False  # what it saves, not before a size came twice
        cost, saves = self._cost(computed), self._gain.seconds
        if computed and saves >= cost:
            return True
        if self._starts(now, cost, learning or computed):
            self._start_pays = True
            return True
        wait = self._wait(now, cost, learning or computed)
        if wait <= 0.0 and self._worth(runs, calls, cost, computed, learning):
            return True
        if not self._computing_pays():
            self.rests_until = now + self._rest(now, wait, cost, learning or computed)
        return False

    def unaffordable(
        self, calls: int, now: float, new: bool, computing: bool = False, learning: bool = False
    ) -> bool:
        """Whether no capture could be had now, whatever the size is. If so, that holds for a while.

        Args:
            new: whether the size came for the first time: then nothing can be captured before there was one
                that did not.
            computing: recordings of most sizes are computed.
            calls, now, learning: as for `pays`.
        """
        if not self._gain.known:
            return new and not computing
        self._passed(calls, now)
        self._learning, cost = learning, self._cost(computing)
        if self._computing_pays() or self._starts(now, cost, learning or computing):
            return False
        wait = self._wait(now, cost, learning or computing)
        if wait > 0.0 and self._novelty.looks >= (_LOOKS if self._again >= _REPEATED else _LOOKS_NEW):
            self.rests_until = now + self._rest(now, wait, cost, learning or computing)
        return wait > 0.0

    def _cost(self, computed: bool) -> float:
        """Seconds of a further capture."""
        if not computed:
            return statistics.median(self._costs) if self._costs else self._guess
        learned = _LEARNED * self._cost(False)
        # The first ones set things up, and may take several times as long.
        return statistics.median([*self._computed, *[learned] * (_FIRST_FEW - len(self._computed))])

    def _starts(self, now: float, cost: float, computing: bool) -> bool:
        """Whether all sizes that are to be expected can be captured for what may be spent at the start, and
        launches pay for that soon."""
        # A few calls with sizes that came before may be a program's warm-up: the latest ones count, too.
        if self._again < _REPEATED or self._novelty.latest_few > _MANY:
            return False
        known = 1.0 - self._novelty.lately  # of the calls to come, as I. J. Good estimated it for species
        if known <= 0.0 or not self._soon(now, self.sizes / known, computing, cost):
            return False
        once, twice = self._rare()
        unseen = once * (once - 1) / (2 * (twice + 1))
        return self._soon(now, self.sizes + unseen, computing)

    def _soon(self, now: float, sizes: float, computing: bool, least: float = 0.0) -> bool:
        """Whether all of so many sizes may be captured at once, for `least` seconds or more."""
        # What takes longest to tell comes last: this is asked at each look.
        further = max(self._all(sizes, computing), least)
        if further > self._gain.seconds * _SOON:
            return False
        if sizes + self._foreseen > _DOZENS or self._purse.debts(now) + further > self._purse.start:
            return False
        usual = self._pace.usual
        return usual is not None and further * usual <= self._gain.seconds * _SOON_S

    def _all(self, sizes: float, computing: bool) -> float:
        """Seconds that it costs to capture so many sizes, but for those that are."""
        further = max(sizes - self._made, 0.0)
        lessons = min(further, max(ENOUGH - self._made, 0)) if self._learning else 0.0
        return lessons * self._cost(False) + (further - lessons) * self._cost(computing)

    def _worth(self, runs: int, calls: int, cost: float, computed: bool, learning: bool) -> bool:
        """Whether launches are expected to pay for a capture that can be afforded."""
        share, saves = self._novelty.lately, self._gain.seconds
        launches = (1.0 - share) / share if share else float("inf")  # till a new size comes
        if cost > self._surplus(learning or computed):  # paid for with time that would not have been lost
            cost = self._cost(True) if learning else cost
            launches = min(launches, float(calls)) / max(self.sizes, 1)
        elif learning or computed:
            return saves > 0.0 and (share < _NEARLY_ALL or learning or not self._computed)
        # Of the calls at which nobody looked it is expected to have had its part, by Laplace's rule of
        # succession: of many sizes some are looked at twice by chance.
        part = (runs + 1.0) / (self.sizes / (1.0 - share) + self._novelty.looks) if share < 1.0 else 0.0
        came = runs + part * self._resting(calls)
        return saves * max(came, launches) >= cost and (saves > 0.0 or not learning)

    def _rest(self, now: float, wait: float, cost: float, computing: bool) -> float:
        """Seconds for which a no holds: till there is credit, or launches may have paid for a capture."""
        if wait <= 0.0:  # it could be had, but sizes come too seldom: that takes as long again to change
            return max(REST_S, min(_REST_RAN * self._pace.ran, _REST_MOST_S))
        rest = min(wait, REST_S)
        if not self._soon(now, self.sizes, computing):  # nor would it be if no further ones came
            rest = min(wait, max(REST_S, min(_REST_SHARE * wait, _REST_MOST_S)))
        gap, launches = self._pace.lately, self._launches_so_far()
        if self._gain.seconds and gap is not None and launches:
            rest = min(rest, (self.debt + cost) / self._gain.seconds * gap)
            if computing:  # till launches, as they come, have paid for it
                needed = max(cost - self._surplus(computing), 0.0) + self.debt
                rest = min(rest, needed / self._gain.seconds * gap * max(self._calls, launches) / launches)
        return rest

    def _wait(self, now: float, cost: float, computing: bool) -> float:
        """Seconds of the program until a further capture can be afforded; 0.0 if it can be now."""
        surplus = self._surplus(computing)
        if cost <= surplus:
            return 0.0
        return max((self._purse.debts(now) + cost - surplus) / CREDIT - self._pace.ran, 0.0)

    def _surplus(self, computing: bool) -> float:
        """Seconds that launches have saved, as far as they may be spent, beyond what captures have cost."""
        launches = self._launches_so_far()
        part = _SPENDS * launches / (launches + _FIRST_ONES) if computing else 1.0
        return max(part * self._gain.seconds * launches - self._spent, 0.0)

    def _resting(self, calls: int) -> int:
        """Calls that were neither launched nor looked at."""
        return max(calls - self._launches_so_far() - self._novelty.looks, 0)

    def _computing_pays(self) -> bool:
        return bool(self._computed) and self._gain.seconds >= statistics.median(self._computed)

    def _passed(self, calls: int, now: float) -> None:
        """Calls have passed, and time: what came before them counts less."""
        more = calls - self._calls
        if more <= 0:
            return
        self._pace.passed(more, now)
        self._calls = calls
        self._novelty.passed(more, self._launches_so_far())


def not_worth() -> Reason:
    """Why a size waits."""
    return Reason(
        "sizes-vary", "so many sizes or layouts come that to capture them takes longer than launches save"
    )
