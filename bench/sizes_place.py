"""What every measurement of `sizes.py` shares: settings, the device, the clock, and when a result is right.

Not a program: `sizes_worker.py` imports it.

Note [Right against Inductor]
Wrong numbers of a backend that rebinds addresses come when sizes change. So some calls of the timed sequence
itself are looked at: what they were given and what they gave is kept on the host, the clock stopped. At the
end all compiled code is dropped, and the reference computes the same again. It is Inductor; for Inductor's
own rows, and on a CPU, it is the uncompiled model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import uses_worker
import worker
from backends import compile_kwargs
from llama import LlamaConfig
from torch import Tensor
from torch._dynamo.utils import counters

Figures = dict[str, Any]
# The root mean square of the difference, over the reference's: bf16 has 8 bits, and six blocks add up.
TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-3}
# What a backend compiles by, where that is not its name.
COMPILER = {"replay": "inductor", "pgraph-static": "pgraph"}


@dataclasses.dataclass(frozen=True)
class Size:
    """How large everything is.

    Args:
        model: of the server and of training.
        batches: smallest and largest batch of the server.
        tokens: of a request to it.
        calls: of the server.
        lengths: shortest and longest in training.
        batch: sequences in a training step.
        steps: of training.
        seen: how many lengths come again and again.
        again: steps with these.
        mark: calls or steps between two totals.
        checked: how many of them are compared with the reference.
        kept: sizes of one model whose memory is measured.
        hidden, mlp, vocabulary: of the language model that generates; layers and heads as in `model`.
        prompts: shortest and longest prompt.
        new: tokens that are generated.
        requests: how many are timed.
    """

    model: LlamaConfig
    batches: tuple[int, int]
    tokens: int
    calls: int
    lengths: tuple[int, int]
    batch: int
    steps: int
    seen: int
    again: int
    mark: int
    checked: int
    kept: int
    hidden: int
    mlp: int
    vocabulary: int
    prompts: tuple[int, int]
    new: int
    requests: int


SIZES = {
    "full": Size(
        model=LlamaConfig(vocab=256, dim=512, layers=6, heads=8, kv_heads=8, max_seq=1024),
        batches=(1, 32),
        tokens=64,
        calls=600,
        lengths=(16, 256),
        batch=8,
        steps=3000,
        seen=16,
        again=800,
        mark=100,
        checked=6,
        kept=64,
        hidden=512,
        mlp=1408,
        vocabulary=4096,
        prompts=(16, 128),
        new=64,
        requests=12,
    ),
    "tiny": Size(
        model=LlamaConfig(vocab=16, dim=16, layers=1, heads=2, kv_heads=2, max_seq=64),
        batches=(1, 4),
        tokens=6,
        calls=24,
        lengths=(4, 9),
        batch=2,
        steps=20,
        seen=3,
        again=12,
        mark=5,
        checked=3,
        kept=4,
        hidden=32,
        mlp=48,
        vocabulary=64,
        prompts=(3, 6),
        new=5,
        requests=3,
    ),
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to measure.

    Args:
        config: one of `sizes_worker.MEASURES`.
        backend: one of the benchmarks' backends.
        size: name of a size.
        device: ``"auto"``, ``"cuda"`` or ``"cpu"``.
        driver, codegen: pgraph's options.
        steps, calls: in the place of the size's.
        seed: of weights, inputs and sizes.
    """

    config: str
    backend: str
    size: str = "full"
    device: str = "auto"
    driver: str = "auto"
    codegen: str = "auto"
    steps: int | None = None
    calls: int | None = None
    seed: int = 0


class Place(uses_worker.Place):
    """A device, its dtype and its clock; how a backend compiles, and what is right."""

    sizes = SIZES
    size: Size

    def __init__(self, spec: Spec) -> None:
        self.backend = spec.backend
        compiler = COMPILER.get(spec.backend, spec.backend)
        super().__init__(dataclasses.replace(spec, backend=compiler))
        self.worst, self.compared = 0.0, 0
        self._graphs = int(counters["stats"]["unique_graphs"])

    def graphs(self) -> int:
        """How many graphs Dynamo has compiled so far."""
        return int(counters["stats"]["unique_graphs"]) - self._graphs

    def arguments(self, dynamic: bool = True, **options: Any) -> dict[str, Any] | None:
        """For `torch.compile`; None for eager.

        Args:
            options: pgraph's, beside those that the spec has.
        """
        found = self.compile_arguments()
        if found is None:
            return None
        if options and self.spec.backend == "pgraph":
            found["options"] |= options
        return found | {"dynamic": dynamic}

    @property
    def reference(self) -> str:
        """The backend that is right by definition."""
        return "inductor" if self.on_gpu and self.spec.backend != "inductor" else "eager"

    def by_reference(self, function: Any) -> Any:
        """The same function compiled by the reference; nothing else may be compiled any more."""
        arguments = compile_kwargs(self.reference, self.device)
        return function if arguments is None else torch.compile(function, **arguments | {"dynamic": True})

    def near(self, mine: Tensor, theirs: Tensor) -> float:
        """The root mean square of the difference, over that of `theirs`.

        Raises:
            ArithmeticError: it is too large.
        """
        wide = theirs.double().to(mine.device)
        scale = wide.square().mean().sqrt().item()
        off = (mine.double() - wide).square().mean().sqrt().item()
        found = off / scale if scale else off
        if not found <= TOLERANCE[self.dtype]:
            raise ArithmeticError(f"results differ by {found:.3g} of their size")
        self.worst, self.compared = max(self.worst, found), self.compared + 1
        return found

    def all_near(self, what: str, mine: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
        """Compare tensor by tensor; `what` names the call in the message."""
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            try:
                self.near(a, b)
            except ArithmeticError as error:
                raise ArithmeticError(f"{what}, tensor {number}: {error}") from None


def on_host(tensor: Tensor) -> Tensor:
    """A copy out of reach of whatever runs next."""
    return tensor.detach().to("cpu", copy=True)


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
) -> Run:
    """Time `step(0)` to `step(count - 1)`.

    Args:
        mark: steps between two totals; the last step is one in any case.
        checked: steps around which `before` and `after` are called, the clock stopped.
        waits: whether each step begins when the device is through with the last one.
    """
    checks = set(checked)
    marks = [*range(mark, count, mark), count]
    stops = sorted({*marks, *(at for n in checks for at in (n, n + 1) if at <= count)})
    parts: list[tuple[int, float]] = []
    totals, total, at = [], 0.0, 0
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
