"""The host driver: CUDA graphs' rules on a CPU.

* Capture records; nothing runs. Ghost addresses are reserved without access rights, so that an op
  that touches data while it is being captured crashes, as it would misbehave under CUDA.
* A kernel node is an op (or a compiled C++ kernel) plus packed parameter bytes with raw addresses, sizes,
  strides and numbers inside; memcpy and memset nodes hold addresses and a number of bytes.
* A launch decodes the addresses and runs the op on whatever memory they name: a wrong slot gives
  wrong numbers. Where a recording forks, nodes that were recorded later run first if they may.
* Ops that read data on the host, draw random numbers or have data-dependent shapes cannot be
  recorded, as under CUDA.

It can also misbehave on purpose, see `pgraph.drivers.host.faults`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten

from pgraph.compat import lazily
from pgraph.drivers.execs import Exec, Recipe
from pgraph.drivers.host import faults as fault
from pgraph.drivers.host.arena import CPU, HostArena
from pgraph.drivers.host.execs import HostExec, HostRecipe
from pgraph.drivers.host.nodes import (
    TABLE,
    KernelCall,
    OpCall,
    as_copy,
    as_fill,
    encode,
    kernel_node,
    kinds,
    packed,
    refuse_mixed_norms,
    refuse_random,
)
from pgraph.drivers.host.rehearsal import Rehearsal
from pgraph.drivers.interface import Arena, Driver, HiddenAllocation, Session, extent
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot, slots_of
from pgraph.template.topology import Topology, topology

__all__ = ["HostDriver"]

_SCRATCH = 512

# Functional in the schema, but their CPU implementation only makes another view.
_VIEWS_IN_DISGUISE = frozenset({"aten::_unsafe_view", "aten::lift_fresh", "aten::_reshape_alias"})


class HostGraph:
    """A recorded graph: how its nodes wait for one another. All else lives in the node records."""

    def __init__(self, order: Topology) -> None:
        self.order = order


class HostSession(Session):
    """Records ops as nodes."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._second = isinstance(arena, HostArena) and arena.layout == 1
        self._nodes: list[NodeRecord] = []
        self._hidden: list[HiddenAllocation] = []
        self._rehearsal = Rehearsal()
        self._absent: list[int] = []  # for the fault `beyond`
        self._given: list[tuple[int, int, StorageWeakRef]] = []  # for the fault `reuse`
        self._edges: list[tuple[int, int]] = []
        self._tail: tuple[int, ...] = ()  # what the next node waits for
        # For the fault `aside`: nodes that no other node waits for yet, and [first, end) of what each writes.
        self._aside: dict[int, list[tuple[int, int]]] = {}
        faults = fault.active()
        faults.reach("second-begin" if self._second else "begin")
        if faults.moving_words:
            self._moving = faults.moving_words[0]
            faults.moving_words = (*faults.moving_words[1:], faults.moving_words[0])

    def node_count(self) -> int:
        return len(self._nodes)

    def hidden(self) -> list[HiddenAllocation]:
        return list(self._hidden)

    def end(
        self, with_kept: bool = True, tracked: Set[int] = frozenset()
    ) -> tuple[Any, tuple[NodeRecord, ...], Topology]:
        fault.active().reach("second-end" if self._second else "end")
        order = topology(len(self._nodes), self._edges)
        return HostGraph(order), tuple(self._nodes), order

    def patches(
        self, namespace: dict[str, Any], empty_strided: Callable[..., torch.Tensor]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in namespace.items():
            if name in ("empty_strided_cpu", "empty_strided"):
                found[name] = empty_strided
            elif _is_kernel(name, value):
                found[name] = self._kernel_recorder(name, value)
        return found

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fault.active().reach("second-op" if self._second else "op")
        view = op.is_view or op._schema.name in _VIEWS_IN_DISGUISE
        if view and isinstance(args[0], torch.Tensor):  # a view of a number is a tensor of its own
            return op(*args, **kwargs)
        if op.overloadpacket.__name__ in fault.active().refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        refuse_random(op, args, kwargs)
        refuse_mixed_norms(op, args, kwargs)
        self._absent = self._beyond(op.overloadpacket.__name__)
        outline = self._rehearsal.outline(op, args, kwargs)
        given = tree_flatten((args, kwargs))[0] if outline.given else ()
        results = list(outline.values)
        for i, argument in outline.given.items():
            results[i] = given[argument]
        fresh: list[torch.Tensor] = []
        for i, like in outline.fresh.items():
            results[i] = lazily(self._result(op, like), like.is_conj(), like.is_neg())
            fresh.append(results[i])
        positions = tuple(outline.fresh)
        out = tree_unflatten(results, outline.spec)
        if op._schema.is_mutable:
            self._join(self._aside)
        self._record(op, args, kwargs, fresh, positions)
        if op.overloadpacket.__name__ in fault.active().aside:
            self._set_aside([*fresh, *_written(op, args, kwargs)])
        return out

    # -- recording --------------------------------------------------------------------------

    def _result(self, op: Any, like: torch.Tensor) -> torch.Tensor:
        nbytes = extent(like.size(), like.stride()) * like.element_size()
        if fault.active().reuse:
            return self._reusing(nbytes, like)
        if op.overloadpacket.__name__ not in fault.active().scratch:
            return self.arena.empty_strided(like.size(), like.stride(), like.dtype)
        # Scratch, twice as large as the result, written and freed; the result takes its place.
        address = self.arena.take(2 * nbytes)
        self._hidden.append(HiddenAllocation(address, 2 * nbytes, freed=True))
        self._add("memset", "scratch", (), [address, 0xA5, 2 * nbytes])
        return self.arena.tensor(address, like.size(), like.stride(), like.dtype)

    def _beyond(self, name: str) -> list[int]:
        """Scratch of the op's own, and the address of the operand that is not there."""
        distance = fault.active().beyond.get(name)
        if distance is None:
            return []
        address = self.arena.take(_SCRATCH)
        self._hidden.append(HiddenAllocation(address, _SCRATCH, freed=True))
        self._add("memset", "scratch", (), [address, 0xA5, _SCRATCH])
        return [address + _SCRATCH + distance]

    def _reusing(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        # The first dead range that is large enough, as a caching allocator would.
        k = next((i for i, (_, n, w) in enumerate(self._given) if w.expired() and nbytes <= n), None)
        address, room, _ = self._given.pop(k) if k is not None else (self.arena.take(nbytes), nbytes, None)
        ghost = self.arena.tensor(address, like.size(), like.stride(), like.dtype)
        self._given.append((address, room, StorageWeakRef(ghost.untyped_storage())))
        return ghost

    def _record(
        self, op: Any, args: Any, kwargs: Any, fresh: list[torch.Tensor], positions: tuple[int, ...]
    ) -> None:
        name = op.overloadpacket.__name__
        if name in fault.active().elsewhere:
            return
        if (copy := as_copy(op, args, kwargs, fresh)) is not None:
            self._add("memcpy", name, (), list(copy))
        elif (fill := as_fill(op, args, fresh)) is not None:
            self._add("memset", name, (), [fill[0], 0, fill[1]])
        else:
            leaves, spec = tree_flatten((args, kwargs))
            codes, words = encode(leaves)
            out_codes, out_words = encode(fresh)
            call = OpCall(op, spec, positions)
            self._kernel(name, call, codes + out_codes, words + out_words)

    def _kernel_recorder(self, name: str, kernel: Callable[..., Any]) -> Callable[..., None]:
        def record(*args: Any) -> None:
            codes, words = encode(args)
            self._kernel(name, KernelCall(kernel), codes, words)

        return record

    def _kernel(self, name: str, call: Any, codes: tuple[Any, ...], words: list[int]) -> None:
        faults = fault.active()
        if name in faults.tables:
            table = self.arena.take(8 * len(words))
            self._hidden.append(HiddenAllocation(table, 8 * len(words), freed=False))
            self._add("kernel", f"{name}_prepare", (TABLE, len(words)), [table, *words])
            self._add("kernel", name, (call, codes, "table"), [table])
            return
        header: tuple[Any, ...] = (call, codes)
        if name in faults.origin:
            back = faults.origin[name]
            header = (call, codes, "origin", back)
            words = [w - back if kind == "tensor" else w for w, kind in zip(words, kinds(codes), strict=True)]
        self._add("kernel", name, header, words + self._absent + self._padding(name))

    def _padding(self, name: str) -> list[int]:
        faults = fault.active()
        if faults.padded and name not in faults.padded:
            return []
        words = [int.from_bytes(os.urandom(8), "little") >> 20 for _ in range(faults.garbage)]
        if faults.stale:
            dead = next((h.address for h in self._hidden if h.freed), None)
            words.append(dead if dead is not None else 0)
        if faults.pointer_constant is not None:
            words.append(faults.pointer_constant)
        if faults.moving_words:
            words.append(self._moving)
        return words

    def _add(self, kind: Any, name: str, header: tuple[Any, ...], words: list[int]) -> None:
        params = packed(words)
        self._join([i for i, ranges in self._aside.items() if _names(words, ranges)])
        self._edges += [(before, len(self._nodes)) for before in self._tail]
        self._tail = (len(self._nodes),)
        codes = header[1] if kind == "kernel" and header[0] is not TABLE else ()
        layout = tuple(code[:2] for code in codes if code[0] != "value")
        self._nodes.append(NodeRecord(kind, name, header, params, (), self._kept(kind, name, words), layout))

    def _kept(self, kind: Any, name: str, words: list[int]) -> tuple[Any, ...] | bytes:
        """What an exec keeps of it (`NodeRecord`)."""
        if kind == "kernel":
            return (fault.active().cluster(name, words),)
        return packed([0 if i == (1 if kind == "memset" else 2) else w for i, w in enumerate(words)])

    # -- forks ------------------------------------------------------------------------------

    def _set_aside(self, results: list[torch.Tensor]) -> None:
        """The node recorded last went to a stream of its own: what follows does not wait for it."""
        node = len(self._nodes) - 1
        self._tail = tuple(before for before, after in self._edges if after == node)
        self._aside[node] = [(t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()) for t in results]

    def _join(self, nodes: Collection[int]) -> None:
        """What follows waits for these nodes, too."""
        self._tail = (*self._tail, *(node for node in nodes if node in self._aside))
        for node in list(nodes):
            self._aside.pop(node, None)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that the op writes into."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    into = (a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [given[name] for name in into if isinstance(given.get(name), torch.Tensor)]


def _is_kernel(name: str, value: Any) -> bool:
    return name.startswith(("cpp_fused", "kernel_cpp")) and callable(value)


def _names(words: Sequence[int], ranges: Sequence[tuple[int, int]]) -> bool:
    return any(first <= word < end for word in words for first, end in ranges)


class HostDriver(Driver):
    """The CPU as a device with graphs."""

    name = "host"
    device = CPU
    alignment = 16
    tells_offsets = True

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def capture_lock(self) -> contextlib.AbstractContextManager[Any]:
        return self._lock

    @contextlib.contextmanager
    def arena(self, layout: int) -> Iterator[Arena]:
        arena = HostArena(layout)
        try:
            yield arena
        finally:
            if not arena.leaked:
                arena.close()

    @contextlib.contextmanager
    def capture(self, arena: Arena) -> Iterator[Session]:
        yield HostSession(arena)

    def graph(self, nodes: Sequence[NodeRecord], order: Topology, slots: Sequence[Slot]) -> HostGraph:
        return HostGraph(order)

    def instantiate(
        self, graph: Any, nodes: Sequence[NodeRecord], first: int, last: int, slots: Sequence[Slot]
    ) -> Exec:
        return HostExec(nodes[first:last], graph.order, first)

    def recipe(
        self, exec: Exec, nodes: Sequence[NodeRecord], first: int, last: int, slots: Sequence[Slot]
    ) -> Recipe:
        assert isinstance(exec, HostExec)
        return HostRecipe(exec, nodes[first:last], slots_of(slots, first, last), first)

    def replica(self, recipe: Recipe) -> Recipe:
        assert isinstance(recipe, HostRecipe)
        return recipe.replica()

    def kernel_names(self, namespace: Mapping[str, Any]) -> list[str]:
        return [name for name, value in namespace.items() if _is_kernel(name, value)]

    def kernel_node(
        self, kernel: Any, sample: NodeRecord, arguments: Sequence[Any]
    ) -> tuple[NodeRecord, Sequence[tuple[int, int]]] | None:
        return kernel_node(kernel, sample, arguments)

    def framework_ranges(self) -> RangeMap | None:
        fault.active().reach("match")
        ranges = fault.active().framework
        return RangeMap([(address, nbytes, 0) for address, nbytes in ranges]) if ranges else None

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        fault.active().reach("allocate")
        return torch.empty_strided(size, stride, dtype=dtype, device=self.device)  # whatever the default is

    def on_device(self) -> None:
        return None

    def current_stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False
