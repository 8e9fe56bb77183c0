"""What a script gives at certain sizes, with library calls and kernels that are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_compute import F32, kernel_node, library, node_of, product, script_of
from torch._inductor.select_algorithm import extern_kernels

from pgraph.compute.computer import Computer, result_types
from pgraph.compute.errors import NotComputableError
from pgraph.compute.evaluate import evaluate
from pgraph.compute.library_call import LibraryCall
from pgraph.compute.pieces import Proved, Tools
from pgraph.compute.script import CallLibrary, LaunchKernel, Script, asks_for_offsets, is_foreign
from pgraph.drivers.operands import HostOperand, Operand
from pgraph.template.recording import GhostAllocation, NodeRecord, OutputSpec, Recording, TensorSpec
from pgraph.template.template import Slot
from pgraph.template.topology import chain

SEEDS = torch.library.Library("seedtest", "FRAGMENT")
SEEDS.define("relu(Tensor x) -> Tensor")


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

    def site(event: CallLibrary, arguments: Sequence[Any]) -> Proved:
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


def both(event: CallLibrary, arguments: Sequence[Any]) -> Proved:
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

    def node(position: int, event: LaunchKernel, arguments: Sequence[Any]) -> Any:
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
    calls = [event for event in script.events if isinstance(event, CallLibrary)]
    known, asked, rounds = set[int](), dict[int, Proved](), list[list[int]]()

    def site(event: CallLibrary, arguments: Sequence[Any]) -> Proved | None:
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


def test_types_that_pytorch_tells_beforehand() -> None:
    """With them all calls are recorded together, however many depend on one another, the first time, too."""
    lines = ["n, x = args", "a0 = torch.ops.aten.relu.default(x)"]
    for i in range(20):
        lines += [
            f"assert_size_stride(a{i}, (n, 2), (2, 1))",
            f"kernel.run(a{i}, stream=0)",  # as what a library returns is often used again, in place
            f"a{i + 1} = torch.ops.aten.relu.default(a{i})",
        ]
    script = script_of("\n".join([*lines, "return (a20, )"]), 6, torch.ones(6, 2))
    waiting: list[tuple[CallLibrary, Sequence[Any]]] = []
    known: dict[int, Proved] = {}
    rounds: list[int] = []

    def site(event: CallLibrary, arguments: Sequence[Any]) -> Proved | None:
        if id(event) not in known:
            waiting.append((event, arguments))
        return known.get(id(event))

    def record() -> list[Proved]:
        rounds.append(len(waiting))
        found = [known.setdefault(id(event), library(event, arguments)) for event, arguments in waiting]
        waiting.clear()
        return found

    def evaluated(foretell: Any) -> Proved:
        known.clear(), rounds.clear(), waiting.clear()
        tools = Tools(kernel_node, site, {}, record=record, foretell=foretell)
        return evaluate(script, [9, torch.ones(9, 2)], [16], tools)

    evaluated(result_types)
    assert rounds == [21]
    with pytest.raises(NotComputableError, match="in ways that cannot be told"):
        evaluated(lambda event, arguments: ())


def test_types_of_results() -> None:
    """Only where PyTorch tells them by itself, and nothing is allocated for it."""

    def told(body: str, *arguments: Any, given: Sequence[Any] | None = None) -> list[Any]:
        script = script_of(body, *arguments)
        (call,) = [event for event in script.events if isinstance(event, CallLibrary)]
        return result_types(call, given if given is not None else arguments)

    x = Operand(1 << 40, (6, 2), (2, 1), torch.float16, 3)
    a = torch.ones(6, 2)
    assert told("return (torch.ops.aten.relu.default(args[0]), )", a, given=[x]) == [torch.float16]
    two = "a = torch.ops.aten.topk.default(args[0], 1)\nreturn (a[0], a[1])"
    assert told(two, a, given=[x, 1]) == [torch.float16, torch.int64]
    custom = "return (torch.ops.seedtest.relu.default(args[0]), )"
    assert told(custom, a, given=[x]) == [], "nobody knows what a custom op does"
    assert told("return (torch.ops.aten.relu.default(args[0]), )", a, given=[HostOperand(a)]) == []
    assert told("return (torch.ops.aten.mm.default(args[0], args[1]), )", a, a, given=[x, x]) == [], (
        "it fails"
    )
    one = [x, x._replace(size=(2,), stride=(1,))]
    both = "return (torch.ops.aten.mv.default(args[0], args[1]), )"
    assert told(both, a, a[0], given=one) == [torch.float16]
    out = "extern_kernels.mm(args[0], args[1], out=args[2])\nreturn (args[2], )"
    assert told(out, a, a, a, given=[x, x._replace(size=(2, 2)), x]) == [], "it makes nothing anew"


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
    ],
)
def test_results_that_are_no_fresh_tensors(output: OutputSpec, why: str) -> None:
    script = script_of("return (torch.ops.aten.relu.default(args[1]), )", 6, torch.ones(6))

    def site(event: CallLibrary, arguments: Sequence[Any]) -> Proved:
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

    def site(event: CallLibrary, arguments: Sequence[Any]) -> Proved:
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

    def site(event: CallLibrary, arguments: Sequence[Any]) -> Proved:
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


def test_whose_functions_are_foreign() -> None:
    """Custom ops, and functions of Python's that are not Inductor's own."""
    for function in torch.ops.seedtest.relu.default, len, abs, test_who_asks_for_offsets:
        assert is_foreign(function), function
    for function in (
        torch.mm,
        torch.as_strided,
        extern_kernels.addmm,
        extern_kernels.bias_addmm,
        torch.ops.aten.mm.out,
    ):
        assert not is_foreign(function), function


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
    position: int, event: LaunchKernel, arguments: Sequence[Any]
) -> tuple[NodeRecord, list[tuple[int, int]]]:
    return node_of(event.name, [arguments[0].address, int(arguments[1])]), [(0, 0)]


@pytest.mark.parametrize("bit", [torch.conj, torch._neg_view])
def test_lazy_inputs_reach_the_library_as_they_are(bit: Any) -> None:
    """It makes them plain first, by kernels that are recorded with its own."""
    script = script_of("return (torch.ops.aten.relu.default(args[1]), )", 6, torch.ones(6))
    lazy = bit(torch.ones(6, dtype=torch.complex64))
    seen: list[Any] = []

    def site(event: CallLibrary, arguments: Sequence[Any]) -> Proved:
        seen.extend(arguments)
        allocations = (GhostAllocation(1 << 50, 48, 0, 1), GhostAllocation(1 << 51, 48, 0, None))
        result = OutputSpec(region=1, layout=TensorSpec((6,), (1,), torch.complex64, 0, conj=True))
        return Recording((node_of("relu", [0]),), chain(1), allocations, 1, (result,), (0, 0), None), ()

    recording, _ = evaluate(script, [6, lazy], [16], Tools(kernel_node, site, {}))
    assert [operand.lazy for operand in seen] == [(lazy.is_conj(), lazy.is_neg())]
    assert (
        LibraryCall(script.events[0], tuple(seen), 0).key
        != LibraryCall(script.events[0], (seen[0]._replace(lazy=(False, False)),), 0).key
    ), "what is plain is another call"
    (result,) = recording.outputs
    assert result.layout == TensorSpec((6,), (1,), torch.complex64, 0, conj=True)
