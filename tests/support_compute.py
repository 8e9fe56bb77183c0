"""Scripts, and library calls and kernels that are made up, for tests of what sizes record."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._inductor.select_algorithm import extern_kernels

from pgraph.compute.pieces import Proved
from pgraph.compute.script import CallLibrary, LaunchKernel, Script
from pgraph.compute.trace import traced
from pgraph.drivers.operands import Operand, distinct
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording, TensorSpec
from pgraph.template.template import Slot
from pgraph.template.topology import chain

F32 = torch.float32


class Kernel:
    """Stands for a generated one."""


def script_of(body: str, *arguments: Any) -> Script:
    module: dict[str, Any] = {"torch": torch, "extern_kernels": extern_kernels, "kernel": Kernel()}
    module |= dict.fromkeys(("empty_strided_cuda", "reinterpret_tensor", "assert_size_stride"))
    exec("def call(args):\n" + "\n".join(f"    {line.strip()}" for line in body.strip().splitlines()), module)

    def kernels(namespace: Mapping[str, Any]) -> list[str]:
        return [name for name, value in namespace.items() if isinstance(value, Kernel)]

    return traced(module["call"], arguments, torch.device("cpu"), kernels)


def node_of(name: str, words: Sequence[int]) -> NodeRecord:
    return NodeRecord("kernel", name, (), struct.pack(f"={len(words)}Q", *words))


def kernel_node(
    position: int, event: LaunchKernel, arguments: Sequence[Any]
) -> tuple[NodeRecord, list[tuple[int, int]]]:
    """A word for each argument: an address, or a number."""
    words = [a.address if isinstance(a, Operand) else a for a in arguments]
    operands = [(8 * i, i) for i, a in enumerate(arguments) if isinstance(a, Operand)]
    return node_of(event.name, words), operands


def product(event: CallLibrary, arguments: Sequence[Any]) -> Proved:
    """`mm` as two nodes: one fills the library's workspace, one reads it; scratch lives in between."""
    a, b, out = (x for x in arguments if isinstance(x, Operand))
    base = 1 << 50
    inputs = tuple(GhostAllocation(base + i * 4096, 64, 0, 2) for i in range(3))
    scratch = GhostAllocation(base + 3 * 4096, 128, 0, 2)
    workspace = GhostAllocation(base + 4 * 4096, 1024, 0, None, library=True)
    sizes = (*a.size, *b.size, *out.size)
    nodes = (node_of("fill", [0]), node_of("mm", [0, 0, 0, 0, *sizes]))
    slots = (Slot(0, 0, 4, 0), Slot(1, 0, 0, 0), Slot(1, 8, 1, 8), Slot(1, 16, 2, 0), Slot(1, 24, 3, 0))
    recording = Recording(
        nodes, chain(2), (*inputs, scratch, workspace), 3, (), (0, 0), None, steps=(0, 1, 2)
    )
    return recording, slots


def of_operands(arguments: Sequence[Any]) -> list[int]:
    """All that a kernel may depend on, but for where operands lie."""
    return [
        number
        for a in arguments
        if isinstance(a, Operand)
        for number in (a.address % 256, *a.size, *a.stride, a.offset)
    ]


def library(event: CallLibrary, arguments: Sequence[Any]) -> Proved:
    """Any call as two nodes, as `product` is; each operand that is another one counts as an input."""
    operands = [arguments[i] for i in distinct(arguments)]
    n = len(operands)
    inputs = tuple(GhostAllocation((1 << 50) + i * 4096, 64, 0, 2) for i in range(n))
    made = [GhostAllocation(1 << 51, 128, 0, 2), GhostAllocation(1 << 52, 1024, 0, None, library=True)]
    slots = [Slot(0, 0, n + 1, 0), *(Slot(1, 8 * i, i, 4 * i) for i in range(n + 1))]
    outputs = []
    if event.results:
        made.insert(0, GhostAllocation(1 << 53, 4096, 1, None))
        size, stride = operands[0].size, operands[0].stride
        outputs.append(OutputSpec(region=n, layout=TensorSpec(size, stride, F32, 16)))
    nodes = (node_of("fill", [0]), node_of("of a library", [0] * (n + 1) + of_operands(operands)))
    return Recording(
        nodes, chain(2), (*inputs, *made), n, tuple(outputs), (0, 0), None, steps=(0, 1, 2)
    ), tuple(slots)
