"""What happens while a partition is captured: each op is sent to the session, each allocation is watched."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from pgraph.capture.culprit import arguments_of, dispatch_of, numbered
from pgraph.capture.failures import failure_of, library_kept, not_recorded
from pgraph.capture.parts import RECORDED_IN_PARTS, in_parts, joined
from pgraph.compat import UnwrappedMode, lazily
from pgraph.drivers.interface import ALIGNMENT, Arena, Session, extent
from pgraph.drivers.operands import Operand
from pgraph.errors import CaptureError
from pgraph.native import ghosts
from pgraph.native.timeline import Place
from pgraph.ops.fx import VIEWS, flat_values, is_builtin, is_custom, op_name
from pgraph.reasons import Dispatch, Reason
from pgraph.template.topology import Topology

__all__ = []


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector is off for the block.

    It must not free the program's device objects in the middle of a capture. Between two captures and after
    them it would walk over all that was recorded, again and again, and nearly all of that stays.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclasses.dataclass(slots=True)
class GhostRange:
    """An allocation of a capture that is over."""

    address: int
    nbytes: int
    birth: int
    margin: int
    owner: int | None  # the storage, if it is a tensor's: what PyTorch calls it while it lives
    death: int | None = None
    library: bool = False


class _Facts(NamedTuple):
    """What is known of an op, whatever it is called with."""

    op: Any  # kept alive: facts are found by its id
    name: str
    builtin: bool
    custom: bool
    in_parts: bool  # perhaps
    view: bool  # it records no node and keeps its argument's storage


class Recorder(UnwrappedMode):
    """Sends each dispatched op to the session and keeps the timeline of allocations.

    Args:
        session: a capture that has just begun.
        like: the ops of an earlier capture of the same code.

    Attributes:
        ranges: of all allocations, once the capture is over.
        inputs: the aliases.
        counters: of the inputs.
    """

    def __init__(self, session: Session, like: Sequence[Dispatch] = ()) -> None:
        super().__init__()
        self._session = session
        self._arena = session.arena
        self._calls = ghosts.calls()
        self._timeline = self._calls.timeline(_place(session))
        self._like = like
        self.ranges: list[GhostRange] = []
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        self.counters: list[torch.Tensor] = []
        self._facts: dict[int, _Facts] = {}
        self.builtin: set[int] = set()
        self.ops: list[Dispatch] = []
        self.boundary = self._timeline.boundary

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = self._facts.get(id(func)) or self._told(func)
        timeline, session = self._timeline, self._session
        if kwargs is None:
            kwargs = {}
        known = len(timeline) if facts.custom else 0
        before = after = timeline.boundary()
        try:
            if facts.view and isinstance(args[0], torch.Tensor):  # of a number it makes a tensor
                result = session.run_view(func, args, kwargs)
                session.held += timeline.adopt(result, before)
                return result
            if facts.in_parts:
                result, after = self._in_parts(func, args, kwargs, before)
            else:
                result = session.run_op(func, args, kwargs)
                session.held += timeline.adopt(result, before)
                after = timeline.count()
        except Exception as e:
            raise failure_of(e, numbered(self.ops, dispatch_of(func, args, kwargs, before, before))) from e
        if after > before:
            if facts.builtin:
                self.builtin.update(range(before, after))
            self._note_op(facts, args, kwargs, before, after)
        elif (
            facts.custom
            and (any(nbytes for _, nbytes, *_ in timeline.seen(known)) or _writes(func, args, kwargs))
            and session.checked_count() == after
        ):
            culprit = numbered(self.ops, dispatch_of(func, args, kwargs, before, after))
            raise CaptureError(not_recorded(facts.name), culprit=culprit)
        timeline.boundary(after)  # nothing was recorded since it was counted
        return result

    def _note_op(
        self, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any], first: int, end: int
    ) -> None:
        place = len(self.ops)
        call = self._like[place] if place < len(self._like) else None
        # What has the same name and recorded the same nodes is the same call: it need not be described again.
        if call is None or call.end != end or call.first != first or call.op != facts.name:
            call = Dispatch(facts.name, first, end, *arguments_of(facts.op, args, kwargs))
        self.ops.append(call)

    def _told(self, op: Any) -> _Facts:
        name = op_name(op)
        builtin = is_builtin(op)
        facts = _Facts(op, name, builtin, is_custom(op), name in RECORDED_IN_PARTS, builtin and name in VIEWS)
        self._facts[id(op)] = facts
        return facts

    def _in_parts(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> tuple[Any, int]:
        """The results of an op that may be recorded as several calls; the count of nodes after them."""
        results: list[Any] = []
        before = count
        for part in in_parts(op, args):
            if count > before:
                self.boundary(count)
            results.append(self._session.run_op(op, part, kwargs))
            self._session.held += self._timeline.adopt(results[-1], count)
            count = self._timeline.count()
        return joined(results), count

    @property
    def arena(self) -> Arena:
        return self._arena

    def argument(self, value: Any, alignments: Sequence[int]) -> Any:
        """A ghost for an argument of the device, aligned as its turn among these says; else the argument."""
        if isinstance(value, Operand):
            alignment = alignments[len(self.inputs)]
            return self._input(value.size, value.stride, value.dtype, value.offset, alignment, value.lazy)
        if isinstance(value, torch.Tensor) and value.device == self._arena.device:
            return self.alias(value, alignments[len(self.inputs)])
        return value

    def alias(self, tensor: torch.Tensor, alignment: int) -> torch.Tensor:
        """A ghost with the layout and storage offset of a real input, and no more than `alignment`."""
        layout = tensor.size(), tensor.stride(), tensor.dtype, int(tensor.storage_offset())
        return self._input(*layout, alignment, (tensor.is_conj(), tensor.is_neg()))

    def _input(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        offset: int,
        alignment: int,
        lazy: tuple[bool, bool] = (False, False),
    ) -> torch.Tensor:
        nbytes = extent(size, stride) * dtype.itemsize
        address = self._arena.take(nbytes, alignment % ALIGNMENT)
        ghost = self._arena.tensor(address, size, stride, dtype, offset)
        self._timeline.track(ghost, address, nbytes, 0)
        ghost = lazily(ghost, *lazy)
        self.inputs.append(weakref.ref(ghost))
        self.counters.append(self._calls.counter_of(ghost))
        return ghost

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What a generated module gets for `torch.empty_strided`."""
        birth = self.boundary()
        ghost = self._arena.empty_strided(size, stride, dtype)
        _, address, nbytes = self._calls.storage_of(ghost)  # the address of an empty tensor is 0, this is not
        self._timeline.track(ghost, address, nbytes, birth)
        return ghost

    def steps(self, order: Topology) -> tuple[int, ...]:
        """Counts of nodes at the boundaries that are joins."""
        return tuple(sorted({count for _, count in self._timeline.marks()}.intersection(order.joins)))

    def builtin_nodes(self, order: Topology) -> frozenset[int]:
        """Nodes recorded by built-in ops; where ops overlap, only if all of them are built-in."""
        if order.is_chain:
            return frozenset(self.builtin.intersection(range(order.n_nodes)))
        spans = (range(first, last) for first, last in pairwise(order.joins))
        return frozenset(node for span in spans if self.builtin.issuperset(span) for node in span)

    def meet(self, order: Topology) -> None:
        """Move each birth back, and each death on, to a join."""
        if order.is_chain:
            return
        for r in self.ranges:
            r.birth = order.before(r.birth)
            r.death = order.after(r.death) if r.death is not None else None

    def finish(self) -> None:
        """Note the last deaths, and give back the memory of what has died."""
        self.boundary()
        self._timeline.let_go()
        self.ranges = [
            GhostRange(address, nbytes, birth, self._arena.guard, owner, death)
            for address, nbytes, birth, death, owner in self._timeline.seen()
        ]

    def all_gone(self) -> None:
        """Make sure that the program kept none of the ghosts.

        Raises:
            CaptureError: it did (an op that remembers its arguments, for example). The addresses are then
                never given back: no later tensor gets an address that the program may still read.
        """
        kept = self._timeline.living()
        if kept:
            gc.collect()  # a cycle of references (an exception's frames) keeps nothing for good
            kept = self._timeline.living()
        if kept:
            self._arena.leaked = True
            raise CaptureError(
                Reason("ghost-kept", f"the code kept {len(kept)} of the tensors that it was captured with")
            )

    def close(self) -> None:
        """Watch nothing any more. To be called last."""
        self._timeline.close()

    def add_hidden(self) -> None:
        """Add what ops allocated for themselves; the arena's position tells when."""
        tracked = {r.address: r for r in self.ranges}
        marks = self._timeline.marks()
        positions = [position for position, _ in marks]
        for h in self._session.hidden():
            if h.address in tracked:
                r = tracked[h.address]
                r.nbytes = max(r.nbytes, h.nbytes)
                continue
            if h.kept:
                self._arena.leaked = True
                raise CaptureError(library_kept(h.nbytes))
            k = bisect.bisect_right(positions, h.address) - 1
            birth = marks[max(k, 0)][1]
            death = marks[min(k + 1, len(marks) - 1)][1] if h.freed else None
            # Kept until just now, and by no tensor: a library's workspace.
            self.ranges.append(GhostRange(h.address, h.nbytes, birth, 0, None, death, library=not h.freed))


def _place(session: Session) -> Place:
    arena = session.arena
    return Place(
        arena.low,
        arena.high,
        arena.device.index if arena.device.type == "cuda" else -1,
        session.node_count,
        lambda: arena.position,
        arena.take,
        flat_values,
        *(session.counter() or (0, 0)),
        arena.cursor or 0,
    )


def _writes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op's schema says that it writes into one of these arguments."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if any(isinstance(t, torch.Tensor) and t.numel() for t in flat_values(value)):
            return True
    return False
