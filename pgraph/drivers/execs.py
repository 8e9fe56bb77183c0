"""What a driver makes of a captured graph: execs, and the recipes that tell them what to do."""

from __future__ import annotations

import abc
import dataclasses
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Final, Protocol

from pgraph.drivers.turns import Turns
from pgraph.template.proofs import Proofs
from pgraph.template.recording import Recording
from pgraph.template.template import Frame, Slot, Template

__all__ = ["Computing", "Exec", "ExecSet", "Recipe", "Shelf"]


class Exec:
    """An executable range of nodes: what the driver holds for it. Recipes set its nodes, and launch it.

    Note [Freed by reference]
    Graphs and execs are freed when the last reference to them goes. A thread that is in the middle
    of a launch holds one, so that eviction and reset cannot pull an exec away under it; launches
    already queued on the device finish first, as the driver promises.

    Note [Shared execs]
    A driver takes new functions, dimensions and parameters for the nodes of an exec. So the specializations
    of a partition share one, as long as their recordings agree in all that cannot be set anew: the kinds of
    the nodes, how they wait for one another, launch attributes, the sizes of fills, and where the plan cuts
    (`pgraph.template.sharing`, `Driver.instantiate`). An update ignores launch attributes without a word, so
    what cannot be read counts as different. Each specialization has a recipe for each exec: all that is to be
    set, in the host's memory.

    What an exec holds is its own state. It knows which recipe it was set to last; a launch of any other first
    sets all nodes that are to do something else, and a launch of the same one those whose addresses changed
    since. Recipes have numbers that are never used again, since one may lie where another was freed. A call
    of the driver's that fails leaves the exec with nobody knows what: it then holds no recipe, and the next
    launch sets all. One thread at a time sets and launches.

    An exec lives as long as one of its recipes does.

    Note [Only what differs]
    To set a node takes a driver a microsecond and more. From one size to the next many nodes stay as they
    are, such as products with weights where only a cache grew. So an exec that several recipes share
    remembers what each node was set to, and a launch of another recipe sets only those that are to do
    something else. After a failure nothing is known of any node.
    """

    nbytes: int = 0
    """Device memory the driver holds for it, in bytes."""


class Recipe(abc.ABC):
    """What one specialization has an exec do (Note [Shared execs]).

    Attributes:
        exec: kept alive by it.
        nbytes: of the host's memory, in bytes.
        entry: address of the native helper's `pg_recipe`; None where launches go through `launch` only.
    """

    exec: Exec
    nbytes: int = 0
    entry: int | None = None
    _turns: Turns | None = None
    _others: tuple[Recipe, ...] = ()
    _itself = True  # takes turns with the others

    @abc.abstractmethod
    def launch(self, bases: list[int], stream: int) -> int:
        """Set the nodes that the exec has otherwise, today's addresses included, then launch.

        Args:
            bases: one address per region.
            stream: raw handle of the stream to launch on.

        Returns:
            Number of nodes set.

        Raises:
            DriverError: a driver call failed.
        """

    @abc.abstractmethod
    def fits(self) -> bool:
        """Whether the exec, made from another recording, takes the functions and dimensions of this one."""

    @abc.abstractmethod
    def today(self, bases: Sequence[int]) -> list[int]:
        """What is to stand in each slot."""

    @abc.abstractmethod
    def misses(self, today: Sequence[int]) -> int | None:
        """How many slots say otherwise now; None if nobody knows what the exec was set to."""

    def watch(self, launches: int) -> None:
        """Keep the addresses of so many launches from now on."""
        self._turns = Turns(launches)

    def watched(self) -> list[bytes]:
        """The addresses that were kept, a launch each; no more are."""
        turns, self._turns = self._turns, None
        return turns.kept if turns is not None else []

    def take_turns(self, others: Sequence[Recipe], itself: bool = True) -> None:
        """From now on launches are made by this one or by one of these (Note [An exec for each layer]).

        Args:
            others: made by `Driver.replica`.
            itself: False where its own exec is left to the other recipes that share it.
        """
        self._others, self._itself = tuple(others), itself
        self._turns = Turns()

    def _turn(self, bases: Sequence[int]) -> Recipe:
        """Which of them serves a launch, where that is told in Python."""
        if self._turns is None:
            return self
        in_turn = self._in_turn
        return in_turn[self._turns.next(in_turn, bases)]

    @property
    def _in_turn(self) -> tuple[Recipe, ...]:
        return (self, *self._others) if self._itself else self._others


@dataclasses.dataclass(frozen=True, eq=False)
class ExecSet:
    """The execs of a plan's chunks, which several specializations share.

    Args:
        execs: one for each chunk, in order.
        template: of the recording that they were made from.
    """

    execs: tuple[Exec, ...]
    template: Template

    @property
    def nbytes(self) -> int:
        """Device memory the driver holds for them, in bytes."""
        return sum(e.nbytes for e in self.execs)


class Computing(Protocol):
    """Tells recordings of sizes that were not captured (`pgraph.compute`).

    Attributes:
        latest: what was in the way of the last recording that was tried in vain.
    """

    latest: str | None

    @property
    def learning(self) -> bool:
        """Whether further captures may have it tell recordings which it does not yet."""
        ...

    @property
    def reason(self) -> str | None:
        """Why it tells none, and never will."""
        ...

    def covers(self, inputs: Sequence[Any], alignments: Sequence[int]) -> bool:
        """Whether these arguments are computed, by all that is known before it is tried."""
        ...

    def recording(
        self, inputs: Sequence[Any], alignments: Sequence[int]
    ) -> tuple[Recording, tuple[Slot, ...]] | None:
        """The recording of a call, without a graph, and its slots; None if it must be captured."""
        ...

    def learn(
        self, recording: Recording, slots: Sequence[Slot], inputs: Sequence[Any], alignments: Sequence[int]
    ) -> None:
        """Be told of a capture."""
        ...


_BORDERS: Final = 64
"""Sets of them that a shelf remembers."""


class Shelf:
    """What the captures of one partition have in common.

    Attributes:
        execs: those that its specializations share, by what their recordings have in common; it keeps none of
            them alive.
        proofs: what is known of its nodes.
        frames: of its templates, by skeleton.
        borders: of the chunks that its plans have, before the first one is in two; the latest first.
        computer: may spare captures; None where sizes do not vary.
    """

    def __init__(self, computer: Computing | None = None) -> None:
        self.computer = computer
        self.execs = weakref.WeakValueDictionary[Hashable, ExecSet]()
        self.proofs = Proofs()
        self.frames = weakref.WeakKeyDictionary[Any, Frame]()
        self.borders: list[tuple[int, ...]] = []

    def planned(self, borders: tuple[int, ...]) -> None:
        """A plan has these; the next one may take them."""
        others = [known for known in self.borders if known != borders]
        self.borders = [borders, *others][:_BORDERS]
