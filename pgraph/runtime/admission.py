"""Which specializations of a partition are captured, and when; captures that fail."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from pgraph import compat
from pgraph.capture.build import build, teach
from pgraph.capture.failures import may_pass
from pgraph.compute.computer import Computer
from pgraph.drivers.interface import Driver
from pgraph.errors import CaptureError, MatchError
from pgraph.launch.program import Program, program_of
from pgraph.options import Options
from pgraph.reasons import Dispatch, Reason
from pgraph.runtime import full_capture, progress, registry, trace, trimming
from pgraph.runtime.ahead import Ahead
from pgraph.runtime.cache import SpecializationCache
from pgraph.runtime.code import Code
from pgraph.runtime.economy import not_worth
from pgraph.runtime.failures import device_failed, unexpected
from pgraph.runtime.glimpses import Glimpse
from pgraph.runtime.lessons import Lessons
from pgraph.runtime.profiler import in_range
from pgraph.runtime.protocols import Resplitting
from pgraph.runtime.sizes import Sizes
from pgraph.runtime.specialization import Specialization, State
from pgraph.runtime.statistics import PartitionStats
from pgraph.text import amount

__all__ = ["Admission", "Chosen"]

log = logging.getLogger(__name__)

Chosen = Specialization | Glimpse | None
"""What is known of a call."""

_MANY = 16
"""Sizes, none of which came twice, after which a program is told that it waits."""

_ATTEMPTS = 3
"""Captures tried of a specialization that the device refuses for the moment, and of a partition in all."""


class Admission:
    """Decides for one partition.

    Args:
        code: of the partition.
        driver: where to capture.
        options: of the compilation.
        cache: the partition's specializations.
        sizes: of the partition.
        stats: of the partition.
        lessons: to be given at the first call.

    Attributes:
        piece: the way back to the graph that it was compiled from, until it is captured or refused.
    """

    def __init__(
        self,
        code: Code,
        driver: Driver,
        options: Options,
        cache: SpecializationCache,
        sizes: Sizes,
        stats: PartitionStats,
        lessons: Lessons | None = None,
    ) -> None:
        self.code = code
        self.piece: Resplitting | None = None
        self._driver = driver
        self._options = options
        self._cache = cache
        self._sizes = sizes
        self._stats = stats
        self._computer: Computer | None = None
        self._lessons = lessons
        self._ahead: Ahead | None = None
        if sizes.dimensions and options.compute_sizes != "off":
            checking = options.compute_sizes == "check"
            self._computer = cache.shelf.computer = Computer(driver, code.run, checking=checking)
        self._refusals = self._failures = 0
        self._untuned = 0  # captures that were put off
        self._given_up: set[tuple[int, ...]] = set()  # sizes that are never captured
        self._pending: tuple[Specialization, Reason, Dispatch | None] | None = None

    def reset(self) -> None:
        """Begin anew: all captures are freed. Called with the partition's lock held."""
        self._stats.forget_captures()
        self._pending = None
        self._refusals = self._failures = 0
        self._given_up.clear()

    def never(self, args: Sequence[Any]) -> bool:
        """Whether sizes like these were given up: they run uncaptured without a further look."""
        return bool(self._given_up) and self._sizes.of(args) in self._given_up

    def choose(self, args: list[Any], *, capture: bool = True) -> Chosen:
        """The specialization for these arguments, captured if it is due and may be.

        Returns:
            A glimpse where none can be captured now; None if it never will be: there are none like these, or
            within somebody's capture.
        """
        if self._driver.is_capturing():
            return None
        with self._cache.lock:
            start = time.perf_counter()
            self._cache.catch_up()
            specialization = self._cache.captured.find(args)
            if specialization is None:
                if not self._sizes.wanted(args):
                    self._wait(lambda: self._sizes.unlisted(args))
                    return None
                if self._refusals >= _ATTEMPTS:  # captures are over, what there is still serves
                    self.insist(self._stats.reason)
                    self._give_up(args)
                    return None
                glimpse = self._cache.glimpse(args) if capture else None  # else sizes may be symbols
                if glimpse is not None:
                    if glimpse is Glimpse.KNOWN or self._cache.economy.sizes > _MANY:
                        self._wait(not_worth)
                    return glimpse
                specialization = self._cache.get(args)
                if specialization is None:
                    return None
                sizes = self._sizes.of(args)
                self._stats.met.note(sizes)
                self._sizes.note(sizes)
                if self._cache.set_aside and specialization.program is None:
                    self._give_up(args)
                    return None
            if self._lessons is not None and not self._lessons.prepare(
                args, specialization.guards, self._driver, self._computer
            ):
                self._lessons = None
            due = capture and specialization.due(self._options.warmup)
            new = capture and specialization.state is State.NOT_RUN
            computed = (due or new) and self._computes(specialization, args, early=not due)
            early = computed and new
            if (due or early) and not self._cache.pays(specialization, args, computed):
                self._wait(not_worth)
            elif (due or early) and not self._tuned():
                pass  # before others go for it
            elif (due or early) and not self._cache.room.there_is(specialization, args):
                self._wait(lambda: self._sizes.too_many(self._cache.room.limit))
            elif due or early:
                made = self._capture if due else self._compute
                if compat.profiling():
                    in_range("capture", self._stats.facts.label, made, specialization, args, start)
                else:
                    made(specialization, args, start)
            elif new and self._cache.economy.sizes > _MANY and not self._cache.captured.programs:
                self._wait(self._never_again)
            self.insist(specialization.reason)
            if specialization.state is State.REFUSED:
                self._give_up(args)
        return specialization

    def _tuned(self) -> bool:
        """Whether no kernel is measured when it is run next, which no capture survives: else one run more,
        but not for ever (Note [Kernels tuned anew] in `pgraph.drivers.cuda.triton`)."""
        if not any(map(compat.awaits_tuning, self.code.namespaces)):
            self._untuned = 0
        elif self._untuned < _ATTEMPTS:
            self._untuned += 1
            return False
        return True

    def ran(self) -> None:
        """The partition's own code has run. Called without the lock."""
        lessons, ahead = self._lessons, self._ahead
        learns = lessons is not None and lessons.due
        if not learns and (ahead is None or not ahead.due(self._stats.calls)):
            return
        with self._cache.lock:
            if learns:
                lessons, self._lessons = self._lessons, None
            if self._driver.is_capturing():
                return
            if learns and lessons is not None:
                code = self.code
                call = functools.partial(teach, self._driver, code.run, shelf=self._cache.shelf)
                call = functools.partial(call, namespaces=code.namespaces, constants=code.constants)
                self._ahead = lessons.give(self._stats, call)
            if self._ahead is not None and self._ahead.due(self._stats.calls):
                self._look_ahead(self._ahead)
            if self._ahead is not None and self._ahead.over:
                self._ahead = None

    def _look_ahead(self, ahead: Ahead) -> None:
        """Compute recordings of sizes that are to be expected (Note [Computed ahead])."""
        if not compat.alone() or any(map(compat.awaits_tuning, self.code.namespaces)):
            return
        before, start = self._stats.computed, time.perf_counter()
        assert self._computer is not None, "it has learned"
        try:
            with compat.unwatched(), self._driver.capture_lock(), self._cache.several():
                ahead.compute(self._computer, self._cache, self._sizes, self._compute)
        except Exception as e:  # whatever it was: sizes are looked at as they come
            log.debug("%s: no sizes ahead: %s: %s", self._stats.name, type(e).__name__, str(e))
            ahead.end()
        count, seconds = self._stats.computed - before, time.perf_counter() - start
        log.info("%s: %s computed ahead in %.0f ms", self._stats.name, amount(count, "size"), seconds * 1e3)

    def _wait(self, made: Callable[[], Reason]) -> None:
        """Calls like this one run uncaptured for now, and maybe for ever: say why, once.

        Raises:
            FullCaptureError: see `insist`.
        """
        if self._stats.waits is None:
            self._stats.waits = made()
            log.info("%s: %s", self._stats.name, self._stats.waits)
        if self._options.require_full_capture:
            self.insist(made())

    def _never_again(self) -> Reason:
        return Reason(
            "sizes-vary",
            f"{self._cache.economy.sizes} sizes, layouts or whole numbers came, none of them often enough",
        )

    def _give_up(self, args: Sequence[Any]) -> None:
        """Next time, look no further than the sizes: what never launches should cost no more than that."""
        captured = bool(self._cache.captured.programs)
        if self._pending is None and not captured and not self._options.require_full_capture:
            self._given_up.add(self._sizes.of(args))

    def _computes(self, specialization: Specialization, args: Sequence[Any], *, early: bool) -> bool:
        """Whether its recording will be computed (Note [Computed recordings])."""
        computer = self._computer
        if computer is None or specialization.standing.failures or (early and computer.after_a_run):
            return False
        return computer.covers(args, specialization.guards.alignments)

    def _compute(self, specialization: Specialization, args: Sequence[Any], start: float) -> bool:
        """Make it launchable without a capture. If that fails it is warmed up and captured like any other;
        one that has not come is forgotten.

        Args:
            start: when it was looked at; what it costs is counted from then on.
        """
        foreseen = specialization.foreseen is not None
        try:
            program = self._program(specialization, args, may_capture=False)
        except Exception as e:
            log.debug("%s was not computed: %s: %s", self._stats.name, type(e).__name__, e)
            program = None
        if program is None or (foreseen and self._cache.would_try(program)):
            if foreseen:
                self._cache.forget(specialization)
                return False
            self._cache.economy.wasted(time.perf_counter() - start)
            told = self._computer.latest if self._computer is not None else None
            self._stats.met.latest = told or "no exec of another size has its kernels"
            return False
        specialization.warmed()
        self._made(specialization, args, program, start)
        return True

    def _program(
        self, specialization: Specialization, args: Sequence[Any], may_capture: bool = True
    ) -> Program | None:
        code, tensors = self.code, specialization.guards.tensors
        slack_bytes = self._options.memory_slack_mb << 20
        built = build(
            self._driver,
            code.run,
            args,
            specialization.guards.alignments,
            namespaces=code.namespaces,
            constants=code.constants,
            kept_inputs=frozenset(i for i, guard in enumerate(tensors) if guard.position in code.static),
            slack_bytes=slack_bytes,
            shelf=self._cache.shelf,
            may_capture=may_capture,
        )
        if built is None:
            return None
        sharing = code.sharing()
        return program_of(built, specialization.guards, sharing, slack_bytes, code.lasting, code.kept)

    def _capture(self, specialization: Specialization, args: Sequence[Any], start: float) -> None:
        try:
            program = self._program(specialization, args)
            assert program is not None, "what may be captured is made"
        except (CaptureError, MatchError) as e:
            if specialization.glimpsed:
                specialization.postponed()
                return
            self.refuse(specialization, self._stats.facts.placed(e.reason, e.op), e.culprit)
        except Exception as e:
            if may_pass(e):
                self._later(specialization, e)
            else:
                log.debug("unexpected failure", exc_info=True)
                self.refuse(specialization, unexpected(e))
        else:
            self._failures = 0
            self._made(specialization, args, program, start)

    def _made(
        self, specialization: Specialization, args: Sequence[Any], program: Program, start: float
    ) -> None:
        try:
            self._cache.add(specialization, program)
        except BaseException:  # Ctrl-C, most likely: half of it may be done
            self._cache.clear()
            raise
        if self.piece is not None:
            self.piece.captured()
            self.piece = None
        computer, built = self._computer, program.built
        seconds, first = time.perf_counter() - start, not specialization.standing.runs
        if specialization.foreseen is not None:
            self._cache.economy.foreseen(seconds)
            self._stats.ahead += specialization.foreseen not in self._stats.met.sizes
        else:
            self._cache.economy.captured(seconds, built.computed, first=first)
        if computer is not None:
            self._stats.met.obstacle = computer.reason
        log.info("%s %s", self._stats.name, self._stats.told(built))
        if not built.computed:
            self._sizes.captured(args, computable=computer is not None and computer.reason is None)
        if not self._stats.met.varies and specialization.foreseen is None:
            trimming.captured(self._stats.name, self._driver)
        progress.captured()

    def _later(self, specialization: Specialization, error: Exception) -> None:
        """The device could not just now (memory, most likely): warm up again, and give up in the end."""
        specialization.postponed()
        failures = specialization.standing.failures
        self._failures += 1  # of all specializations: one that is seldom seen, or evicted, forgets its own
        if failures >= _ATTEMPTS or self._failures >= _ATTEMPTS**2:
            self.refuse(specialization, device_failed(error, max(failures, self._failures)))
        else:
            log.info("%s could not be captured yet: %s", self._stats.name, str(error))

    def refuse(self, specialization: Specialization, reason: Reason, culprit: Dispatch | None = None) -> None:
        """It could not be captured or launched. Called with the partition's lock held."""
        self._cache.release(specialization)
        self._refusals += 1
        if self.piece is not None:
            self._pending = specialization, reason, culprit
            specialization.refused(reason)
        else:
            self._tell(specialization, reason)

    def resolve(self) -> None:
        """After a refusal: split, if one op is to blame for it, or run uncaptured. Called without the lock.

        Compiling takes other locks, which a thread may hold that waits for this partition's (Dynamo's reset).
        """
        if self._pending is None:
            return
        with self._cache.lock:
            piece, pending = self.piece, self._pending
        if piece is None or pending is None:
            return
        specialization, reason, culprit = pending
        with piece.turn() as mine:
            if not mine or self._pending is not pending:
                return  # another thread is at it; so it is tried again at the next call, or done
            told = piece.refused(reason, culprit)
            with self._cache.lock:
                self.piece = self._pending = None
                if told is not None:
                    self._tell(specialization, told)

    def _tell(self, specialization: Specialization, reason: Reason) -> None:
        others = [s.reason for s in self._stats.standings if s is not specialization.standing]
        before = {other.info for other in others if other is not None}
        specialization.refused(reason)
        self._stats.latest(specialization.standing)
        log.log(
            logging.INFO if reason.info in before else logging.WARNING,
            "%s runs uncaptured: %s",
            self._stats.name,
            reason,
        )
        trace.refused(self._stats.facts, reason)

    def insist(self, reason: Reason | None) -> None:
        """In hard mode a refusal is an error, at this call and at every later one.

        Raises:
            FullCaptureError: there is a reason, and `require_full_capture` is set.
        """
        if reason is not None and self._options.require_full_capture:
            full_capture.refuse(self._stats.name, reason, str(registry.report()))
