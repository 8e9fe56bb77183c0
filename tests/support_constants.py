"""Graphs as AOTAutograd makes them for a device that is not the CPU, without a GPU.

The device is ``meta``: autograd and Dynamo know it in every build, and it has no numbers. What the graphs
compute is seen by running them with the CPU in its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import GraphModule, Interpreter
from torch.fx.node import map_aggregate

from pgraph.ops.safety import refusal
from pgraph.partition.scan import Partition, scan
from pgraph.reasons import Reason
from pgraph.rewrites import constants

DEVICE = "meta"
PARTITIONS = {"aten": default_partition, "min-cut": min_cut_rematerialization_partition}


class _Compiled(Exception):  # noqa: N818  (nothing went wrong)
    """All graphs are there; on a device without numbers there is nothing to run."""


class OnCpu(Interpreter):
    """Runs a graph with the CPU as the device."""

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = map_aggregate(
            (n.args, n.kwargs),
            lambda a: torch.device("cpu") if isinstance(a, torch.device) else a,
        )
        n.args, n.kwargs = args, kwargs
        return super().run_node(n)


@dataclasses.dataclass
class Compiled:
    """The graphs of one program, in the order in which they were compiled, and what was refused before."""

    graphs: list[GraphModule]
    before: list[Reason]

    def run(self, position: int, *args: Any) -> Any:
        return OnCpu(self.graphs[position]).run(*args)

    def partitions(self) -> list[list[Partition]]:
        return [partitions(gm) for gm in self.graphs]

    def reasons(self) -> set[str]:
        """Codes of the refusals that are left."""
        return {
            reason.code for found in self.partitions() for partition in found for reason in partition.reasons
        }


def partitions(gm: GraphModule) -> list[Partition]:
    """How pgraph would cut the graph."""
    return scan(gm.graph, lambda node: refusal(node, device_type=DEVICE), min_ops=1)


def compiled(
    fn: Callable[..., Any],
    *inputs: Any,
    patch: pytest.MonkeyPatch,
    partition: str = "aten",
    dynamic: bool = False,
    cured: bool = True,
    by_inductor: bool = True,
) -> Compiled:
    """The graphs of `fn` for inputs like these on the device; with their backward where they need one."""
    # A tensor on `meta` would forget its numbers.
    patch.setattr(constants, "_held", lambda value, device: value.clone())
    found = Compiled([], [])

    def change(gm: GraphModule) -> None:
        found.before += [r for partition in partitions(gm) for r in partition.reasons]
        if cured:
            constants.on_device(gm, DEVICE, by_inductor=by_inductor)

    def keep(gm: GraphModule, inputs: Any) -> Any:
        found.graphs.append(gm)
        return stop

    def infer(gm: GraphModule, inputs: Any) -> Any:
        change(gm)
        return keep(gm, inputs)

    def split(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        change(joint)
        return PARTITIONS[partition](joint, *args, **kwargs)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        inference_compiler=infer,
        partition_fn=split,
        keep_inference_input_mutations=True,
    )

    def stop(*args: Any) -> Any:
        raise _Compiled

    given = [_there(x) for x in inputs]
    run = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    eagerly = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with eagerly, contextlib.suppress(_Compiled):
        run(*given)
    return found


def _there(x: Any) -> Any:
    """Like `x`, on the device; scalars and what is no tensor stay."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    return x.detach().to(DEVICE).requires_grad_(x.requires_grad)
