"""The copy that Note [Numbers of the call] in `pgraph.rewrites.scalars` speaks of: an op, and a short cut.

The op is what generated code calls. It stacks the numbers, and gives a copy of its own: generated code may
write there. Most graphs only hand what was copied to their partitions, which read it. There the short cut
serves: the numbers are told by their bits, and what was copied before is handed over as it is.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pgraph import compat
from pgraph.ops import op_names
from pgraph.ops.fx import storage_of

__all__ = ["COPY", "ShortCut", "short_cut", "stay_inside"]

_library = torch.library.Library("pgraph", "FRAGMENT")  # kept: its ops go when it goes
_library.define("numbers_on_device(Tensor[] numbers, Device device) -> Tensor")

_MOST: Final = 64
_copied_before: OrderedDict[Hashable, Tensor] = OrderedDict()
_lock = threading.Lock()

_PACKED: Final = {torch.float64: "d", torch.float32: "f", torch.int64: "q", torch.int32: "i"}
"""How the bytes of a Python number are those of a tensor of this type."""

_KEPT: Final = 16
"""Calls whose results one short cut remembers: a few streams, or numbers that take turns."""


def _numbers_on_device(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.stack(tuple(numbers)).to(device, non_blocking=True)
    return _copied(numbers, device).clone()


def _copied(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """Numbers on a CUDA device, which nobody may write to."""
    together = torch.stack(tuple(numbers))
    content = ctypes.string_at(together.data_ptr(), together.nbytes)
    return _known((*_place(device), together.dtype, content), together, device)


def _place(device: torch.device) -> tuple[int, int]:
    """A CUDA device's index and its current stream."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, compat.current_raw_stream(index)


def _known(key: Hashable, together: Tensor, device: torch.device) -> Tensor:
    """Numbers on the device: those that were copied before, if there are such with this key."""
    with _lock:
        found = _copied_before.get(key)
        if found is not None:
            _copied_before.move_to_end(key)
            return found
    # From pageable memory: CUDA has read it when the call returns, and does not wait for the device.
    found = together.to(device, non_blocking=True)
    with _lock:
        _copied_before[key] = found
        while len(_copied_before) > _MOST:
            _copied_before.popitem(last=False)
    return found


def _fake(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    return numbers[0].new_empty((len(numbers),), device=device)


_library.impl("numbers_on_device", _numbers_on_device, "CompositeExplicitAutograd")
torch.library.register_fake(op_names.NUMBERS_OP, _fake, lib=_library)

COPY: Final = torch.ops.pgraph.numbers_on_device.default
"""Numbers on the CPU, all of one type, in a tensor on a device."""

_SELECT: Final = torch.ops.aten.select.int


def _copies_in(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target is COPY]


def stay_inside(gm: GraphModule) -> bool:
    """Whether nothing that a graph returns lies in the memory of a copy: then nobody writes there. Results
    may be written by the program, and what is saved for a backward by its generated code.
    """
    copies = _copies_in(gm)
    memory = {storage_of(node) for node in copies}
    results = gm.graph.output_node().all_input_nodes if copies else ()
    return all(_told(node, copies) is None and storage_of(node) not in memory for node in results)


class ShortCut:
    """Callable in the place of the code of a partition that copies numbers and does nothing else.

    Args:
        plain: that code; takes one list and empties it. It runs where others are to see each op.
        device: where the numbers go.
        copies: for each copy the positions of its numbers among the arguments, and their type.
        results: for each result the copy that it is of, and which number it is; None for all of them.
    """

    def __init__(
        self,
        plain: Callable[[list[Any]], Any],
        device: torch.device,
        copies: Sequence[tuple[Sequence[int], torch.dtype]],
        results: Sequence[tuple[int, int | None]],
    ) -> None:
        self._plain, self._device, self._copies, self._results = plain, device, tuple(copies), tuple(results)
        self._order = [position for positions, _ in copies for position in positions]
        self._pack = struct.Struct("=" + "".join(_PACKED[dtype] * len(ps) for ps, dtype in copies)).pack
        self._found: dict[Hashable, tuple[Tensor, ...]] = {}

    def __call__(self, args: list[Any]) -> tuple[Tensor, ...]:
        if compat.intercepted() or torch.cuda.is_current_stream_capturing():
            made: tuple[Tensor, ...] = self._plain(args)
            return made
        content = self._pack(*[args[position].item() for position in self._order])
        key = (*_place(self._device), content)
        found = self._found.get(key)
        if found is None:
            found = self._results_of(args)
            if len(self._found) >= _KEPT:
                self._found = {}  # a new one: another thread may be reading
            self._found[key] = found
        args.clear()
        return found

    def _results_of(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        wholes = [_copied([args[p] for p in positions], self._device) for positions, _ in self._copies]
        return tuple(wholes[copy] if at is None else wholes[copy][at] for copy, at in self._results)


def short_cut(
    module: GraphModule, plain: Callable[[list[Any]], Any], device: torch.device
) -> ShortCut | None:
    """What may run in the place of a partition's code, where nobody writes to its results; None if the
    partition does more than to copy numbers to a CUDA device.

    Args:
        module: the partition.
        plain: its code.
        device: of the graph.
    """
    copies = _copies_in(module)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    end = module.graph.output_node()
    if device.type != "cuda" or not copies:
        return None
    known = {*inputs, end}
    if any(node not in known and _told(node, copies) is None for node in module.graph.nodes):
        return None
    taken: list[Any] = [node.args[0] for node in copies]
    numbers = [[inputs.index(n) if n in inputs else -1 for n in mine] for mine in taken]
    types = [node.meta["val"].dtype for node in copies]
    if any(-1 in positions for positions in numbers) or not set(types) <= set(_PACKED):
        return None
    results: Any = end.args[0]
    told = [_told(node, copies) for node in results]
    found = [t for t in told if t is not None]
    return ShortCut(plain, device, list(zip(numbers, types, strict=True)), found) if found == told else None


def _told(node: Any, copies: Sequence[Node]) -> tuple[int, int | None] | None:
    """Which copy a node is, or is a number of, and which one; None if it is neither."""
    if node in copies:
        return copies.index(node), None
    if not isinstance(node, Node) or node.op != "call_function" or node.target is not _SELECT:
        return None
    whole, dim, at = node.args
    if whole not in copies or dim != 0 or not isinstance(at, int):
        return None
    return copies.index(whole), at
