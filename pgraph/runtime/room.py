"""Whether there is room for one more capture of a partition, if need be in others' place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgraph.options import Options
from pgraph.runtime.budget import NODE_BYTES, Budget, Holder, Memory
from pgraph.runtime.holdings import Holdings, Unit
from pgraph.runtime.keeping import Keeper, Use
from pgraph.runtime.replication import SHARE
from pgraph.runtime.sizes import Sizes
from pgraph.runtime.specialization import Specialization
from pgraph.runtime.statistics import PartitionStats

__all__ = ["Room"]


class Room:
    """Of one partition. Called with its lock held.

    Args:
        owner: of the captures.
        options: of the compilation.
        sizes, stats: of the partition.
        budgets: what its captures count in.
        limit: of each, in bytes.

    Attributes:
        holdings: what its captures take.
        keeper: which of them are kept.
    """

    def __init__(
        self,
        owner: Holder[Unit],
        options: Options,
        sizes: Sizes,
        stats: PartitionStats,
        budgets: tuple[Budget[Unit], ...],
        limit: int,
    ) -> None:
        self._owner, self._sizes, self._stats = owner, sizes, stats
        self._budgets, self._limit, self._most = budgets, limit, options.max_captures
        self.holdings = Holdings()
        self.keeper = Keeper(options.max_captures, options.warmup, budgets[0].tick)

    def there_is(self, specialization: Specialization, args: Sequence[Any]) -> bool:
        """Whether it may have a capture, if need be in others' place (Note [Taking turns])."""
        return self._place(specialization, args) and self._memory(specialization, args)

    def fits(self) -> bool:
        """Whether one more would be in nobody's place."""
        if self._most is not None and self.holdings.count >= self._most:
            return False
        return all(budget.total() + self._expected(budget.memory) <= self._limit for budget in self._budgets)

    def _place(self, specialization: Specialization, args: Sequence[Any]) -> bool:
        if self._most is None or self.holdings.count < self._most:
            return True
        oldest = min((held.use for held in self._owner.held("recipes")), key=lambda use: use.latest)
        if self._admits(specialization, oldest):
            return True
        if self.keeper.patient(specialization.standing.runs):
            self._sizes.crowded(args, f"max_captures={self._most}")
        return False

    def _memory(self, specialization: Specialization, args: Sequence[Any]) -> bool:
        use = specialization.use
        patience = max(budget.patience(self.holdings.count) for budget in self._budgets)
        if use.declined and not self.keeper.may_ask(use, patience):
            return False  # to see at each call whether there is room by now would take longer
        needed = [(budget, self._expected(budget.memory)) for budget in self._budgets]
        if all(budget.total() + expected <= self._limit for budget, expected in needed):
            return True
        if not self.keeper.may_ask(use, patience):
            return False
        too_much = any(expected > self._limit for _, expected in needed)
        if not too_much and all(self.make(specialization, *one) for one in needed):
            return True
        self.keeper.declined(use)
        if too_much or self.keeper.patient(specialization.standing.runs):
            self._sizes.crowded(args, self.memory_limit)
        return False

    def make(
        self,
        specialization: Specialization,
        budget: Budget[Unit],
        planned: int = 0,
        unit: Unit | None = None,
    ) -> bool:
        """Have others go for it, as far as its partition's captures and their own rules admit."""
        use = specialization.use

        def admits(holder: Holder[Unit], held: Unit) -> bool:
            mine = holder is self._owner
            return self._admits(specialization, held.use) if mine else self.keeper.rests(use, held.use)

        return budget.make_room(self._owner, unit, self._limit, admits, planned=planned)

    def for_replicas(self) -> int:
        """Bytes of the device that further execs may take."""
        return int(self._limit * SHARE) - self._budgets[0].total()

    @property
    def limit(self) -> str:
        """The option that keeps further captures out, with its value."""
        full = self._most is not None and self.holdings.count >= self._most
        return f"max_captures={self._most}" if full else self.memory_limit

    @property
    def memory_limit(self) -> str:
        """The option for the captures' memory, with its value."""
        return f"capture_memory_mb={self._limit >> 20}"

    def _expected(self, memory: Memory) -> int:
        """Bytes of a further capture. What a first one takes is a guess, which alone never keeps it out."""
        guess = min(NODE_BYTES * max(self._stats.facts.device_ops, 1), self._limit)
        return self.holdings.expected(memory, guess)

    def _admits(self, specialization: Specialization, other: Use) -> bool:
        runs, captured = specialization.standing.runs, specialization.program is not None
        captures = self.holdings.count - captured
        return self.keeper.admits(specialization.use, runs, other, captures, self._stats.launches)
