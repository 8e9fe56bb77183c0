"""Generated Triton kernels: the node that a launch of one records, without a launch.

Inductor makes a function of each compiled kernel that computes the grid from the arguments and calls a
launcher with the kernel's parameters in order. That very function is run, with another launcher.

The launcher is Inductor's static one or Triton's own. The latter is given values for constants, too, which
the kernel is compiled for; its signature tells them.

Note [Kernels tuned anew]
Inductor compiles a kernel for several sizes of blocks, and keeps the launcher of the fastest. Whoever
compiles a kernel of the same source later in the process, such as another model or another backend, gets the
same object, and all of its launchers are made again: the next run measures anew, and on a busy machine
another one wins. A node has the function that was captured, so the grid of the new launcher is not for it:
half of the blocks would not be launched. Therefore each function is noted with the code whose launcher
launched it, and where they do not belong together no node is made: the size is captured. Where the code
tells as which function it was loaded, that is proof enough, whatever was noted: a handle may have been
another function's before.
"""

from __future__ import annotations

import struct
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from pgraph import compat
from pgraph.drivers.operands import Operand
from pgraph.template.recording import NodeRecord

__all__ = ["kernel_names", "kernel_node"]

# As the launcher reads the types of parameters: a character each, C's on 64-bit Linux.
_POINTER: Final = "O"
_FORMATS: Final = {c: c for c in "bhiBHIfd"} | {"l": "q", "K": "Q", _POINTER: "Q"}
_CONSTANT: Final = "-"
_NUMBERS: Final = (int, float)


class _Run(NamedTuple):
    """Parameters that lie side by side.

    Args:
        offset: of the first of them.
        form: of all of them.
        first, end: which of the parameters.
    """

    offset: int
    form: struct.Struct
    first: int
    end: int


class _Kernel:
    """What is known of a kernel, whatever it is launched with.

    Attributes:
        code: what its launcher launches.
        given: how many values the launcher is called with.
        passed: which of them the kernel is given, and a character for the type of each.
    """

    def __init__(self, launcher: compat.Launcher) -> None:
        self.name, self.code, self._nulls = launcher.name, launcher.code, launcher.nulls
        self.given = launcher.others + len(launcher.kinds)
        given = enumerate(launcher.kinds, launcher.others)
        self.passed = [(i, kind) for i, kind in given if kind != _CONSTANT]
        namespace = dict(launcher.launch.__globals__)
        namespace.pop(launcher.launch.__name__, None)  # it would keep the launcher, and with it this object
        self._told: list[tuple[Any, ...]] = []
        told = self._told
        namespace["runner"] = lambda *given: told.append(given)
        self._probe = types.FunctionType(
            launcher.launch.__code__,
            namespace,
            None,
            launcher.launch.__defaults__,
            launcher.launch.__closure__,
        )
        self._runs: dict[tuple[int, ...], list[_Run] | None] = {}

    def launched(self, arguments: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
        """The grid, and what else the launcher is called with: the parameters come last."""
        self._told.clear()
        self._probe(*arguments, stream=0)
        x, y, z, _, *parameters = self._told.pop()
        return (int(x), int(y), int(z)), parameters

    def runs(self, offsets: tuple[int, ...]) -> list[_Run] | None:
        """The parameters that the kernel is given, if all begin at these bytes; None if that cannot be."""
        if offsets not in self._runs:
            kinds = "".join([kind for _, kind in self.passed])
            nulls = len(offsets) - len(kinds)
            right = nulls >= 0 and self._nulls in (None, nulls) and _FORMATS.keys() >= set(kinds)
            self._runs[offsets] = _runs(offsets, kinds) if right else None
        return self._runs[offsets]


def _runs(offsets: Sequence[int], kinds: str) -> list[_Run]:
    found: list[_Run] = []
    first = 0
    for i, kind in enumerate(kinds):
        form = "=" + "".join([_FORMATS[kind] for kind in kinds[first : i + 1]])
        after = offsets[i] + struct.calcsize("=" + _FORMATS[kind])
        if i + 1 == len(kinds) or offsets[i + 1] != after:
            found.append(_Run(offsets[first], struct.Struct(form), first, i + 1))
            first = i + 1
    return found


_kernels: weakref.WeakKeyDictionary[types.FunctionType, _Kernel] = weakref.WeakKeyDictionary()
_codes: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()  # by function
_functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the other way round


def _belong_together(function: Any, code: Any) -> bool:
    """Whether a captured function is what this code is launched as (Note [Kernels tuned anew]). Where the
    code does not tell, that is taken for granted the first time: the capture was just made.
    """
    if compat.handle_of(code) == function:
        _codes[function], _functions[code] = code, function
        return True
    return _codes.setdefault(function, code) is code and _functions.setdefault(code, function) == function


def _known(kernel: Any) -> _Kernel | None:
    launch = compat.only_launcher(kernel)
    if launch is None:
        return None
    found = _kernels.get(launch)
    if found is None:
        launcher = compat.launcher_of(kernel)
        if launcher is not None:
            found = _kernels[launch] = _Kernel(launcher)
    return found


def kernel_names(namespace: Mapping[str, Any]) -> list[str]:
    """Names of kernels among the globals of a generated module."""
    return [name for name, value in namespace.items() if compat.is_triton_kernel(value)]


def kernel_node(
    kernel: Any, sample: NodeRecord, arguments: Sequence[Any]
) -> tuple[NodeRecord, list[tuple[int, int]]] | None:
    """See `pgraph.drivers.interface.Driver.kernel_node`."""
    known = _known(kernel)
    if known is None or (sample.kind, sample.name) != ("kernel", known.name):
        return None
    way, *rest = sample.header[-1]
    if way != "params" or not _belong_together(sample.header[0], known.code):
        return None
    grid, given = known.launched(arguments)
    if len(given) != known.given or min(grid) < 1 or max(grid) >= 1 << 31:
        return None
    (offsets,) = rest
    runs = known.runs(offsets)
    if runs is None:
        return None
    for offset in offsets[len(known.passed) :]:
        if sample.params[offset : offset + 8].strip(b"\0"):
            return None  # scratch memory that the launcher allocates
    at = {id(value): i for i, value in enumerate(arguments)}
    values, addresses = [], []
    for offset, (i, kind) in zip(offsets, known.passed, strict=False):
        value = given[i]
        if kind != _POINTER:
            if not isinstance(value, _NUMBERS):
                return None
        elif isinstance(value, Operand) and not any(value.lazy):
            addresses.append((offset, at[id(value)]))
            value = value.address
        elif isinstance(value, torch.Tensor):
            value = value.data_ptr()
        elif value is None:
            value = 0
        else:
            return None
        values.append(value)
    params = bytearray(sample.params)
    for run in runs:
        run.form.pack_into(params, run.offset, *values[run.first : run.end])
    function, _, *others = sample.header
    header = (function, grid, *others)
    made = NodeRecord(
        sample.kind, sample.name, header, bytes(params), sample.structs, sample.kept, sample.layout
    )
    return made, addresses
