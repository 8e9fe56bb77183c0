"""Ghost memory on a GPU: huge reserved ranges over one small physical allocation.

A `CudaArena` reserves virtual addresses and maps the same physical chunk behind them again and
again, as far as they are used; memcpy and memset nodes and Triton's launcher check that an address
is mapped, nothing more. `GhostPools` routes the caching allocator's requests there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from cuda.bindings import driver as cu

from pgraph.drivers.cuda import snapshot
from pgraph.drivers.cuda.nodes import check
from pgraph.drivers.interface import ALIGNMENT, UNIT, Arena, further, next_start
from pgraph.errors import DriverError
from pgraph.native import ghosts, libraries
from pgraph.native.structs import ArenaState

__all__ = ["CudaArena", "GhostPools", "unlimited"]

_RESERVE = 1 << 40
_CHUNKS = (32 << 20, 2 << 20)  # physical bytes; the smaller where the device is nearly full
# Where ghosts should lie. Parameters are full of small numbers, side by side and over left-over halves
# of addresses: neither may look like an address here. So the upper half is large, and the lower half is
# neither a small number nor a common float (0x5000_0000 is 1.3e9, or 8.6e9 as a float32).
_HINT = (0x5A00_0000_0000, 0x5B00_0000_0000)
_START = 0x5000_0000
# Each arena starts elsewhere, so that an address of an earlier one is not taken for one of this. After some
# tens of arenas the same places come again (`CudaArena.since`).
_STRIDE = 8 << 30
_arenas = itertools.count()
_GUARD = 256 << 10
_AHEAD = 128 << 20
"""Bytes mapped beyond what is needed whenever some are. Each time takes 0.1 ms, or 0.14 ms for four chunks
(H200): to compute the recording of one size took a fifth longer without."""


class CudaArena(Arena):
    """One capture's ghost addresses on one GPU.

    Attributes:
        since: what the allocator's log says up to this time, in microseconds, is of earlier arenas.
        stream: raw handle of one for which all memory comes from the arena; None if that is not known.

    Raises:
        DriverError: not even the smallest physical chunk could be allocated.
    """

    since = -1
    stream: int | None = None

    def __init__(self, device: torch.device, layout: int) -> None:
        ghosts.calls()  # a compiler may have to run for it: now, and not within a capture
        self._device = device
        self._layout = layout
        self._direct = 0
        prop, self._access = _on_device(device.index)
        self._chunk, self._handle = _physical(prop)
        try:
            (base,) = check(cu.cuMemAddressReserve(_RESERVE, 0, _HINT[layout], 0))
        except DriverError:
            check(cu.cuMemRelease(self._handle))
            raise
        self._base = self.low = int(base)
        self.high, self.guard = self._base + _RESERVE, _GUARD
        self.low = self._base + _START + next(_arenas) % (_RESERVE // 2 // _STRIDE) * _STRIDE
        self.state = ArenaState(
            low=self.low,
            high=self.high,
            position=self.low,
            mapped=self.low,
            chunk=self._chunk,
            handle=int(self._handle),
            guard=_GUARD,
            unit=UNIT,
            further=further(layout),
            ahead=_AHEAD,
            **_functions(),
            desc=self._access.getPtr(),
        )

    @property
    def position(self) -> int:
        return self.state.position

    @property
    def cursor(self) -> int | None:
        return ctypes.addressof(self.state) + ArenaState.position.offset

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def segments(self) -> int:
        """How many ranges the caching allocator has been given: each holds one allocation or more."""
        return int(self.state.count) - self._direct

    def take(self, nbytes: int, phase: int = 0) -> int:
        self._direct += 1
        return self._take(nbytes, phase % ALIGNMENT)

    def segment(self, nbytes: int) -> int:
        """A range for the caching allocator."""
        return self._take(nbytes, 0)

    def _take(self, nbytes: int, phase: int) -> int:
        library = libraries.load()
        if library is not None:
            address = library.pg_arena_take(ctypes.addressof(self.state), nbytes, phase)
        else:
            address = self._take_in_python(nbytes, phase)
        if not address:
            raise DriverError(
                f"{nbytes} bytes of ghost memory could not be had (CUDA error {self.state.error}, "
                f"{self.position - self.low} of {_RESERVE} bytes of address space used)"
            )
        return address

    def _take_in_python(self, nbytes: int, phase: int) -> int:
        s = self.state
        start = next_start(s.position, s.guard, self._layout, phase)
        end = start + nbytes + s.guard
        if end > s.high or s.error:
            return 0
        first = s.mapped
        wanted = end + s.ahead if first < end else first
        while not s.error and (s.mapped < end or (s.mapped < wanted and s.mapped + s.chunk <= s.high)):
            s.error = cu.cuMemMap(s.mapped, s.chunk, 0, self._handle, 0)[0].value
            s.mapped += 0 if s.error else s.chunk
        if not s.error and s.mapped > first:
            s.error = cu.cuMemSetAccess(first, s.mapped - first, [self._access], 1)[0].value
        if s.error:
            return 0
        s.position, s.count = end, s.count + 1
        return start

    def close(self) -> None:
        """Unmap and free everything, unless a library holds on to part of it."""
        if self.touched:
            torch.cuda.synchronize(self._device)
        if self.leaked:
            return
        self._unmap()
        check(cu.cuMemRelease(self._handle))
        check(cu.cuMemAddressFree(self._base, _RESERVE))

    def _unmap(self) -> None:
        mapped = self.state.mapped - self.low
        # All mappings side by side at once; one by one if a driver should not take that.
        if mapped and cu.cuMemUnmap(self.low, mapped)[0] != cu.CUresult.CUDA_SUCCESS:
            for address in range(self.low, self.state.mapped, self._chunk):
                check(cu.cuMemUnmap(address, self._chunk))


@functools.cache
def _on_device(index: int) -> tuple[Any, Any]:
    """What the driver is told of memory on a device: what is allocated, and who may use it."""
    prop, access = cu.CUmemAllocationProp(), cu.CUmemAccessDesc()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = index
    access.location = prop.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return prop, access


@functools.cache
def _functions() -> dict[str, int | None]:
    """Addresses of the driver functions that the native helper calls."""
    lib = ctypes.CDLL("libcuda.so.1")
    calls = {"map": lib.cuMemMap, "access": lib.cuMemSetAccess}
    return {name: ctypes.cast(call, ctypes.c_void_p).value for name, call in calls.items()}


def _physical(prop: Any) -> tuple[int, Any]:
    for size in _CHUNKS:
        error, handle = cu.cuMemCreate(size, prop, 0)
        if error == cu.CUresult.CUDA_SUCCESS:
            return size, handle
    raise DriverError(f"no {_CHUNKS[-1]} bytes of device memory for ghost memory: {error.name}")


# -- routing the caching allocator --------------------------------------------------------------

_current: CudaArena | None = None


@functools.cache
def _allocator() -> Any:
    """The allocator behind all ghost pools; lives for ever, as pools may outlive a capture.

    Note [Ghost allocator lock order]
    The caching allocator calls it with its own mutex held. The native functions need nothing else.
    The Python callbacks (no C compiler) need the interpreter lock: a thread that holds that lock
    and waits for the mutex would never get it. PyTorch's own bindings release the lock before they
    allocate, but generated code does not; so the callbacks are only the second choice.
    """
    library = libraries.load()
    functions: tuple[Any, Any]
    if library is not None:
        functions = (library.pg_ghost_alloc, library.pg_ghost_free)
    else:
        functions = (_ALLOC(_python_alloc), _FREE(_python_free))
    addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions]
    allocator = torch._C._cuda_customAllocator(*addresses)
    _KEEP.extend([*functions, allocator])
    return allocator


_KEEP: list[Any] = []
_ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)


def _python_alloc(size: int, device: int, stream: int | None) -> int | None:
    try:
        return _current.segment(size) if _current is not None else None
    except DriverError:
        return None


def _python_free(ptr: int | None, size: int, device: int, stream: int | None) -> None:
    return None


class GhostPools(contextlib.AbstractContextManager["GhostPools"]):
    """While active, what this thread allocates on the arena's device is ghost memory.

    Note [Pools of the program's own]
    A pool that is destroyed while another one is in use (`torch.cuda.use_mem_pool`) ends the process: the
    allocator then waits for events, asserts that no pool is in use, and does so in a destructor. And nothing
    says from which of two pools of a thread memory comes; from the program's, it would be written to by each
    launch. So nothing is captured there. Whether the thread uses a pool is told by where memory comes from.
    That takes long in a large program, and is asked only if the program ever made a pool: they are numbered.
    The pool that was made to find that out stays for ever, empty.

    Attributes:
        latest: id of the pool that is in use.

    Raises:
        DriverError: the thread uses another pool.
    """

    def __init__(self, arena: CudaArena) -> None:
        self._arena = arena
        self._device = arena.device.index
        self._pools: list[Any] = []
        self._loose = arena.segments  # ranges that may be handed out again, or used to be
        self.latest = (0, 0)

    def __enter__(self) -> GhostPools:
        global _current
        first, number, alone = _pool()
        if not alone and _uses_a_pool(self._arena.device):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(first))
            raise DriverError("a memory pool of the program's own is in use")
        library = libraries.load()
        if library is not None:
            library.pg_arena_activate(ctypes.addressof(self._arena.state))
        _current = self._arena
        self._begin(first, number)
        return self

    def __exit__(self, *exc: object) -> None:
        global _current
        self._close()
        self._pools.clear()
        library = libraries.load()
        if library is not None:
            library.pg_arena_activate(None)
        _current = None

    def refresh(self, held: int) -> None:
        """Begin a new pool if this one may have something to hand out again (Note [One pool per op]).

        Args:
            held: of the ranges that the allocator has asked for, so many are not given back.
        """
        # Each range holds one allocation: pools do not split.
        loose = self._arena.segments - held
        if loose != self._loose:
            self.renew()
            self._loose = loose

    def renew(self) -> None:
        """Begin a new pool."""
        self._close()
        pool, number, _ = _pool()
        self._begin(pool, number)

    def _begin(self, pool: Any, number: tuple[int, int]) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, number)
        self._pools.append(pool)
        self.latest = number

    def _close(self) -> None:
        torch._C._cuda_endAllocateToPool(self._device, self.latest)
        torch._C._cuda_releasePool(self._device, self.latest)


_made = 0  # pools


def _pool() -> tuple[Any, tuple[int, int], bool]:
    """A new pool of ghosts, its id, and whether all pools of the process were made here."""
    global _made
    _made += 1
    pool = torch.cuda.MemPool(_allocator(), no_split=True)
    first, second = pool.id
    return pool, (first, second), (first, second) == (0, _made)


def _uses_a_pool(device: torch.device) -> bool:
    """Whether what this thread allocates comes from a pool."""
    with snapshot.taken([1], device, torch.cuda.default_stream(device)) as (address,):
        return any(
            segment["address"] <= address < segment["address"] + segment["total_size"]
            and tuple(segment["segment_pool_id"]) != (0, 0)
            for segment in snapshot.segments()
        )


@contextlib.contextmanager
def unlimited(device: torch.device) -> Iterator[None]:
    """Lift the share of the device that the process may allocate, as far as it can be lifted.

    Note [Ghosts and the memory fraction]
    The caching allocator counts ghosts against `set_per_process_memory_fraction`, though they take no
    memory: near the limit a capture would fail. Worse, it would first have the allocator free its
    cached blocks, which a stream that is being captured does not survive. What other threads allocate
    meanwhile is not limited either, for the few milliseconds that a capture takes.
    """
    share = torch.cuda.get_per_process_memory_fraction(device)
    if share >= 1.0:  # also if it was never set; setting it would switch the check on
        yield
        return
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(share, device)
        # PyTorch keeps bytes, rounded down: a share that it tells may be a hair less than whole bytes.
        lost = share - torch.cuda.get_per_process_memory_fraction(device)
        if lost > 0:
            torch.cuda.set_per_process_memory_fraction(share + lost / 2, device)
