"""One set of sizes, layouts and alignments of a partition's arguments, and what has become of it.

The state machine, from which reports and explanations derive all that they say::

              ran                captured
    NOT RUN -------> WARMING UP ----------> CAPTURED
       ^                |   |                 |   |
       |    postponed   |   |     refused     |   |
       +----------------+   +----> REFUSED <--+   |
       |                    evicted               |
       +------------------------------------------+

A refused one stays refused until `pgraph.reset()`, and says nothing of the others.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from typing import Any

from pgraph.capture.build import Built
from pgraph.launch.guards import Guards
from pgraph.launch.program import Program
from pgraph.reasons import Reason
from pgraph.runtime.keeping import Use

__all__ = ["Specialization", "Standing", "State"]


class State(enum.Enum):
    """Where a specialization stands."""

    NOT_RUN = "not run"
    WARMING_UP = "warming up"
    CAPTURED = "captured"
    REFUSED = "refused"


@dataclasses.dataclass(slots=True, eq=False)
class Standing:
    """What a report sees of a specialization: no code, no tensor, no exec.

    Args:
        state: of the state machine.
        runs: uncaptured runs since it began to warm up.
        failures: captures that the device could not make just then.
        reason: why it is refused.
    """

    state: State = State.NOT_RUN
    runs: int = 0
    failures: int = 0
    reason: Reason | None = None


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
    """

    guards: Guards
    standing: Standing = dataclasses.field(default_factory=Standing)
    program: Program | None = None
    native: Any = None
    use: Use = dataclasses.field(default_factory=Use)
    threads: set[int] = dataclasses.field(default_factory=set)

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

    def ran(self) -> None:
        """It was run uncaptured, by this thread."""
        self.standing.runs += 1
        self.threads.add(threading.get_ident())
        if self.state is State.NOT_RUN:
            self.standing.state = State.WARMING_UP

    def due(self, warmup: int) -> bool:
        """Warm runs are done, at least one of them in this thread: library handles belong to threads."""
        if self.state is not State.WARMING_UP or self.standing.runs < warmup:
            return False
        return threading.get_ident() in self.threads or self.standing.runs >= warmup + 3

    def captured(self, program: Program, native: Any) -> None:
        """From now on it is launched."""
        assert self.state is State.WARMING_UP, self.state
        self.program, self.native = program, native
        self.standing.state = State.CAPTURED

    def postponed(self) -> None:
        """The device could not capture it just now: it warms up again."""
        assert self.state is State.WARMING_UP, self.state
        self.standing.failures += 1
        self.standing.runs = 0
        self.standing.state = State.NOT_RUN

    def evicted(self) -> None:
        """Its capture went for another's sake: it begins anew."""
        assert self.state is State.CAPTURED, self.state
        self.program, self.native, self.use = None, None, Use()
        self.standing.runs = 0
        self.standing.state = State.NOT_RUN

    def refused(self, reason: Reason) -> None:
        """It runs uncaptured for good, and why."""
        self.program = self.native = None
        self.standing.reason = reason
        self.standing.state = State.REFUSED
