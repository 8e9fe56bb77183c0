"""Record one run of a partition on ghost memory: nodes, allocations with lifetimes, outputs.

No kernel runs and no physical memory is used: inputs are aliased by ghosts of the same layout and
alignment, and whatever the code allocates gets a ghost address. The allocation timeline counts in
nodes: a range is born at the number of nodes recorded when it was taken, and dead at the number
recorded when it was first seen without an owner; where the recording forks, at the joins around these
(Note [Forks and joins] in `pgraph.template.topology`).

Note [Lifetimes in program order]
A range dies when the program drops its last reference (seen by a weak reference to the storage),
not after the last node that names it: some ops write a table of pointers on the device, and only
the table is named by the kernels that read through it.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import gc
import logging
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pgraph.capture.culprit import dispatch_at, dispatch_of
from pgraph.compat import lazily, same_counter
from pgraph.drivers.interface import ALIGNMENT, Arena, Driver, Session, extent, patched
from pgraph.errors import CaptureError, DriverError
from pgraph.ops.fx import is_foreign, is_own, op_name
from pgraph.reasons import Reason
from pgraph.template.template import Allocation, Dispatch, OutputSpec, Recording, TensorSpec
from pgraph.template.topology import Topology

__all__ = ["may_pass", "record"]

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Range:
    """An allocation while it is being watched."""

    address: int
    nbytes: int
    birth: int
    slack: int
    owner: StorageWeakRef | None
    death: int | None = None
    library: bool = False


class _Recorder(TorchDispatchMode):
    """Sends each dispatched op to the session and keeps the allocation timeline."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.ranges: list[_Range] = []
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        self._alive: list[_Range] = []
        self._known: dict[int, _Range] = {}
        # (arena position, nodes recorded) at each boundary: tells when an address was handed out.
        self._marks: list[tuple[int, int]] = []
        self.own: set[int] = set()
        self.ops: list[Dispatch] = []
        self._times: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before, known = self.boundary(), len(self.ranges)
        try:
            result = self._session.run_op(func, args, kwargs or {})
            after = self._session.node_count()
        except Exception as e:
            raise _failure(e, self._dispatch(func, args, kwargs, before, before)) from e
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._adopt(leaf, before)
        if is_own(func):
            self.own.update(range(before, after))
        elif is_foreign(func):
            fresh = any(r.nbytes for r in self.ranges[known:])
            if after == before and (fresh or _writes(func, args, kwargs or {})):
                culprit = self._dispatch(func, args, kwargs, before, after)
                raise CaptureError(_not_recorded(op_name(func)), culprit=culprit)
        if after > before:
            self.ops.append(self._dispatch(func, args, kwargs, before, after))
        self.boundary()
        return result

    def _dispatch(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, first: int, end: int
    ) -> Dispatch:
        found = dispatch_of(func, args, kwargs or {}, first, end)
        key = found.op, found.tensors, found.literals
        self._times[key] += 1
        return dataclasses.replace(found, nth=self._times[key] - 1)

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
        self._watch(ghost, address, nbytes, birth=0)
        ghost = lazily(ghost, tensor.is_conj(), tensor.is_neg())
        self.inputs.append(weakref.ref(ghost))
        return ghost

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What a generated module gets for `torch.empty_strided`."""
        birth = self.boundary()
        ghost = self._session.arena.empty_strided(size, stride, dtype)
        storage = ghost.untyped_storage()  # the address of an empty tensor is 0, its storage's is not
        self._watch(ghost, storage.data_ptr(), storage.nbytes(), birth)
        return ghost

    def boundary(self) -> int:
        """Note deaths up to now; returns the number of nodes recorded."""
        count = self._session.node_count()
        self._marks.append((self._session.arena.position, count))
        still_alive = []
        for r in self._alive:
            assert r.owner is not None
            if r.owner.expired():
                r.death = count
                self._known.pop(r.address, None)
            else:
                still_alive.append(r)
        self._alive = still_alive
        return count

    def steps(self, order: Topology) -> tuple[int, ...]:
        """Counts of nodes at the boundaries that are joins."""
        return tuple(sorted({count for _, count in self._marks}.intersection(order.joins)))

    def own_nodes(self, order: Topology) -> frozenset[int]:
        """Nodes recorded by ops of PyTorch's own: where ops overlap, only if all of those are."""
        spans = (range(first, last) for first, last in pairwise(order.joins))
        return frozenset(node for span in spans if self.own.issuperset(span) for node in span)

    def meet(self, order: Topology) -> None:
        """Date births and deaths by joins."""
        for r in self.ranges:
            r.birth = order.before(r.birth)
            r.death = order.after(r.death) if r.death is not None else None

    def _adopt(self, tensor: torch.Tensor, birth: int) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() == 0 and tensor.device == self._session.arena.device:
            if all(r.owner is None or r.owner.cdata != StorageWeakRef(storage).cdata for r in self._alive):
                self._watch(tensor, self._session.arena.take(0), 0, birth)  # allocators give no address
            return
        if address in self._known or not self._session.arena.holds(address):
            return
        cdata = StorageWeakRef(storage).cdata
        if any(r.owner is not None and r.owner.cdata == cdata for r in self._alive):
            return  # an alias of an input: its storage begins before its range
        self._watch(tensor, address, storage.nbytes(), birth)

    def _watch(self, tensor: torch.Tensor, address: int, nbytes: int, birth: int) -> None:
        owner = StorageWeakRef(tensor.untyped_storage())
        r = _Range(address, nbytes, birth, self._session.arena.guard, owner)
        self.ranges.append(r)
        self._alive.append(r)
        self._known[address] = r

    def all_gone(self) -> None:
        """Make sure that the program kept none of the ghosts.

        Raises:
            CaptureError: it did (an op that remembers its arguments, say). The addresses are then
                never given back, so that whoever holds such a tensor can at least not read another's.
        """
        if self._kept():
            gc.collect()  # a cycle of references (an exception's frames) keeps nothing for good
        kept = self._kept()
        if kept:
            self._session.arena.leaked = True
            raise CaptureError(
                Reason(
                    "ghost-kept",
                    f"the code kept {len(kept)} of the tensors that it was captured with",
                    "mark the op that remembers its arguments or results with pgraph.mark_unsafe",
                )
            )

    def _kept(self) -> list[_Range]:
        return [r for r in self.ranges if r.owner is not None and not r.owner.expired()]

    def add_hidden(self) -> None:
        """Add what ops allocated for themselves, dated by the arena's position."""
        tracked = {r.address: r for r in self.ranges}
        positions = [position for position, _ in self._marks]
        for h in self._session.hidden():
            if h.address in tracked:
                r = tracked[h.address]
                r.nbytes = max(r.nbytes, h.nbytes)
                continue
            if h.kept:
                self._session.arena.leaked = True
                raise CaptureError(_library_kept(h.nbytes))
            k = bisect.bisect_right(positions, h.address) - 1
            birth = self._marks[max(k, 0)][1]
            death = self._marks[min(k + 1, len(self._marks) - 1)][1] if h.freed else None
            # Kept until just now, and by no tensor: a library's workspace.
            self.ranges.append(_Range(h.address, h.nbytes, birth, 0, None, death, library=not h.freed))


def record(
    driver: Driver,
    arena: Arena,
    fn: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[Any],
    alignments: Sequence[int],
    namespaces: Sequence[dict[str, Any]] = (),
) -> Recording:
    """Capture one call of `fn` (which takes one list and empties it).

    Args:
        driver: where to capture.
        arena: ghost addresses to use; must outlive the second capture too.
        fn: the partition's code.
        inputs: today's arguments; only their layout is read.
        alignments: bytes, a power of two per device tensor in `inputs`: its ghost has exactly this
            alignment (up to `ALIGNMENT`), so that no kernel is chosen that needs more.
        namespaces: globals of generated modules that allocate by themselves.

    Raises:
        CaptureError: the capture was lost, or the code kept a ghost; nothing has run.
        DriverError: the device could not just now (memory, most likely); nothing has run.
    """
    # The collector must not free somebody else's device objects in the middle of a capture.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with driver.capture(arena) as session:
            try:
                return _record(session, fn, inputs, alignments, namespaces)
            except Exception as e:
                # Some op may have started kernels on another stream before it failed.
                arena.touched = True
                failure = _failure(e)
                log.debug("capture failed", exc_info=True)
                # The frames hold ghost tensors, which must be gone before their memory is.
                traceback.clear_frames(e.__traceback__)
                if e.__cause__ is not None:
                    traceback.clear_frames(e.__cause__.__traceback__)
    finally:
        if collecting:
            gc.enable()
    raise failure


def _record(
    session: Session,
    fn: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[Any],
    alignments: Sequence[int],
    namespaces: Sequence[Any],
) -> Recording:
    recorder = _Recorder(session)
    arguments: list[Any] = []
    for value in inputs:
        ghostly = isinstance(value, torch.Tensor) and value.device == session.arena.device
        arguments.append(recorder.alias(value, alignments[len(recorder.ranges)]) if ghostly else value)
    n_inputs = len(recorder.ranges)
    with contextlib.ExitStack() as stack:
        for namespace in namespaces:
            stack.enter_context(patched(namespace, session.patches(namespace, recorder.empty_strided)))
        stack.enter_context(recorder)
        results = fn(arguments)
    arguments.clear()
    recorder.boundary()
    try:
        graph, nodes, order = session.end()
    except CaptureError as e:
        raise CaptureError(e.reason, e.op, culprit=dispatch_at(recorder.ops, e.node)) from None
    recorder.add_hidden()
    recorder.meet(order)
    ranges, moved = _merge(recorder.ranges, n_inputs)
    specs = _output_specs(results, recorder, moved, ranges)
    del results
    recorder.all_gone()
    allocations = tuple(Allocation(r.address, r.nbytes, r.birth, r.death, r.slack, r.library) for r in ranges)
    ghosts = (session.arena.low, session.arena.position)
    own, steps = recorder.own_nodes(order), recorder.steps(order)
    return Recording(
        nodes, order, allocations, n_inputs, specs, ghosts, graph, own, steps, tuple(recorder.ops)
    )


def _merge(ranges: list[_Range], n_inputs: int) -> tuple[list[_Range], list[int]]:
    """Ranges that overlap become one region; returns the regions and, per range, its region.

    Note [Scratch and result in one place]
    A library may free scratch inside an op and take the same address for the result. Nothing tells
    which word means which, so both become one region as large as both and alive as long as either.
    """
    moved = list(range(n_inputs)) + [-1] * (len(ranges) - n_inputs)
    merged: list[tuple[_Range, list[int]]] = []
    for i in sorted(range(n_inputs, len(ranges)), key=lambda i: (ranges[i].address, i)):
        r = ranges[i]
        if merged:
            last = merged[-1][0]
            if r.address < last.address + last.nbytes:
                last.nbytes = max(last.nbytes, r.address + r.nbytes - last.address)
                last.birth = min(last.birth, r.birth)
                ends = (last.death, r.death)
                last.death = None if None in ends else max(e for e in ends if e is not None)
                last.slack = 0
                last.library = last.library and r.library  # a tensor's bytes are meant to last
                merged[-1][1].append(i)
                continue
        merged.append((dataclasses.replace(r), [i]))
    merged.sort(key=lambda m: (m[0].birth, m[0].address))
    for region, (_, members) in enumerate(merged):
        for i in members:
            moved[i] = n_inputs + region
    return ranges[:n_inputs] + [r for r, _ in merged], moved


def _output_specs(
    results: Sequence[Any], recorder: _Recorder, moved: list[int], regions: list[_Range]
) -> tuple[OutputSpec, ...]:
    """Note [One tensor, several results]
    What a forward returns and saves is one tensor or a view of it, and their version counter tells autograd
    that somebody has written into it. Two tensors on the same memory, with a counter each, would give wrong
    gradients without a word.
    """
    specs: list[OutputSpec] = []
    for position, value in enumerate(results):
        spec = _output_spec(value, recorder, moved, regions)
        if spec.region is not None:
            for earlier in range(position):
                if specs[earlier].region != spec.region:
                    continue
                if results[earlier] is value:
                    spec = dataclasses.replace(spec, same=earlier)
                    break
                if same_counter(results[earlier], value):
                    spec = dataclasses.replace(spec, view_of=earlier)
                    break
        specs.append(spec)
    return tuple(specs)


def _output_spec(value: Any, recorder: _Recorder, moved: list[int], regions: list[_Range]) -> OutputSpec:
    if not isinstance(value, torch.Tensor):
        return OutputSpec(constant=value)
    for i, ghost in enumerate(recorder.inputs):
        if ghost() is value:
            return OutputSpec(input=i)
    arena, n_inputs = recorder.arena, len(recorder.inputs)
    owner = StorageWeakRef(value.untyped_storage())
    for i, r in enumerate(recorder.ranges):
        if r.owner is not None and r.owner.cdata == owner.cdata and r.death is None:
            region = moved[i]
            sizes = tuple(value.size()), tuple(value.stride())
            layout = TensorSpec(*sizes, value.dtype, 0, value.is_conj(), value.is_neg())
            if r.nbytes:
                # Not `data_ptr()`, which is 0 for an empty tensor.
                start = value.untyped_storage().data_ptr() + value.storage_offset() * value.element_size()
                layout = dataclasses.replace(layout, offset=int(start) - regions[region].address)
            if i < n_inputs:
                return OutputSpec(input=region, layout=layout)
            return OutputSpec(region=region, layout=layout)
    if value.device != arena.device and value.device.type == "cpu":
        # Attention without dropout hands out host seeds that its backward takes and never reads; the
        # safety rules let no other host tensor into a captured partition.
        return OutputSpec(constant=value, unread=True)
    if arena.holds(value.data_ptr()):
        raise CaptureError(
            Reason(
                "untracked-output",
                f"a result of shape {tuple(value.size())} lies in memory that no tensor was seen to own",
                "mark the op that makes it with pgraph.mark_unsafe",
            )
        )
    return OutputSpec(constant=value)


def _writes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op's schema says that it writes into one of these arguments."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if any(isinstance(t, torch.Tensor) and t.numel() for t in tree_leaves(value)):
            return True
    return False


def _not_recorded(name: str) -> Reason:
    """Note [Work on another stream]

    An op that launches on a stream of its own choice, one that it remembered or the default stream,
    leaves nothing in the graph: each launch would hand out memory that nobody wrote. PyTorch's own
    ops use the current stream; of others, one that has a result and no node is refused.
    """
    return Reason(
        "not-recorded",
        f"{name} has a result but left no node in the capture: its kernels went to another stream",
        "have it launch on torch.cuda.current_stream(), asked for at each call; until then the partition "
        "runs plainly, and pgraph.mark_unsafe on the op keeps the rest of it in a graph",
    )


def may_pass(error: BaseException) -> bool:
    """Whether a failure says something of the moment (no memory, a driver call) and not of the op.

    Libraries and generated code report a want of memory in other types, so their text is read.
    """
    if isinstance(error, DriverError | torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)


def _failure(error: Exception, culprit: Dispatch | None = None) -> CaptureError | DriverError:
    """What to raise for it, without the frames that it came through."""
    if isinstance(error, CaptureError):
        return CaptureError(error.reason, error.op, culprit=error.culprit or culprit)
    op = culprit.op if culprit is not None else None
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if may_pass(error):
        what = first if isinstance(error, DriverError) else f"{type(error).__name__}: {first}"
        return DriverError(f"{what} (in {op})" if op else what)
    return CaptureError(
        Reason(
            "capture-failed",
            f"the capture stopped{f' in {op}' if op else ''}: {type(error).__name__}: {first}",
            "mark the op with pgraph.mark_unsafe, so that the rest of the partition stays in a graph",
        ),
        culprit=culprit,
    )


def _library_kept(nbytes: int) -> Reason:
    return Reason(
        "library-keeps-memory",
        f"a library took {nbytes} bytes during the capture and kept them",
        "run the model once more before it is captured (option warmup), so that the library settles",
    )
