"""Events of a script that are alike are evaluated once; what they have in common is kept for other sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest
import torch
from support_compute import F32, library, node_of, of_operands, script_of

from pgraph.compute.evaluate import evaluate
from pgraph.compute.library_call import LibraryCall
from pgraph.compute.pieces import Proved, Tools
from pgraph.compute.script import CallLibrary, LaunchKernel, Script
from pgraph.compute.skeleton import Latest
from pgraph.drivers.operands import Layout, Layouts, Operand
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot
from pgraph.template.topology import chain

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


class Launches:
    """Makes nodes of kernels, of which some have other samples."""

    def __init__(self, samples: Mapping[int, Hashable]) -> None:
        self.samples: Mapping[int, Hashable] = samples
        self.made = 0

    def node(
        self, position: int, event: LaunchKernel, arguments: Sequence[Any]
    ) -> tuple[NodeRecord, list[tuple[int, int]]]:
        self.made += 1
        words = [a.address if isinstance(a, Operand) else 0 for a in arguments] + of_operands(arguments)
        numbers = [a for a in arguments if not isinstance(a, Operand)]
        node = node_of(f"{event.name} {numbers} {self.samples.get(event.number, 'usual')}", words)
        return node, [(8 * i, i) for i, a in enumerate(arguments) if isinstance(a, Operand)]

    def sample(self, event: LaunchKernel) -> Hashable:
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

    def choosing(event: CallLibrary, arguments: Sequence[Any]) -> Proved:
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

        def site(event: CallLibrary, arguments: Sequence[Any]) -> Proved | None:
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
