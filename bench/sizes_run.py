"""The sequences of `sizes.py`: their model, inputs and sizes, and how they are timed.

Not a program: `sizes_worker.py` imports it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import worker
from backends import reset_compiled
from host_speed import fast_core
from llama import Llama
from sizes_place import Figures, Place
from torch import Tensor

COLUMNS, STRIDE = 1 << 18, 251  # random tokens of a sequence, and how far apart two calls begin

Call = Callable[[Tensor], Tensor]


def llama(place: Place) -> Llama:
    """The model with its random weights, the same in every process."""
    torch.manual_seed(place.spec.seed)
    return Llama(place.size.model).to_training(place.device)


class Tokens:
    """Random tokens, in fresh memory whenever they are asked for, other ones at every call.

    So many that training cannot learn them: gradients stay as large as they are at first.
    """

    def __init__(self, place: Place, batch: int) -> None:
        generator = torch.Generator().manual_seed(place.spec.seed + 1)
        made = torch.randint(place.size.model.vocab, (batch, COLUMNS), generator=generator)
        self._all = made.to(place.device)

    def __call__(self, number: int, batch: int, length: int, shift: int = 0) -> Tensor:
        """(batch, length) of them for the call with this number; those after `shift` more tokens."""
        at = number * STRIDE % (COLUMNS - length - shift) + shift
        return self._all[:batch, at : at + length].clone()


def apart(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The same function with code of its own, so that Dynamo keeps what it compiles apart."""

    def call(*args: Any) -> Any:
        return function(*args)

    code = call.__code__.replace(co_name=f"call_{number}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def compiled(place: Place, sizes: Sequence[int], call: Callable[[int], Any]) -> Figures:
    """Run each of `sizes` once, so that all is compiled; seconds of it.

    What the compiler leaves for Python's collector goes with it: to look at its million objects takes half a
    second, at whichever call happens to be the next.
    """
    began = time.perf_counter()
    for size in sizes:
        call(size)
    gc.collect()
    place.clock.drain()
    place.clock.reset_peak()
    return {
        "compile_s": time.perf_counter() - began,
        "graphs": place.graphs(),
        "captures_warm": place.recordings(),
    }


def result(place: Place, timed: Run, early: int, warm: Figures) -> Figures:
    """What a sequence has shown so far; read before anything else is compiled."""
    found = {**timed.figures(early), **warm, "recompiles": place.graphs() - warm["graphs"]}
    return found | ended(place)


def expected(place: Place, model: Llama) -> Call:
    """The reference; all other compiled code is gone after this."""
    reset_compiled()
    return place.by_reference(model.forward)


def draw(seed: int, low: int, high: int, count: int) -> list[int]:
    """So many random sizes; the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, (count,), generator=generator).tolist()


def spaced(low: int, high: int, count: int) -> list[int]:
    """So many sizes, evenly from the smallest to the largest."""
    return [low + (high - low) * i // max(count - 1, 1) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Run:
    """Times of a sequence.

    Args:
        parts: (calls, host ms until the device was through with them), one after another.
        marks: numbers of calls.
        totals_ms: of all calls up to each mark.
    """

    parts: Sequence[tuple[int, float]]
    marks: Sequence[int]
    totals_ms: Sequence[float]

    def figures(self, early: int = 0) -> Figures:
        """Of calls after the first so many: their mean, tails over what was timed together; totals."""
        ends = itertools.accumulate(count for count, _ in self.parts)
        late = [part for part, end in zip(self.parts, ends, strict=True) if end > early]
        each = [ms / count for count, ms in late]
        return {
            "ms_per_step": sum(ms for _, ms in late) / sum(count for count, _ in late),
            "ms_p10": worker.quantile(each, 0.1),
            "ms_p90": worker.quantile(each, 0.9),
            "total_ms": self.totals_ms[-1],
            "early_ms": dict(zip(self.marks, self.totals_ms, strict=True)).get(early),
            "steps": self.marks[-1],
            "marks": list(self.marks),
            "totals_ms": list(self.totals_ms),
        }


def run(
    place: Place,
    count: int,
    step: Callable[[int], Any],
    *,
    mark: int,
    checked: Iterable[int] = (),
    before: Callable[[int], None] = lambda at: None,
    after: Callable[[int], None] = lambda at: None,
    waits: bool = False,
    look: Callable[[], None] | None = None,
) -> Run:
    """Time `step(0)` to `step(count - 1)`, on a core that is fast when it begins and at each mark.

    Args:
        mark: steps between two totals; the last step is one in any case.
        checked: steps around which `before` and `after` are called, the clock stopped.
        waits: whether each step begins when the device is through with the last one.
        look: of `fast_core`, where this is one of several runs.
    """
    checks = set(checked)
    marks = [*range(mark, count, mark), count]
    stops = sorted({*marks, *(at for n in checks for at in (n, n + 1) if at <= count)})
    parts: list[tuple[int, float]] = []
    totals, total, at = [], 0.0, 0
    with fast_core(place.on_gpu) if look is None else contextlib.nullcontext(look) as look_again:
        while at < count:
            end = at + 1 if waits else next(stop for stop in stops if stop > at)
            looked_at = at in checks
            if looked_at:
                before(at)
            ms = place.ms(lambda numbers=range(at, end): [step(number) for number in numbers] and None)
            parts.append((end - at, ms))
            total += ms
            if looked_at:
                after(at)
            at = end
            if at in marks:
                totals.append(total)
                look_again()
    return Run(parts, marks, totals)


def some(count: int, wanted: int) -> set[int]:
    """Numbers of steps to look at, evenly over a sequence, the last one among them."""
    return {max(0, (k + 1) * count // wanted - 1) for k in range(wanted)}


def ended(place: Place) -> Figures:
    """Memory, and pgraph's own account."""
    found = {**place.clock.memory(), "captures": place.recordings()}
    if place.spec.backend == "pgraph":
        import pgraph

        report = pgraph.report()
        found |= {
            "computed": report.computed,
            "launches": report.launches,
            "uncaptured_runs": sum(p.uncaptured_runs for p in report.capturable),
            "capture_s": report.capture_s,
            "refused": report.refused,
            "exec_mb": report.exec_bytes / worker.MB,
            "recipe_mb": report.recipe_bytes / worker.MB,
            "summary": report.summary(),
            "reasons": sorted({str(reason) for p in report.partitions for reason in p.reasons}),
        }
    return found
