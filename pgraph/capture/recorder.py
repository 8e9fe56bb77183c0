"""What happens while a partition is captured: each op is sent to the session, each allocation is watched."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pgraph.capture.culprit import dispatch_of, numbered
from pgraph.capture.failures import failure_of, library_kept, not_recorded
from pgraph.capture.parts import in_parts, joined
from pgraph.compat import lazily
from pgraph.drivers.interface import ALIGNMENT, Arena, Session, extent
from pgraph.errors import CaptureError
from pgraph.ops.fx import flat_values, is_builtin, is_custom, op_name
from pgraph.reasons import Dispatch, Reason
from pgraph.template.topology import Topology

__all__ = []


@dataclasses.dataclass(slots=True)
class GhostRange:
    """An allocation while it is being watched."""

    address: int
    nbytes: int
    birth: int
    margin: int
    owner: StorageWeakRef | None
    death: int | None = None
    library: bool = False


class Recorder(TorchDispatchMode):
    """Sends each dispatched op to the session and keeps the allocation timeline.

    Note [Only orphans are asked]
    A range is dead when its storage is. To ask all living storages at each op takes time that grows with
    the square of the ops. A storage cannot die before the tensor object that it was first seen in, so only
    those whose object is gone are asked (views may keep their storages). One that gave its storage away
    while it lived (``set_``) is never asked: its range then lives to the end, which is safe.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.ranges: list[GhostRange] = []
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        self._alive: dict[int, GhostRange] = {}  # by storage
        self._orphans: list[GhostRange] = []
        self._watchers: list[weakref.ref[torch.Tensor]] = []  # they report orphans for as long as they live
        self._known: dict[int, GhostRange] = {}
        # (arena position, nodes recorded) at each boundary: tells when an address was handed out.
        self._marks: list[tuple[int, int]] = []
        self._mark: tuple[int, int] | None = None
        self.builtin: set[int] = set()
        self.ops: list[Dispatch] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before, known = self.boundary(), len(self.ranges)
        after, results = before, []
        try:
            for part in in_parts(func, args):
                if after > before:
                    self.boundary(after)
                results.append(self._run(func, part, kwargs or {}, after))
                after = self._session.node_count()
        except Exception as e:
            raise failure_of(e, numbered(self.ops, dispatch_of(func, args, kwargs, before, before))) from e
        if is_builtin(func):
            self.builtin.update(range(before, after))
        elif is_custom(func):
            fresh = any(r.nbytes for r in self.ranges[known:])
            if after == before and (fresh or _writes(func, args, kwargs or {})):
                culprit = numbered(self.ops, dispatch_of(func, args, kwargs, before, after))
                raise CaptureError(not_recorded(op_name(func)), culprit=culprit)
        if after > before:
            self.ops.append(dispatch_of(func, args, kwargs, before, after))
        self.boundary(after)  # nothing was recorded since it was counted
        return joined(results)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], birth: int) -> Any:
        result = self._session.run_op(func, args, kwargs)
        for leaf in flat_values(result):
            if isinstance(leaf, torch.Tensor):
                self._adopt(leaf, birth)
        return result

    @property
    def arena(self) -> Arena:
        return self._session.arena

    def alias(self, tensor: torch.Tensor, alignment: int) -> torch.Tensor:
        """A ghost with the layout and storage offset of a real input, and no more than `alignment`."""
        nbytes = extent(tensor.size(), tensor.stride()) * tensor.element_size()
        address = self._session.arena.take(nbytes, alignment % ALIGNMENT)
        ghost = self._session.arena.tensor(
            address, tensor.size(), tensor.stride(), tensor.dtype, int(tensor.storage_offset())
        )
        self._watch(ghost, StorageWeakRef(ghost.untyped_storage()), address, nbytes, birth=0)
        ghost = lazily(ghost, tensor.is_conj(), tensor.is_neg())
        self.inputs.append(weakref.ref(ghost))
        return ghost

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What a generated module gets for `torch.empty_strided`."""
        birth = self.boundary()
        ghost = self._session.arena.empty_strided(size, stride, dtype)
        storage = ghost.untyped_storage()  # the address of an empty tensor is 0, its storage's is not
        self._watch(ghost, StorageWeakRef(storage), storage.data_ptr(), storage.nbytes(), birth)
        return ghost

    def boundary(self, count: int | None = None) -> int:
        """Note deaths up to now; returns the number of nodes recorded.

        Args:
            count: that number, where it was just asked for: a driver needs longer to tell than all else here.
        """
        if count is None:
            count = self._session.node_count()
        mark = self._session.arena.position, count
        if mark != self._mark:
            self._marks.append(mark)
            self._mark = mark
        if self._orphans:
            kept = []
            for r in self._orphans:
                assert r.owner is not None
                if r.owner.expired():
                    r.death = count
                    del self._alive[r.owner.cdata]
                    self._known.pop(r.address, None)
                else:
                    kept.append(r)
            self._orphans[:] = kept  # in place: the watchers add to it
        return count

    def steps(self, order: Topology) -> tuple[int, ...]:
        """Counts of nodes at the boundaries that are joins."""
        return tuple(sorted({count for _, count in self._marks}.intersection(order.joins)))

    def builtin_nodes(self, order: Topology) -> frozenset[int]:
        """Nodes recorded by built-in ops; where ops overlap, only if all of them are built-in."""
        if order.is_chain:
            return frozenset(self.builtin.intersection(range(order.n_nodes)))
        spans = (range(first, last) for first, last in pairwise(order.joins))
        return frozenset(node for span in spans if self.builtin.issuperset(span) for node in span)

    def meet(self, order: Topology) -> None:
        """Move each birth back, and each death on, to a join."""
        for r in self.ranges:
            r.birth = order.before(r.birth)
            r.death = order.after(r.death) if r.death is not None else None

    def _adopt(self, tensor: torch.Tensor, birth: int) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes == 0 and tensor.device == self._session.arena.device:
            owner = StorageWeakRef(storage)
            if owner.cdata not in self._alive:
                self._watch(
                    tensor, owner, self._session.arena.take(0), 0, birth
                )  # allocators give no address
            return
        if address in self._known or not self._session.arena.holds(address):
            return
        owner = StorageWeakRef(storage)
        if owner.cdata in self._alive:
            return  # an alias of an input: its storage begins before its range
        self._watch(tensor, owner, address, nbytes, birth)

    def _watch(
        self, tensor: torch.Tensor, owner: StorageWeakRef, address: int, nbytes: int, birth: int
    ) -> None:
        r = GhostRange(address, nbytes, birth, self._session.arena.guard, owner)
        self.ranges.append(r)
        self._alive[owner.cdata] = r
        self._known[address] = r
        # No reference to the recorder itself: a circle would keep it, with the collector off.
        self._watchers.append(weakref.ref(tensor, functools.partial(_orphaned, self._orphans, r)))

    def all_gone(self) -> None:
        """Make sure that the program kept none of the ghosts.

        Raises:
            CaptureError: it did (an op that remembers its arguments, for example). The addresses are then
                never given back: no later tensor gets an address that the program may still read.
        """
        if self._kept():
            gc.collect()  # a cycle of references (an exception's frames) keeps nothing for good
        kept = self._kept()
        if kept:
            self._session.arena.leaked = True
            raise CaptureError(
                Reason("ghost-kept", f"the code kept {len(kept)} of the tensors that it was captured with")
            )

    def _kept(self) -> list[GhostRange]:
        return [r for r in self.ranges if r.owner is not None and not r.owner.expired()]

    def add_hidden(self) -> None:
        """Add what ops allocated for themselves; the arena's position tells when."""
        tracked = {r.address: r for r in self.ranges}
        positions = [position for position, _ in self._marks]
        for h in self._session.hidden():
            if h.address in tracked:
                r = tracked[h.address]
                r.nbytes = max(r.nbytes, h.nbytes)
                continue
            if h.kept:
                self._session.arena.leaked = True
                raise CaptureError(library_kept(h.nbytes))
            k = bisect.bisect_right(positions, h.address) - 1
            birth = self._marks[max(k, 0)][1]
            death = self._marks[min(k + 1, len(self._marks) - 1)][1] if h.freed else None
            # Kept until just now, and by no tensor: a library's workspace.
            self.ranges.append(GhostRange(h.address, h.nbytes, birth, 0, None, death, library=not h.freed))


def _orphaned(orphans: list[GhostRange], r: GhostRange, gone: Any) -> None:
    orphans.append(r)


def _writes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op's schema says that it writes into one of these arguments."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if any(isinstance(t, torch.Tensor) and t.numel() for t in flat_values(value)):
            return True
    return False
