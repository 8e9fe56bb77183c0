"""The specializations of one partition: found, made, judged and evicted."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pgraph.drivers.execs import Shelf
from pgraph.drivers.interface import Driver, Passed
from pgraph.launch.guards import Guards, Trait, alignments, guards_of
from pgraph.launch.lookup import Lookup
from pgraph.launch.native import Addresses, Calls, calls_of, native_addresses, native_program
from pgraph.launch.program import Program
from pgraph.options import Options
from pgraph.runtime import trial
from pgraph.runtime.budget import Memory, limit_of
from pgraph.runtime.captured import Captured
from pgraph.runtime.economy import Economy
from pgraph.runtime.glimpses import Glimpse, Glimpses
from pgraph.runtime.holdings import Group, Unit, budgets_of
from pgraph.runtime.keeping import WAITING
from pgraph.runtime.purse import OF_THE_PROCESS
from pgraph.runtime.replication import Replication
from pgraph.runtime.room import Room
from pgraph.runtime.sizes import Sizes
from pgraph.runtime.specialization import Specialization, State
from pgraph.runtime.statistics import PartitionStats
from pgraph.runtime.trial import MOST_NODES, Trial

__all__ = ["SpecializationCache"]


class SpecializationCache:
    """Called with its lock held, but for `captured`, `latest` and `rests`, which are read without it, and for
    `ran`, `timed` and `captured_as`, which take it.

    Args:
        driver: whose tensors count.
        options: of the compilation.
        watched: argument positions of which more must stay as captured than layout and alignment.
        sizes: of the partition.
        stats: of the partition.

    Attributes:
        lock: of the partition.
        captured: what can be launched.
        latest: the one that was launched last, as far as it was told.
        economy: whether further ones pay.
        room: whether there is room for them.
        set_aside: one of them took longer to launch than to run, so that no other one is captured. (Where
            one took less, no other one is tried.)
        shelf: execs that further captures may share.
    """

    def __init__(
        self,
        driver: Driver,
        options: Options,
        watched: Mapping[int, Trait],
        sizes: Sizes,
        stats: PartitionStats,
    ) -> None:
        self._driver, self._options = driver, options
        self._watched = watched
        self._sizes = sizes
        self._stats = stats
        self._known, self._met = dict[Guards, Specialization](), Lookup[Specialization]()  # the same ones
        self._budgets = budgets_of(driver.device)
        self._limit = limit_of(options.capture_memory_mb, driver.memory())
        self.room = self._new_room()
        self._glimpses = Glimpses(sizes, stats.met, self._steps_aside)
        self.economy = self._new_economy()
        self.shelf = Shelf()
        self.latest: Specialization | None = None
        self.lock = threading.RLock()
        self._asked = self._told = 0  # how often one was asked for; launches when one was last told
        self.captured = Captured()
        self.set_aside = self._gains = self._tries = self._adding = False
        for budget in self._budgets:
            budget.join(self)

    def _new_economy(self) -> Economy:
        def rare() -> tuple[int, int]:
            return self._glimpses.rare(s for s in self._known.values() if s.foreseen is None)

        return Economy(lambda: self._stats.launches, OF_THE_PROCESS, self._stats.facts.device_ops, rare)

    def _new_room(self) -> Room:
        return Room(self, self._options, self._sizes, self._stats, self._budgets, self._limit)

    def all(self) -> list[Specialization]:
        """The one that was run uncaptured last is last."""
        return sorted(self._known.values(), key=lambda s: s.asked)

    def launched(self, specialization: Specialization) -> None:
        """Note a launch; further ones of the same specialization need not be told."""
        self.catch_up()
        if specialization.foreseen is not None and not specialization.use.launches:
            self._stats.met.note(specialization.foreseen)
        self.latest = specialization
        self.room.keeper.used(specialization.use)

    def catch_up(self) -> None:
        """Note launches that were not told."""
        if self.latest is not None and self._told != self._stats.launches:
            self.room.keeper.used(self.latest.use)
            self.latest.use.launches += self._stats.launches - self._told
        self._told = self._stats.launches

    def mark(self, chosen: Specialization | Glimpse) -> Passed | None:
        """See `Driver.mark`; None where nothing depends on it."""
        told = chosen is not Glimpse.NEW and self.economy.sizes > 1 and self._steps_aside
        return self._driver.mark() if told else None

    def ran(self, chosen: Specialization | Glimpse, seconds: float, passed: Passed | None = None) -> None:
        """Note an uncaptured run, how long it kept the host, and a mark from its beginning."""
        with self.lock:
            behind = passed is not None and not passed()
            if isinstance(chosen, Glimpse):
                self.economy.ran(seconds, behind, chosen is Glimpse.NEW)
                return
            chosen.ran()
            self.room.keeper.ran(chosen.use, self._stats.launches)
            self.economy.ran(seconds, behind, chosen.standing.runs == 1)
            if chosen.trial is not None:
                chosen.trial.own.append(seconds)
                self._judge(chosen)

    def timed(self, specialization: Specialization, seconds: float) -> None:
        """Note how long a launch kept the host."""
        with self.lock:
            self.economy.launched(seconds)
            if specialization.trial is not None:
                specialization.trial.launches.append(seconds)
                self._judge(specialization)

    def _judge(self, specialization: Specialization) -> None:
        assert specialization.trial is not None
        if not specialization.trial.over:
            return
        if specialization.trial.gains:
            self._gains = True
        else:
            self._let_go(specialization)
            self.set_aside = True
        specialization.judged()
        self._renew()

    def moved(self, specialization: Specialization, rewritten: int) -> None:
        """Note a launch that set several nodes (Note [An exec for each layer] in `pgraph.drivers.turns`)."""
        replication = specialization.replication
        if replication is not None and (replication.over or rewritten < replication.worth):
            return
        with self.lock:
            if (built := specialization.built) is None:
                return
            if (replication := specialization.replication) is None:
                shared, few = len(self.room.holdings.group_of(specialization).members) > 1, self.economy.few
                replication = Replication(self._stats.name, built.parts, self._driver, shared, few)
                specialization.replication = replication
            if rewritten < replication.worth:
                return
            start = time.perf_counter()
            replication.moved(self.room.for_replicas)
            if replication.nbytes:
                self.economy.replicated(time.perf_counter() - start)
                self.room.holdings.replicated(specialization)
                self._tell_bytes()

    def captured_as(self, specialization: Specialization) -> Captured:
        """What launches this one: with all others, or by itself while it is on trial."""
        with self.lock:  # another thread's call may end the trial
            return Captured([specialization]) if specialization.trial is not None else self.captured

    def get(self, args: list[Any]) -> Specialization | None:
        """The one for arguments like these, made if need be; None for tensors that lie nowhere."""
        found = self._like(args)
        if found is None:
            guards = guards_of(args, self._driver.device, self._driver.alignment, self._watched)
            if guards is None:
                return None
            found = self._known.get(guards) or self._new(guards, self._glimpses.made(args))
        self._asked += 1
        found.asked = self._asked
        return found

    def _like(self, args: list[Any]) -> Specialization | None:
        """A known one with these sizes, layouts and alignments; cheaper than to make guards and compare."""
        usual = self._driver.alignment
        for guards, specialization in self._met.candidates(args):
            addresses = specialization.addresses(args)
            if addresses is None:
                continue
            # It would do. But what is aligned better than it needs is another specialization.
            wanted = [guard.mask + 1 for guard in guards.tensors]
            if wanted.count(usual) == len(wanted) or wanted == alignments(addresses, usual):
                return specialization
        return None

    def knows(self, guards: Guards) -> bool:
        """Whether there is one with these guards."""
        return guards in self._known

    def expected(self, guards: Guards, sizes: tuple[int, ...]) -> Specialization:
        """One for sizes that have not come yet (Note [Computed ahead])."""
        found = self._new(guards, None, came=False)
        found.foreseen = sizes
        return found

    def forget(self, specialization: Specialization, *, told: bool = False) -> None:
        """It has no capture, and goes.

        Args:
            told: a report goes on telling of it.
        """
        del self._known[specialization.guards]
        self._met.discard(specialization.guards, specialization)
        if not told:
            self._stats.standings.remove(specialization.standing)

    def _new(self, guards: Guards, thread: int | None, came: bool = True) -> Specialization:
        self._forget_some()
        if self._known:
            guards = guards.alike(next(iter(self._known)))
        found = self._known[guards] = Specialization(guards)
        found.addresses = self._in_c[1](guards)
        self._met.add(guards, found)
        if thread is not None:
            found.glimpsed_by(thread)
        elif came:
            self.economy.met(self._stats.calls, trial.clock())
        self._stats.standings.append(found.standing)
        return found

    @functools.cached_property
    def _in_c(self) -> tuple[Calls | None, Callable[[Guards], Addresses]]:
        return calls_of(self._driver), native_addresses(self._driver)

    def _forget_some(self) -> None:
        waiting = [s for s in self._known.values() if s.program is None]
        if len(waiting) >= WAITING:
            gone = min(waiting, key=lambda s: s.asked)
            self.forget(gone, told=gone.state is State.REFUSED)

    def glimpse(self, args: list[Any]) -> Glimpse | None:
        """What there is to know of a call whose size cannot be captured, whatever it is."""
        if not self._known or self._sizes.listed or self._tries or self.set_aside:
            return None
        return self._glimpses.at(args, self.economy, self._stats.calls, trial.clock(), self.shelf.computer)

    def pays(self, specialization: Specialization, args: Sequence[Any], computed: bool) -> bool:
        """Whether a capture is worth it, or computing, where sizes vary and times are a device's."""
        if not self._steps_aside or self.economy.sizes == 1 or self._sizes.listed:
            return True
        runs, told = specialization.standing.runs + self._glimpses.runs(args), self.shelf.computer
        learning, calls = told is not None and told.learning, self._stats.calls
        return self.economy.pays(runs, calls, trial.clock(), computed, learning)

    def rests(self) -> bool:
        """Whether no capture pays just now, whatever comes. Called without the lock."""
        return trial.clock() < self.economy.rests_until and not self._tries

    @property
    def _steps_aside(self) -> bool:
        options = self._options
        return self._driver.host_times and options.step_aside and not options.require_full_capture

    def add(self, specialization: Specialization, program: Program) -> None:
        """It was captured. Others go if there is one too many, or it does itself if it needs too much."""
        tried = Trial(len(program.built.template.nodes)) if self.would_try(program) else None
        native = native_program(program, self._in_c[0], specialization.addresses)
        specialization.captured(program, native, tried)
        self._stats.captured(program.built)
        self._stats.waits = None
        units: tuple[Unit, ...] = self.room.holdings.add(specialization), specialization
        self._tell_bytes()
        for budget, unit in zip(self._budgets, units, strict=True):
            if not self.room.make(specialization, budget, unit=unit):
                self.evict(specialization)
                return
        if specialization.foreseen is None:
            self.launched(specialization)
        limit = self._options.max_captures
        if limit is not None and self.room.holdings.count > limit:
            self._drop(self._by_use()[0], f"max_captures={limit}")
        self._renew()

    def would_try(self, program: Program) -> bool:
        """Whether a capture would be on trial first."""
        return len(program.built.template.nodes) <= MOST_NODES and self._steps_aside and not self._gains

    def takes(self, memory: Memory) -> int:
        """Bytes that the captures count for in a budget."""
        return self.room.holdings.takes(memory)

    def held(self, memory: Memory) -> Sequence[Unit]:
        """What may go for the memory that it takes."""
        return self.room.holdings.groups if memory == "execs" else self._captured()

    def evict(self, held: Unit) -> None:
        """Let captures go, for the memory that they take."""
        for specialization in list(held.members) if isinstance(held, Group) else [held]:
            self._drop(specialization, self.room.memory_limit)
        self._renew()

    def _captured(self) -> list[Specialization]:
        """Those with a capture, in the order in which they were met."""
        return [s for s in self._known.values() if s.program is not None]

    def _drop(self, specialization: Specialization, limit: str) -> None:
        self._let_go(specialization)
        specialization.evicted()
        self.room.keeper.dropped()
        self._sizes.evicted(limit)

    def release(self, specialization: Specialization) -> None:
        """Let its execs go, if it has any: they are freed with their last reference."""
        if specialization.program is not None:
            self._let_go(specialization)
            specialization.program = specialization.native = specialization.trial = None
            self._renew()

    def clear(self) -> None:
        """Forget everything, whatever half-done state an interrupt has left."""
        for specialization in self._captured():
            specialization.program = specialization.native = specialization.trial = None
            specialization.replication = None
        self.set_aside = self._gains = False
        self._known.clear()
        self._met = Lookup()
        self._glimpses.clear()
        self._stats.standings.clear()
        self.room, self.economy = self._new_room(), self._new_economy()
        self._tell_bytes()
        for budget in self._budgets:
            budget.cleared()
        self._stats.waits = None
        self.latest = None
        self._renew()

    def _by_use(self) -> list[Specialization]:
        """Those with a capture, least recently used first."""
        return sorted(self._captured(), key=lambda s: s.use.latest)

    def _let_go(self, specialization: Specialization) -> None:
        self.room.holdings.remove(specialization)
        self._tell_bytes()
        if specialization is self.latest:
            self.latest = None

    def _tell_bytes(self) -> None:
        self._stats.exec_bytes = self.room.holdings.exec_bytes
        self._stats.recipe_bytes = self.room.holdings.takes("recipes")

    @contextlib.contextmanager
    def several(self) -> Iterator[None]:
        """In this block several are added: they can be launched from its end on. To see to that for each of
        them takes the longer the more there are.
        """
        self._adding = True
        try:
            yield
        finally:
            self._adding = False
            self._renew()

    def _renew(self) -> None:
        if self._adding:
            return
        captured = self._captured()
        self._tries = any(s.trial is not None for s in captured)
        self.captured = Captured([s for s in captured if s.trial is None], self.captured)
