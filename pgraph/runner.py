"""What runs in place of a partition: plain code first, then a launch.

A safe partition is a small state machine, one state per *variant* (a set of integers, layouts and
alignments of its arguments)::

    COLD --plain run--> WARM --captured twice, matched, planned--> READY: launch for ever
                          \\--anything refused--> REFUSED: plain running, with the reason

Nothing is lost on the way: a capture runs nothing, so the call that was to be captured can always
run plainly instead.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pgraph import stats
from pgraph.build import Built, build
from pgraph.compat import assert_size_stride
from pgraph.drivers.base import Driver
from pgraph.errors import CaptureError, DriverError, LaunchError, MatchError, PlanError
from pgraph.launch import Launcher
from pgraph.options import Options
from pgraph.partition import Const, SplitPlan
from pgraph.reasons import Reason

__all__ = ["GraphRunner", "PartitionRunner", "Variant"]

log = logging.getLogger(__name__)

Boxed = Callable[[list[Any]], Any]


class State(enum.Enum):
    """Where a variant stands."""

    COLD = "cold"
    WARM = "warm"
    READY = "ready"
    REFUSED = "refused"


@dataclasses.dataclass(slots=True)
class Variant:
    """One set of layouts and alignments, and what has become of it.

    Args:
        tensors: per device tensor: (position among the arguments, size, stride, alignment needed).
        others: (position, value) of the integers that the code was specialized for.
    """

    tensors: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]
    others: tuple[tuple[int, Any], ...]
    runs: int = 0
    threads: set[int] = dataclasses.field(default_factory=set)
    built: Built | None = None
    launcher: Launcher | None = None
    reason: Reason | None = None

    @property
    def state(self) -> State:
        if self.reason is not None:
            return State.REFUSED
        if self.launcher is not None:
            return State.READY
        return State.WARM if self.runs else State.COLD

    def fits(self, args: Sequence[Any]) -> bool:
        """True if a launch of this variant is right for these arguments.

        Note [Alignment is part of the contract]
        Kernels were chosen for the alignment of the captured addresses; a less aligned address
        needs another capture.
        """
        for position, value in self.others:
            if args[position] != value:
                return False
        try:
            for position, size, stride, alignment in self.tensors:
                tensor = args[position]
                if tensor.data_ptr() % alignment:
                    return False
                assert_size_stride(tensor, size, stride)
        except AssertionError:
            return False
        return True

    def close(self) -> None:
        """Free the execs; the variant is cold again."""
        if self.built is not None:
            self.built.close()
        self.built = self.launcher = self.reason = None
        self.runs = 0
        self.threads.clear()


class PartitionRunner:
    """Callable in place of a safe partition's code.

    Args:
        name: for reports, e.g. ``"forward 0, part 1"``.
        plain: the partition's code; takes one list and empties it.
        driver: where to capture.
        options: of this compilation.
        namespaces: see `pgraph.capture.record`.
        constants: tensors held by the code.
        static: argument positions whose memory the caller keeps (parameters and buffers).
    """

    def __init__(
        self,
        name: str,
        plain: Boxed,
        driver: Driver,
        options: Options,
        *,
        namespaces: Sequence[dict[str, Any]] = (),
        constants: Sequence[torch.Tensor] = (),
        static: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.stats = stats.PartitionStats(name)
        self._plain = plain
        self._driver = driver
        self._options = options
        self._namespaces = namespaces
        self._constants = constants
        self._static = static
        self._variants: OrderedDict[Any, Variant] = OrderedDict()
        self._last: Variant | None = None
        self._lock = threading.RLock()
        stats.register(self)

    def __call__(self, args: list[Any]) -> Any:
        variant = self._last
        if variant is None or variant.launcher is None or not variant.fits(args):
            variant = self._choose(args)
            if variant is None or variant.launcher is None:
                return self._run_plainly(args, variant)
        if self._driver.is_capturing():
            return self._run_plainly(args, None)
        launcher = variant.launcher
        inputs = [args[position] for position, *_ in variant.tensors]
        n_args = len(args)
        args.clear()
        try:
            results, rewritten = launcher(inputs)
        except (DriverError, LaunchError) as e:
            return self._run_plainly(self._give_up(variant, inputs, n_args, e), None)
        self.stats.launches += 1
        self.stats.rewritten_nodes += rewritten
        return results

    def variants(self) -> list[Variant]:
        """All variants, least recently used first."""
        with self._lock:
            return list(self._variants.values())

    def reset(self) -> None:
        """Free everything captured; the partition starts again."""
        with self._lock:
            for variant in self._variants.values():
                variant.close()
            self._variants.clear()
            self._last = None
            self.stats.reason = None

    # -- the slow path ----------------------------------------------------------------------

    def _run_plainly(self, args: list[Any], variant: Variant | None) -> Any:
        result = self._plain(args)
        self.stats.plain_runs += 1
        if variant is not None:
            variant.runs += 1
            variant.threads.add(threading.get_ident())
        return result

    def _choose(self, args: list[Any]) -> Variant | None:
        """The variant for these arguments, captured if it is due; None to run plainly."""
        if self._driver.is_capturing():
            return None
        with self._lock:
            variant = next(
                (v for v in reversed(self._variants.values()) if v.launcher and v.fits(args)), None
            )
            if variant is None:
                if self.stats.reason is not None:  # captures are over, what there is still serves
                    return None
                variant = self._variant(args)
            else:
                self._variants.move_to_end((variant.tensors, variant.others))
            if variant is None:
                return None
            if variant.state is State.WARM and self._due(variant):
                self._capture(variant, args)
            if variant.launcher is not None:
                self._last = variant
            return variant

    def _due(self, variant: Variant) -> bool:
        """Warm runs done, at least one of them in this thread: library handles belong to threads."""
        if variant.runs < self._options.warmup:
            return False
        return threading.get_ident() in variant.threads or variant.runs >= self._options.warmup + 3

    def _variant(self, args: Sequence[Any]) -> Variant | None:
        tensors, others, addresses = [], [], []
        for position, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                if value.device != self._driver.device:
                    continue  # CPU seeds of attention without dropout: never read
                tensors.append((position, tuple(value.size()), tuple(value.stride())))
                addresses.append(value.data_ptr())
            elif isinstance(value, int | float | bool):
                others.append((position, value))
        aligned = _alignments(addresses, self._driver.alignment)
        key = (tuple((*t, a) for t, a in zip(tensors, aligned, strict=True)), tuple(others))
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = Variant(*key)
            self._evict()
        self._variants.move_to_end(key)
        return variant

    def _evict(self) -> None:
        while len(self._variants) > self._options.max_captures:
            _, oldest = self._variants.popitem(last=False)
            if oldest is self._last:
                self._last = None
            oldest.close()

    def _capture(self, variant: Variant, args: Sequence[Any]) -> None:
        kept = frozenset(i for i, (position, *_) in enumerate(variant.tensors) if position in self._static)
        try:
            built = build(
                self._driver,
                self._plain,
                args,
                [alignment for *_, alignment in variant.tensors],
                namespaces=self._namespaces,
                constants=self._constants,
                kept_inputs=kept,
                slack_bytes=self._options.memory_slack_mb << 20,
            )
        except (CaptureError, MatchError) as e:
            self._refuse(variant, e.reason)
        except (DriverError, PlanError, torch.OutOfMemoryError) as e:
            self._refuse(
                variant,
                Reason(
                    "driver-failed",
                    f"the capture stopped: {e}",
                    "nothing is lost: the partition runs plainly",
                ),
            )
        else:
            variant.built, variant.launcher = built, Launcher(built)
            self.stats.captured(built)

    def _give_up(self, variant: Variant, inputs: list[Any], n_args: int, error: Exception) -> list[Any]:
        """Never launch this variant again; the arguments of the failed call, to run it plainly.

        Its execs may hold half of today's addresses. Another thread may be launching them, so they
        are freed with the variant and not here.

        Raises:
            DriverError, LaunchError: `error`, if part of it has run or arguments cannot be restored.
        """
        with self._lock:
            variant.launcher = None
            fix = "pgraph.reset() captures it anew; until then the partition runs plainly"
            self._refuse(variant, Reason("launch-failed", f"a launch failed: {error}", fix))
        if not isinstance(error, LaunchError) or len(inputs) + len(variant.others) != n_args:
            raise error
        args: list[Any] = [None] * n_args
        for (position, *_), tensor in zip(variant.tensors, inputs, strict=True):
            args[position] = tensor
        for position, value in variant.others:
            args[position] = value
        inputs.clear()
        return args

    def _refuse(self, variant: Variant, reason: Reason) -> None:
        first = self.stats.reason is None
        variant.reason = reason
        if first:
            self.stats.reason = reason
        log.log(logging.WARNING if first else logging.INFO, "%s runs plainly: %s", self.name, reason)


def _alignments(addresses: Sequence[int], usual: int) -> list[int]:
    """The alignment to capture each address with, in bytes.

    Few classes, so that addresses that wander (slices of one large buffer) do not ask for a capture
    each: all as the allocator aligns, or all to 16 bytes (what vector loads and tensor maps need),
    or each by itself.
    """
    lows = [(a & -a) if a else usual for a in addresses]
    for common in (usual, 16):
        if all(low >= common for low in lows):
            return [common] * len(lows)
    return [min(low, 16) for low in lows]


class GraphRunner:
    """Runs the parts of a split graph in order over a list of values.

    Args:
        split: which values each part takes and makes.
        parts: the code of each part; takes one list and empties it.
    """

    def __init__(self, split: SplitPlan, parts: Sequence[Boxed]) -> None:
        self._n_slots = split.n_slots
        self._input_slots = split.input_slots
        self._outputs = split.output_slots
        self._calls = [
            (part, call.inputs, call.outputs, call.last_use)
            for part, call in zip(parts, split.calls, strict=True)
        ]

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        values: list[Any] = [None] * self._n_slots
        for slot, value in zip(self._input_slots, args, strict=True):
            values[slot] = value
        args.clear()
        del value
        for part, inputs, outputs, last_use in self._calls:
            handed = [values[slot] for slot in inputs]
            for slot in last_use:
                values[slot] = None
            results = part(handed)
            for slot, result in zip(outputs, results, strict=True):
                values[slot] = result
            del results
        return tuple(o.value if isinstance(o, Const) else values[o] for o in self._outputs)
