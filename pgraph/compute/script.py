"""What a partition's generated code does, for whatever sizes: plain facts, immutable.

Numbers are places on a tape (`pgraph.compute.tape`).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch._ops import OpOverload

from pgraph.compute.errors import NotComputableError
from pgraph.compute.tape import Tape
from pgraph.ops import op_names
from pgraph.ops.fx import is_builtin, op_name

__all__ = [
    *(
        "PLAIN",
        "CallLibrary",
        "CallView",
        "Check",
        "Drop",
        "Event",
        "Figure",
        "Host",
        "Make",
        "TensorRef",
        "LaunchKernel",
        "Script",
        "Sort",
        "View",
        "asks_for_offsets",
        "is_foreign",
    ),
]

PLAIN: Final = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of values that stand for themselves among arguments."""


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
class TensorRef:
    """A tensor.

    Args:
        memory: number of the allocation that it lies in: inputs first, then in the order of their making.
        size, stride: None where they are those that the memory came with.
        offset: elements from the beginning of the tensor that the memory came with.
        look: number of the `CallView` that gave this tensor; then the others are told from there.
    """

    memory: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    offset: int | None = None
    look: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Make:
    """Memory is allocated."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchKernel:
    """A generated kernel is launched.

    Args:
        number: of the launch, among all launches of kernels.
        kernel: as the generated module has it.
        arguments: a `TensorRef`, a `Figure`, or a value.
    """

    number: int
    name: str
    kernel: Any
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CallLibrary:
    """A library is called.

    Args:
        kind: equal for calls of the same function with arguments nested alike.
        function: takes what `spec` makes of the arguments.
        arguments: a `TensorRef`, a `Figure`, or a value.
        spec: how the arguments are nested.
        results: memory that each result comes with.
    """

    kind: int
    function: Any
    arguments: tuple[Any, ...]
    spec: Any
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CallView:
    """A library is asked for a view, as for that of numbers as complex ones: nothing is launched.

    Args:
        kind, function, arguments, spec: as of `CallLibrary`; one argument is a tensor.
        look: number of the view.
    """

    kind: int
    function: Any
    arguments: tuple[Any, ...]
    spec: Any
    look: int


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A tensor must be laid out like this."""

    tensor: TensorRef
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """The program gives up memory."""

    memory: int


Event = Make | LaunchKernel | CallLibrary | CallView | Check | Drop


class View(NamedTuple):
    """A `TensorRef` that is not what the memory came with, without the memory."""

    size: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    offset: int | None
    look: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Sort:
    """What an event has in common with others, as those of like layers of a model.

    Args:
        number: equal for events that say the same, but for the tensors that they take; those lie in the
            same memory in the one event where they do in the other. None for an event that is like no other.
        tensors: memory of each tensor among its arguments, and the number of the view if it is one.
    """

    number: int | None
    tensors: tuple[tuple[int, int | None], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """Of one partition.

    Args:
        inputs: position among the arguments of each that is a tensor.
        constants: (position, value) of the arguments that are neither tensors nor whole numbers: the script
            has them as they were.
        events: in order.
        results: a `TensorRef`, a `Figure`, or a value; equal numbers in `identities` are one and the same
            object.
        memories: how many there are.
        layouts: (size, stride) of results of library calls, by memory, where the code checks them.

    Attributes:
        sorts: of the events.
        views: by number.
        shown: of each result the number of the view; None if it is none.
        runs: the launches among the events.
        returned: memory that results of calls come with.
        offsets: whether a library may ask where in its storage a tensor begins.
        foreign: whether something is called that is neither PyTorch's nor Inductor's.
    """

    tape: Tape
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    events: tuple[Event, ...]
    results: tuple[Any, ...]
    identities: tuple[int, ...]
    memories: int
    layouts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    sorts: tuple[Sort, ...] = dataclasses.field(init=False, repr=False, compare=False)
    views: tuple[View, ...] = dataclasses.field(init=False, repr=False, compare=False)
    shown: tuple[int | None, ...] = dataclasses.field(init=False, repr=False, compare=False)
    runs: tuple[LaunchKernel, ...] = dataclasses.field(init=False, repr=False, compare=False)
    returned: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    offsets: bool = dataclasses.field(init=False, repr=False, compare=False)
    foreign: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sorting = _Sorting()
        object.__setattr__(self, "sorts", tuple(map(sorting.sort, self.events)))
        shown = [sorting.view(leaf) if isinstance(leaf, TensorRef) else None for leaf in self.results]
        object.__setattr__(self, "shown", tuple(shown))
        object.__setattr__(self, "views", tuple(sorting.views))
        object.__setattr__(
            self, "runs", tuple([event for event in self.events if isinstance(event, LaunchKernel)])
        )
        calls = [event for event in self.events if isinstance(event, CallLibrary)]
        object.__setattr__(self, "returned", tuple([memory for call in calls for memory in call.results]))
        functions = {call.kind: call.function for call in calls}
        object.__setattr__(self, "offsets", any(map(asks_for_offsets, functions.values())))
        object.__setattr__(self, "foreign", any(map(is_foreign, functions.values())))

    def require(self, arguments: Sequence[Any]) -> None:
        """Make sure that these are arguments like those that the code was followed with.

        Raises:
            NotComputableError: they are not.
        """
        kept = ((i, value, arguments[i]) for i, value in self.constants)
        # By their texts: 0.0 and -0.0 are equal, and nan is not.
        others = [i for i, was, now in kept if type(now) is not type(was) or repr(now) != repr(was)]
        others += [s.position for s in self.tape.arguments if type(s.of(arguments)) is not int]
        if others:
            raise NotComputableError(
                f"argument {min(others)} is not what the generated code was followed with"
            )


def asks_for_offsets(function: Any) -> bool:
    """Whether what a function of a library does may depend on where in its storage a tensor begins.

    PyTorch's own ops see a tensor's first element, but for a few.
    """
    name = op_name(function) if isinstance(function, OpOverload) else f"aten::{_name(function)}"
    return is_foreign(function) or name in op_names.STORAGE_OFFSETS


def is_foreign(function: Any) -> bool:
    """Whether a function is neither PyTorch's nor Inductor's: nobody knows what it does besides, such as to
    keep a table for each size.
    """
    if isinstance(function, OpOverload):
        return not is_builtin(function)
    # What `extern_kernels` has are functions such as `torch.mm`, and Inductor's own around them.
    builtin = isinstance(function, types.BuiltinFunctionType)
    own = builtin and getattr(torch, _name(function), None) is function
    return not own and not str(getattr(function, "__module__", "")).startswith("torch._inductor.")


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", ""))


class _Sorting:
    """Events being sorted."""

    def __init__(self) -> None:
        self.views: dict[View, int] = {}
        self._numbers: dict[Hashable, int] = {}

    def sort(self, event: Event) -> Sort:
        said: list[Any] = [type(event)]
        arguments: tuple[Any, ...] = ()
        if isinstance(event, Make):
            said += event.size, event.stride, event.dtype
        elif isinstance(event, Check):
            said += event.size, event.stride
            arguments = (event.tensor,)
        elif isinstance(event, LaunchKernel):
            said += event.name, id(event.kernel)
            arguments = event.arguments
        elif isinstance(event, CallLibrary):
            said += event.kind, len(event.results)
            arguments = event.arguments
        elif isinstance(event, CallView):
            said.append(event.kind)
            arguments = event.arguments
        memories: dict[int, int] = {}  # each has a number within the event
        said += [_said(value, memories) for value in arguments]
        known = all(x is not None for x in said)
        number = self._numbers.setdefault(tuple(said), len(self._numbers)) if known else None
        return Sort(number, tuple([(a.memory, self.view(a)) for a in arguments if isinstance(a, TensorRef)]))

    def view(self, place: TensorRef) -> int | None:
        """The number of a view; None if the place is none."""
        if place.size is None and place.look is None:
            return None
        return self.views.setdefault(
            View(place.size, place.stride, place.offset, place.look), len(self.views)
        )


def _said(value: Any, memories: dict[int, int]) -> Hashable | None:
    """What an argument says, but for the memory and the layout of a tensor; None if that cannot be told."""
    if isinstance(value, TensorRef):
        return TensorRef, memories.setdefault(value.memory, len(memories))
    if isinstance(value, Figure):
        return Figure, value.place
    if type(value) not in PLAIN or value != value:  # a nan's text does not tell which one
        return None
    return type(value), repr(value)  # 0.0 == -0.0
