"""A server of random batches. Not a program: `sizes_worker.py` imports it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from sizes_place import Figures, Place, on_host
from sizes_run import Call, Tokens, apart, compiled, draw, expected, llama, result, run, some
from sizes_turns import OwnTime, in_turns
from torch import Tensor


class Server:
    """A compiled model that answers one request before the next one comes, and some of its answers.

    Args:
        batches: of the requests.
        number: of this server in its process.
    """

    def __init__(self, place: Place, batches: Sequence[int], number: int = 0) -> None:
        self.place, self.batches = place, batches
        self.model = llama(place).eval()
        self.tokens = Tokens(place, place.size.batches[1])
        arguments = place.arguments()
        self.call: Call = self.model.forward
        if arguments is not None:
            self.call = torch.compile(apart(self.model.forward, number), **arguments)
        self.answer: Tensor | None = None
        self._kept: dict[int, Tensor] = {}

    def warm(self) -> Figures:
        """Compile. A batch of one is compiled by itself: Dynamo takes sizes of 0 and 1 for constants."""
        low, high = self.place.size.batches
        return compiled(self.place, [high, low], lambda batch: self._ask(0, batch))

    def step(self, number: int) -> None:
        """Answer a request."""
        self._ask(number, self.batches[number])

    def _ask(self, number: int, batch: int) -> None:
        self.answer = None
        self.place.begin()
        self.answer = self.call(self.tokens(number, batch, self.place.size.tokens))

    def before(self, number: int) -> None:
        """Nothing is kept of how things were."""

    def after(self, number: int) -> None:
        """Keep an answer."""
        assert self.answer is not None
        self._kept[number] = on_host(self.answer)

    def compare(self) -> None:
        """The reference answers the same; whatever was compiled is gone after this."""
        right = expected(self.place, self.model)
        for number, mine in self._kept.items():
            theirs = right(self.tokens(number, self.batches[number], self.place.size.tokens))
            self.place.all_near(f"call {number + 1}, batch {self.batches[number]}", [mine], [theirs])


def requests(place: Place) -> tuple[list[int], int, set[int]]:
    """Batches; how many requests count as the first half; those whose answers are compared."""
    size = place.size
    count = place.spec.calls or size.calls
    batches = draw(place.spec.seed, *size.batches, count)
    return batches, count // 2 // size.mark * size.mark, some(count, 4 * size.checked)


@torch.no_grad()
def serving(place: Place) -> Figures:
    """Requests of random batches, each answered before the next one comes."""
    batches, early, checked = requests(place)
    server = Server(place, batches)
    warm, mark = server.warm(), place.size.mark
    timed = run(place, len(batches), server.step, mark=mark, checked=checked, after=server.after, waits=True)
    found = result(place, timed, early, warm)
    server.compare()
    return found


@torch.no_grad()
def serving_beside(place: Place) -> Figures:
    """As `serving`, and Inductor's code and CUDAGraph Trees' answer the same requests, some of each in turn.

    What libraries set up when they first see a batch is set up by whoever meets it first. So the first half
    says little here, and the second half all.
    """
    batches, early, checked = requests(place)
    names = ["inductor", "reduce-overhead"] if place.on_gpu else ["aot_eager", "eager"]
    places = [Place(dataclasses.replace(place.spec, backend=name)) for name in names]
    others = [Server(other, batches, number) for number, other in enumerate(places, 1)]
    for other in others:
        other.warm()
    clock = OwnTime()
    if place.spec.backend == "pgraph":
        clock.tells()
    server = Server(place, batches)
    warm = server.warm()
    timed, (beside, trees) = in_turns(server, others, len(batches), clock, checked, waits=True)
    found = result(place, timed, early, warm) | {"beside_ms": beside, "trees_ms": trees}
    server.compare()
    return found
