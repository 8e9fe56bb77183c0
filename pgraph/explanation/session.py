"""`pgraph.explain`: run a program for real until nothing new is captured, and look at what ran.

Every partition that runs is watched (`pgraph.runtime.observe`); what comes of it is an `Explanation`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pgraph import compat
from pgraph.compiler.graph_breaks import from_log
from pgraph.drivers import choice
from pgraph.errors import OptionError
from pgraph.explanation.explanation import Explanation
from pgraph.explanation.findings import Change, PartitionExplanation
from pgraph.options import parse
from pgraph.partition import facts
from pgraph.reasons import Reason
from pgraph.runtime import functions, observe, registry, statistics

__all__ = ["explain"]

_LIMIT = 12  # steps at most, if the caller does not say how many
_MEASURED = 3


def explain(
    fn: Callable[..., Any],
    *,
    steps: int | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **named: Any,
) -> Callable[..., Explanation]:
    """Explain what pgraph makes of a program: ``pgraph.explain(model)(x)``.

    On a machine without a GPU it is a preview, unless a driver is chosen: what is compiled now is judged as
    if it were on CUDA and tried on the host driver. A program that was compiled for pgraph before its first
    call stays there until `torch._dynamo.reset()`.

    Args:
        fn: a model or function; compiled here, unless it is compiled with pgraph or calls something that
            is (a training step). To see the backward, pass a function that calls ``backward()``.
        steps: how often to run it; the last run is measured. None: until nothing new is captured, at
            most 12 times, and three more to measure. One more under the profiler finds what is not
            compiled.
        dynamic: as for `torch.compile`.
        options: as for ``torch.compile(..., backend="pgraph", options=...)``.
        named: options by name, as in ``explain(model, warmup=2)``.

    Returns:
        A function of `fn`'s arguments. It runs `fn` on them several times, side effects included.

    Raises:
        OptionError: an option is not valid, or is given for a program that is already compiled.
    """
    if steps is not None and (type(steps) is not int or steps < 1):
        raise OptionError(f"explain: steps is {steps!r}. Fix: pass an int of at least 1, or None")
    if not callable(fn):
        raise OptionError(f"explain: {fn!r} is no model or function. Fix: pass what you would call")
    parse(options)  # which may be no dict
    if twice := sorted(set(options or {}) & set(named)):
        raise OptionError(
            f"explain: {twice} are given twice. Fix: give each once, by name or in options={{...}}"
        )
    chosen = {**(options or {}), **named}
    parse(chosen)

    def run(*args: Any, **kwargs: Any) -> Explanation:
        return _Explainer(fn, steps, dynamic, chosen).explain(args, kwargs)

    return run


class _Explainer:
    """One explanation in the making."""

    def __init__(
        self, fn: Callable[..., Any], steps: int | None, dynamic: bool | None, options: dict[str, Any]
    ) -> None:
        self._fn, self._steps, self._dynamic, self._options = fn, steps, dynamic, options
        self._history: list[list[observe.TimedCall]] = []
        self._compiles = False
        free = "driver" not in options and not os.environ.get("PGRAPH_DRIVER")
        self._previews = free and not torch.cuda.is_available()

    def explain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Explanation:
        """Run the program, and tell."""
        if not self._previews:
            return self._explain(args, kwargs)
        with choice.previewing() as preview:
            found = self._explain(args, kwargs)
        return dataclasses.replace(found, preview=self._compiles or preview.graphs > 0)

    def _explain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Explanation:
        known = {id(partition) for partition in registry.live_partitions()}
        with compat.hearing_graph_breaks() as heard:
            self._prepare(args, kwargs, heard)
            if self._steps is not None:
                while len(self._history) < self._steps:
                    self._step(args, kwargs)
                measured = self._history[-1:]
                own = []
            else:
                while not self._settled() and len(self._history) < _LIMIT:
                    self._step(args, kwargs)
                measured = [self._step(args, kwargs) for _ in range(_MEASURED)]
                own = self._own_code(args, kwargs)
            with compat.hearing_calls() as called:
                between = observe.count_ops(lambda: self._fn(*args, **kwargs))
        live = set(registry.live_partitions())  # those that were split are gone
        seen = [
            p for p in dict.fromkeys(run.partition for step in self._history for run in step) if p in live
        ]
        numbers = {partition.stats.facts.graph.number for partition in seen}
        idle = [
            p
            for p in registry.live_partitions()
            if p not in seen and (id(p) not in known or p.stats.facts.graph.number in numbers)
        ]
        partitions = tuple(_partition(partition, measured, own) for partition in (*seen, *idle))
        graphs = list({p.stats.facts.graph.number: p.stats.facts.graph for p in (*seen, *idle)}.values())
        calls = {p.graph: p.calls for p in reversed(partitions)}
        found = _breaks(graphs, heard)
        # Others may have been skipped or stopped for another program.
        mine = [f for f in functions.live() if f.where is None or f.where in called]
        # What was skipped before left nothing else behind. A library's function may be another program's.
        told = [f for f in mine if not seen or (f.where is not None and not f.below)]
        skipped = [f.skipped for f in told if f.skipped is not None]
        heard_of = {(reason.sentence, reason.fix) for reason in found}
        found += tuple(r for r in dict.fromkeys(skipped) if (r.sentence, r.fix) not in heard_of)
        stopped = tuple(f.stopped for f in mine if f.stopped is not None)
        changes = (
            *(Change(reason, 0, 0, 0.0) for reason in stopped),
            *_changes(partitions, graphs, calls, found),
        )
        return Explanation(
            partitions,
            found,
            changes,
            tuple(between.items()),
            len(self._history) + 1,
            choice.ghost_peaks(),
            stopped,
            elsewhere=not (partitions or found or stopped or self._compiles),
        )

    def _prepare(self, args: Sequence[Any], kwargs: dict[str, Any], heard: Sequence[str]) -> None:
        """Compile the program, unless its first run shows that it is compiled already.

        Where Dynamo gives up on a whole function, nothing compiled runs; what it says tells.
        """
        fresh = not compat.is_compiled(self._fn)
        if fresh:
            # A training step, perhaps: compiling it as a whole would not be the user's program.
            fresh = not self._step(args, kwargs) and not heard
        if not fresh:
            if self._options or self._dynamic is not None:
                raise OptionError(
                    f"explain: options {sorted(self._options)} are given for a program that is compiled "
                    "already. Fix: give them to torch.compile, or pass the program as it was before that"
                )
            return
        from pgraph.backend import backend

        self._history.clear()
        # With a driver among the options, no later torch.compile of the same function gets a preview's code.
        self._compiles = True
        options = {**self._options, "driver": "host"} if self._previews else self._options
        self._fn = torch.compile(self._fn, backend=backend, dynamic=self._dynamic, options=options or None)

    def _step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[observe.TimedCall]:
        with observe.watching() as watch:
            self._fn(*args, **kwargs)
        self._history.append(watch.runs)
        return watch.runs

    def _own_code(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[list[observe.TimedCall]]:
        """What the captured partitions' own code takes, where host times are those of a device."""
        built = [s.built for p in registry.live_capturable() for s in p.specializations()]
        if not any(one is not None and one.driver.host_times for one in built):
            return []
        found = []
        for _ in range(_MEASURED):
            with observe.watching(uncaptured=True) as watch:
                self._fn(*args, **kwargs)
            found.append(watch.runs)
        return found

    def _settled(self) -> bool:
        """Everything that can be captured was launched, or nothing has changed for a while."""
        if len(self._history) < 2:
            return False
        shapes = [[(id(run.partition), run.launched) for run in step] for step in self._history]
        if shapes[-1] != shapes[-2]:
            return False
        waiting = [r for r in self._history[-1] if not r.launched and _may_launch(r.partition)]
        return not waiting or (len(shapes) > 5 and all(shape == shapes[-1] for shape in shapes[-5:]))


def _may_launch(partition: Any) -> bool:
    counters = partition.stats
    return bool(counters.facts.safe and counters.reason is None and counters.state != "set aside")


def _times(partition: Any, steps: Sequence[Sequence[observe.TimedCall]]) -> list[list[float]]:
    return [[run.seconds for run in step if run.partition is partition] for step in steps]


def _partition(
    partition: Any,
    measured: Sequence[Sequence[observe.TimedCall]],
    own: Sequence[Sequence[observe.TimedCall]] = (),
) -> PartitionExplanation:
    counters: statistics.PartitionStats = partition.stats
    known = counters.facts
    times = _times(partition, measured)
    own_times = _times(partition, own) if counters.state == "captured" else []
    template = partition.template() if known.safe else None
    kinds = [template.regions[slot.region].kind for slot in template.slots] if template else []
    return PartitionExplanation(
        name=counters.name,
        kind=known.graph.kind,
        graph=known.graph.number,
        partition=known.index or 0,
        piece=known.piece,
        state=counters.state,
        ops=known.ops,
        kernels=len(template.nodes) if template else None,
        captures=counters.captures,
        slots=tuple(
            (kind, kinds.count(kind))
            for kind in ("input", "output", "temp", "workspace")
            if template and (kind != "workspace" or kind in kinds)
        ),
        chunks=len(template.plan.chunks) if template else 0,
        blocks=len(template.plan.blocks) if template else 0,
        eager_peak=template.plan.eager_peak if template else 0,
        plan_peak=template.plan.peak if template else 0,
        exec_bytes=counters.exec_bytes,
        calls=len(times[-1]),
        seconds=min((sum(step) for step in times if step), default=None),
        reasons=counters.reasons,
        splits=counters.splits,
        split_s=counters.split_s,
        own_s=min((sum(step) for step in own_times if step), default=None),
        capture_s=counters.capture_s,
        sizes=counters.sizes,
    )


def _breaks(graphs: Iterable[facts.GraphFacts], heard: Iterable[str]) -> tuple[Reason, ...]:
    """Breaks met while compiling, and those at the end of graphs compiled before; each place once."""
    found = [reason for message in heard if (reason := from_log(message)) is not None]
    places = {reason.where for reason in found}
    found += [graph.broken for graph in graphs if graph.broken and graph.broken.where not in places]
    placed = {(reason.sentence, reason.fix) for reason in found if reason.where is not None}
    return tuple(
        reason
        for reason in dict.fromkeys(found)
        if reason.where is not None or (reason.sentence, reason.fix) not in placed
    )


def _changes(
    partitions: Sequence[PartitionExplanation],
    graphs: Sequence[facts.GraphFacts],
    calls: dict[int, int],
    breaks: Sequence[Reason],
) -> tuple[Change, ...]:
    """Graph breaks first: what runs between two graphs is not even seen. Then by ops gained."""
    refused: dict[Any, Reason] = {}
    for graph in graphs:
        for step in graph.op_runs:
            if step.reason is not None and step.reason.info.actionable:
                refused.setdefault(facts.same_cause(step.reason), step.reason)
    changes = []
    for key, reason in refused.items():
        ops = fewer = 0
        for graph in graphs:
            if any(step.reason and facts.same_cause(step.reason) == key for step in graph.op_runs):
                now, then = facts.captured_ops(graph), facts.captured_ops(graph, without=reason)
                ops += (then[0] - now[0]) * max(calls.get(graph.number, 1), 1)
                fewer += now[1] - then[1]
        changes.append(Change(reason, ops, fewer, _seconds(partitions, key)))
    for partition in partitions:
        if partition.state in ("refused", "waiting"):
            ops = partition.device_ops * max(partition.calls, 1)
            changes.append(Change(partition.reasons[-1], ops, 0, partition.seconds or 0.0))
        elif partition.state == "captured":  # other sizes or layouts of it are refused
            changes += [Change(reason, 0, 0, 0.0) for reason in partition.reasons]
    changes.sort(key=lambda c: (-c.ops, -c.graphs))
    return (*(Change(reason, 0, 0, 0.0) for reason in breaks), *changes)


def _seconds(partitions: Iterable[PartitionExplanation], key: tuple[str, ...]) -> float:
    return sum(p.seconds or 0.0 for p in partitions if any(facts.same_cause(r) == key for r in p.reasons))
