"""What PyTorch takes for the results of a launch. Not a program: `probes.py` imports it."""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

RESULTS = 13
ROUNDS = 2000
SIZE, STRIDE = (64, 256), (256, 1)  # float32: 64 KiB, of which the allocator keeps blocks

Figures = dict[str, Any]
Make = Callable[[], Any]


Way = tuple[Make, Callable[[list[Any]], Any]]
"""How to make one, and how to free all of them."""


def per_one(way: Way, idle: Way | None = None) -> Figures:
    """us to make one of `RESULTS` (``us``), and to free one (``done_us``): the medians; all live at once.

    Args:
        idle: the same without what is asked about. It takes turns with the other, so that a core that is slow
            for a while is so for both, and is taken off round by round.
    """
    made, freed = zip(*(_round(way, idle) for _ in range(ROUNDS)), strict=True)
    us, done_us = (statistics.median(found[ROUNDS // 2 :]) for found in (made, freed))
    return {"us": us, "done_us": done_us, "answer": f"{RESULTS} at once, each"}


def _round(way: Way, idle: Way | None) -> tuple[float, float]:
    make, free = way
    began = time.perf_counter()
    held = [make() for _ in range(RESULTS)]
    there = time.perf_counter()
    free(held)
    done = time.perf_counter()
    less = _round(idle, None) if idle is not None else (0.0, 0.0)
    return (there - began) * 1e6 / RESULTS - less[0], (done - there) * 1e6 / RESULTS - less[1]


def _calls(driver: Any) -> Any:
    calls = driver.native_calls()
    if calls is None:
        raise RuntimeError("this PyTorch lacks what a launch in C calls")
    return calls


def memory_alone(driver: Any) -> Figures:
    """The allocator, without a tensor around it; the cost of a call by ctypes is taken off."""
    calls, nbytes = _calls(driver), 4 * SIZE[0] * SIZE[1]
    alloc = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p)(calls.raw_alloc)
    release = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64)(calls.raw_free)
    places = (ctypes.c_uint64 * RESULTS)()
    addresses = [ctypes.addressof(places) + 8 * i for i in range(RESULTS)]
    nothing = ctypes.CDLL(None).labs
    nothing.argtypes, nothing.restype = [ctypes.c_uint64, ctypes.c_void_p], ctypes.c_int32
    place = itertools.cycle(addresses)  # as many are freed as are made, so each round begins with the first

    spot = itertools.cycle(addresses)
    really = (lambda: alloc(nbytes, next(place)), lambda held: [release(address) for address in places])
    idly = (lambda: nothing(nbytes, next(spot)), lambda held: [nothing(address, 0) for address in places])
    return per_one(really, idly)


def tensors(driver: Any) -> Figures:
    """Tensors as a launch makes them: in C++, with their Python objects."""
    import torch

    from pgraph.native import libraries

    calls, library = _calls(driver), libraries.load_tensors()
    if library is None or calls.made_on is None:
        raise RuntimeError("tensors.cpp could not be built here")
    python = ctypes.PyDLL(library._name)
    empty, number = python.pg_empty, python.pg_scalar_type
    number.argtypes, number.restype = [ctypes.py_object], ctypes.c_int64
    p, whole = ctypes.c_void_p, ctypes.c_int64
    empty.argtypes, empty.restype = [whole, p, whole, whole, p], ctypes.py_object
    layout, at = (ctypes.c_int64 * 4)(*SIZE, *STRIDE), ctypes.c_uint64()
    told = 2, ctypes.addressof(layout), number(torch.float32), calls.made_on, ctypes.addressof(at)
    nothing = ctypes.PyDLL(None).labs
    nothing.argtypes, nothing.restype = [whole, p, whole, whole, p], ctypes.c_int32
    return per_one((lambda: empty(*told), list.clear), (lambda: nothing(*told), list.clear))


def from_python(driver: Any) -> Figures:
    """Tensors as generated code makes them."""
    import torch

    empty = _calls(driver).empty
    return per_one((lambda: empty(SIZE, STRIDE, torch.float32), list.clear))
