"""One set of sizes, layouts and alignments of a partition's arguments, and what has become of it.

The state machine, from which reports and explanations derive all that they say::

              ran                captured
    NOT RUN -------> WARMING UP ----------> CAPTURED
       ^                |   |                 |   |
       |    postponed   |   |     refused     |   |
       +----------------+   +----> REFUSED <--+   |
       |                    evicted               |
       +------------------------------------------+

A recording of few nodes is on trial first (`pgraph.runtime.trial`), which counts as captured above::

                 captured             kept
    WARMING UP ----------> ON TRIAL -------> CAPTURED
                               |  set aside
                               +-----------> SET ASIDE

One that is refused or set aside stays so until `pgraph.reset()`. A refused one says nothing of the others.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable
from typing import Any

from pgraph.capture.build import Built
from pgraph.launch.guards import Guards
from pgraph.launch.program import Program
from pgraph.reasons import Reason
from pgraph.runtime.keeping import Use
from pgraph.runtime.replication import Replication
from pgraph.runtime.trial import Trial

__all__ = ["Specialization", "Standing", "State"]


class State(enum.Enum):
    """Where a specialization stands."""

    NOT_RUN = "not run"
    WARMING_UP = "warming up"
    CAPTURED = "captured"
    ON_TRIAL = "on trial"
    SET_ASIDE = "set aside"
    REFUSED = "refused"


@dataclasses.dataclass(slots=True, eq=False)
class Standing:
    """What a report sees of a specialization: no code, no tensor, no exec.

    Args:
        state: of the state machine.
        runs: uncaptured runs since it began to warm up.
        failures: captures that the device could not make just then.
        reason: why it is refused, or set aside.
        own_s, launch_s: seconds of host time of an uncaptured run and of a launch, if that was tried.
    """

    state: State = State.NOT_RUN
    runs: int = 0
    failures: int = 0
    reason: Reason | None = None
    own_s: float | None = None
    launch_s: float | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Specialization:
    """A specialization and its capture. Changed with the partition's lock held.

    Args:
        guards: what holds of its arguments.
        standing: its state.
        program: launches its capture, while there is one.
        native: the same program as C reads it, where there are launches in C.
        use: when it was used.
        threads: that have run it uncaptured.
        trial: while it is on trial.
        asked: when it was asked for, in such questions of the partition.
        glimpsed: it counts as run because such sizes were (`pgraph.runtime.glimpses`).
        addresses: `Guards.addresses` of the guards.
        nbytes: what its capture counts for in the budget of the host's memory.
        replication: whether it gets further execs, while it is captured and that is asked.
        foreseen: its sizes, if it was made before they came (Note [Computed ahead]).
    """

    guards: Guards
    standing: Standing = dataclasses.field(default_factory=Standing)
    program: Program | None = None
    native: Any = None
    use: Use = dataclasses.field(default_factory=Use)
    threads: set[int] = dataclasses.field(default_factory=set)
    trial: Trial | None = None
    asked: int = 0
    glimpsed: bool = False
    nbytes: int = 0
    replication: Replication | None = None
    foreseen: tuple[int, ...] | None = None
    addresses: Callable[[list[Any]], list[int] | None] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.addresses = self.guards.addresses

    @property
    def state(self) -> State:
        return self.standing.state

    @property
    def reason(self) -> Reason | None:
        return self.standing.reason

    @property
    def built(self) -> Built | None:
        """Its template and execs, while it is captured."""
        return self.program.built if self.program is not None else None

    @property
    def launches_next(self) -> bool:
        """Whether the next call is to be launched."""
        return self.state is State.CAPTURED or (self.trial is not None and self.trial.launches_next)

    def ran(self) -> None:
        """It was run uncaptured, by this thread."""
        self.standing.runs += 1
        self.threads.add(threading.get_ident())
        if self.state is State.NOT_RUN:
            self.standing.state = State.WARMING_UP

    def glimpsed_by(self, thread: int) -> None:
        """Such sizes were run before it was made, by this thread. Should a capture fail for what a run of its
        own would have set up, it is warmed up after all.
        """
        assert self.state is State.NOT_RUN, self.state
        self.glimpsed = True
        self.standing.runs = 1
        self.threads.add(thread)
        self.standing.state = State.WARMING_UP

    def warmed(self) -> None:
        """It need not run before it is launched."""
        assert self.state is State.NOT_RUN, self.state
        self.standing.state = State.WARMING_UP

    def due(self, warmup: int) -> bool:
        """Warm runs are done, at least one of them in this thread: library handles belong to threads."""
        if self.state is not State.WARMING_UP or self.standing.runs < warmup:
            return False
        return threading.get_ident() in self.threads or self.standing.runs >= warmup + 3

    def captured(self, program: Program, native: Any, trial: Trial | None = None) -> None:
        """From now on it is launched, or on trial."""
        assert self.state is State.WARMING_UP, self.state
        self.program, self.native, self.trial = program, native, trial
        self.glimpsed = False
        self.standing.state = State.CAPTURED if trial is None else State.ON_TRIAL

    def judged(self) -> None:
        """Its trial is over: it is kept, or set aside."""
        trial = self.trial
        assert self.state is State.ON_TRIAL, self.state
        assert trial is not None
        self.trial = None
        self.standing.own_s, self.standing.launch_s = trial.own_s, trial.launch_s
        self.standing.state = State.CAPTURED if trial.gains else State.SET_ASIDE
        if not trial.gains:
            self.program = self.native = None
            self.standing.reason = trial.reason()

    def postponed(self) -> None:
        """The device could not capture it just now: it warms up again."""
        assert self.state is State.WARMING_UP, self.state
        self.standing.failures += 1
        self.standing.runs = 0
        self.glimpsed = False
        self.standing.state = State.NOT_RUN

    def evicted(self) -> None:
        """Its capture went for another's sake: it begins anew."""
        assert self.state in (State.CAPTURED, State.ON_TRIAL), self.state
        self.program, self.native, self.trial, self.use = None, None, None, Use()
        self.foreseen = None
        self.standing.runs = 0
        self.standing.state = State.NOT_RUN

    def refused(self, reason: Reason) -> None:
        """It runs uncaptured for good, and why."""
        self.program = self.native = self.trial = None
        self.standing.reason = reason
        self.standing.state = State.REFUSED
