"""Whether a launch takes the host less time than a partition's own code.

A launch has a price: it looks at every argument, makes every result, and hands the graph to the driver. For
many kernels that is little. For a few of them with many arguments it can be more than launching them one by
one. So a partition of few kernels is tried in the first calls after its capture: launched and run uncaptured
in turn. The results are the same either way.

Only the host's time counts. Where the device sets the pace neither makes a step longer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Final

from pgraph.reasons import Reason
from pgraph.text import amount

__all__ = ["MOST_NODES", "ROUNDS", "Trial", "clock"]

ROUNDS: Final = 3
"""Calls of each kind of which the fastest counts. The first launch comes on top: it is slower than others."""

MOST_NODES: Final = 16
"""A recording with more nodes needs no trial: one by one they take the host longer than any launch."""

clock: Callable[[], float] = time.perf_counter
"""Seconds."""


@dataclasses.dataclass(slots=True)
class Trial:
    """Of one specialization.

    Args:
        nodes: of its recording.
        own: seconds of host time of its uncaptured runs since the capture.
        launches: seconds of host time of its launches.
    """

    nodes: int
    own: list[float] = dataclasses.field(default_factory=list)
    launches: list[float] = dataclasses.field(default_factory=list)

    @property
    def launches_next(self) -> bool:
        """Whether the next call is to be launched; else it is to be run uncaptured."""
        return len(self.launches) <= len(self.own)

    @property
    def over(self) -> bool:
        return len(self.own) >= ROUNDS and len(self.launches) > ROUNDS

    @property
    def own_s(self) -> float:
        """Seconds of host time of an uncaptured run."""
        return min(self.own)

    @property
    def launch_s(self) -> float:
        """Seconds of host time of a launch."""
        return min(self.launches[1:])

    @property
    def gains(self) -> bool:
        """Of a trial that is over: whether a launch is the faster way."""
        return self.launch_s < self.own_s

    def reason(self) -> Reason:
        """Why a partition is set aside."""
        return Reason(
            "no-gain",
            f"a launch of its {amount(self.nodes, 'kernel')} takes the host {self.launch_s * 1e6:,.0f} us, "
            f"its own code {self.own_s * 1e6:,.0f} us",
        )
