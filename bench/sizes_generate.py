"""transformers' `generate()` with prompts of many lengths. Not a program: `sizes_worker.py` imports it.

With a static cache `generate()` itself compiles decoding steps, all of one size; what prompts of many lengths
change is the prefill, which it runs uncompiled. With a `DynamicCache` the whole forward is compiled here, and
every token is another size: hundreds of them, each of which comes once in a request. pgraph captures them
within a minute or two, since it spends no more than a hundredth of the program's time on what may not come
again. What is timed is what a server does after that (`settle`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import uses_worker
from backends import reset_compiled
from language_model import language_model
from sizes_place import Figures, Place, on_host
from sizes_run import draw, ended, some

Request = Callable[..., Any]
LAUNCHED = 0.95  # of the tokens of a request, when captures have settled
SETTLE_S = 150.0  # after which it is timed in any case


def model_of(place: Place) -> Any:
    """The language model."""
    size = place.size
    return language_model(place, size.blocks, size.prompts[1] + size.new, place.spec.seed)


def request(model: Any, ids: torch.Tensor, new: int, **arguments: Any) -> Any:
    """Greedy tokens for one prompt."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        **arguments,
    )


def settings(place: Place, backend: str) -> dict[str, Any]:
    """Have `generate()` compile its decoding steps by a backend."""
    from transformers import CompileConfig

    if backend == "eager":
        return {"disable_compile": True}
    known: dict[str, dict[str, Any]] = {
        "aot_eager": {"backend": "aot_eager", "mode": None},
        "inductor": {"backend": "inductor", "mode": "default"},
        "reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
    }
    if backend == "pgraph":
        chosen = place.compile_arguments()
        assert chosen is not None
        known["pgraph"] = {"backend": "pgraph", "mode": None, "options": chosen["options"]}
    config = CompileConfig(**known[backend])
    config._compile_all_devices = True
    return {"compile_config": config}


def static(place: Place) -> Figures:
    """A static cache, as large as the longest prompt needs."""
    model = model_of(place)
    mine = {"cache_implementation": "static", **settings(place, place.spec.backend)}
    return measured(place, model, mine, lambda: {"cache_implementation": "static", "disable_compile": True})


def growing(place: Place) -> Figures:
    """A `DynamicCache`, the whole forward compiled."""
    model = model_of(place)
    plain, arguments = model.forward, place.arguments()
    if arguments is not None:
        model.forward = torch.compile(plain, **arguments)

    def reference() -> dict[str, Any]:
        model.forward = plain
        return {"disable_compile": True}

    return measured(place, model, {"disable_compile": True}, reference, settle)


def settle(place: Place, ask: Callable[[int], Any]) -> None:
    """Requests until pgraph launches nearly every token, of a short prompt's and of a long one's, and makes
    no more execs: a size that is launched often gets some of its own.

    Args:
        ask: a request with a prompt of so many tokens.
    """
    if place.spec.backend != "pgraph":
        return
    import pgraph

    def launched(length: int) -> bool:
        before = pgraph.report().launches
        ask(length)
        return pgraph.report().launches - before >= LAUNCHED * (place.size.new - 1)

    low, high = place.size.prompts
    ends, lengths = time.monotonic() + SETTLE_S, random.Random(place.spec.seed + 2)
    while time.monotonic() < ends:
        execs = pgraph.report().exec_bytes
        each = lengths.randint(low, high), low, high
        if all(map(launched, each)) and pgraph.report().exec_bytes == execs:
            break


class Marks:
    """Asked by `generate()` after each token whether it is to stop: notes when that was, and says no."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._place.clock.drain()
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


@torch.no_grad()
def measured(
    place: Place,
    model: Any,
    mine: dict[str, Any],
    reference: Callable[[], dict[str, Any]],
    settled: Callable[[Place, Callable[[int], Any]], None] = lambda place, ask: None,
) -> Figures:
    """Requests with prompts of random lengths; ms of a token after the first, and of the first (`first_ms`).

    Args:
        mine: how to generate by the backend.
        reference: how to generate uncompiled, after all compiled code is gone.
        settled: makes further requests before any is timed.
    """
    size = place.size
    low, high = size.prompts
    lengths = draw(place.spec.seed, low, high, size.requests)
    generator = torch.Generator().manual_seed(place.spec.seed + 1)

    def prompt(length: int) -> torch.Tensor:
        return torch.randint(1, size.vocabulary, (1, length), generator=generator).to(place.device)

    prompts = [prompt(n) for n in (high, low, *lengths)]
    began = time.perf_counter()
    for ids in (*prompts[:2], prompts[0]):
        request(model, ids, size.new, **mine)
    settled(place, lambda length: request(model, prompt(length), size.new, **mine))
    place.clock.drain()
    took, before, warm = time.perf_counter() - began, place.graphs(), place.recordings()
    place.clock.reset_peak()
    tokens, firsts, totals = [], [], [0.0]
    for ids in prompts[2:]:
        marks, asked = Marks(place), time.perf_counter()
        request(model, ids, size.new, stopping_criteria=[marks], **mine)
        first, last = marks.times[0], marks.times[-1]
        firsts.append((first - asked) * 1e3)
        tokens.append((last - first) * 1e3 / (size.new - 1))
        totals.append(totals[-1] + (last - asked) * 1e3)
    found = {
        **uses_worker.spread(tokens),
        "first_ms": statistics.median(firsts),
        "total_ms": totals[-1],
        "steps": size.requests * size.new,
        "marks": [size.new * (k + 1) for k in range(size.requests)],
        "totals_ms": totals[1:],
        "compile_s": took,
        "captures_warm": warm,
        "recompiles": place.graphs() - before,
    }
    said = {"return_dict_in_generate": True, "output_logits": True}
    looked_at = [prompts[2 + k] for k in sorted(some(size.requests, size.checked))]
    answers = [kept(request(model, ids, size.new, **mine, **said)) for ids in looked_at]
    found |= ended(place)
    reset_compiled()
    theirs = reference()
    for ids, answer in zip(looked_at, answers, strict=True):
        right = kept(request(model, ids, size.new, **theirs, **said))
        uses_worker.agreement(place, answer, right, ids.shape[1])
    return found


def kept(answer: Any) -> Any:
    """Tokens and logits of a request, out of reach of whatever runs next."""
    answer.sequences = on_host(answer.sequences)
    answer.logits = tuple(on_host(logits) for logits in answer.logits)
    return answer
