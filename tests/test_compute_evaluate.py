"""What a script gives at certain sizes, with library calls and kernels that are made up."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.select_algorithm import extern_kernels

from pgraph.compute.computer import Computer
from pgraph.compute.errors import NotComputableError
from pgraph.compute.evaluate import evaluate
from pgraph.compute.pieces import Proved, Tools
from pgraph.compute.script import Call, Run, Script, asks_for_offsets
from pgraph.compute.sites import LibraryCall
from pgraph.compute.skeleton import Latest
from pgraph.compute.trace import traced
from pgraph.drivers.operands import Layout, Layouts, Operand, distinct
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording, TensorSpec
from pgraph.template.template import Slot
from pgraph.template.topology import chain

F32 = torch.float32


SEEDS = torch.library.Library("seedtest", "FRAGMENT")
SEEDS.define("relu(Tensor x) -> Tensor")


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
    position: int, event: Run, arguments: Sequence[Any]
) -> tuple[NodeRecord, list[tuple[int, int]]]:
    """A word for each argument: an address, or a number."""
    words = [a.address if isinstance(a, Operand) else a for a in arguments]
    operands = [(8 * i, i) for i, a in enumerate(arguments) if isinstance(a, Operand)]
    return node_of(event.name, words), operands


def product(event: Call, arguments: Sequence[Any]) -> Proved:
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


def test_lifetimes_are_those_of_a_capture() -> None:
    """Deaths are noted where a recorder looks: when memory is made, and around calls; not at kernels."""
    script = script_of(
        """
        n, x = args
        args.clear()
        buf0 = empty_strided_cuda((n, 4), (4, 1), torch.float32)
        kernel.run(x, buf0, n, stream=0)
        del x
        kernel.run(buf0, n, stream=0)
        buf1 = empty_strided_cuda((n, n), (n, 1), torch.float32)
        extern_kernels.mm(buf0, reinterpret_tensor(buf0, (4, n), (1, 4), 2), out=buf1)
        del buf0
        buf2 = empty_strided_cuda((n, ), (1, ), torch.float32)
        extern_kernels.mm(buf1, buf1, out=buf2)
        kernel.run(buf2, stream=0)
        del buf2
        return (buf1, n)
        """,
        6,
        torch.ones(6, 4),
    )
    found = evaluate(script, [10, torch.ones(10, 4)], [16], Tools(kernel_node, both, {}))
    assert found is not None
    recording, slots = found
    names = [node.name for node in recording.nodes]
    assert names == ["kernel", "kernel", "fill", "mm", "fill", "mm", "kernel"]
    lives = [(a.nbytes, a.birth, a.death, a.library) for a in recording.allocations]
    assert lives == [
        (160, 0, 2, False),  # x: dropped after the first kernel, noted when memory was made
        (160, 0, 4, False),
        (400, 2, None, False),
        (128, 2, 4, False),  # scratch of the first product
        (1024, 2, None, True),  # one workspace for both
        (40, 4, 7, False),
        (128, 4, 6, False),
    ]
    assert recording.steps == (0, 2, 3, 4, 5, 6, 7)
    assert recording.n_inputs == 1
    told = [(s.node, s.offset, s.region, s.delta) for s in slots]
    assert told == [
        *((0, 0, 0, 0), (0, 8, 1, 0), (1, 0, 1, 0)),
        *((2, 0, 4, 0), (3, 0, 1, 0), (3, 8, 1, 16), (3, 16, 2, 0), (3, 24, 3, 0)),
        *((4, 0, 4, 0), (5, 0, 2, 0), (5, 8, 5, 0), (5, 16, 6, 0)),
        (6, 0, 5, 0),
    ]
    result, number = recording.outputs
    assert result == OutputSpec(region=2, layout=TensorSpec((10, 10), (10, 1), F32, 0))
    assert number == OutputSpec(constant=10)


HOW = b"\1\0\1"


@pytest.mark.parametrize(
    ("before", "edges"),
    [("", [(0, 1)]), ("kernel.run(a, stream=0)", [(0, 1), (1, 2)]), ("copied", None)],
    ids=["first", "after a kernel", "after a copy"],
)
def test_calls_that_need_not_wait_for_all_of_what_comes_before(
    before: str, edges: list[tuple[int, int]] | None
) -> None:
    """An edge into a call's first node is there where a kernel comes before it; between two nodes of a call,
    always. How a call waits for a copy was not seen."""
    line = before if before != "copied" else "extern_kernels.mm(a, a, out=a)"
    script = script_of(
        f"""
        a, = args
        args.clear()
        {line}
        extern_kernels.mm(a, a, out=a)
        return (a, )
        """,
        torch.ones(4, 4),
    )

    def site(event: Call, arguments: Sequence[Any]) -> Proved:
        inputs = (GhostAllocation(1 << 50, 64, 0, 2),)
        nodes = (node_of("mm", [0]), node_of("sum", [1]))
        if before == "copied":
            nodes = (*nodes[:1], NodeRecord("memcpy", "copy", (), bytes(8)))
        order = dataclasses.replace(chain(2), odd=((-1, 0, HOW), (0, 1, HOW)))
        return Recording(nodes, order, inputs, 1, (), (0, 0), None), (Slot(0, 0, 0, 0),)

    def found() -> Proved:
        return evaluate(script, [torch.ones(4, 4)], [16], Tools(kernel_node, site, {}))

    if edges is None:
        with pytest.raises(NotComputableError, match="a copy, a fill or a fork"):
            found()
        return
    order = found()[0].order
    assert order == dataclasses.replace(chain(order.n_nodes), odd=tuple((*edge, HOW) for edge in edges))


def both(event: Call, arguments: Sequence[Any]) -> Proved:
    """Of three tensors, or of two: the third is the second then."""
    operands = [x for x in arguments if isinstance(x, Operand)]
    if len(set(operands)) == 3:
        found, slots = product(event, arguments)
        return found, tuple(s if (s.node, s.offset) != (1, 8) else Slot(1, 8, 1, 8) for s in slots)
    recording, _ = product(event, arguments)
    fewer = Recording(
        recording.nodes,
        recording.order,
        (*recording.allocations[:2], *recording.allocations[3:]),
        2,
        (),
        (0, 0),
        None,
        steps=(0, 1, 2),
    )
    return fewer, (Slot(0, 0, 3, 0), Slot(1, 0, 0, 0), Slot(1, 8, 1, 0), Slot(1, 16, 2, 0))


def test_views_count_from_where_their_tensor_begins() -> None:
    """An input may begin anywhere in its storage: kernels are told the address, libraries the offset, too."""
    script = script_of(
        """
        n, x = args
        args.clear()
        a = reinterpret_tensor(x, (n, ), (1, ), 3)
        kernel.run(a, stream=0)
        b = reinterpret_tensor(a, (n, ), (1, ), n)
        kernel.run(b, stream=0)
        return (b, )
        """,
        6,
        torch.ones(20),
    )
    seen: list[Operand] = []

    def node(position: int, event: Run, arguments: Sequence[Any]) -> Any:
        seen.extend(arguments)
        return kernel_node(position, event, arguments)

    x = torch.ones(40)[5:]
    found = evaluate(script, [10, x], [16], Tools(node, product, {}))
    assert found is not None
    recording, slots = found
    assert [operand.offset for operand in seen] == [8, 18]
    assert [slot.delta for slot in slots] == [12, 52]
    assert recording.outputs == (OutputSpec(input=0, layout=TensorSpec((10,), (1,), F32, 52)),)
    assert seen[0].address % 16 == 12, "as aligned as the view of an input that is aligned to 16 bytes"


def test_calls_that_are_missing_are_recorded_together() -> None:
    """As far as the code itself tells the layouts of their results."""
    script = script_of(
        """
        n, x = args
        a = torch.ops.aten.relu.default(x)
        assert_size_stride(a, (n, 2), (2, 1))
        b = torch.ops.aten.relu.default(a)
        c = torch.ops.aten.relu.default(b)
        d = torch.ops.aten.relu.default(c)
        return (d, )
        """,
        6,
        torch.ones(6, 2),
    )
    calls = [event for event in script.events if isinstance(event, Call)]
    known, asked, rounds = set[int](), dict[int, Proved](), list[list[int]]()

    def site(event: Call, arguments: Sequence[Any]) -> Proved | None:
        assert arguments[0].size == (9, 2)
        number = calls.index(event)
        if number in known:  # its argument lies otherwise than was told, and as well
            return library(event, arguments)
        assert number not in asked, "once"
        asked[number] = library(event, arguments)
        return None

    def record() -> list[Proved]:
        known.update(asked)
        rounds.append([*asked])
        found = [*asked.values()]
        asked.clear()
        return found

    def evaluated(types: dict[int, Any]) -> Proved:
        known.clear(), asked.clear(), rounds.clear()
        return evaluate(script, [9, torch.ones(9, 2)], [16], Tools(kernel_node, site, types, record=record))

    types = {calls[0].results[0]: F32}
    found = evaluated(types)
    # The third one's argument is not known before the second was recorded.
    assert rounds == [[0, 1], [2], [3]]
    assert types.keys() == {call.results[0] for call in calls}, "now all are known"
    assert evaluated({}) == found
    assert rounds == [[0], [1], [2], [3]], "nor of which type the first result is"
    with pytest.raises(NotComputableError, match="in ways that cannot be told"):
        evaluate(script, [9, torch.ones(9, 2)], [16], Tools(kernel_node, lambda event, arguments: None, {}))


def test_rounds_come_to_an_end() -> None:
    script = script_of("return (torch.ops.aten.relu.default(args[1]), )", 6, torch.ones(6))
    rounds: list[int] = []

    def record() -> list[Proved | None]:
        rounds.append(1)
        return [None]

    tools = Tools(kernel_node, lambda event, arguments: None, {}, record=record)
    with pytest.raises(NotComputableError, match="in ways that cannot be told"):
        evaluate(script, [6, torch.ones(6)], [16], tools)
    assert rounds == [1], "what was recorded is known, or will never be"


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (OutputSpec(input=0), "returns one of its arguments"),
        (OutputSpec(region=1, layout=TensorSpec((2,), (1,), F32, 0), view_of=0), "one result twice"),
        (OutputSpec(region=1, layout=TensorSpec((2,), (1,), F32, 0, conj=True)), "a lazy view"),
    ],
)
def test_results_that_are_no_fresh_tensors(output: OutputSpec, why: str) -> None:
    script = script_of("return (torch.ops.aten.relu.default(args[1]), )", 6, torch.ones(6))

    def site(event: Call, arguments: Sequence[Any]) -> Proved:
        allocations = (GhostAllocation(1 << 50, 8, 0, 1), GhostAllocation(1 << 51, 8, 0, None))
        return Recording((node_of("relu", [0]),), chain(1), allocations, 1, (output,), (0, 0), None), ()

    with pytest.raises(NotComputableError, match=why):
        evaluate(script, [6, torch.ones(6)], [16], Tools(kernel_node, site, {}))


@pytest.mark.parametrize("expected", [(), (2,)])
def test_a_result_on_the_host_is_checked_as_it_is(expected: tuple[int, ...]) -> None:
    """Attention's seed, which no kernel reads."""
    check = f"assert_size_stride(y, {expected}, {expected})"
    script = script_of(f"y = torch.ops.aten.relu.default(args[1])\n{check}\nreturn (y, )", 6, torch.ones(6))
    seed = torch.tensor(0)

    def site(event: Call, arguments: Sequence[Any]) -> Proved:
        allocations, outputs = (GhostAllocation(1 << 50, 8, 0, 1),), (OutputSpec(constant=seed, unread=True),)
        return Recording((node_of("relu", [0]),), chain(1), allocations, 1, outputs, (0, 0), None), ()

    tools = Tools(kernel_node, site, {})
    if expected:
        with pytest.raises(NotComputableError, match="laid out otherwise"):
            evaluate(script, [6, torch.ones(6)], [16], tools)
        return
    found = evaluate(script, [6, torch.ones(6)], [16], tools)
    assert found is not None
    assert found[0].outputs == (OutputSpec(constant=seed, unread=True),)


def test_a_tensor_that_is_laid_out_otherwise() -> None:
    script = script_of("assert_size_stride(args[1], (args[0], 3), (3, 1))\nreturn ()", 6, torch.ones(6, 3))
    tools = Tools(kernel_node, product, {})
    assert evaluate(script, [7, torch.ones(7, 3)], [16], tools)
    assert evaluate(script, [1, torch.ones(3, 1).t()], [16], tools) is not None, (
        "one row, whatever its stride"
    )
    for x in (torch.ones(8, 3), torch.ones(3, 7).t()):
        with pytest.raises(NotComputableError, match="laid out otherwise"):
            evaluate(script, [7, x], [16], tools)


@pytest.mark.parametrize(
    ("function", "calls"), [("aten.relu.default", 1), ("seedtest.relu.default", 3)], ids=["own", "custom"]
)
def test_where_in_its_storage_a_tensor_begins(function: str, calls: int) -> None:
    """Seeds of all layers lie in one piece (Note [Results in one piece]): their calls are alike."""
    piece = torch.ones(1024)
    seeds = [piece[at : at + 6] for at in (0, 128, 256)]
    results = ", ".join(f"torch.ops.{function}(args[{i}])" for i in (1, 2, 3))
    script = script_of(f"return ({results})", 6, *seeds)
    keys: set[Hashable] = set()

    def site(event: Call, arguments: Sequence[Any]) -> Proved:
        keys.add(LibraryCall(event, tuple(arguments), 0).key)
        allocations = (GhostAllocation(1 << 50, 24, 0, 1), GhostAllocation(1 << 51, 24, 0, None))
        made = (OutputSpec(region=1, layout=TensorSpec((6,), (1,), F32, 0)),)
        nodes = (node_of("relu", [0]),)
        recording = Recording(nodes, chain(1), allocations, 1, made, (0, 0), None)
        return recording, (Slot(0, 0, 0, 0),)

    for offsets, asked in (script.offsets, calls), (True, 3):
        keys.clear()
        found = evaluate(script, [6, *seeds], [16] * 3, Tools(kernel_node, site, {}, offsets=offsets))
        assert found is not None
        assert len(keys) == asked
        assert [slot.region for slot in found[1]] == [0, 1, 2], "each reads its own"


def test_who_asks_for_offsets() -> None:
    asking = torch.as_strided, torch.ops.aten.as_strided_copy.out, torch.ops.seedtest.relu.default, len, abs
    for function in asking:
        assert asks_for_offsets(function), function
    for function in torch.mm, extern_kernels.addmm, extern_kernels.bias_addmm, torch.ops.aten.mm.out:
        assert not asks_for_offsets(function), function


def test_the_code_or_the_driver_asks_for_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def noted(script: Script, arguments: Any, alignments: Any, tools: Tools, latest: Any) -> str:
        seen.append(tools.offsets)
        return "a recording"

    monkeypatch.setattr("pgraph.compute.computer.evaluate", noted)
    for function in ("aten", "seedtest"):
        script = script_of(f"return (torch.ops.{function}.relu.default(args[0]), )", torch.ones(6))
        for tells in (False, True):
            driver: Any = SimpleNamespace(tells_offsets=tells)
            Computer(driver, None)._evaluated(script, [], [], None)
    assert seen == [False, True, True, True]


def test_results_that_are_one_tensor() -> None:
    script = script_of("y = empty_strided_cuda((args[0], ), (1, ), torch.float32)\nreturn (y, args[0], y)", 6)
    found = evaluate(script, [9], [], Tools(kernel_node, product, {}))
    assert found is not None
    layout = TensorSpec((9,), (1,), F32, 0)
    first, _, second = found[0].outputs
    assert first == OutputSpec(region=0, layout=layout)
    assert second == OutputSpec(region=0, layout=layout, same=0)


@pytest.mark.parametrize("other", [2.5, -0.0, 0, None, True, "mean", torch.ones(3)])
def test_an_argument_that_the_code_was_made_for_is_no_other(other: Any) -> None:
    """A script has it as it was: for another one the code is captured."""
    script = script_of("kernel.run(args[0], args[2], stream=0)\nreturn ()", torch.ones(3), 6, 0.0)
    tools = Tools(kernel_node, product, {})
    floats = [torch.ones(3), 7, 0.0]
    with pytest.raises(
        NotComputableError, match="argument 2 is not what the generated code was followed with"
    ):
        evaluate(script, [*floats[:2], other], [16], tools)
    with pytest.raises(NotComputableError, match="argument 1 "):
        evaluate(script, [floats[0], True, 0.0], [16], tools)
    assert evaluate(script, [floats[0], 7, 0.0], [16], Tools(of_numbers, product, {})) is not None


def of_numbers(
    position: int, event: Run, arguments: Sequence[Any]
) -> tuple[NodeRecord, list[tuple[int, int]]]:
    return node_of(event.name, [arguments[0].address, int(arguments[1])]), [(0, 0)]


@pytest.mark.parametrize("bit", [torch.conj, torch._neg_view])
def test_lazy_inputs_are_captured(bit: Any) -> None:
    """A library would make them plain first, by kernels that no script knows of."""
    script = script_of("return (torch.ops.aten.relu.default(args[1]), )", 6, torch.ones(6))
    lazy = bit(torch.ones(6, dtype=torch.complex64))
    assert lazy.is_conj() or lazy.is_neg()
    with pytest.raises(NotComputableError, match="lazy"):
        evaluate(script, [6, lazy], [16], Tools(kernel_node, product, {}))


LAYER = """
    a = empty_strided_cuda((n, 4), (4, 1), torch.float32)
    kernel.run(x, w{i}, a, n, {number}, stream=0)
    b = empty_strided_cuda((n, 4), (4, 1), torch.float32)
    extern_kernels.mm(a, reinterpret_tensor(w{i}, (4, 4), (1, 4), 0), out=b)
    c = reinterpret_tensor(a, (n, 4), (4, 1), 0)
    extern_kernels.mm(b, b, out=c)
    extern_kernels.mm(b, a, out=c)
    extern_kernels.mm(b, reinterpret_tensor(b, (4, n), (1, 4), 0), out=c)
    del a, b
    d = torch.ops.aten.relu.default(c)
    assert_size_stride(d, (n, 4), (4, 1))
    kernel.run(d, d, c, n, {number}, stream=0)
    x = reinterpret_tensor(d, (n, 4), (4, 1), 0)
    kernel.run(x, reinterpret_tensor(x, (n, 2), (4, 1), 2), c, n, {number}, stream=0)
    kernel.run(x, reinterpret_tensor(c, (n, 2), (4, 1), 2), c, n, {number}, stream=0)
    del c, d
"""
LAYERS = 6
LAUNCHES = 4 * LAYERS


def layers(*numbers: Any) -> Script:
    """Layers that are alike, but for what the kernels of each are given as a number."""
    bodies = [LAYER.format(i=i, number=number) for i, number in enumerate(numbers)]
    weights = ", ".join(f"w{i}" for i in range(LAYERS))
    return script_of(
        "\n".join([f"n, x, {weights} = args", "args.clear()", *bodies, "return (x, w0, n)"]),
        6,
        torch.ones(6, 4),
        *[torch.ones(4, 4)] * LAYERS,
    )


def given(n: int) -> tuple[list[Any], list[int]]:
    """Arguments and alignments: two of the weights lie otherwise in their storage, or in memory."""
    weights = [torch.ones(4, 4) for _ in range(LAYERS)]
    weights[3] = torch.ones(5, 4)[1:]
    return [n, torch.ones(n, 4), *weights], [256, *[256] * (LAYERS - 1), 16]


def of_operands(arguments: Sequence[Any]) -> list[int]:
    """All that a kernel may depend on, but for where operands lie."""
    return [
        number
        for a in arguments
        if isinstance(a, Operand)
        for number in (a.address % 256, *a.size, *a.stride, a.offset)
    ]


def library(event: Call, arguments: Sequence[Any]) -> Proved:
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


class Launches:
    """Makes nodes of kernels, of which some have other samples."""

    def __init__(self, samples: Mapping[int, Hashable]) -> None:
        self.samples: Mapping[int, Hashable] = samples
        self.made = 0

    def node(
        self, position: int, event: Run, arguments: Sequence[Any]
    ) -> tuple[NodeRecord, list[tuple[int, int]]]:
        self.made += 1
        words = [a.address if isinstance(a, Operand) else 0 for a in arguments] + of_operands(arguments)
        numbers = [a for a in arguments if not isinstance(a, Operand)]
        node = node_of(f"{event.name} {numbers} {self.samples.get(event.number, 'usual')}", words)
        return node, [(8 * i, i) for i, a in enumerate(arguments) if isinstance(a, Operand)]

    def sample(self, event: Run) -> Hashable:
        return self.samples.get(event.number, "usual")


def without_addresses(proved: Proved | None) -> Proved:
    assert proved is not None
    recording, slots = proved
    nodes = [bytearray(node.params) for node in recording.nodes]
    for slot in slots:
        nodes[slot.node][slot.offset : slot.offset + 8] = bytes(8)
    blank = [n._replace(params=bytes(p)) for n, p in zip(recording.nodes, nodes, strict=True)]
    return dataclasses.replace(recording, nodes=tuple(blank)), slots


HALF = ["0.5"] * LAYERS


@pytest.mark.parametrize(
    ("numbers", "samples", "made"),
    [
        # Of each of a layer's launches one; the first layer's input, and two of the weights, are others.
        (HALF, {}, 4 + 3),
        (HALF, {5: "another"}, 4 + 3 + 1),
        (HALF, {5: "another", 9: "another", 13: "a third"}, 4 + 3 + 2),
        (HALF, {1: None, 5: None, 9: None}, 4 + 3 + 3),
        (["0.0", "-0.0", "0", "False", "n * 2", "None"], {}, LAUNCHES),
        (["n", "n", "n * 2", "n * 2", *["float('nan')"] * 2], {}, (4 + 1) + (4 + 1) + 2 * 4),
    ],
)
def test_events_that_are_alike_are_evaluated_once(
    numbers: list[str], samples: dict[int, Hashable], made: int
) -> None:
    """What comes out is what each event by itself gives: the same tensors, aligned alike, numbers by type."""
    script = layers(*numbers)
    types: list[dict[int, Any]] = [{}, {}]
    launches = Launches(samples)
    shared, latest = Tools(launches.node, library, types[0], launches.sample), Latest()
    for n in (6, 9, 2, 4, 9):
        arguments, alignments = given(n)
        launches.made = 0
        found = without_addresses(evaluate(script, arguments, alignments, shared))
        assert launches.made == made
        assert without_addresses(evaluate(script, arguments, alignments, shared, latest)) == found
        assert launches.made == 2 * made
        launches.made = made
        alone = Tools(launches.node, library, types[1])
        assert without_addresses(evaluate(script, arguments, alignments, alone)) == found
        assert launches.made == made + LAUNCHES
    assert types[0] == types[1]


def test_libraries_that_choose_by_size() -> None:
    """What is kept of one size is given for another one only as far as that is like it: here a call has more
    nodes at some, other words at others, or a larger workspace."""
    script, launches, latest = layers(*HALF), Launches({}), Latest()

    def choosing(event: Call, arguments: Sequence[Any]) -> Proved:
        recording, slots = library(event, arguments)
        n = next(a.size[0] for a in arguments if isinstance(a, Operand))
        if n % 2:
            slots = (*slots[:-1], slots[-1]._replace(delta=n))
        if n % 3 == 0:
            slots = (Slot(0, 8, slots[0].region, 8), *slots)
            nodes = (node_of("fill", [0, 0]), *recording.nodes[1:])
            recording = dataclasses.replace(recording, nodes=nodes)
        if n % 5 == 0:
            *rest, workspace = recording.allocations
            allocations = (*rest, workspace._replace(nbytes=2048))
            recording = dataclasses.replace(recording, allocations=allocations)
        if n > 6:
            nodes = (*recording.nodes, node_of("another", [n]))
            recording = dataclasses.replace(recording, nodes=nodes, order=chain(3), steps=(0, 1, 3))
        return recording, tuple(slots)

    shared = Tools(launches.node, choosing, {}, launches.sample)
    told = set()
    for n in (2, 4, 3, 6, 10, 5, 9, 15, 8, 2, 6, 15):
        found = without_addresses(evaluate(script, *given(n), shared, latest))
        assert without_addresses(evaluate(script, *given(n), Tools(launches.node, choosing, {}))) == found
        told.add((len(found[0].nodes), len(found[1])))
    assert len(told) > 3


def test_arguments_that_are_alike_at_some_sizes_only() -> None:
    """An input has the layout of another one at one size, which comes first: at others it has its own."""
    body = """
        n, x, y = args
        args.clear()
        a = empty_strided_cuda((n, 4), (4, 1), torch.float32)
        kernel.run(x, a, stream=0)
        b = empty_strided_cuda((n, 4), (4, 1), torch.float32)
        kernel.run(y, b, stream=0)
        return (a, b)
        """
    script, launches, latest = script_of(body, 6, torch.ones(6, 4), torch.ones(5, 4)), Launches({}), Latest()
    shared = Tools(launches.node, library, {}, launches.sample)
    made = []
    for n in (5, 4, 5, 4, 7):
        arguments: list[Any] = [n, torch.ones(n, 4), torch.ones(5, 4)]
        launches.made = 0
        found = without_addresses(evaluate(script, arguments, [256, 256], shared, latest))
        made.append(launches.made)
        alone = Tools(launches.node, library, {})
        assert without_addresses(evaluate(script, arguments, [256, 256], alone)) == found
    assert made == [1, 2, 1, 2, 2]


def test_launches_that_turn_out_to_be_unlike_others() -> None:
    """Their samples are known later: what was kept until then is not given."""
    script, launches, latest = layers(*HALF), Launches({}), Latest()
    shared = Tools(launches.node, library, {}, launches.sample)
    for samples in ({}, {5: "another"}, {}):
        launches.samples = samples
        found = without_addresses(evaluate(script, *given(6), shared, latest))
        assert without_addresses(evaluate(script, *given(6), Tools(launches.node, library, {}))) == found


def test_layouts_have_a_number_each() -> None:
    layouts = Layouts()
    usual = {"size": (3, 2), "stride": (2, 1), "dtype": F32, "offset": 4, "into": 16, "phase": 0}
    others = {"size": (2, 2), "stride": (1, 3), "dtype": torch.int32, "offset": 0, "into": 0, "phase": 16}
    each = [usual, *({**usual, key: value} for key, value in others.items())]
    numbers = [layouts.number(**layout) for layout in each]
    assert numbers == list(range(7)) == [layouts.number(**layout) for layout in each]
    assert layouts.known[0] == Layout((3, 2), (2, 1), F32, 4, 16)
    views = [layouts.view(number, (2,), (1,), 2) for number in (0, 6, 0)]
    assert views == [7, 8, 7], "as aligned as what they are views of"
    assert layouts.known[7] == layouts.known[8] == Layout((2,), (1,), F32, 6, 24)


@pytest.mark.parametrize("known", [(), ("mm",), ("mm", "relu")])
def test_calls_that_are_alike_are_asked_for_as_those_alone(known: tuple[str, ...]) -> None:
    script, launches = layers(*HALF), Launches({})
    arguments, alignments = given(9)
    complete: dict[int, Any] = {}
    assert evaluate(script, arguments, alignments, Tools(launches.node, library, complete)) is not None
    some = dict(list(complete.items())[:3])
    right = evaluate(script, arguments, alignments, Tools(launches.node, library, complete))

    def asked(types: dict[int, Any], sample: Any) -> list[list[Hashable]]:
        """The keys of calls that were not known before the first recording, before the second one, ..."""
        recorded, rounds = set[Hashable](), [list[Hashable]()]
        missing: list[Proved] = []

        def site(event: Call, arguments: Sequence[Any]) -> Proved | None:
            key = LibraryCall(event, tuple(arguments), 0).key
            if key in recorded or any(name in str(event.function) for name in known):
                return library(event, arguments)
            rounds[-1].append(key)
            missing.append(library(event, arguments))
            return None

        def record() -> list[Proved]:
            recorded.update(rounds[-1])
            rounds.append([])
            found = [*missing]
            missing.clear()
            return found

        tools = Tools(launches.node, site, dict(types), sample, record=record)
        assert without_addresses(evaluate(script, arguments, alignments, tools)) == without_addresses(right)
        return rounds

    for types in ({}, some, complete):
        one, other = asked(types, launches.sample), asked(types, None)
        assert [list(dict.fromkeys(keys)) for keys in one] == [list(dict.fromkeys(keys)) for keys in other]
        assert all(len(keys) < 10 for keys in one)
        if types is complete:
            assert len(one) == (1 if len(known) == 2 else 2), "all in one go"
