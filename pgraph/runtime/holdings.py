"""What the captures of one partition take: memory of the device for execs, of the host for recipes.

Each kind of memory has a budget (`pgraph.runtime.budget`) with the same limit, option `capture_memory_mb`.
Execs are freed when the last of those that share them goes. So where the device's memory is short all of them
go, and where the host's is short one does.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from pgraph.drivers.execs import ExecSet
from pgraph.runtime.budget import NODE_BYTES, Budget, Memory
from pgraph.runtime.keeping import Use
from pgraph.runtime.specialization import Specialization

__all__ = ["RECIPE_BYTES", "Group", "Holdings", "Unit", "budgets_of"]

RECIPE_BYTES: Final = 1000
"""What a node of a specialization takes on the host beside its recipe: template, plan and launch program
(measured by `bench/sizes.py`)."""


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """Specializations that share execs.

    Args:
        nbytes: what the execs count for in the budget of the device.
    """

    shared: ExecSet
    nbytes: int
    members: list[Specialization] = dataclasses.field(default_factory=list)

    @property
    def use(self) -> Use:
        """Of all of them together."""
        latest = max((s.use.latest for s in self.members), default=0)
        return Use(latest=latest, launches=sum(s.use.launches for s in self.members))


Unit = Group | Specialization
"""What may go: all that share execs, for the device's memory; one, for the host's."""

_budgets: dict[torch.device, tuple[Budget[Unit], ...]] = {}


def budgets_of(device: torch.device) -> tuple[Budget[Unit], ...]:
    """Of the device's memory, and of the host's."""
    first: Budget[Unit] = Budget("execs")
    # Two threads may ask at once: what came first stays.
    return _budgets.setdefault(device, (first, Budget("recipes", first.tick)))


class Holdings:
    """Called with the partition's lock held.

    Attributes:
        groups: in the order in which their execs were made.
        sharing: whether the latest capture shares the execs of an earlier one; None before there were two.
    """

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.sharing: bool | None = None
        self._host = self._device = self._measured = 0  # bytes: that count for recipes and execs; of execs
        self._replicated: list[Specialization] = []
        self._largest = {"execs": 0, "recipes": 0}

    @property
    def count(self) -> int:
        """How many captures there are."""
        return sum(len(group.members) for group in self.groups)

    @property
    def exec_bytes(self) -> int:
        """Memory of the device, as it was measured."""
        return self._measured + sum(s.replication.exec_bytes for s in self._replicated if s.replication)

    def takes(self, memory: Memory) -> int:
        """Bytes that count in a budget."""
        return self._device if memory == "execs" else self._host

    def expected(self, memory: Memory, guess: int) -> int:
        """Bytes that one more capture will take.

        Args:
            guess: what it is as long as there was none.
        """
        if memory == "execs" and self.groups and self.sharing is not False:
            return 0  # if it should share none after all, that is known of the next one
        return self._largest[memory] or guess

    def add(self, specialization: Specialization) -> Group:
        """It was captured; returns those that it shares its execs with, and itself."""
        built = specialization.built
        assert built is not None
        nodes = len(built.template.nodes)
        specialization.nbytes = sum(recipe.nbytes for recipe in built.recipes) + RECIPE_BYTES * nodes
        self._host += specialization.nbytes
        group = next((group for group in self.groups if group.shared is built.shared), None)
        if self.groups:
            self.sharing = group is not None
        if group is None:
            group = Group(built.shared, max(built.shared.nbytes, NODE_BYTES * nodes))
            self.groups.append(group)
            self._device += group.nbytes
            self._measured += built.shared.nbytes
        group.members.append(specialization)
        for memory, nbytes in (("execs", group.nbytes), ("recipes", specialization.nbytes)):
            self._largest[memory] = max(self._largest[memory], nbytes)
        return group

    def group_of(self, specialization: Specialization) -> Group:
        """Those that it shares its execs with, and itself."""
        assert specialization.built is not None
        return next(group for group in self.groups if group.shared is specialization.built.shared)

    def replicated(self, specialization: Specialization) -> None:
        """It got further execs."""
        assert specialization.replication is not None
        self.group_of(specialization).nbytes += specialization.replication.nbytes
        self._device += specialization.replication.nbytes
        if specialization not in self._replicated:
            self._replicated.append(specialization)
        specialization.nbytes += specialization.replication.recipe_bytes
        self._host += specialization.replication.recipe_bytes

    def remove(self, specialization: Specialization) -> None:
        """Its capture goes."""
        group = self.group_of(specialization)
        if specialization.replication is not None:
            group.nbytes -= specialization.replication.nbytes
            self._device -= specialization.replication.nbytes
            specialization.replication = None
        if specialization in self._replicated:
            self._replicated.remove(specialization)
        group.members.remove(specialization)
        if not group.members:
            self.groups.remove(group)
            self._device -= group.nbytes
            self._measured -= group.shared.nbytes
        self._host -= specialization.nbytes
        specialization.nbytes = 0
