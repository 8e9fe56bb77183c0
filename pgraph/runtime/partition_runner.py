"""What runs in place of a partition: its own code first, then a launch.

Each set of sizes, layouts and alignments of its arguments is a *specialization* with a state machine of its
own (`pgraph.runtime.specialization`): it is run uncaptured, then captured twice, matched, planned and
launched for ever; or refused, and run uncaptured with the reason.

Where one op is at fault, the partition is split around it instead (`pgraph.compiler.resplit`), and its
pieces run in its place from then on.

Nothing is lost on the way: a capture runs nothing, so the call that was to be captured can always
run uncaptured instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from pgraph import compat
from pgraph.capture.build import build
from pgraph.capture.failures import may_pass
from pgraph.drivers.interface import Driver
from pgraph.errors import CaptureError, DriverError, MatchError
from pgraph.launch.guards import Trait
from pgraph.launch.interpreter import Launched, launch_first
from pgraph.launch.program import program_of
from pgraph.options import Options
from pgraph.partition.facts import PartitionFacts
from pgraph.reasons import Dispatch, Reason
from pgraph.runtime import full_capture, observe, registry, statistics
from pgraph.runtime.cache import Captured, SpecializationCache
from pgraph.runtime.failures import LaunchFailure, device_failed, launch_failed, unexpected
from pgraph.runtime.profiler import in_range
from pgraph.runtime.protocols import Boxed, Resplitting
from pgraph.runtime.sizes import Dimension, Sizes
from pgraph.runtime.specialization import Specialization, State
from pgraph.template.template import Template

__all__ = ["PartitionRunner"]

log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Captures tried of a specialization that the device refuses for the moment, and of a partition in all."""

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
        dimensions: sizes that may vary from call to call.
        watched: argument positions of which more must stay as captured than layout and alignment.
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
        dimensions: tuple[Dimension, ...] = (),
        watched: Mapping[int, Trait] = MappingProxyType({}),
    ) -> None:
        self.name = facts.name
        self._label = facts.label
        self.stats = statistics.PartitionStats(facts.name, facts)
        self._sizes = Sizes(facts.name, dimensions, options.capture_sizes, options.max_captures)
        self._plain = plain
        self._driver = driver
        self._options = options
        self._namespaces = namespaces
        self._constants = constants
        self._static = static
        self._carries_tangents = options.codegen == "aten"  # Inductor's code never does
        self._cache = SpecializationCache(driver, options, watched, self._sizes, self.stats)
        self._refusals = self._failures = 0
        self._short = False
        self._given_up: set[tuple[int, ...]] = set()  # sizes that are never captured
        self._pending: tuple[Specialization, Reason, Dispatch | None] | None = None
        self._instead: Boxed | None = None
        self.piece: Resplitting | None = None  # until it is captured or refused
        self._lock = threading.RLock()
        registry.register(self)

    @property
    def code(self) -> Boxed:
        """The partition's own code."""
        return self._plain

    def __call__(self, args: list[Any]) -> Any:
        instead = self._instead
        if instead is not None:
            return instead(args)
        if observe.watch is not None and observe.watch.outside():
            return observe.watch.call(self, args)
        if self._given_up and self._sizes.of(args) in self._given_up:
            return self._run_uncaptured(args, None)
        if self._carries_tangents and compat.forward_mode():
            return self._run_uncaptured(args, None)  # a launch would lose the tangents without a word
        if compat.intercepted():
            # A mode or a transform is to see every op, and must not see the ghosts of a capture. (AOTAutograd
            # itself is such a mode at a first call.)
            return self._run_uncaptured(args, self._choose(args, capture=False))
        captured = self._cache.captured  # once: an eviction may replace it
        launched = specialization = failed = None
        try:
            launched = self._launch(captured, args) if compat.profiling() else captured.launch(args)
        except _LAUNCH_ERRORS as e:
            failed = self._failed(captured, e)
        if launched is None and failed is None:
            specialization = self._choose(args)
            if self._pending is not None:
                self._resolve()
            instead = self._instead
            if instead is not None:
                return instead(args)
            captured = self._cache.captured
            if specialization is not None and specialization.state is State.CAPTURED:
                try:  # also where another device is current
                    launched = self._launch(captured, args)
                except _LAUNCH_ERRORS as e:
                    failed = self._failed(captured, e)
        if failed is not None:  # not in a handler: the error's frames hold memory
            self._insist(failed.reason)
            return self._run_uncaptured(args, None)
        if launched is None:
            return self._run_uncaptured(args, specialization)
        results, rewritten, index = launched
        self.stats.launches += 1
        self.stats.rewritten_nodes += rewritten
        if self._cache.latest is not captured.specializations[index]:
            with self._lock:
                self._cache.launched(captured.specializations[index])
        return results

    def specializations(self) -> list[Specialization]:
        """All of them, least recently used first."""
        with self._lock:
            return self._cache.all()

    def template(self) -> Template | None:
        """What the capture used last left behind; None if there is none."""
        with self._lock:
            captured = [s for s in self._cache.all() if s.program is not None]
        latest = max(captured, key=lambda s: s.use.latest, default=None)
        return latest.built.template if latest is not None and latest.built is not None else None

    def reset(self) -> None:
        """Free everything captured; the partition starts again."""
        with self._lock:
            self._cache.clear()
            self._pending = None
            self._refusals = self._failures = 0
            self._given_up.clear()

    def replace(self, run: Boxed) -> None:
        """Have other code run in this partition's place, what was split from it."""
        self._instead = run

    def retire(self) -> None:
        """It is never to come back: let its own code go."""
        with self._lock:
            if self._instead is not None:
                self._plain = self._instead
                self._namespaces = self._constants = ()

    def give_up(self, reason: Reason) -> None:
        """Come back, to run uncaptured: what was split from it could not be captured either."""
        self.stats.give_up(reason)
        self._instead = None
        log.warning("%s runs uncaptured: %s", self.name, reason)

    # -- launches -----------------------------------------------------------------------------

    def _launch(self, captured: Captured, args: list[Any]) -> Launched | None:
        """Launch by the first way that accepts these arguments, in a range of the profiler's if one is on."""

        def launch(args: list[Any]) -> Launched | None:
            return captured.launch(args) or launch_first(captured.programs, args)

        if not compat.profiling():
            return launch(args)
        return in_range("launch", self._label, launch, args) if captured.accept(args) else None

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
            with self._lock:
                self._refuse(captured.specializations[index], reason)
        if ran:
            try:
                raise error
            finally:
                del error  # else it and this frame hold each other, and all that the launch had
        return LaunchFailure(reason)

    def _run_uncaptured(self, args: list[Any], specialization: Specialization | None) -> Any:
        if compat.profiling():
            result = in_range("uncaptured", self._label, self._plain, args)
        else:
            result = self._plain(args)
        self.stats.uncaptured_runs += 1
        if specialization is not None:
            with self._lock:
                self._cache.ran(specialization)
        return result

    # -- captures -----------------------------------------------------------------------------

    def _choose(self, args: list[Any], *, capture: bool = True) -> Specialization | None:
        """The specialization for these arguments, captured if it is due and may be.

        Returns:
            None if it never will be: there are none like these, or within somebody's capture.
        """
        if self._driver.is_capturing():
            return None
        with self._lock:
            self._cache.catch_up()
            specialization = self._cache.find(args)
            if specialization is None:
                if not self._sizes.wanted(args):
                    return None
                if self._refusals >= _ATTEMPTS:  # captures are over, what there is still serves
                    self._insist(self.stats.reason)
                    self._give_up(args)
                    return None
                specialization = self._cache.get(args)
                if specialization is None:
                    return None
            due = capture and specialization.due(self._options.warmup)
            if due and self._cache.has_room(specialization, args):
                if compat.profiling():
                    in_range("capture", self._label, self._capture, specialization, args)
                else:
                    self._capture(specialization, args)
            self._insist(specialization.reason)
            if specialization.state is State.REFUSED:
                self._give_up(args)
        return specialization

    def _give_up(self, args: Sequence[Any]) -> None:
        """Next time, look no further than the sizes: what never launches should cost no more than that."""
        captured = bool(self._cache.captured.programs)
        if self._pending is None and not captured and not self._options.require_full_capture:
            self._given_up.add(self._sizes.of(args))

    def _capture(self, specialization: Specialization, args: Sequence[Any]) -> None:
        tensors = specialization.guards.tensors
        kept = frozenset(i for i, guard in enumerate(tensors) if guard.position in self._static)
        try:
            built = build(
                self._driver,
                self._plain,
                args,
                [guard.mask + 1 for guard in tensors],
                namespaces=self._namespaces,
                constants=self._constants,
                kept_inputs=kept,
                slack_bytes=self._options.memory_slack_mb << 20,
            )
            program = program_of(built, specialization.guards)
        except (CaptureError, MatchError) as e:
            self._refuse(specialization, self.stats.facts.placed(e.reason, e.op), e.culprit)
        except Exception as e:
            if may_pass(e):
                self._later(specialization, e)
            else:
                log.debug("unexpected failure", exc_info=True)
                self._refuse(specialization, unexpected(e))
        else:
            self._failures = 0
            if self.piece is not None:
                self.piece.captured()
                self.piece = None
            self._cache.add(specialization, program)
            self._sizes.captured(args)

    def _later(self, specialization: Specialization, error: Exception) -> None:
        """The device could not just now (memory, most likely): warm up again, and give up in the end."""
        specialization.postponed()
        failures = specialization.standing.failures
        self._failures += 1  # of all specializations: one that is seldom seen, or evicted, forgets its own
        if failures >= _ATTEMPTS or self._failures >= _ATTEMPTS**2:
            self._refuse(specialization, device_failed(error, max(failures, self._failures)))
        else:
            log.info("%s could not be captured yet: %s", self.name, str(error))

    def _short_of_memory(self, error: Exception) -> None:
        """Nothing has run: the partition's own code may do with less, or fails as it would without pgraph."""
        log.log(
            logging.INFO if self._short else logging.WARNING,
            "%s ran uncaptured for once, there was no memory for a launch: %s",
            self.name,
            str(error),  # not the error: a record that somebody keeps would keep what its frames hold
        )
        self._short = True

    def _refuse(
        self, specialization: Specialization, reason: Reason, culprit: Dispatch | None = None
    ) -> None:
        self._cache.release(specialization)
        self._refusals += 1
        if self.piece is not None:
            self._pending = specialization, reason, culprit
            specialization.refused(reason)
        else:
            self._tell(specialization, reason)

    def _resolve(self) -> None:
        """After a refusal: split, if one op is to blame for it, or run uncaptured. Called without the lock.

        Compiling takes other locks, which a thread may hold that waits for this partition's (Dynamo's reset).
        """
        with self._lock:
            piece, pending = self.piece, self._pending
        if piece is None or pending is None:
            return
        specialization, reason, culprit = pending
        with piece.turn() as mine:
            if not mine or self._pending is not pending:
                return  # another thread is at it; so it is tried again at the next call, or done
            told = piece.refused(reason, culprit)
            with self._lock:
                self.piece = self._pending = None
                if told is not None:
                    self._tell(specialization, told)

    def _tell(self, specialization: Specialization, reason: Reason) -> None:
        others = [s.reason for s in self.stats.standings if s is not specialization.standing]
        before = {other.info for other in others if other is not None}
        specialization.refused(reason)
        log.log(
            logging.INFO if reason.info in before else logging.WARNING,
            "%s runs uncaptured: %s",
            self.name,
            reason,
        )

    def _insist(self, reason: Reason | None) -> None:
        """In hard mode a refusal is an error, at this call and at every later one.

        Raises:
            FullCaptureError: there is a reason, and `require_full_capture` is set.
        """
        if reason is not None and self._options.require_full_capture:
            full_capture.refuse(self.name, reason, str(registry.report()))
