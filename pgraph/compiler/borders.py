"""The strides of values that go from one partition of a graph to the next, and to the backward.

Note [Borders]
Every partition is compiled on its own, for inputs of certain strides, and Inductor's code stops (or computes
wrongly, if its checks are off) on any others. The strides in the trace are not always those of the values at
run time: Inductor pads what a forward saves, returns views of padded buffers, and chooses the layout of
convolutions. So:

* AOTAutograd compiles a backward with example inputs that have the strides which the forward reported.
  The traced values are brought up to date with them (`bring_up_to_date`), as Inductor does by itself.
* The partitions are compiled in the order in which they run. Inductor reports which strides the results of
  each have; with those later partitions are compiled (Inductor traces anew inside of each), and those are
  reported to AOTAutograd, which compiles the backward for them.
* What the user sees, and what `as_strided` reads, must have the strides of the trace. Where Inductor
  reports others, or none, the code makes a copy that has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from pgraph import compat
from pgraph.compat import Strides
from pgraph.compiler.context import CompilePartition, Memory
from pgraph.compiler.strides import dense, keep_strides
from pgraph.ops import op_names
from pgraph.ops.fx import op_name, unbacked
from pgraph.partition.extract import Call, SplitPlan
from pgraph.rewrites.storage_owners import owner_of
from pgraph.runtime.protocols import Boxed

__all__ = ["Borders", "bring_up_to_date"]


def bring_up_to_date(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Trace `gm` anew, in place, if its inputs are laid out otherwise than when it was traced.

    A view may have become impossible: views are turned into reshapes, as Inductor does.
    """
    traced = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    pairs = zip(traced, inputs, strict=True)
    if any(_strided(was) and _strided(now) and not _same(was, now.stride()) for was, now in pairs):
        compat.propagate(gm, inputs)


class Borders:
    """The traced values of a graph's partitions, with the strides that they have when the code runs.

    A graph in one piece has no borders: its compiler is told nothing, and its strides are left alone.

    Args:
        gm: what was split.
        inputs: example inputs of the whole graph.
        split: its partitions, which `compile` is to be given in order.
        by_inductor: whether the compiler of the partitions chooses strides.
    """

    def __init__(
        self, gm: GraphModule, inputs: Sequence[Any], split: SplitPlan, *, by_inductor: bool
    ) -> None:
        self.whole = split.calls[0].module is gm
        self._split = split
        self._by_inductor = by_inductor
        self._values: list[Any] = [None] * split.n_slots
        traced = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
        for slot, was, now in zip(split.input_slots, traced, inputs, strict=True):
            self._values[slot] = now if self.whole or isinstance(now, torch.Tensor) else was
        self._returned = {slot for slot in split.output_slots if isinstance(slot, int)}
        visible = gm.graph.output_node().meta.get("user_visible_output_idxs", range(len(split.output_slots)))
        self._exact = {slot for at, slot in enumerate(split.output_slots) if at in visible}
        self._exact |= {slot for call in split.calls for slot in _read_as_storage(call)}

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """While the partitions are compiled; then AOTAutograd is told the strides of the whole graph."""
        if self.whole:
            yield
            return
        with compat.own_output_strides() as strides:
            yield
            strides += self._output_strides()

    def inputs(self, call: Call) -> list[Any]:
        """The values that a partition takes, as they will be. Those before it must be compiled."""
        return [self._values[slot] for slot in call.inputs]

    def compile(self, call: Call, compiler: CompilePartition, memory: Memory) -> Boxed:
        """The code of the next partition, whose results have the strides that later partitions are compiled
        for.

        Args:
            memory: of the partition's inputs.
        """
        inputs = self.inputs(call)
        if self.whole:
            # A backward (nothing else has gradients) may have fewer donated inputs than its compiler knows.
            fewer = memory.gradients and memory.donated < set(compat.donated_inputs())
            with compat.donating(sorted(memory.donated)) if fewer else contextlib.nullcontext():
                return compiler(call.module, inputs, None)
        returned: Any = call.module.graph.output_node().args[0]
        outputs = [node.meta.get("val") for node in returned]  # before a compiler rewrites the module
        with compat.donating(sorted(memory.donated)):
            code = compiler(call.module, inputs, sorted(memory.static))
        for slot, value in zip(call.outputs, outputs, strict=True):
            self._values[slot] = value
        if not self._by_inductor:
            return code
        found = compat.returned_strides(code, [*inputs, *outputs])
        if found is None or len(found) != len(outputs):
            found = [None] * len(outputs)
        copied = self._copied(call, outputs, found)
        return keep_strides(code, inputs, outputs, copied) if copied else code

    def _copied(
        self, call: Call, outputs: Sequence[Any], found: Sequence[Strides | None]
    ) -> dict[int, Strides | None]:
        """The results that are copied where they have other strides than these, by position; None stands for
        those of a tensor without gaps. The other results have the strides that the compiler reports.

        Args:
            outputs: traced results of the partition.
            found: the strides that its compiler reports.
        """
        copied: dict[int, Strides | None] = {}
        for position, (slot, value, strides) in enumerate(zip(call.outputs, outputs, found, strict=True)):
            if not _strided(value) or (strides is not None and _same(value, strides)):
                continue
            if slot in self._exact:
                copied[position] = value.stride()
            elif strides is not None:
                self._values[slot] = compat.restrided(value, strides)
            elif slot in self._returned or not any(unbacked(stride) for stride in value.stride()):
                copied[position] = value.stride()
            else:  # strides without a name: what no sizes tell (Note [Strides that depend on data])
                copied[position] = None
                self._values[slot] = compat.restrided(value, dense(value.size()))
        return copied

    def _output_strides(self) -> list[Strides | None]:
        """The strides of each output of the whole graph; None where they depend on data.

        AOTAutograd counts without tokens what a forward saves, and only there does it look.
        """
        slots = self._split.output_slots[compat.tokens() :]
        values = [self._values[o] if isinstance(o, int) else None for o in slots]
        strides = [value.stride() if _strided(value) else None for value in values]
        return [None if any(unbacked(stride) for stride in found or ()) else found for found in strides]


def _strided(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _same(value: torch.Tensor, strides: Strides) -> bool:
    """Whether the value certainly has these strides; that of a dimension of size 1 does not matter."""
    return all(
        compat.same_number(mine, theirs) or compat.same_number(size, 1)
        for size, mine, theirs in zip(value.size(), value.stride(), strides, strict=True)
    )


def _read_as_storage(call: Call) -> set[int]:
    """The slots whose storage a partition reads by numbers of its own."""
    slot_of = dict(zip(call.module.graph.find_nodes(op="placeholder"), call.inputs, strict=True))
    readers = (node for node in call.module.graph.nodes if isinstance(node.target, OpOverload))
    owners = (owner_of(node.args[0]) for node in readers if op_name(node.target) in op_names.STORAGE_OFFSETS)
    return {slot_of[owner] for owner in owners if owner in slot_of}
