"""What runs in place of a partition: plain code first, then a launch.

A safe partition is a small state machine, one state per *specialization* (a set of integers, layouts and
alignments of its arguments)::

    COLD --uncaptured run--> WARM --captured twice, matched, planned--> READY: launch for ever
                          \\--anything refused--> REFUSED: running uncaptured, with the reason

Where one op is at fault, the partition is split around it instead (`pgraph.compiler.resplit`), and its
pieces run in its place from then on.

Nothing is lost on the way: a capture runs nothing, so the call that was to be captured can always
run uncaptured instead.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from pgraph import compat
from pgraph.capture.build import build
from pgraph.capture.failures import may_pass
from pgraph.drivers.interface import Driver
from pgraph.errors import CaptureError, DriverError, LaunchError, LaunchMemoryError, MatchError
from pgraph.launch.interpreter import Launcher
from pgraph.launch.native import native_call
from pgraph.options import Options
from pgraph.partition.facts import PartitionFacts
from pgraph.reasons import Dispatch, Reason
from pgraph.runtime import full_capture, observe, registry, statistics
from pgraph.runtime.failures import before_all, device_failed, launch_failed, unexpected
from pgraph.runtime.keeping import WAITING, Keeper
from pgraph.runtime.profiler import in_range
from pgraph.runtime.protocols import Boxed, Resplitting
from pgraph.runtime.sizes import Dimension, Sizes
from pgraph.runtime.specialization import Specialization, State, Trait, key_of
from pgraph.template.template import Template

__all__ = ["PartitionRunner"]

log = logging.getLogger(__name__)

_ATTEMPTS = (
    3  # captures tried of one specialization that the device refuses, and of a partition that is refused
)

_LAUNCH_ERRORS = (LaunchError, DriverError, torch.OutOfMemoryError)


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
        self._watched = watched
        self._carries_tangents = options.codegen == "aten"  # Inductor's code never does
        self._specializations: OrderedDict[Any, Specialization] = OrderedDict()
        self._keeper = Keeper(options.max_captures, options.warmup)
        self._last: Specialization | None = None
        self._seen = 0  # launches counted when the slow path was last taken
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
            # Somebody wants to see these ops, and must not see the ghosts of a capture. (AOTAutograd itself
            # looks on at a first call.)
            return self._run_uncaptured(args, self._choose(args, capture=False))
        specialization = self._last
        # Once: an eviction may take them away.
        call, launcher = (
            (specialization.call, specialization.launcher) if specialization is not None else (None, None)
        )
        if specialization is not None and call is not None:
            done, failed = None, False
            try:
                if not compat.profiling():
                    done = call(args)
                elif specialization.addresses(args) is not None:
                    done = in_range("launch", self._label, call, args)
            except _LAUNCH_ERRORS as e:
                self._failed(specialization, before_all(e, launcher, args))
                failed = True
            if failed:  # not in the handler: the error's frames hold memory
                self._insist(specialization.reason)
                return self._run_uncaptured(args, None)
            if done is not None:
                self.stats.launches += 1
                self.stats.rewritten_nodes += done[1]
                return done[0]
        addresses = (
            specialization.addresses(args) if launcher is not None and specialization is not None else None
        )
        if addresses is None:
            specialization = self._choose(args)
            if self._pending is not None:
                self._resolve()
                instead = self._instead
                if instead is not None:
                    return instead(args)
            launcher = specialization.launcher if specialization is not None else None
            addresses = (
                specialization.addresses(args)
                if launcher is not None and specialization is not None
                else None
            )
        if launcher is None or addresses is None or self._driver.is_capturing():
            return self._run_uncaptured(args, specialization)
        assert specialization is not None
        inputs = []
        for position in launcher.positions:
            inputs.append(args[position])
            args[position] = None
        try:
            if compat.profiling():
                results, rewritten = in_range("launch", self._label, launcher, inputs, addresses)
            else:
                results, rewritten = launcher(inputs, addresses)
        except _LAUNCH_ERRORS as e:
            for position, tensor in zip(launcher.positions, inputs, strict=True):
                args[position] = tensor
            self._failed(specialization, e)
        else:
            self.stats.launches += 1
            self.stats.rewritten_nodes += rewritten
            return results
        self._insist(specialization.reason)
        return self._run_uncaptured(args, None)  # not in the handler: the error's frames hold memory

    def specializations(self) -> list[Specialization]:
        """All specializations, least recently used first."""
        with self._lock:
            return list(self._specializations.values())

    def template(self) -> Template | None:
        """What the capture in use left behind; None if there is none."""
        with self._lock:
            found = [v for v in (self._last, *reversed(self._specializations.values())) if v is not None]
        return next((v.built.template for v in found if v.built is not None), None)

    def reset(self) -> None:
        """Free everything captured; the partition starts again."""
        with self._lock:
            for specialization in self._specializations.values():
                self._release(specialization)
            self._specializations.clear()
            self._keeper = Keeper(self._options.max_captures, self._options.warmup)
            self._last = self._pending = None
            self._refusals = self._failures = 0
            self._given_up.clear()
            self.stats.reason = None

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
        self.stats.reason = reason
        self._instead = None
        log.warning("%s runs uncaptured: %s", self.name, reason)

    # -- the slow path ----------------------------------------------------------------------

    def _failed(self, specialization: Specialization, error: Exception) -> None:
        """A launch failed: run uncaptured, and from now on if it was not for want of memory.

        Raises:
            DriverError, torch.OutOfMemoryError: `error` itself, if a part of the partition has run already.
        """
        if isinstance(error, torch.OutOfMemoryError):
            try:
                raise error
            finally:
                del error  # else it and this frame hold each other, and all that the launch had
        if isinstance(error, LaunchMemoryError):
            self._short_of_memory(error)
            return
        self._refuse(specialization, launch_failed(error))
        if isinstance(error, DriverError):
            try:
                raise error
            finally:
                del error

    def _run_uncaptured(self, args: list[Any], specialization: Specialization | None) -> Any:
        if compat.profiling():
            result = in_range("uncaptured", self._label, self._plain, args)
        else:
            result = self._plain(args)
        self.stats.uncaptured_runs += 1
        if specialization is not None:
            with self._lock:
                specialization.runs += 1
                specialization.threads.add(threading.get_ident())
                self._keeper.ran(specialization.use, self.stats.launches)
        return result

    def _choose(self, args: list[Any], *, capture: bool = True) -> Specialization | None:
        """The specialization for these arguments, captured if it is due and may be; None to run
        uncaptured."""
        if self._driver.is_capturing():
            return None
        with self._lock:
            if self._last is not None and self._seen != self.stats.launches:
                self._keeper.used(self._last.use)  # the fast path does not tell
            self._seen = self.stats.launches
            specialization = self._find(args)
            if specialization is None:
                if not self._sizes.wanted(args):
                    return None
                if self._refusals >= _ATTEMPTS:  # captures are over, what there is still serves
                    self._insist(self.stats.reason)
                    self._give_up(args)
                    return None
                specialization = self._specialization(args)
                if specialization is None:
                    return None
            due = capture and specialization.state is State.WARM and self._due(specialization)
            if due and self._has_room(specialization, args):
                if compat.profiling():
                    in_range("capture", self._label, self._capture, specialization, args)
                else:
                    self._capture(specialization, args)
            self._insist(specialization.reason)
            if specialization.launcher is not None:
                self._last = specialization
            elif specialization.reason is not None:
                self._give_up(args)
            return specialization

    def _give_up(self, args: Sequence[Any]) -> None:
        """Next time, look no further than the sizes: what never launches should cost no more than that."""
        if self._pending is None and not self._captured() and not self._options.require_full_capture:
            self._given_up.add(self._sizes.of(args))

    def _find(self, args: Sequence[Any]) -> Specialization | None:
        """The specialization that can be launched on these arguments; it becomes the most recently used."""
        for key, specialization in reversed(self._specializations.items()):
            if specialization.launcher is not None and specialization.addresses(args) is not None:
                self._specializations.move_to_end(key)
                self._keeper.used(specialization.use)
                return specialization
        return None

    def _captured(self) -> list[Specialization]:
        """Variants with a capture, least recently used first."""
        return sorted(
            (v for v in self._specializations.values() if v.launcher is not None), key=lambda v: v.use.latest
        )

    def _has_room(self, specialization: Specialization, args: Sequence[Any]) -> bool:
        """Whether a specialization may have a capture, if need be in another's place (Note [Taking
        turns])."""
        captured = self._captured()
        if len(captured) < self._options.max_captures:
            return True
        oldest, launches = captured[0].use, self.stats.launches
        if self._keeper.admits(specialization.use, specialization.runs, oldest, len(captured), launches):
            return True
        if self._keeper.patient(specialization.runs):
            self._sizes.crowded(args)
        return False

    def _due(self, specialization: Specialization) -> bool:
        """Warm runs done, at least one of them in this thread: library handles belong to threads."""
        if specialization.runs < self._options.warmup:
            return False
        return (
            threading.get_ident() in specialization.threads or specialization.runs >= self._options.warmup + 3
        )

    def _specialization(self, args: Sequence[Any]) -> Specialization | None:
        """The one for these layouts, made if need be; None for tensors that lie nowhere (batched, fake)."""
        key = key_of(args, self._driver.device, self._driver.alignment, self._watched)
        if key is None:
            return None
        specialization = self._specializations.get(key)
        if specialization is None:
            waiting = [k for k, v in self._specializations.items() if v.launcher is None]
            for k in waiting[: len(waiting) - WAITING + 1]:
                del self._specializations[k]
            specialization = self._specializations[key] = Specialization(*key)
        self._specializations.move_to_end(key)
        return specialization

    def _make_room(self) -> None:
        """Drop the least recently used capture if there is one too many."""
        for gone in self._captured()[: -self._options.max_captures]:
            self._release(gone)
            gone.restart()
            if gone is self._last:
                self._last = None
            self._keeper.dropped()
            self._sizes.evicted()

    def _release(self, specialization: Specialization) -> None:
        """Let its execs go: they are freed with their last reference (Note [Freed by reference])."""
        with self._lock:
            if specialization.built is not None:
                self.stats.released(specialization.built)
            specialization.built = specialization.launcher = specialization.call = None

    def _capture(self, specialization: Specialization, args: Sequence[Any]) -> None:
        kept = frozenset(
            i for i, (position, *_) in enumerate(specialization.tensors) if position in self._static
        )
        try:
            built = build(
                self._driver,
                self._plain,
                args,
                [mask + 1 for *_, mask in specialization.tensors],
                namespaces=self._namespaces,
                constants=self._constants,
                kept_inputs=kept,
                slack_bytes=self._options.memory_slack_mb << 20,
            )
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
            specialization.built = built
            specialization.launcher = Launcher(built, [position for position, *_ in specialization.tensors])
            specialization.call = native_call(
                specialization.launcher, specialization.tensors, specialization.others, specialization.traits
            )
            self._keeper.used(specialization.use)
            self._make_room()
            self.stats.captured(built)
            self._sizes.captured(args)

    def _later(self, specialization: Specialization, error: Exception) -> None:
        """The device could not just now (memory, most likely): warm up again, and give up in the end."""
        specialization.failures += 1
        specialization.runs = 0
        self._failures += 1  # of all specializations: one that is seldom seen, or evicted, forgets its own
        if specialization.failures >= _ATTEMPTS or self._failures >= _ATTEMPTS**2:
            self._refuse(specialization, device_failed(error, max(specialization.failures, self._failures)))
        else:
            log.info("%s could not be captured yet: %s", self.name, str(error))

    def _short_of_memory(self, error: LaunchMemoryError) -> None:
        """Nothing has run: the plain code may do with less, or fails as it would without pgraph."""
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
        self._release(specialization)
        specialization.reason = reason
        self._refusals += 1
        if self.piece is not None:
            self._pending = specialization, reason, culprit
        else:
            self._tell(reason)

    def _resolve(self) -> None:
        """After a refusal: split, if one op is to blame for it, or run uncaptured. Called without the lock.

        Compiling takes other locks, which somebody may hold who waits for this partition's (Dynamo's reset).
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
                    specialization.reason = told
                    self._tell(told)

    def _tell(self, reason: Reason) -> None:
        told = self.stats.reason is not None and self.stats.reason.code == reason.code
        log.log(logging.INFO if told else logging.WARNING, "%s runs uncaptured: %s", self.name, reason)
        self.stats.reason = reason

    def _insist(self, reason: Reason | None) -> None:
        """In hard mode a refusal is an error, at this call and at every later one.

        Raises:
            FullCaptureError: there is a reason, and `require_full_capture` is set.
        """
        if reason is not None and self._options.require_full_capture:
            full_capture.refuse(self.name, reason, str(registry.report()))
