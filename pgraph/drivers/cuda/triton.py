"""Generated Triton kernels: the node that a launch of one records, without a launch.

Inductor makes a function of each compiled kernel that computes the grid from the arguments and calls a
launcher with the kernel's parameters in order. That very function is run, with another launcher.
"""

from __future__ import annotations

import dataclasses
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
    grid, parameters = _launched(launcher.launch, arguments)
    (offsets,) = rest
    if len(launcher.kinds) != len(parameters) or len(offsets) != len(parameters) + launcher.nulls:
        return None
    if min(grid) < 1 or max(grid) >= 1 << 31:
        return None
    at = {id(value): i for i, value in enumerate(arguments)}
    params, addresses = bytearray(sample.params), []
    for kind, offset, value in zip(launcher.kinds, offsets, parameters, strict=False):
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
    for offset in offsets[len(parameters) :]:
        struct.pack_into("=Q", params, offset, 0)
    function, _, *others = sample.header
    header = (function, grid, *others)
    return dataclasses.replace(sample, header=header, params=bytes(params)), addresses


def _launched(launcher: types.FunctionType, arguments: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """The grid and the parameters with which a launcher launches."""
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
