"""What all partitions of one ATen graph have in common while they are compiled."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from pgraph.compat import Joint
from pgraph.drivers.interface import Driver
from pgraph.options import Options
from pgraph.partition.facts import Kind
from pgraph.reasons import Reason
from pgraph.runtime.protocols import Boxed

__all__ = ["Account", "CompilePartition", "Context", "Declined", "Memory", "Origin"]

# (module, its example inputs, positions of inputs that never move or None to leave that as it is) -> code.
CompilePartition = Callable[[GraphModule, Sequence[Any], "Sequence[int] | None"], Boxed]


class Declined(Exception):  # noqa: N818 - no error of the program's
    """A partition is not split. The text says why."""


class Account:
    """The automatic splits of one ATen graph (Note [Automatic splits]).

    Args:
        splits: made, or tried.
        found: names of the ops that made captures fail.
        lock: held while one of the graph's partitions is split; no thread waits for it.
    """

    def __init__(self) -> None:
        self.splits = 0
        self.found: set[str] = set()
        self.lock = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a graph comes from.

    Args:
        broken: why Dynamo ended it where it did, if the function went on.
        model: gives the model that it was made for; None if that is gone, or was not found.
    """

    broken: Reason | None = None
    model: Callable[[], Any] = lambda: None


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """How one ATen graph is compiled.

    Args:
        driver: where its partitions are captured; None if the graph is on no device.
        options: of this compilation.
        kind: of the graph.
        compile_partition: makes code of one partition.
        origin: of the graph.
        joint: what the forward and the backward know of each other; None for an inference.
        account: of its automatic splits.
    """

    driver: Driver | None
    options: Options
    kind: Kind
    compile_partition: CompilePartition
    origin: Origin = Origin()
    joint: Joint | None = None
    account: Account = dataclasses.field(default_factory=Account)

    @property
    def by_inductor(self) -> bool:
        """Whether Inductor compiles the partitions: it chooses strides, ATen code does not."""
        return self.options.codegen != "aten"


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What is known of the inputs and results of a graph or of a partition, by position.

    Args:
        static: the caller keeps their memory.
        donated: the code may overwrite them.
        gradients: no guard covers their lazy bits and types (Note [Unguarded arguments]).
        saved: results that the backward gets, and their names there (Note [Results in one piece]).
        kept: results that are parameters' gradients.
        lasting: results that the program gets (Note [Results first]).
    """

    static: frozenset[int]
    donated: frozenset[int]
    gradients: tuple[int, ...]
    saved: Mapping[int, str] = dataclasses.field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    lasting: frozenset[int] = frozenset()
