"""What a partition's generated code does, for whatever sizes: plain facts, immutable.

Numbers are places on a tape (`pgraph.compute.tape`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pgraph.compute.tape import Tape

__all__ = ["Call", "Check", "Drop", "Event", "Figure", "Host", "Make", "Place", "Run", "Script"]


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A number among the arguments of a kernel or of a call."""

    place: int


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """An argument of the partition that lies on the host: a seed of attention, which no kernel reads.

    Args:
        position: among the arguments.
    """

    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A tensor.

    Args:
        memory: number of the allocation that it lies in: inputs first, then in the order of their making.
        size, stride: None where they are those that the memory came with.
        offset: elements from the beginning of the tensor that the memory came with.
    """

    memory: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    offset: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Make:
    """Memory is allocated."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A generated kernel is launched.

    Args:
        number: of the launch, among all launches of kernels.
        kernel: as the generated module has it.
        arguments: a `Place`, a `Figure`, or a value.
    """

    number: int
    name: str
    kernel: Any
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A library is called.

    Args:
        kind: equal for calls of the same function with arguments nested alike.
        function: takes what `spec` makes of the arguments.
        arguments: a `Place`, a `Figure`, or a value.
        spec: how the arguments are nested.
        results: memory that each result comes with.
    """

    kind: int
    function: Any
    arguments: tuple[Any, ...]
    spec: Any
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A tensor must be laid out like this."""

    tensor: Place
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """The program gives up memory."""

    memory: int


Event = Make | Run | Call | Check | Drop


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """Of one partition.

    Args:
        inputs: position among the arguments of each that is a tensor.
        constants: (position, value) of the arguments that are neither tensors nor whole numbers: the script
            has them as they were.
        events: in order.
        results: a `Place`, a `Figure`, or a value; equal numbers in `identities` are one and the same object.
        memories: how many there are.
        layouts: (size, stride) of results of library calls, by memory, where the code checks them.
    """

    tape: Tape
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    events: tuple[Event, ...]
    results: tuple[Any, ...]
    identities: tuple[int, ...]
    memories: int
    layouts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
