"""What runs in place of a partition: its own code first, then a launch.

Each set of sizes, layouts and alignments of its arguments is a *specialization* with a state machine of its
own (`pgraph.runtime.specialization`): it is run uncaptured, then captured twice, matched, planned and
launched for ever; or refused, or set aside after a trial, and run uncaptured with the reason.

Where one op is at fault, the partition is split around it instead (`pgraph.compiler.resplit`), and its
pieces run in its place from then on.

Nothing is lost on the way: a capture runs nothing, so its call can always run uncaptured instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from pgraph import compat
from pgraph.drivers.interface import Driver
from pgraph.errors import DriverError
from pgraph.launch.allocations import apart
from pgraph.launch.guards import Trait
from pgraph.launch.interpreter import Launched
from pgraph.options import Options
from pgraph.partition.facts import PartitionFacts
from pgraph.reasons import Reason
from pgraph.runtime import cudnn, observe, registry, replication, statistics, trial, trimming
from pgraph.runtime.admission import Admission, Chosen
from pgraph.runtime.cache import SpecializationCache
from pgraph.runtime.captured import Captured
from pgraph.runtime.code import Code
from pgraph.runtime.failures import LaunchFailure, launch_failed
from pgraph.runtime.lessons import Lessons
from pgraph.runtime.profiler import in_range
from pgraph.runtime.protocols import Boxed
from pgraph.runtime.sizes import Dimension, Sizes
from pgraph.runtime.specialization import Specialization
from pgraph.template.template import Template

__all__ = ["PartitionRunner"]

log = logging.getLogger(__name__)

_LAUNCH_ERRORS = (DriverError, torch.OutOfMemoryError)


class PartitionRunner:
    """Callable in place of a safe partition's code.

    Args:
        facts: what is known of it, its name included.
        plain: the partition's code; takes one list and empties it.
        driver: where to capture.
        options: of this compilation.
        namespaces: see `pgraph.capture.record.record`.
        constants: tensors held by the code.
        static: argument positions whose memory the caller keeps (parameters and buffers).
        saved, kept, lasting, joint: see `pgraph.runtime.code.Code`.
        dimensions: sizes that may vary from call to call.
        watched: argument positions of which more must stay as captured than layout and alignment.
        lessons: see `pgraph.runtime.admission.Admission`.
    """

    def __init__(
        self,
        facts: PartitionFacts,
        plain: Boxed,
        driver: Driver,
        options: Options,
        *,
        namespaces: Sequence[dict[str, Any]] = (),
        constants: Sequence[torch.Tensor] = (),
        static: frozenset[int] = frozenset(),
        saved: Mapping[int, str] = MappingProxyType({}),
        kept: frozenset[int] = frozenset(),
        lasting: frozenset[int] = frozenset(),
        joint: compat.Joint | None = None,
        dimensions: tuple[Dimension, ...] = (),
        watched: Mapping[int, Trait] = MappingProxyType({}),
        lessons: Lessons | None = None,
    ) -> None:
        self.name = facts.name
        self._label = facts.label
        self.stats = statistics.PartitionStats(facts.name, facts)
        self._plain = plain
        self._carries_tangents = options.codegen == "aten"  # Inductor's code never does
        self._saves = bool(saved)  # hooks get nothing else
        self._short = False
        self._instead: Boxed | None = None
        self._cudnn = cudnn.watched([name for name, _ in facts.ops])
        self.stats.met.labels = tuple(dimension.label for dimension in dimensions)
        self.stats.met.numbers = frozenset(i for i, d in enumerate(dimensions) if not d.of_tensor)
        sizes = Sizes(facts.name, dimensions, options.capture_sizes, options.max_captures)
        self._cache = SpecializationCache(driver, options, watched, sizes, self.stats)
        code = Code(plain, namespaces, constants, static, saved, kept, lasting, joint)
        self.admission = Admission(code, driver, options, self._cache, sizes, self.stats, lessons)
        registry.register(self)

    @property
    def code(self) -> Boxed:
        """The partition's own code."""
        return self._plain

    def __call__(self, args: list[Any]) -> Any:
        if (instead := self._instead) is not None:
            return instead(args)
        if trimming.pending is not None:
            trimming.called(self.name, self._cache.captured.growth())
        if (watch := observe.watch) is not None and watch.outside():
            return watch.call(self, args)
        if self._cudnn is not None and self._cudnn.changed():
            self.reset()
        if self.admission.never(args):
            return self._run_uncaptured(args, None)
        if self._carries_tangents and compat.forward_mode():
            return self._run_uncaptured(args, None)  # a launch would lose the tangents without a word
        if compat.intercepted():
            # A mode or a transform sees every op, but no ghosts. (AOTAutograd is a mode at a first call.)
            return self._run_uncaptured(args, self.admission.choose(args, capture=False))
        captured = self._cache.captured  # once: an eviction may replace it
        launched = specialization = failed = None
        try:
            launched = self._launch(captured, args) if compat.profiling() else captured.launch(args)
        except _LAUNCH_ERRORS as e:
            failed = self._failed(captured, e)
        if launched is None and failed is None:
            specialization = None if self._cache.rests() else self.admission.choose(args)
            self.admission.resolve()
            if (instead := self._instead) is not None:
                return instead(args)
            if isinstance(specialization, Specialization) and specialization.launches_next:
                captured, start = self._cache.captured_as(specialization), trial.clock()
                try:  # also where another device is current
                    launched = self._launch(captured, args)
                except _LAUNCH_ERRORS as e:
                    failed = self._failed(captured, e)
                if launched is not None:
                    self._cache.timed(specialization, trial.clock() - start)
        if failed is not None:  # not in a handler: the error's frames hold memory
            self.admission.insist(failed.reason)
            return self._run_uncaptured(args, None)
        if launched is None:
            return self._run_uncaptured(args, specialization)
        results, rewritten, index = launched
        if self._saves and captured.shared and compat.packed_by_others():
            apart(results, captured.programs[index].shared)
        if self._cache.latest is not captured.specializations[index]:
            with self._cache.lock:  # before this launch is counted: it is no use of the one before
                self._cache.launched(captured.specializations[index])
        self.stats.launches += 1
        self.stats.rewritten_nodes += rewritten
        if rewritten >= replication.FEW:
            self._cache.moved(captured.specializations[index], rewritten)
        return results

    def specializations(self) -> list[Specialization]:
        """All of them; the one that was run uncaptured last comes last."""
        with self._cache.lock:
            return self._cache.all()

    def template(self) -> Template | None:
        """What the capture used last left behind; None if there is none."""
        with self._cache.lock:
            captured = [s for s in self._cache.all() if s.program is not None]
        latest = max(captured, key=lambda s: s.use.latest, default=None)
        return latest.built.template if latest is not None and latest.built is not None else None

    def reset(self) -> None:
        """Free everything captured; the partition starts again."""
        with self._cache.lock:
            self._cache.clear()
            self.admission.reset()

    def replace(self, run: Boxed) -> None:
        """Have other code run in this partition's place, what was split from it."""
        self._instead = run

    def retire(self) -> None:
        """It is never to come back: let its own code go."""
        with self._cache.lock:
            if self._instead is not None:
                self._plain = self._instead
                self.admission.code = Code(self._instead)

    def give_up(self, reason: Reason) -> None:
        """Come back, to run uncaptured: what was split from it could not be captured either."""
        self.stats.give_up(reason)
        self._instead = None
        log.warning("%s runs uncaptured: %s", self.name, reason)

    # -- launches -----------------------------------------------------------------------------

    def _launch(self, captured: Captured, args: list[Any]) -> Launched | None:
        """Launch by the first way that accepts these arguments, in a range of the profiler's if one is on."""

        def launch(args: list[Any]) -> Launched | None:
            return captured.launch(args) or captured.in_python(args)

        if compat.profiling():
            return in_range("launch", self._label, launch, args) if captured.find(args) else None
        return launch(args)

    def _failed(self, captured: Captured, error: Exception) -> LaunchFailure:
        """A launch failed: run uncaptured, and from now on if it was not for want of memory.

        Raises:
            DriverError, torch.OutOfMemoryError: `error` itself, if a part of the partition has run already.
        """
        index, ran = getattr(error, "pgraph_launch", (None, True))
        memory = isinstance(error, torch.OutOfMemoryError)
        reason = None
        if memory and not ran:
            self._short_of_memory(error)
        elif index is not None and not memory:
            reason = launch_failed(error)
            with self._cache.lock:
                specialization = captured.specializations[index]
                # Another thread may have failed before, or dropped this capture and made a new one.
                if specialization.program is captured.programs[index]:
                    self.admission.refuse(specialization, reason)
        if ran:
            try:
                raise error
            finally:
                del error  # else it and this frame hold each other, and all that the launch had
        return LaunchFailure(reason)

    def _run_uncaptured(self, args: list[Any], specialization: Chosen) -> Any:
        passed = self._cache.mark(specialization) if specialization is not None else None
        start, plain = trial.clock(), self._plain
        result = in_range("uncaptured", self._label, plain, args) if compat.profiling() else plain(args)
        self.stats.uncaptured_runs += 1
        if specialization is not None:
            self._cache.ran(specialization, trial.clock() - start, passed)
            self.admission.ran()
        return result

    def _short_of_memory(self, error: Exception) -> None:
        """Nothing has run: the partition's own code may do with less, or fails as it would without pgraph."""
        log.log(
            logging.INFO if self._short else logging.WARNING,
            "%s ran uncaptured for once, there was no memory for a launch: %s",
            self.name,
            str(error),  # not the error: a record that somebody keeps would keep what its frames hold
        )
        self._short = True
