"""Generated Triton kernels: the node that a launch of one records, without a launch.

Inductor makes a function of each compiled kernel that computes the grid from the arguments and calls a
launcher with the kernel's parameters in order. That very function is run, with another launcher.

The launcher is Inductor's static one or Triton's own. The latter is given values for constants, too, which
the kernel is compiled for; its signature tells them.
"""

from __future__ import annotations

import struct
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from pgraph import compat
from pgraph.drivers.operands import Operand
from pgraph.template.recording import NodeRecord

__all__ = ["kernel_names", "kernel_node"]

# As the launcher reads the types of parameters: a character each, C's on 64-bit Linux.
_FORMATS: Final = {c: f"={c}" for c in "bhiBHIfd"} | {"l": "=q", "K": "=Q"}
_POINTER: Final = "O"
_CONSTANT: Final = "-"
_TOLD: Final = "pgraph_launched"  # a name in the globals of a probe

_probes: weakref.WeakKeyDictionary[Any, types.FunctionType] = weakref.WeakKeyDictionary()


def kernel_names(namespace: Mapping[str, Any]) -> list[str]:
    """Names of kernels among the globals of a generated module."""
    return [name for name, value in namespace.items() if compat.is_triton_kernel(value)]


def kernel_node(
    kernel: Any, sample: NodeRecord, arguments: Sequence[Any]
) -> tuple[NodeRecord, list[tuple[int, int]]] | None:
    """See `pgraph.drivers.interface.Driver.kernel_node`."""
    launcher = compat.launcher_of(kernel)
    if launcher is None or (sample.kind, sample.name) != ("kernel", launcher.name):
        return None
    way, *rest = sample.header[-1]
    if way != "params":
        return None
    grid, given = _launched(launcher.launch, arguments)
    if len(given) != launcher.others + len(launcher.kinds) or min(grid) < 1 or max(grid) >= 1 << 31:
        return None
    mine = zip(launcher.kinds, given[launcher.others :], strict=True)
    passed = [(kind, value) for kind, value in mine if kind != _CONSTANT]
    (offsets,) = rest
    nulls = offsets[len(passed) :]
    if len(offsets) < len(passed) or launcher.nulls not in (None, len(nulls)):
        return None
    if any(sample.params[offset : offset + 8].strip(b"\0") for offset in nulls):
        return None  # scratch memory that the launcher allocates
    at = {id(value): i for i, value in enumerate(arguments)}
    params, addresses = bytearray(sample.params), []
    for offset, (kind, value) in zip(offsets, passed, strict=False):
        if kind == _POINTER:
            if isinstance(value, Operand):
                addresses.append((offset, at[id(value)]))
                address = value.address
            elif isinstance(value, torch.Tensor):
                address = value.data_ptr()
            elif value is None:
                address = 0
            else:
                return None
            struct.pack_into("=Q", params, offset, address)
        elif kind in _FORMATS and isinstance(value, int | float):
            struct.pack_into(_FORMATS[kind], params, offset, value)
        else:
            return None
    function, _, *others = sample.header
    header = (function, grid, *others)
    # Not by `dataclasses.replace`, which takes longer than all else here.
    made = NodeRecord(
        sample.kind, sample.name, header, bytes(params), sample.structs, sample.kept, sample.layout
    )
    return made, addresses


def _launched(launcher: types.FunctionType, arguments: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """The grid, and what else a launcher is called with: the parameters come last."""
    probe = _probes.get(launcher)
    if probe is None:
        namespace = dict(launcher.__globals__)
        namespace.pop(launcher.__name__, None)  # it would keep the launcher, and with it this entry
        namespace["runner"] = lambda *given: namespace.update({_TOLD: given})
        probe = _probes[launcher] = types.FunctionType(
            launcher.__code__, namespace, None, launcher.__defaults__, launcher.__closure__
        )
    probe(*arguments, stream=0)
    x, y, z, _, *parameters = probe.__globals__.pop(_TOLD)
    return (int(x), int(y), int(z)), parameters
