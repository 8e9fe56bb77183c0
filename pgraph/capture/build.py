"""From a partition's code to what can be launched: capture, match, plan, instantiate or share an exec.

Each step either succeeds or raises an error with a `Reason`; nothing has run by then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pgraph.capture.culprit import culprit_of
from pgraph.capture.record import record
from pgraph.capture.recorder import uncollected
from pgraph.drivers.execs import Exec, ExecSet, Recipe, Shelf
from pgraph.drivers.interface import Driver
from pgraph.errors import MatchError, RecountError
from pgraph.template.early import begun_early
from pgraph.template.lifetimes import Lifetime, Lives, Rows, survives
from pgraph.template.match import match
from pgraph.template.plan import GRANULE, Plan, plan_of
from pgraph.template.ranges import RangeMap
from pgraph.template.recording import Recording
from pgraph.template.sharing import sharing_key
from pgraph.template.template import Frame, Region, Slot, Template, alike
from pgraph.template.topology import Topology

__all__ = ["Built", "build", "teach"]

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """A template with a recipe for each chunk of its plan (Note [Freed by reference]).

    Args:
        shared: the execs that the recipes are for, one each. Others may use them, too.
        seconds: that it took.
        computed: nothing was captured (Note [Computed recordings]).
    """

    template: Template
    recipes: tuple[Recipe, ...]
    shared: ExecSet
    driver: Driver
    seconds: float = 0.0
    computed: bool = False

    @property
    def execs(self) -> tuple[Exec, ...]:
        """One for each chunk."""
        return self.shared.execs

    @property
    def parts(self) -> list[tuple[Recipe, int]]:
        """Each recipe with the number of its nodes."""
        nodes = [chunk.last - chunk.first for chunk in self.template.plan.chunks]
        return list(zip(self.recipes, nodes, strict=True))


def build(
    driver: Driver,
    fn: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[Any],
    alignments: Sequence[int],
    *,
    namespaces: Sequence[dict[str, Any]] = (),
    constants: Sequence[torch.Tensor] = (),
    kept_inputs: frozenset[int] = frozenset(),
    slack_bytes: int = 4 << 20,
    shelf: Shelf | None = None,
    may_capture: bool = True,
) -> Built | None:
    """Capture `fn` and make it launchable.

    Args:
        driver: where.
        fn: the partition's code; takes one list and empties it.
        inputs: today's arguments; only their layout is read.
        alignments: see `pgraph.capture.record.record`.
        namespaces: see `pgraph.capture.record.record`.
        constants: tensors that the code holds for as long as it lives.
        kept_inputs: positions among the device tensors in `inputs` whose memory the caller keeps
            (parameters): the plan need not wait for their release.
        slack_bytes: see `pgraph.template.plan.make_plan`.
        shelf: what is known of `fn` at other sizes: execs that may serve these, too, and proofs. New ones are
            put there.
        may_capture: False where a recording is computed or there is none; then None is returned.

    Raises:
        CaptureError, MatchError, DriverError: with the reason; nothing has run or changed.
    """
    start = time.perf_counter()
    device = driver.device
    mates = _mates([t for t in inputs if isinstance(t, torch.Tensor) and t.device == device])

    def planned(first: Recording, second: Recording, slots: tuple[Slot, ...]) -> Template:
        return _template(driver, first, second, slots, kept_inputs, mates, slack_bytes, shelf)

    computer = shelf.computer if shelf is not None else None
    # In this order: else the collector comes back on after another thread has begun to capture.
    with driver.capture_lock(), uncollected():
        built = None
        computed = computer.recording(inputs, alignments) if computer is not None else None
        if computed is not None:
            first, slots = computed
            built = _executable(driver, first, planned(first, first, slots), shelf)
        if built is not None:
            built = dataclasses.replace(built, computed=True)
        elif may_capture:
            lasting = RangeMap([_storage(t) for t in constants])
            call = functools.partial(
                record, driver, fn=fn, inputs=inputs, alignments=alignments, namespaces=namespaces
            )
            with contextlib.ExitStack() as arenas:
                first, second, slots = _recorded(driver, call, arenas, shelf, lasting)
                built = _executable(driver, first, planned(first, second, slots), shelf)
            log.debug("captured, by %s", "one capture" if second is first else "two captures")
            if computer is not None:
                computer.learn(first, slots, inputs, alignments)
    if built is None:
        return None
    built = dataclasses.replace(built, seconds=time.perf_counter() - start)
    if log.isEnabledFor(logging.DEBUG):
        how = "computed" if built.computed else "captured"
        log.debug("%s in %.1f ms\n%s", how, built.seconds * 1e3, built.template.render())
    return built


def teach(
    driver: Driver,
    fn: Callable[[list[Any]], Sequence[Any]],
    stand_ins: Sequence[Any],
    given: Sequence[Any],
    alignments: Sequence[int],
    *,
    shelf: Shelf,
    namespaces: Sequence[dict[str, Any]] = (),
    constants: Sequence[torch.Tensor] = (),
) -> None:
    """Capture `fn` for what its computer learns by it; nothing is made launchable.

    Args:
        stand_ins: arguments as `Computing.learn` takes them.
        given: these as `pgraph.capture.record.record` takes them.
        alignments: see there, and `build` for all else.

    Raises:
        CaptureError, MatchError, DriverError: with the reason; nothing has run or changed.
    """
    assert shelf.computer is not None, "there is somebody who learns"
    with driver.capture_lock(), uncollected():
        call = functools.partial(
            record, driver, fn=fn, inputs=given, alignments=alignments, namespaces=namespaces
        )
        with contextlib.ExitStack() as arenas:
            lasting = RangeMap([_storage(t) for t in constants])
            first, _, slots = _recorded(driver, call, arenas, shelf, lasting)
        shelf.computer.learn(first, slots, stand_ins, alignments)


def _recorded(
    driver: Driver,
    call: Callable[..., Recording],
    arenas: contextlib.ExitStack,
    shelf: Shelf | None,
    constants: RangeMap,
) -> tuple[Recording, Recording, tuple[Slot, ...]]:
    """Two recordings of a call and their slots; twice the same one, where that is proof enough
    (Note [Proved by another size]). `arenas` holds what they lie on."""

    def recorded() -> tuple[Recording, Recording, tuple[Slot, ...]]:
        one, two = (arenas.enter_context(driver.arena(layout)) for layout in (0, 1))
        # What an exec keeps is asked of the first only: the execs are made from that one.
        first = call(arena=one, with_kept=shelf is not None)
        proved = (
            shelf.proofs.slots(first, driver.framework_ranges(), constants) if shelf is not None else None
        )
        if proved is not None:
            return first, first, proved
        second = call(arena=two, like=first.ops, with_kept=False)
        slots = _slots(driver, first, second, constants)
        if shelf is not None:
            shelf.proofs.add(first, slots)
        return first, second, slots

    try:
        return recorded()
    except RecountError as e:
        log.debug("captured again: %s", e)
        arenas.close()
        return recorded()


def _executable(
    driver: Driver, recording: Recording, template: Template, shelf: Shelf | None
) -> Built | None:
    """A recording made launchable, by others' execs if they serve it; None if they do not, and there is no
    graph to make some of, nor can there be one.
    """
    nodes, chunks = recording.nodes, template.plan.chunks

    def on(shared: ExecSet) -> Built:
        mine = alike(template, shared.template)
        recipes = tuple(
            driver.recipe(e, nodes, chunk.first, chunk.last, mine.slots)
            for e, chunk in zip(shared.execs, chunks, strict=True)
        )
        return Built(mine, recipes, shared, driver)

    key = sharing_key(nodes, recording.order, template.slots, chunks) if shelf is not None else None
    shared = shelf.execs.get(key) if shelf is not None and key is not None else None
    if shared is not None:
        built = on(shared)
        if all(recipe.fits() for recipe in built.recipes):
            return built
    graph = recording.graph or driver.graph(nodes, recording.order, template.slots)
    if graph is None:
        return None
    driver.cut(graph, [(chunk.first, chunk.last) for chunk in chunks])
    execs = tuple(driver.instantiate(graph, nodes, c.first, c.last, template.slots) for c in chunks)
    shared = ExecSet(execs, template)
    if shelf is not None and key is not None:
        shelf.execs[key] = shared
    return on(shared)


def _slots(driver: Driver, first: Recording, second: Recording, constants: RangeMap) -> tuple[Slot, ...]:
    """The slots of two recordings.

    Raises:
        MatchError: with the op at fault, if one op is.
    """
    try:
        return match(
            first,
            second,
            framework=driver.framework_ranges(),
            workspaces=driver.workspaces(),
            constants=constants,
        )
    except MatchError as e:
        raise MatchError(e.reason, node=e.node, culprit=culprit_of(first, second, e.node)) from None


def _storage(tensor: torch.Tensor) -> tuple[int, int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes(), 0


def _mates(inputs: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """For each input the first one in the same storage, and the byte of it where it begins.

    Autograd saves a tensor and its alias as two, and small ones share memory (Note [Results in one piece]).
    """
    # Empty storages have no address and share nothing.
    addresses = [t.untyped_storage().data_ptr() or -i for i, t in enumerate(inputs, 1)]
    if len(set(addresses)) == len(addresses):
        return [(i, 0) for i in range(len(addresses))]  # where one begins matters to what lies beside it
    first: dict[int, int] = {}
    starts = [int(t.storage_offset()) * t.element_size() for t in inputs]
    return [
        (first.setdefault(address, i), start)
        for i, (address, start) in enumerate(zip(addresses, starts, strict=True))
    ]


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes of one storage that these (start, bytes) lie in, small gaps between them included."""
    total = end = 0
    apart = False
    for i, (start, nbytes) in enumerate(sorted(ranges)):
        gap = start - end if i else 0
        apart |= i > 0 and gap >= 0
        total += nbytes if gap >= GRANULE else max(0, nbytes + gap)
        end = max(end, start + nbytes) if i else start + nbytes
    return -(-total // GRANULE) * GRANULE if apart else total


def _template(
    driver: Driver,
    a: Recording,
    b: Recording,
    slots: tuple[Slot, ...],
    kept_inputs: frozenset[int],
    mates: Sequence[tuple[int, int]],
    slack_bytes: int,
    shelf: Shelf | None = None,
) -> Template:
    frame = _frame(driver, a, b, slots, kept_inputs, shelf)
    regions, slots = frame.regions(a.allocations), frame.slots(slots)
    plan = _plan(a.order, regions, slots, mates, slack_bytes, shelf, frame)
    return Template(frame.nodes(a.nodes), regions, slots, a.outputs, a.n_inputs, plan)


def _frame(
    driver: Driver,
    a: Recording,
    b: Recording,
    slots: tuple[Slot, ...],
    kept_inputs: frozenset[int],
    shelf: Shelf | None,
) -> Frame:
    """The frame of the recordings' template; the one that another size has, if they have one skeleton."""
    frames = shelf.frames if shelf is not None and a.skeleton is not None and a is b else {}
    known = frames.get(a.skeleton)
    if known is not None:
        workspaces = known.workspaces
    else:
        both = enumerate(zip(a.allocations, b.allocations, strict=True))
        workspaces = [i for i, (x, y) in both if x.library and y.library]
    lent = _lent(driver, {i: a.allocations[i].nbytes for i in workspaces})
    if known is not None and (known.lent, known.kept_inputs) == (lent, kept_inputs):
        return known
    frames[a.skeleton] = made = Frame(a, b, slots, kept_inputs, workspaces, lent)
    return made


def _lent(driver: Driver, workspaces: dict[int, int]) -> int | None:
    """The workspace (region -> bytes) that launches find where the library keeps it; None: they find none.

    There may be several: cuBLAS's, a small one of cuBLASLt's, those of an op's own streams. A workspace holds
    nothing between two calls, so it does not matter which one is lent. But no two may be: they can be in use
    at once. Lending the largest saves most.
    """
    sizes = sorted(workspaces.items(), key=lambda found: (-found[1], found[0]))
    return next((region for region, nbytes in sizes if driver.lends_workspace(nbytes)), None)


def _plan(
    order: Topology,
    regions: Rows[Region],
    slots: tuple[Slot, ...],
    mates: Sequence[tuple[int, int]],
    slack_bytes: int,
    shelf: Shelf | None,
    frame: Frame | None = None,
) -> Plan:
    """The plan of a recording. What lies between two joins counts as one node: it cannot be cut."""
    lives = frame.lives if frame is not None else None
    if lives is None:
        lives = _lives(order, regions, slots)
        if frame is not None:
            frame.lives = lives
    # Inputs in one storage hold its memory once, until the last of them dies. They need not share it at
    # later calls: that concerns how well the memory is planned, not what is right.
    groups: dict[int, list[int]] = {}
    for i, (first, _) in enumerate(mates):
        if first != i:
            groups.setdefault(first, [first]).append(i)
    held: dict[int, int] = {}
    for group in groups.values():
        held |= dict.fromkeys(group, 0)
        last = max(group, key=lambda i: (regions[i].death, i))
        held[last] = _covered((mates[i][1], regions[i].nbytes) for i in group)
    nbytes = list(map(regions.column("nbytes").__getitem__, lives.regions))
    if held:
        nbytes = [held.get(i, told) for i, told in zip(lives.regions, nbytes, strict=True)]
    known = shelf.borders if shelf is not None else ()
    plan = plan_of(lives, nbytes, slack_bytes=slack_bytes, known=known)
    if shelf is not None:
        shelf.planned(plan.borders)
    plan = begun_early(plan, lives)
    if order.is_chain:
        return plan
    chunks = (
        dataclasses.replace(c, first=order.joins[c.first], last=order.joins[c.last]) for c in plan.chunks
    )
    return dataclasses.replace(plan, chunks=tuple(chunks))


def _lives(order: Topology, regions: Sequence[Region], slots: Sequence[Slot]) -> Lives:
    """When the regions exist that a plan has to place."""
    # A temporary that no node names has no reader and no writer: it needs no memory.
    named = {s.region for s in slots}
    n, whole = len(order.joins) - 1, order.is_chain
    lasting, end = survives(order.n_nodes), survives(n)
    lifetimes = []
    for index, kind, nbytes, birth, death in regions:
        if kind == "workspace" or (kind == "temp" and index not in named):
            continue
        if not whole:
            birth, death = order.index(birth), end if death == lasting else order.index(death)
        lifetimes.append(Lifetime(index, nbytes, birth, death, kind))
    return Lives(n, lifetimes)
