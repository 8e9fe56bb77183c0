"""One measurement of `sizes.py` in one process: settings from the command line, JSON on the last line.

    python bench/sizes_worker.py '{"config": "serving", "backend": "pgraph", "size": "tiny", "device": "cpu"}'

Lengths in turn and memory are here; servers, training and generated text have files of their own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tracemalloc
from collections.abc import Callable, Sequence

import _paths  # noqa: F401  (puts examples/ on sys.path)
import sizes_generate
import torch
import worker
from backends import reset_compiled
from claims import device_bytes, resident_bytes
from sizes_place import Figures, Place, Spec, on_host
from sizes_run import Call, Tokens, apart, compiled, ended, expected, llama, result, run, some, spaced
from sizes_serving import serving, serving_beside
from sizes_training import lengths_beside, lengths_of, lengths_seen
from torch import Tensor

MB = worker.MB
CALLS = 4  # of each size whose memory is measured: one uncaptured, a capture, launches


# -- inference: lengths in turn ----------------------------------------------------------------------------


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

    warm = compiled(place, range(size.warm * len(lengths)), step)
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

    def called(chosen: Sequence[int]) -> None:
        for length in chosen:
            for number in range(CALLS):
                once(length, number)

    seen: list[tuple[tuple[int | None, int, int], Figures]] = [(held(), holdings(place))]
    for chosen in (lengths[:1], lengths[1:]):
        called(chosen)
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
        found["traced_bytes_a_node"] = traced(place, lambda: called(lengths[:1]), lambda: called(lengths[1:]))
    numbers = {lengths[k]: on_host(once(lengths[k], k)) for k in some(len(lengths), 4 * size.checked)}
    right = expected(place, model)
    for k in some(len(lengths), 4 * size.checked):
        theirs = right(tokens(k, 1, lengths[k]))
        place.all_near(f"length {lengths[k]}", [numbers[lengths[k]]], [theirs])
    return found


def traced(place: Place, one: Callable[[], None], others: Callable[[], None]) -> float:
    """Bytes that further sizes take for each node, of those that Python allocates, all captured anew.

    A process grows by more: libraries keep plans for each size, whoever runs them.

    Args:
        one, others: call a size, and all others.
    """
    place.forget()
    one()
    nodes = holdings(place)["nodes"]
    gc.collect()
    tracemalloc.start()
    try:
        others()
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return taken / (holdings(place)["nodes"] - nodes)


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
    "serving-beside": serving_beside,
    "lengths": lambda place: lengths_of(place, cudnn=False),
    "lengths-flash": lambda place: lengths_of(place, cudnn=True),
    "lengths-beside": lambda place: lengths_beside(place, cudnn=False),
    "lengths-flash-beside": lambda place: lengths_beside(place, cudnn=True),
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
    with torch._dynamo.config.patch(specialize_float=True):
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
