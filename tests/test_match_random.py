"""The matcher on random captures: exactly the planted slots, and never a wrong one."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgraph.drivers.interface import next_start
from pgraph.errors import MatchError
from pgraph.native import libraries
from pgraph.template.match import match
from pgraph.template.plain_regions import PlainRegions, in_python, suspects
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import GhostAllocation, NodeRecord, Recording
from pgraph.template.template import Slot
from pgraph.template.topology import chain

LOW = (0x7000_0000_0000, 0x7100_0000_0000)
FRAMEWORK = (0x7F00_0000_0000, 1 << 16)
FOREIGN = RangeMap([(*FRAMEWORK, 0)])
SLACK = 32
KINDS = ("slot", "same", "garbage", "half", "stale", "stale beyond")


@dataclasses.dataclass
class Case:
    """Two captures as a driver would leave them, and what is hidden in them.

    Args:
        sizes: bytes of each region.
        lives: (birth, death) of each region.
        bases: per capture, the address of each region.
        nodes: per node, the words, each ("slot", region, delta), ("same", v) or ("two", va, vb).
        own: nodes of ops of PyTorch's own, which pass one struct.
    """

    sizes: list[int]
    lives: list[tuple[int, int | None]]
    bases: tuple[list[int], list[int]]
    nodes: list[list[tuple[Any, ...]]]
    own: frozenset[int] = frozenset()

    def params(self, node: int, bases: list[int], capture: int) -> bytes:
        words = []
        for kind, *facts in self.nodes[node]:
            fixed = facts[0 if kind == "same" else capture]
            words.append((bases[facts[0]] + facts[1]) % 2**64 if kind == "slot" else fixed)
        return struct.pack(f"={len(words)}Q", *words)

    def recording(self, capture: int) -> Recording:
        bases = self.bases[capture]
        allocations = tuple(
            GhostAllocation(address, size, *life, margin=SLACK)
            for address, size, life in zip(bases, self.sizes, self.lives, strict=True)
        )
        nodes = tuple(
            NodeRecord("kernel", f"k{i}", (), data, ((0, len(data)),) if i in self.own else ())
            for i, data in enumerate(self.params(i, bases, capture) for i in range(len(self.nodes)))
        )
        ghosts = (LOW[capture], LOW[capture] + (1 << 32))
        return Recording(nodes, chain(len(nodes)), allocations, 0, (), ghosts, None, self.own)

    def planted(self) -> set[Slot]:
        return {
            Slot(i, 8 * w, word[1], word[2])
            for i, words in enumerate(self.nodes)
            for w, word in enumerate(words)
            if word[0] == "slot"
        }

    def alive(self, node: int) -> list[int]:
        return [r for r, (b, d) in enumerate(self.lives) if b <= node and (d is None or node < d)]


def is_free(value: int) -> bool:
    """Neither a ghost nor the framework's: what constants and garbage look like."""
    ghost = any(low - SLACK <= value < low + (1 << 32) for low in LOW)
    return not ghost and FOREIGN.find(value) is None


free_words = st.one_of(
    st.integers(0, 4096), st.integers(0, 2**64 - 1), st.sampled_from([LOW[0] - 4096, 2**64 - 1, 1 << 47])
).filter(is_free)


def own_ghosts(capture: int) -> st.SearchStrategy[int]:
    """Addresses in a capture's ghost range, whether a region lies there or not."""
    return st.integers(LOW[capture], LOW[capture] + (1 << 32) - 1)


def derivable(case: Case, node: int, pair: tuple[int, int]) -> bool:
    """Whether the two words lie as far apart as a region that is alive."""
    return any(pair[0] - case.bases[0][r] == pair[1] - case.bases[1][r] for r in case.alive(node))


def in_turn(case: Case, pair: list[int]) -> bool:
    """Whether the word lies in some region in both captures."""
    return all(
        any(base <= word <= base + size for base, size in zip(bases, case.sizes, strict=True))
        for word, bases in zip(pair, case.bases, strict=True)
    )


def left_over(case: Case, node: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Words that look like addresses and can be none of what an op of PyTorch's own was given."""

    def underivable(pair: tuple[int, int]) -> bool:
        return not derivable(case, node, pair)

    return st.one_of(
        st.tuples(own_ghosts(0), own_ghosts(1)).filter(underivable),
        st.integers(0, 2**32 - 1).map(lambda low: (LOW[0] + low, LOW[1] + low)).filter(underivable),
        st.tuples(own_ghosts(0), framework_words),
        st.tuples(framework_words, own_ghosts(1)),
        st.tuples(framework_words, framework_words).filter(lambda pair: pair[0] != pair[1]),
        framework_words.filter(lambda word: word != FRAMEWORK[0]).map(lambda word: (word, word)),
    ).map(lambda pair: ("two", *pair))


framework_words = st.integers(FRAMEWORK[0], FRAMEWORK[0] + FRAMEWORK[1] - 1)


# Deltas that lead into a neighbour, between two regions, or out of the ghosts.
beyond = st.integers(-(1 << 20), 1 << 20) | st.integers(-(1 << 45), 1 << 45)


@st.composite
def cases(draw: st.DrawFn, own: bool = True) -> Case:
    n_nodes = draw(st.integers(1, 5))
    n_regions = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(0, 4096), min_size=n_regions, max_size=n_regions))
    lives = []
    for _ in range(n_regions):
        birth = draw(st.integers(0, n_nodes - 1))
        lives.append((birth, draw(st.one_of(st.none(), st.integers(birth, n_nodes)))))
    bases: tuple[list[int], list[int]] = ([], [])
    for capture in (0, 1):
        at = LOW[capture]
        for size in sizes:
            bases[capture].append(next_start(at, SLACK, capture))
            at = bases[capture][-1] + max(size, 1) + SLACK
    case = Case(sizes, lives, bases, [])
    for i in range(n_nodes):
        alive = case.alive(i)
        dead = [r for r in range(n_regions) if r not in alive]
        words: list[tuple[Any, ...]] = []
        kinds = KINDS
        if own and draw(st.booleans()):
            case.own |= {i}
            kinds = (*KINDS, "left over")
        for kind in draw(st.lists(st.sampled_from(kinds), max_size=6)):
            if kind == "left over":
                words.append(draw(left_over(case, i)))
            elif kind == "slot" and alive:
                region = draw(st.sampled_from(alive))
                near = st.integers(-SLACK, max(sizes[region], 1) + SLACK - 1)
                delta = draw(near | beyond)
                if i not in case.own and in_turn(case, [b[region] + delta for b in bases]):
                    delta = draw(near)
                words.append(("slot", region, delta))
            elif kind == "stale" and dead and i in case.own:
                olds = tuple(bases[c][draw(st.sampled_from(dead))] for c in (0, 1))
                if not derivable(case, i, olds):
                    words.append(("two", *olds))
            elif kind == "stale beyond" and dead and i in case.own:
                old, delta = draw(st.sampled_from(dead)), draw(beyond)
                words.append(("two", *(bases[c][old] + delta for c in (0, 1))))
            elif kind == "garbage":
                words.append(("two", draw(free_words), draw(free_words)))
            elif kind == "half":  # an address on one side only
                capture, free = draw(st.integers(0, 1)), draw(free_words)
                address = draw(own_ghosts(capture) | framework_words)
                words.append(("two", *((address, free) if capture == 0 else (free, address))))
            else:
                words.append(("same", draw(free_words | own_ghosts(0) | own_ghosts(1))))
        case.nodes.append(words)
    return case


@given(cases())
def test_the_slots_are_exactly_the_planted_ones(case: Case) -> None:
    """Constants, garbage and left-over addresses around them change nothing."""
    slots = match(case.recording(0), case.recording(1), framework=FOREIGN)
    assert set(slots) == case.planted()
    assert len(slots) == len(set(slots))


@given(cases(), st.data())
def test_rebinding_equals_rendering_at_the_new_addresses(case: Case, data: st.DataObject) -> None:
    """The proof of the pudding: write new bases through the slots, compare with the real thing."""
    first = case.recording(0)
    slots = match(first, case.recording(1), framework=FOREIGN)
    new = [data.draw(st.integers(1 << 20, 1 << 46)) for _ in case.sizes]
    for i, node in enumerate(first.nodes):
        params = bytearray(node.params)
        for slot in slots:
            if slot.node == i:
                struct.pack_into("=Q", params, slot.offset, (new[slot.region] + slot.delta) % 2**64)
        assert bytes(params) == case.params(i, new, capture=0)


@given(cases(own=False), st.data())
def test_ambiguous_words_always_refuse(case: Case, data: st.DataObject) -> None:
    """One word that two captures see differently, among any others, is never given an address."""
    node = data.draw(st.integers(0, len(case.nodes) - 1))
    alive = case.alive(node)
    always = ["framework", "ghost, framework", "framework, ghost"]
    kind = data.draw(st.sampled_from(["delta", "region", "nowhere", *always] if alive else always))
    region = data.draw(st.sampled_from(alive)) if alive else 0
    here = [bases[region] for bases in case.bases]
    if kind == "delta":
        # Not as far as another region moved: that lies half a `UNIT` further on, or more.
        shift = data.draw(st.integers(1, max(case.sizes[region], 1) + SLACK - 1))
        word = ("two", here[0], here[1] + shift)
    elif kind == "region":
        n = len(case.sizes)
        other = data.draw(st.integers(0, n - 1).filter(lambda r: r != region or n == 1))
        word = ("two", here[0], case.bases[1][other] + (1 if other == region else 0))
    elif kind == "nowhere":
        word = ("two", here[0], LOW[1] + (1 << 31))
    elif kind == "framework":
        word = ("two", *data.draw(st.lists(framework_words, min_size=2, max_size=2, unique=True)))
    elif kind == "ghost, framework":
        word = ("two", data.draw(own_ghosts(0)), data.draw(framework_words))
    else:
        word = ("two", data.draw(framework_words), data.draw(own_ghosts(1)))
    at = data.draw(st.integers(0, len(case.nodes[node])))
    case.nodes[node].insert(at, word)
    with pytest.raises(MatchError) as caught:
        match(case.recording(0), case.recording(1), framework=FOREIGN)
    assert caught.value.reason.code == "ambiguous-word"
    assert f"word {8 * at} of node {node} " in str(caught.value)


@st.composite
def doubtful(draw: st.DrawFn) -> tuple[Recording, Recording, RangeMap]:
    """Two captures that may break any promise: regions overlap or move alike, words lie at borders."""
    n_nodes = draw(st.integers(1, 2))
    counts = st.integers(0, n_nodes)
    births = st.sampled_from([0, 0, 0, 1])
    places, moves, sizes = (st.sampled_from(x) for x in ((0, 4, 8), (0, 4, -LOW[1] + LOW[0]), (4, 4, 8, 0)))
    regions = draw(st.lists(st.tuples(places, moves, sizes, births), min_size=1, max_size=3))
    addresses = [[low + at + c * move for at, move, *_ in regions] for c, low in enumerate(LOW)]
    margin = draw(st.sampled_from([0, 0, 4]))
    framework = [at + 64 * i for i in range(draw(st.integers(0, 2))) for at in (LOW[0], FRAMEWORK[0])]
    pairs = [*zip(*addresses, strict=True), *((at, at) for at in framework), (0, 9)]
    distances = st.sampled_from([0, 4, 1, -1, 8])

    def words() -> list[tuple[int, ...]]:
        found = []
        for _ in range(draw(st.integers(1, 2))):
            pair, distance = draw(st.sampled_from(pairs)), draw(distances)
            further = draw(st.sampled_from([0, 0, 0, 0, 4]))
            found.append(tuple((word + distance + c * further) % 2**64 for c, word in enumerate(pair)))
        return found

    nodes = [words() for _ in range(n_nodes)]
    facts = [
        (draw(st.sampled_from(["kernel", "kernel", "memcpy"])), draw(st.sampled_from([(), ((0, 8),)])))
        for _ in nodes
    ]
    builtin = frozenset(i for i in range(n_nodes) if draw(st.booleans()))

    def recording(c: int) -> Recording:
        recorded = (
            NodeRecord(kind, "k", (), struct.pack(f"={len(node)}Q", *(word[c] for word in node)), structs)
            for node, (kind, structs) in zip(nodes, facts, strict=True)
        )
        allocations = (
            GhostAllocation(address, size, birth, draw(st.none() | counts), margin)
            for address, (_, _, size, birth) in zip(addresses[c], regions, strict=True)
        )
        ghosts = LOW[c], LOW[c] + 64
        return Recording(
            tuple(recorded), chain(n_nodes), tuple(allocations), 0, (), ghosts, None, builtin
        )  # fmt: skip

    return recording(0), recording(1), RangeMap([(at, 8, 0) for at in framework])


def outcome(a: Recording, b: Recording, framework: RangeMap) -> Any:
    try:
        return match(a, b, framework=framework)
    except MatchError as e:
        return e.reason, e.node


@settings(max_examples=500)
@given(doubtful())
def test_what_is_told_at_once_is_what_the_rules_say(case: tuple[Recording, Recording, RangeMap]) -> None:
    """Words that are skipped, or taken for a slot without further questions, are so by the rules as well."""
    found = outcome(*case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RangeMap, "span", (0, 1 << 64))
        patch.setattr(PlainRegions, "told", lambda self, words: ([], list(words)))
        assert outcome(*case) == found


_bits = st.sampled_from((0, 1, 99, 100, 101, 199, 200, (1 << 64) - 1))
_spans = st.lists(st.tuples(_bits, _bits), max_size=3)


@st.composite
def two_of_a_kind(draw: st.DrawFn) -> list[tuple[NodeRecord, NodeRecord]]:
    """Nodes of two captures; some of their bytes are no whole word."""
    pairs = []
    for words in draw(st.lists(st.lists(st.tuples(_bits, _bits), max_size=4), max_size=5)):
        rest = bytes(draw(st.integers(0, 7)))
        kinds = (struct.pack(f"={len(words)}Q", *(word[c] for word in words)) + rest for c in (0, 1))
        x, y = (NodeRecord("kernel", "k", (), params) for params in kinds)
        pairs.append((x, y))
    return pairs


@pytest.mark.skipif(libraries.load() is None, reason="no C compiler, or PGRAPH_NATIVE=0")
@settings(max_examples=500)
@given(two_of_a_kind(), _spans)
def test_suspects_in_c_are_those_in_python(
    pairs: list[tuple[NodeRecord, NodeRecord]], spans: list[tuple[int, int]]
) -> None:
    first, second = [x for x, _ in pairs], [y for _, y in pairs]
    assert list(suspects(first, second, spans)) == list(in_python(first, second, spans))


@settings(max_examples=500)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(0, 4)), max_size=8))
def test_undisturbed_ranges_are_found_at_each_byte(gaps: list[tuple[int, int, int]]) -> None:
    """Gaps may be shorter than the margins beside them: then some of those may be left out."""
    ranges, at, apart = [], 100, True
    for gap, nbytes, margin in gaps:
        apart &= not ranges or gap >= margin + ranges[-1][2]
        ranges.append((at + gap, nbytes, margin))
        at += gap + nbytes
    ranges.reverse()
    found = RangeMap(ranges)
    everywhere = {
        i
        for i, (first, nbytes, _) in enumerate(ranges)
        if all(found.find(byte) == (i, byte - first) for byte in range(first, first + nbytes))
    }
    assert found.undisturbed() <= everywhere
    assert not apart or found.undisturbed() == everywhere


@pytest.mark.parametrize(
    ("regions", "word"),
    [
        pytest.param([(0, 4, 4), (4, 4, 8)], (4, 8), id="at the end, where another one begins"),
        pytest.param([(0, 0, 8), (4, 3, 4)], (4, 4), id="inside, and inside another one"),
        pytest.param([(0, 4, 8), (16, 20, 8)], (0, 4), id="another one moved as far"),
    ],
)
def test_doubts_are_left_to_the_rules(regions: list[tuple[int, int, int]], word: tuple[int, int]) -> None:
    """A custom op's word that is not told at once, though it moved with a region and lies at its bytes."""
    first, second = (
        Recording(
            (NodeRecord("kernel", "k", (), struct.pack("=Q", LOW[c] + word[c])),),
            chain(1),
            tuple(GhostAllocation(LOW[c] + r[c], r[2], 0, None) for r in regions),
            0,
            (),
            (LOW[c], LOW[c] + 64),
            None,
        )
        for c in (0, 1)
    )
    with pytest.raises(MatchError) as caught:
        match(first, second)
    assert caught.value.reason.code == "ambiguous-word"


def test_nothing_is_found_outside_the_span() -> None:
    ranges = RangeMap([(100, 8, 2), (40, 10, 3), (200, 0, 1)])
    low, high = ranges.span
    assert (low, high) == (37, 202)
    assert ranges.find(low) is not None
    assert ranges.find(high - 1) is not None
    assert ranges.find(low - 1) is None
    assert ranges.find(high) is None
    assert RangeMap([]).span == (0, 0)
