"""A library call, and what tells whether another one records the same nodes; calls that give views."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_flatten, tree_unflatten

from pgraph.compute.errors import NotComputableError
from pgraph.compute.first import without_memory
from pgraph.compute.script import CallLibrary, CallView
from pgraph.drivers.interface import ALIGNMENT
from pgraph.drivers.operands import HostOperand, Operand, distinct
from pgraph.ops.fx import is_builtin

__all__ = ["LibraryCall", "alignment", "gives_view", "returned_arguments", "view_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class LibraryCall:
    """A call of a library.

    Args:
        event: of the script.
        arguments: an `Operand` for each tensor of the device, or a value.
        settings: a number for those of libraries (`pgraph.compat.library_settings`).

    Attributes:
        operands: the tensors among its arguments, each once.
        key: equal for calls of one script that record the same nodes, but for addresses.
    """

    event: CallLibrary
    arguments: tuple[Any, ...]
    settings: int
    operands: list[Operand] = dataclasses.field(init=False, repr=False, compare=False)
    key: Hashable = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        operands = [self.arguments[i] for i in distinct(self.arguments)]
        object.__setattr__(self, "operands", operands)
        given = sum([isinstance(a, Operand) for a in self.arguments])
        same = tuple(self._numbers) if len(operands) < given else None
        likeness = tuple(map(_likeness, self.arguments))
        object.__setattr__(self, "key", (self.event.kind, likeness, same, self.settings))

    @property
    def _numbers(self) -> list[int]:
        """For each argument that is a tensor, which one."""
        return [self.operands.index(a) for a in self.arguments if isinstance(a, Operand)]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Call with these operands; the results that are none of the arguments."""
        at = iter(self._numbers)
        given = [tensors[next(at)] if isinstance(a, Operand) else _value(a) for a in self.arguments]
        args, options = tree_unflatten(given, self.event.spec)
        known = {id(value) for value in given if isinstance(value, torch.Tensor)}
        made = self.event.function(*args, **options)
        if made is None and not self.event.results:  # all that it does is to write; None counts as a leaf
            return []
        return [result for result in tree_flatten(made)[0] if id(result) not in known]


def gives_view(function: Any) -> bool:
    """Whether an op of PyTorch's returns one tensor, which may lie in the memory of an argument."""
    if not isinstance(function, OpOverload) or not is_builtin(function):
        return False
    returns = function._schema.returns
    if len(returns) != 1 or not isinstance(returns[0].type, torch.TensorType):
        return False
    alias = returns[0].alias_info
    return alias is not None and not alias.is_write


def returned_arguments(
    function: Any, arguments: Sequence[Any], options: Mapping[str, Any], tensor: type
) -> list[Any]:
    """For each result of a call the argument that it is; None for what is made anew.

    Args:
        tensor: of what stands for tensors among the arguments.

    Raises:
        NotComputableError: that is not told.
    """
    if isinstance(function, OpOverloadPacket):
        raise NotComputableError(f"which overload of {function} is called is not known")
    if not isinstance(function, OpOverload):
        out = options.get("out")
        if out is not None and not isinstance(out, tensor):
            raise NotComputableError(f"{function} writes into {type(out).__name__}")
        return [out]
    found: list[Any] = []
    schema = function._schema
    for result in schema.returns:
        # A number stands for itself, as a tensor does: cuDNN's attention tells how long its inputs are.
        if not isinstance(result.type, torch.TensorType | torch.IntType):
            raise NotComputableError(f"{schema.name} returns {result.type}")
        if result.alias_info is None:
            found.append(None)
            continue
        names = result.alias_info.before_set
        at = next(
            (
                i
                for i, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.before_set & names
            ),
            None,
        )
        if at is None or not result.alias_info.is_write:
            raise NotComputableError(f"{schema.name} returns a view")
        found.append(arguments[at] if at < len(arguments) else options.get(schema.arguments[at].name))
    return found


def view_of(event: CallView, arguments: Sequence[Any]) -> torch.Tensor:
    """The view that an op gives, without memory: the op itself tells its layout.

    Args:
        arguments: as of a `LibraryCall`.

    Raises:
        NotComputableError: it is no view for this layout.
    """
    bases = [
        without_memory(a.dtype, a.size, a.stride, a.offset, a.lazy) if isinstance(a, Operand) else a
        for a in arguments
    ]
    args, options = tree_unflatten(bases, event.spec)
    found: torch.Tensor = event.function(*args, **options)
    storage = found.untyped_storage()._cdata
    if all(storage != base.untyped_storage()._cdata for base in bases if isinstance(base, torch.Tensor)):
        raise NotComputableError(f"{event.function} copies what it cannot give as a view")
    return found


def alignment(address: int) -> int:
    return min(address & -address, ALIGNMENT)


def _value(argument: Any) -> Any:
    return argument.tensor if isinstance(argument, HostOperand) else argument


def _likeness(value: Any) -> Hashable:
    """All of an argument that kernels may depend on."""
    if isinstance(value, Operand):
        address, *layout = value
        return *layout, alignment(address)
    if isinstance(value, HostOperand):
        return "host", tuple(value.tensor.size()), value.tensor.dtype
    if isinstance(value, torch.Tensor):  # a constant of the code
        return id(value), value.data_ptr(), tuple(value.size()), tuple(value.stride()), value.dtype
    return type(value), str(value) if isinstance(value, float | complex) else value  # -0.0 == 0.0
