"""What pgraph asks of a driver. Everything above this interface is device-free.

It is implemented by `pgraph.drivers.cuda`, and by `pgraph.drivers.host` on a CPU. A capture goes

    with driver.capture_lock(), driver.arena(0) as arena, driver.capture(arena) as session:
        ...ops run through `session.run_op`, allocations through `arena.empty_strided`...
        session.end()

and leaves a graph behind, from which `driver.instantiate` makes an exec for a range of nodes, and
`driver.recipe` what launches it (`pgraph.drivers.execs`).
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple

import torch

from pgraph.drivers.execs import Exec, Recipe
from pgraph.drivers.native_calls import NativeCalls
from pgraph.drivers.peak_stats import GhostPeaks
from pgraph.errors import DriverError
from pgraph.native import ghosts
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot
from pgraph.template.topology import Topology

__all__ = [
    "ALIGNMENT",
    "UNIT",
    "Arena",
    "Driver",
    "HiddenAllocation",
    "Passed",
    "Session",
    "further",
    "next_start",
]

Passed = Callable[[], bool]
"""Whether the device has come to a mark in a stream; it is not waited for."""

ALIGNMENT = 256
"""Bytes. Kernels are chosen by the alignment of their arguments; nothing looks beyond this
(cuBLASLt's heuristics ask for up to 256, Triton and TMA for 16)."""

UNIT = 1 << 16
"""Bytes. Arenas round addresses up to it (Note [Two layouts])."""


class HiddenAllocation(NamedTuple):
    """Ghost memory that no tensor of the program owned: an op's own scratch.

    Args:
        address: first byte.
        nbytes: size in bytes as it was asked for.
        freed: False if its owner (a library's cache) still held it when the last op was recorded.
        kept: True if the owner could not be made to give it back afterwards.
    """

    address: int
    nbytes: int
    freed: bool
    kept: bool = False


class Arena(abc.ABC):
    """A reserved range of ghost addresses: no data is read or written there, and none is handed
    out twice.

    Note [Addresses are never reused]
    A dead temporary's address must not be handed out again inside one capture: a later tensor at
    the same address would be taken for the earlier one (hazard: scratch of attention written past
    the end of the smaller output that took its place). Ghost memory costs nothing, so the position
    only grows. What a library frees and takes again inside one op cannot be kept apart; those
    ranges are merged into one region (`pgraph.capture.record`).

    Note [Two layouts]
    A pointer is told by how far it moved from one capture to the other: as far as the range that it was
    computed from (`pgraph.template.match`). So no two ranges may move equally far, or a pointer past the end
    of one would pass for its neighbour's. In both arenas a range begins (`next_start`) at

        round_up(position + guard, UNIT) + layout * (UNIT + UNIT / 2) + phase

    and `position` is then a guard past its end. Say that range k lies s bytes further on in layout 1 than in
    layout 0. Both captures take the same sizes in the same order, so what is rounded up for range k + 1 lies
    s further on, too. Rounding takes away less than UNIT of that, and UNIT + UNIT / 2 come on top: range
    k + 1 lies more than s + UNIT / 2 further on. So s grows from range to range, and any two ranges lie
    further apart in layout 1 than in layout 0.

    The lower two bytes of a range's address, less its phase, are 0 in layout 0 and UNIT / 2 in layout 1. So
    its two addresses never differ in the upper six bytes alone, or in the upper four. An old pointer whose
    lower two or four bytes were overwritten by a number does differ in just those.
    """

    low: int
    high: int
    guard: int
    leaked: bool = False
    """Set when a library kept some of it: the addresses then stay reserved for ever."""
    touched: bool = False
    """Set when kernels that were not recorded may be running on it: they have to end before it goes."""

    @property
    @abc.abstractmethod
    def position(self) -> int:
        """Every address handed out so far lies below it."""

    @property
    def cursor(self) -> int | None:
        """The address of eight bytes that hold `position`; None if there are none."""
        return None

    @abc.abstractmethod
    def take(self, nbytes: int, phase: int = 0) -> int:
        """A fresh range of `nbytes` bytes whose address is `phase` modulo `ALIGNMENT`.

        Raises:
            DriverError: the reserved range is used up.
        """

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device that the ghost tensors claim to be on."""

    def holds(self, address: int) -> bool:
        """True if the address lies in this arena."""
        return self.low <= address < self.high

    def tensor(
        self,
        address: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        storage_offset: int = 0,
    ) -> torch.Tensor:
        """A tensor whose `data_ptr()` is `address`; nothing owns the memory.

        Args:
            storage_offset: in elements; the storage then begins that much before `address`.
        """
        before = storage_offset * dtype.itemsize
        nbytes = before + extent(size, stride) * dtype.itemsize
        device = self.device.index if self.device.type == "cuda" else -1
        return ghosts.calls().ghost(address - before, nbytes, device, size, stride, dtype, storage_offset)

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fresh ghost tensor, in place of `torch.empty_strided`."""
        nbytes = extent(size, stride) * dtype.itemsize
        return self.tensor(self.take(nbytes), size, stride, dtype)


class Session(abc.ABC):
    """One capture under way."""

    arena: Arena
    held: int = 0
    """Results of ops whose memory is not given back before the capture ends, whatever becomes of them."""

    @abc.abstractmethod
    def node_count(self) -> int:
        """Number of nodes recorded so far. Should it be wrong, `end` raises."""

    def counter(self) -> tuple[int, int] | None:
        """A C function that tells what `node_count` does: its address, and its argument. None: there is none.

        It takes one pointer and returns an int64. Below 0: ask `node_count`; and if that tells of nodes then,
        never call the function again. Both last as long as the session.
        """
        return None

    def checked_count(self) -> int:
        """As `node_count`, and not wrong, however long that takes."""
        return self.node_count()

    @abc.abstractmethod
    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one dispatched op; results lie in the arena."""

    def run_view(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `run_op`, for a built-in op that records nothing and allocates nothing."""
        return self.run_op(op, args, kwargs)

    @abc.abstractmethod
    def patches(
        self, namespace: dict[str, Any], empty_strided: Callable[..., torch.Tensor]
    ) -> dict[str, Any]:
        """Names of a generated module to replace while it is captured (allocators, host kernels)."""

    @abc.abstractmethod
    def end(
        self, with_kept: bool = True, tracked: Set[int] = frozenset()
    ) -> tuple[Any, tuple[NodeRecord, ...], Topology]:
        """End the capture: the graph's handle, its nodes, and their order.

        Args:
            with_kept: False where nobody will ask for `NodeRecord.kept`: it takes long to read.
            tracked: addresses of allocations of which nobody will ask whether they were kept.

        Raises:
            CaptureError: the driver refused something on the way.
            RecountError: `node_count` was wrong; in the driver's next capture it will not be.
        """

    @abc.abstractmethod
    def hidden(self) -> list[HiddenAllocation]:
        """Ghost allocations that ops made for themselves, known after `end`."""


class Driver(abc.ABC):
    """A device, as pgraph sees it."""

    name: ClassVar[str]
    device: torch.device
    alignment: ClassVar[int] = ALIGNMENT
    """Bytes to which the device's allocator aligns everything, at most `ALIGNMENT`."""

    host_times: ClassVar[bool] = False
    """Whether what the host spends on a launch here is what it spends on a device."""

    tells_offsets: ClassVar[bool] = False
    """Whether a node holds where in its storage each tensor begins. A kernel is only given its address."""

    @abc.abstractmethod
    def capture_lock(self) -> contextlib.AbstractContextManager[Any]:
        """Held from the first to the last capture of a partition: captures never overlap."""

    @abc.abstractmethod
    def arena(self, layout: int) -> contextlib.AbstractContextManager[Arena]:
        """Reserve ghost addresses. `layout` 0 or 1 chooses the gaps (Note [Two layouts])."""

    @abc.abstractmethod
    def capture(self, arena: Arena) -> contextlib.AbstractContextManager[Session]:
        """Begin a capture; leaving the block ends it whatever happened."""

    def cut(self, graph: Any, chunks: Sequence[tuple[int, int]]) -> None:
        """Be told which ranges of nodes of a captured graph will be instantiated: all of them, in order."""
        return  # there may be nothing to prepare

    @abc.abstractmethod
    def instantiate(
        self, graph: Any, nodes: Sequence[NodeRecord], first: int, last: int, slots: Sequence[Slot]
    ) -> Exec:
        """An exec of the nodes [first, last) of a captured graph, which wait for one another as captured.

        Whoever launches it needs a recipe. Recipes of other recordings may be tried, if these agree by
        `pgraph.template.sharing.sharing_key`.

        Args:
            first, last: joins.
            slots: of all nodes, in the order of their nodes.
        """

    def graph(self, nodes: Sequence[NodeRecord], order: Topology, slots: Sequence[Slot]) -> Any:
        """A graph of nodes that no capture recorded; None if it cannot be made, or would not be the same.

        Args:
            slots: of all nodes.
        """
        return None

    @abc.abstractmethod
    def recipe(
        self, exec: Exec, nodes: Sequence[NodeRecord], first: int, last: int, slots: Sequence[Slot]
    ) -> Recipe:
        """What has an exec do what the nodes [first, last) of a recording do.

        Args:
            exec: made from these nodes, or from those of another recording.
            slots: of all nodes, in the order of their nodes.
        """

    @abc.abstractmethod
    def replica(self, recipe: Recipe) -> Recipe:
        """One that does the same, with an exec of its own; a `DriverError` if there is no room for it."""

    @abc.abstractmethod
    def framework_ranges(self) -> RangeMap | None:
        """Device memory that the framework's allocator holds now; None where it cannot be known."""

    def workspaces(self) -> frozenset[int]:
        """First bytes of blocks among it that libraries keep for streams other than the capture's."""
        return frozenset()

    def lends_workspace(self, nbytes: int) -> bool:
        """Whether launches may use the workspace that a library keeps, as its own calls do."""
        return False

    def workspace(self, stream: int, nbytes: int) -> int:
        """Address of the workspace that a library keeps for this thread and its current stream.

        Args:
            stream: raw handle of the current stream.
            nbytes: that it must have.

        Raises:
            torch.OutOfMemoryError: there is none, and no memory for it.
            DriverError: this driver lends none.
        """
        raise DriverError(f"driver {self.name} lends no workspace; it said so when it was asked")

    @abc.abstractmethod
    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An ordinary tensor from the ordinary allocator."""

    @abc.abstractmethod
    def on_device(self) -> contextlib.AbstractContextManager[Any] | None:
        """A guard that makes this device current; None if it already is."""

    @abc.abstractmethod
    def current_stream(self) -> int:
        """Raw handle of the stream that is current on this device."""

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """True while other code than pgraph captures the current stream."""

    def kernel_names(self, namespace: Mapping[str, Any]) -> list[str]:
        """Names of generated kernels in a generated module, of which `kernel_node` may be asked."""
        return []

    def kernel_node(
        self, kernel: Any, sample: NodeRecord, arguments: Sequence[Any]
    ) -> tuple[NodeRecord, Sequence[tuple[int, int]]] | None:
        """The node that the launch of a generated kernel records; None where that cannot be told.

        Which fields and bytes are the sample's does not depend on the arguments. So samples that give equal
        nodes for some arguments do so for all.

        Args:
            sample: what a launch of it recorded, with other arguments.
            arguments: an `Operand` for each tensor of the device, or a value.

        Returns:
            The node, and (byte of its parameters, number of the argument) of each address in it.
        """
        return None

    def mark(self) -> Passed | None:
        """Put a mark into the current stream; None where the device keeps up with the host, as a CPU does."""
        return None

    def native_calls(self) -> NativeCalls | None:
        """What a launch in C needs; None where there is none."""
        return None

    def memory(self) -> int:
        """Bytes of memory that the device has; 0 if that bounds nothing."""
        return 0

    def in_use(self) -> int:
        """Bytes of the device's memory that tensors hold."""
        return 0

    def reserved(self) -> int:
        """Bytes of the device's memory that the framework's allocator holds, in use or not."""
        return 0

    def trim(self, piece: int) -> int | None:
        """Give back what the framework's allocator keeps without need, and have it take some in one piece.

        Args:
            piece: bytes to take, for this stream.

        Returns:
            Bytes that were taken, 0 where it does not suit the allocator; None if this is not the time, and
            nothing was done.
        """
        return 0

    def ghost_peaks(self) -> GhostPeaks | None:
        """What captures may have added to the device's peak statistics; None if nothing."""
        return None


def further(layout: int) -> int:
    """Bytes that each range of an arena lies further on for its layout's sake (Note [Two layouts])."""
    return layout * (UNIT + UNIT // 2)


def next_start(position: int, guard: int, layout: int, phase: int = 0) -> int:
    """First byte of an arena's next range, which is `phase` modulo `ALIGNMENT` (Note [Two layouts])."""
    return -(-(position + guard) // UNIT) * UNIT + further(layout) + phase % ALIGNMENT


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to one past the last that a strided tensor can touch."""
    reach = 1
    for n, step in zip(size, stride, strict=True):
        if n == 0:
            return 0
        reach += (n - 1) * step
    return reach
