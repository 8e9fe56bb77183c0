"""The host's ghost memory: addresses reserved without memory behind them."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from pgraph.drivers.host import faults as fault
from pgraph.drivers.interface import Arena, next_start
from pgraph.errors import DriverError

__all__ = ["CPU", "HostArena"]


CPU = torch.device("cpu")

_RESERVE = 1 << 42

_GUARD = 1 << 16

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_size_t,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_MAP_NORESERVE = 0x4000


class HostArena(Arena):
    """Reserved address space with no access rights."""

    def __init__(self, layout: int) -> None:
        fault.active().reach("arena")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _LIBC.mmap(None, _RESERVE, 0, flags, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise DriverError(
                f"could not reserve {_RESERVE} bytes of address space: {os.strerror(ctypes.get_errno())}"
            )
        self.low, self.high, self.guard = address, address + _RESERVE, _GUARD
        self._position = self.low
        self.layout = layout

    @property
    def position(self) -> int:
        return self._position

    @property
    def device(self) -> torch.device:
        return CPU

    def take(self, nbytes: int, phase: int = 0) -> int:
        start = next_start(self._position, self.guard, self.layout, phase)
        end = start + nbytes + self.guard
        if end > self.high:
            raise DriverError(
                f"{nbytes} bytes do not fit into the ghost range of {self.high - self.low} bytes"
            )
        self._position = end
        return start

    def close(self) -> None:
        _LIBC.munmap(self.low, self.high - self.low)
