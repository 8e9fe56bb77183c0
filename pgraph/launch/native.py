"""Runs launch programs in C, for drivers that have the calls for it: `native/launch.c`.

It saves the interpreter between the steps, most of all the check of some twenty tensors one by one. What
that comes to on a machine, `bench/launch.py` shows: its column of native microseconds against the same run
with ``PGRAPH_NATIVE=0``. `pgraph.launch.interpreter` stays the reference, and serves whatever C declines.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pgraph import compat
from pgraph.drivers.interface import Driver
from pgraph.drivers.native_calls import NativeCalls
from pgraph.launch.guards import Guards
from pgraph.launch.interpreter import Launched
from pgraph.launch.lookup import Lookup, PartKind
from pgraph.launch.program import Program, Source
from pgraph.launch.views import view
from pgraph.native import libraries

__all__ = [
    "PHASES",
    "Addresses",
    "Calls",
    "NativeLaunch",
    "calls_of",
    "native_addresses",
    "native_launch",
    "native_program",
    "time_calls",
]

PHASES = ("guards", "allocate", "launch", "free", "results")
"""Of a launch in C: look at the arguments; allocate blocks; rewrite nodes and launch; free; make results."""

NativeLaunch = Callable[[list[Any]], "Launched | None"]
Addresses = Callable[[list[Any]], "list[int] | None"]


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """What a launch in C calls: Python functions, and addresses of C functions.

    Args:
        handles_of: tensors -> capsules with a handle each.
        dim, size, stride, data_ptr: what reads a tensor through a handle.
        delete_handle: frees a handle.
        launch: `pg_launch` of `rebind.c`.
        tensor_type: the Python class whose objects hold a C++ tensor in place.
        tensor_offset, tensor_class: see `pgraph.compat.tensor_layout`.
        device: what the driver offers.
        reinterpret, view: the makers of results that `make_alias` replaces.
        number_of, make_tensor, make_alias: of `tensors.cpp`; None where Python functions make tensors.
    """

    handles_of: Callable[[list[torch.Tensor]], list[Any]]
    dim: int
    size: int
    stride: int
    data_ptr: int
    delete_handle: int
    launch: int
    tensor_type: type
    tensor_offset: int
    tensor_class: int
    device: NativeCalls
    reinterpret: Callable[..., torch.Tensor]
    view: Callable[..., torch.Tensor]
    number_of: int | None = None
    make_tensor: int | None = None
    make_alias: int | None = None


def native_program(program: Program, calls: Calls | None = None, addresses: Addresses | None = None) -> Any:
    """The program as C reads it, or None where there are no launches in C.

    Args:
        calls: those of its driver, where somebody has them.
        addresses: those of its guards, if `native_addresses` made some: what C read for them is shared.
    """
    module = libraries.load_call()
    calls = calls or calls_of(program.built.driver)
    recipes = [chunk.recipe for chunk in program.chunks if chunk.recipe is not None]
    if module is None or calls is None or any(recipe.entry is None for recipe in recipes):
        return None
    if program.workspace is not None and calls.device.workspace is None:
        return None
    if any(getattr(module, source.name) != source for source in Source):
        raise SystemError("launch/program.py and native/launch.c number the sources differently")
    if any(getattr(module, number.name) != number for number in PartKind):
        raise SystemError("launch/lookup.py and native/launch.c number the parts of keys differently")
    guards = addresses.args[0] if isinstance(addresses, functools.partial) else None
    return module.program(program, calls, guards)


def native_addresses(driver: Driver) -> Callable[[Guards], Addresses]:
    """Makes `Guards.addresses` of guards; in C, where that is possible."""
    module, calls = libraries.load_call(), calls_of(driver)
    if module is None or calls is None:
        return lambda guards: guards.addresses
    return lambda guards: functools.partial(module.addresses, module.guards(guards, calls))


def native_launch(programs: Sequence[Any], lookup: Lookup[int]) -> NativeLaunch | None:
    """A function of a partition's arguments that launches, or None where there is no way in C.

    It does what `pgraph.launch.interpreter.launch_first` does with the same programs, and returns and raises
    the same, except that it also returns None where another device is current.

    Args:
        programs: made by `native_program`, of one partition.
        lookup: the number of each of them, in order.
    """
    if not programs or any(program is None for program in programs):
        return None
    module = libraries.load_call()
    if module is None:
        return None
    return functools.partial(module.call, module.programs(lookup.parts, tuple(lookup.keys), tuple(programs)))


def time_calls(program: Any, on: bool) -> dict[str, int]:
    """Nanoseconds that each phase took since timing was switched on; switches it on, or off.

    Args:
        program: made by `native_program`.
        on: whether the calls that follow are timed; the clock is read several times in each of them.
    """
    module = libraries.load_call()
    assert module is not None, "there is a program only where there is the module"
    return dict(zip(PHASES, module.time_calls(program, on), strict=True))


def calls_of(driver: Driver) -> Calls | None:
    """What launches call in C; None where there are none in C."""
    library, device, shims = libraries.load(), driver.native_calls(), compat.tensor_shims()
    if library is None or device is None or shims is None:
        return None
    handles_of, functions = shims
    dim, size, stride, data_ptr, delete_handle = (libraries.address_of(function) for function in functions)
    tensor_offset, tensor_class = compat.tensor_layout()
    makers = libraries.load_tensors() if device.made_on is not None else None
    names = {"number_of": "pg_scalar_type", "make_tensor": "pg_empty", "make_alias": "pg_alias"}
    made = {call: libraries.address_of(getattr(makers, name)) for call, name in names.items() if makers}
    return Calls(
        handles_of=handles_of,
        dim=dim,
        size=size,
        stride=stride,
        data_ptr=data_ptr,
        delete_handle=delete_handle,
        launch=libraries.address_of(library.pg_launch),
        tensor_type=torch.Tensor,
        tensor_offset=tensor_offset,
        tensor_class=tensor_class,
        device=device,
        reinterpret=compat.reinterpret,
        view=view,
        **made,
    )
