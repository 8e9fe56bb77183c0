"""One measurement of `sizes.py` in one process: settings from the command line, JSON on the last line.

python bench/sizes_worker.py '{"config": "serving", "backend": "pgraph", "size": "tiny", "device": "cpu"}'
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _paths  # noqa: F401  (puts examples/ on sys.path)
import sizes_generate
import torch
import worker
from backends import reset_compiled
from claims import device_bytes, resident_bytes
from llama import Llama
from sizes_place import Figures, Place, Run, Spec, draw, ended, on_host, run, some, spaced
from torch import Tensor

MB = worker.MB
WARM = 6  # calls of a size that is to be warm: uncaptured ones, a capture, launches on trial
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


def compiled(place: Place, sizes: Sequence[int], call: Callable[[int], Any]) -> Figures:
    """Run each of `sizes` once, so that all is compiled; seconds of it."""
    began = time.perf_counter()
    for size in sizes:
        call(size)
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


# -- inference: a server, lengths in turn ------------------------------------------------------------------


def expected(place: Place, model: Llama) -> Call:
    """The reference; all other compiled code is gone after this."""
    reset_compiled()
    return place.by_reference(model.forward)


@torch.no_grad()
def serving(place: Place) -> Figures:
    """Requests of random batches, each answered before the next one comes."""
    size, model = place.size, llama(place).eval()
    low, high = size.batches
    count = place.spec.calls or size.calls
    batches = draw(place.spec.seed, low, high, count)
    tokens = Tokens(place, high)
    arguments = place.arguments()
    call: Call = model.forward if arguments is None else torch.compile(model.forward, **arguments)
    kept: dict[int, Tensor] = {}
    answer: list[Tensor] = []

    def step(number: int) -> None:
        answer.clear()
        place.begin()
        answer.append(call(tokens(number, batches[number], size.tokens)))

    def compile_one(batch: int) -> None:
        place.begin()
        call(tokens(0, batch, size.tokens))

    def keep(number: int) -> None:
        kept[number] = on_host(answer[0])

    # A batch of one is compiled by itself: Dynamo takes sizes of 0 and 1 for constants.
    warm = compiled(place, [high, low], compile_one)
    checked = some(count, 4 * size.checked)
    timed = run(place, count, step, mark=size.mark, checked=checked, after=keep, waits=True)
    early = count // 2 // size.mark * size.mark
    found = result(place, timed, early, warm)
    right = expected(place, model)
    for number, mine in kept.items():
        theirs = right(tokens(number, batches[number], size.tokens))
        place.all_near(f"call {number + 1}, batch {batches[number]}", [mine], [theirs])
    return found


def apart(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The same function with code of its own, so that Dynamo keeps what it compiles apart."""

    def call(*args: Any) -> Any:
        return function(*args)

    code = call.__code__.replace(co_name=f"call_{number}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def replayed(place: Place, call: Call, tokens: Tensor) -> Call:
    """A `torch.cuda.CUDAGraph` of the call; what it is given is copied to where the graph reads."""
    static, graph = tokens.clone(), torch.cuda.CUDAGraph()
    for _ in range(3):
        call(static)
    place.clock.drain()
    with torch.cuda.graph(graph):
        answer = call(static)

    def replay(given: Tensor) -> Tensor:
        static.copy_(given)
        graph.replay()
        return answer

    return replay


@torch.no_grad()
def turns(place: Place) -> Figures:
    """A few lengths in turn, again and again; by one compiled function, or by a capture for each length.

    ``replay`` is a `torch.cuda.CUDAGraph` for each length, of the code that Inductor makes for all lengths;
    ``pgraph-static`` is pgraph compiled anew for each length with ``dynamic=False``.
    """
    size, model, backend = place.size, llama(place).eval(), place.backend
    lengths = spaced(*size.lengths, size.seen)
    tokens = Tokens(place, 1)
    arguments = place.arguments(dynamic=backend != "pgraph-static")
    apiece = backend == "pgraph-static"

    def function(number: int) -> Call:
        plain = apart(model.forward, number)
        return plain if arguments is None else torch.compile(plain, **arguments)

    one = function(0)
    calls = {length: function(number + 1) if apiece else one for number, length in enumerate(lengths)}
    kept: dict[int, Tensor] = {}
    answer: list[Tensor] = []

    def step(number: int) -> None:
        length = lengths[number % len(lengths)]
        answer.clear()
        place.begin()
        answer.append(calls[length](tokens(number, 1, length)))

    def keep(number: int) -> None:
        kept[number] = on_host(answer[0])

    warm = compiled(place, range(WARM * len(lengths)), step)
    if backend == "replay":
        calls = {n: replayed(place, calls[n], tokens(0, 1, n)) for n in lengths}
        warm["captures_warm"] = len(calls)
    rounds = max(1, size.again // len(lengths))
    count = rounds * len(lengths)
    timed = run(place, count, step, mark=len(lengths), checked=some(count, 4 * size.checked), after=keep)
    issue = iter(range(count))
    issued = place.clock.issue(lambda: step(next(issue)), count)
    found = result(place, timed, 0, warm) | {"cpu_issue_ms": sum(issued) / count, "sizes": len(lengths)}
    if backend == "replay":
        found["captures"] = len(calls)
    answer.clear()
    calls.clear()
    right = expected(place, model)
    for number, mine in kept.items():
        length = lengths[number % len(lengths)]
        place.all_near(f"call {number + 1}, length {length}", [mine], [right(tokens(number, 1, length))])
    return found


# -- training ----------------------------------------------------------------------------------------------


class Training:
    """A model in training, and what some of its steps were given and gave.

    Args:
        lengths: of the steps.
    """

    def __init__(self, place: Place, lengths: Sequence[int]) -> None:
        self.place, self.lengths, self.model = place, lengths, llama(place)
        self.tokens = Tokens(place, place.size.batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=place.on_gpu)
        arguments = place.arguments()
        self.call: Callable[..., Tensor] = self.model.forward
        if arguments is not None:
            self.call = torch.compile(self.model.forward, **arguments)
        self.loss: Tensor | None = None
        self._weights: dict[int, list[Tensor]] = {}
        self._given: dict[int, list[Tensor]] = {}

    def batch(self, number: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens of a step, and those that follow them."""
        rows = self.place.size.batch
        return self.tokens(number, rows, length), self.tokens(number, rows, length, 1)

    def step(self, number: int) -> None:
        """Forward, backward, optimizer; gradients stay until the next step."""
        self.on(number, self.lengths[number])

    def on(self, number: int, length: int) -> None:
        """A step with this length."""
        self.loss = None  # it lies in a pool of `reduce-overhead`, and so do the gradients
        self.optimizer.zero_grad(set_to_none=True)
        self.place.begin()
        loss = self.call(*self.batch(number, length))
        loss.backward()
        self.loss = loss.detach()
        self.optimizer.step()

    def before(self, number: int) -> None:
        """Keep the weights that a step begins with."""
        self._weights[number] = [on_host(p) for p in self.model.parameters()]

    def after(self, number: int) -> None:
        """Keep the loss and the gradients of a step."""
        self._given[number] = [on_host(t) for t in self._found()]

    def _found(self) -> Iterator[Tensor]:
        assert self.loss is not None
        yield self.loss
        for p in self.model.parameters():
            assert p.grad is not None
            yield p.grad

    @torch.no_grad()
    def _put(self, weights: Sequence[Tensor]) -> None:
        for p, weight in zip(self.model.parameters(), weights, strict=True):
            p.copy_(weight)

    def compare(self) -> None:
        """The reference repeats the steps that were looked at (Note [Right against Inductor])."""
        self.loss = None
        self.optimizer.zero_grad(set_to_none=True)
        reset_compiled()
        right = self.place.by_reference(self.model.forward)
        for number, mine in self._given.items():
            self._put(self._weights[number])
            self.optimizer.zero_grad(set_to_none=True)
            loss = right(*self.batch(number, self.lengths[number]))
            loss.backward()
            self.loss = loss.detach()
            self.place.all_near(f"step {number + 1}, length {self.lengths[number]}", mine, self._found())


def lengths_of(place: Place, cudnn: bool) -> Figures:
    """Training on random lengths, from the first new one on.

    Args:
        cudnn: whether attention may be cuDNN's, which plans anew for each length.
    """
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    size = place.size
    count = place.spec.steps or size.steps
    training = Training(place, draw(place.spec.seed, *size.lengths, count))
    # Neither end is 0 or 1, and both are compiled for.
    warm = compiled(place, [size.lengths[1], size.lengths[0]], lambda length: training.on(0, length))
    mark, checked = min(size.mark, count), some(count, size.checked)
    timed = run(
        place,
        count,
        training.step,
        mark=mark,
        checked=checked,
        before=training.before,
        after=training.after,
    )
    found = result(place, timed, 0, warm)
    training.compare()
    return found


def lengths_seen(place: Place) -> Figures:
    """Training on a few lengths, each of them seen often enough before."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    size = place.size
    lengths = spaced(*size.lengths, size.seen)
    chosen = draw(place.spec.seed, 0, len(lengths) - 1, size.again)
    training = Training(place, [lengths[k] for k in chosen])
    warm = compiled(place, lengths * WARM, lambda length: training.on(0, length))
    timed = run(
        place,
        size.again,
        training.step,
        mark=size.mark,
        checked=some(size.again, size.checked),
        before=training.before,
        after=training.after,
    )
    found = result(place, timed, 0, warm) | {"sizes": len(lengths)}
    training.compare()
    return found


# -- memory ------------------------------------------------------------------------------------------------


def settled() -> int:
    """Bytes that this process has in RAM, after what was freed went back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


@torch.no_grad()
def memory(place: Place) -> Figures:
    """What captures of many sizes take, beside that of one.

    All memory counts from after the first call, when code is compiled and libraries are loaded. Kernels that
    a library loads for other sizes count in the device's figures: Inductor's row says how much that is.
    """
    size, model = place.size, llama(place).eval()
    lengths = spaced(*size.lengths, size.kept)
    tokens = Tokens(place, 1)
    # All sizes are to be captured, whether it pays or not.
    arguments = place.arguments(step_aside=False)
    call: Call = model.forward if arguments is None else torch.compile(model.forward, **arguments)

    def once(length: int, number: int = 0) -> Tensor:
        place.begin()
        return call(tokens(number, 1, length))

    def held() -> tuple[int | None, int, int]:
        place.clock.drain()
        reserved = torch.cuda.memory_reserved() if place.on_gpu else 0
        return device_bytes(place.clock), settled(), reserved

    warm = compiled(place, lengths[:1], once)
    seen: list[tuple[tuple[int | None, int, int], Figures]] = [(held(), holdings(place))]
    for chosen in (lengths[:1], lengths[1:]):
        for length in chosen:
            for number in range(WARM):
                once(length, number)
        seen.append((held(), holdings(place)))
    (before, _), (one, of_one), (all_of_them, of_all) = seen
    found = ended(place) | warm | {"recompiles": place.graphs() - warm["graphs"], "sizes": len(lengths)}
    found |= {f"{key}_one": value for key, value in of_one.items()} | of_all
    for name, after in (("_one", one), ("", all_of_them)):
        device, host = after[0], after[1] - before[1]
        found[f"device_mb{name}"] = None if device is None else max(0, device - (before[0] or 0)) / MB
        found[f"host_mb{name}"] = max(0, host) / MB
        found[f"reserved_mb{name}"] = max(0, after[2] - before[2]) / MB if place.on_gpu else None
    nodes = of_all.get("nodes", 0) - of_one.get("nodes", 0)
    if nodes:
        more = all_of_them[1] - one[1]
        found["host_bytes_a_node"] = max(0, more) / nodes
        found["counted_bytes_a_node"] = (of_all["counted_bytes"] - of_one["counted_bytes"]) / nodes
        found["own_bytes_a_node"] = (of_all["own_bytes"] - of_one["own_bytes"]) / nodes
    numbers = {lengths[k]: on_host(once(lengths[k], k)) for k in some(len(lengths), 4 * size.checked)}
    right = expected(place, model)
    for k in some(len(lengths), 4 * size.checked):
        theirs = right(tokens(k, 1, lengths[k]))
        place.all_near(f"length {lengths[k]}", [numbers[lengths[k]]], [theirs])
    return found


def holdings(place: Place) -> Figures:
    """What pgraph's captures take: execs on the device, recipes and what belongs to them on the host."""
    if place.spec.backend != "pgraph":
        return {}
    import pgraph
    from pgraph.runtime import registry

    built = [s.built for p in registry.live_capturable() for s in p.specializations() if s.built is not None]
    report = pgraph.report()
    return {
        "nodes": sum(len(b.template.nodes) for b in built),
        "kept": len(built),
        "execs": len({e for b in built for e in b.execs}),
        "exec_bytes": report.exec_bytes,
        "counted_bytes": report.recipe_bytes,
        "own_bytes": sum(recipe.nbytes for b in built for recipe in b.recipes),
    }


MEASURES: dict[str, Callable[[Place], Figures]] = {
    "serving": serving,
    "lengths": lambda place: lengths_of(place, cudnn=False),
    "lengths-flash": lambda place: lengths_of(place, cudnn=True),
    "lengths-seen": lengths_seen,
    "turns": turns,
    "generate-static": sizes_generate.static,
    "generate-dynamic": sizes_generate.growing,
    "memory": memory,
}


def measure(spec: Spec) -> Figures:
    """All figures of one row."""
    reset_compiled()
    place = Place(spec)
    found = MEASURES[spec.config](place)
    return found | {"max_diff": place.worst, "compared": place.compared}


def main() -> None:
    """Measure what the first argument says; print one JSON line last."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        sys.exit(__doc__)
    spec = Spec(**json.loads(sys.argv[1]))
    if not worker.Device(spec.device).on_gpu:
        torch.set_num_threads(1)  # tiny models: threads that wait for one another are all that would be seen
    figures = measure(spec)
    sys.stdout.flush()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
