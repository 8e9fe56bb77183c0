"""Steps timed in bursts, on the core that is fastest then.

Not a program: `coverage_time.py` and `worker.py` import it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from host_speed import SLOW, Cores
from strain import Strain

if TYPE_CHECKING:
    from worker import Device

SETTLE_STEPS = 2
MOST = 3  # times as many bursts as asked for, if the host is slow


@dataclasses.dataclass(frozen=True)
class Burst:
    """Some steps, one after the other.

    Args:
        times: ms of each, issued back to back; without the first, which the drained device had to wait for.
        issue: host ms of one more, the device drained before; where sizes vary, the mean of a round of them.
        strain: see `strain.Strain`, of the first ones.
        slowdown: of the host at the end, see `host_speed.Cores`.
    """

    times: list[float]
    issue: float
    strain: dict[str, float]
    slowdown: float

    @property
    def counts(self) -> bool:
        """Whether the host was fast, or had so much time that it made no difference."""
        return self.slowdown <= SLOW or 2 * self.issue < statistics.median(self.times)


def bursts(
    step: Callable[[], Any], device: Device, steps: int, count: int, cores: Cores, round_of: int = 1
) -> list[Burst]:
    """Bursts of so many steps, until there are `count` in which the host was fast, or waited for the device.

    Args:
        round_of: steps after which the sizes of inputs come again. `steps` must be a multiple of it: bursts
            of other sizes cannot be compared.
    """
    if steps % round_of:
        raise ValueError(f"a burst of {steps} steps holds no whole number of rounds of {round_of}")
    taken, good = list[Burst](), 0
    while good < count and len(taken) < MOST * count:
        if not taken or not taken[-1].counts:
            cores.choose()
            settle(step, device)
        with Strain() as strain:
            times = device.timed(step, steps + 1)[1:]
        issue = statistics.mean(device.issue(step, round_of))
        taken.append(Burst(times, issue, strain.totals, cores.slowdown()))
        good += taken[-1].counts
    return taken


def fastest(taken: Sequence[Burst], count: int) -> list[Burst]:
    """So many of those during which the host was fastest, in the order in which they were taken."""
    chosen = sorted(range(len(taken)), key=lambda i: (taken[i].slowdown, i))[:count]
    return [taken[i] for i in sorted(chosen)]


def settle(step: Callable[[], Any], device: Device) -> None:
    """Some steps that do not count: other processes had the caches, and the device was idle."""
    for _ in range(SETTLE_STEPS):
        step()
    device.drain()
