"""Training on varying lengths. Not a program: `sizes_worker.py` imports it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from backends import reset_compiled
from sizes_place import Figures, Place, Size, on_host
from sizes_run import Tokens, apart, compiled, draw, ended, llama, result, run, some, spaced
from sizes_turns import OwnTime, in_turns
from torch import Tensor

AGAIN, EARLY = 1, 500  # so many programs before, of so many steps. With 2 it took 290 to 340 s (H200)


class Training:
    """A model in training, and what some of its steps were given and gave.

    Args:
        lengths: of the steps.
        number: of this training in its process.
    """

    def __init__(self, place: Place, lengths: Sequence[int], number: int = 0) -> None:
        self.place, self.lengths, self.model = place, lengths, llama(place)
        self.tokens = Tokens(place, place.size.batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=place.on_gpu)
        arguments = place.arguments()
        self.call: Callable[..., Tensor] = self.model.forward
        if arguments is not None:
            self.call = torch.compile(apart(self.model.forward, number), **arguments)
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
        reset_compiled()
        right = self.place.by_reference(self.model.forward)
        judged = self.place.reference == "eager"
        for number, mine in self._given.items():
            theirs = self._in_float32(number) if judged else self._again(number, right)
            eager = self._again(number, self.model.forward)
            self.place.all_near(f"step {number + 1}, length {self.lengths[number]}", mine, theirs, eager)

    def _in_float32(self, number: int) -> list[Tensor]:
        """What judges the reference: it may be four times as far from this as the uncompiled model is."""
        self.model.float()
        found = self._again(number, self.model.forward)
        self.model.to(self.place.dtype)
        return found

    def _again(self, number: int, call: Callable[..., Tensor]) -> list[Tensor]:
        self.loss = None
        self._put(self._weights[number])
        self.optimizer.zero_grad(set_to_none=True)
        loss = call(*self.batch(number, self.lengths[number]))
        loss.backward()
        self.loss = loss.detach()
        return [on_host(t) for t in self._found()]


def choose_attention(cudnn: bool) -> None:
    """Attention may be cuDNN's, or may not.

    That is decided while AOTAutograd traces, and the key of its cache does not tell it: code that another
    config left there would run its attention, not this one's (the reference ran without cuDNN's, H200).
    """
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.compiler.config.cache_key_tag = f"cuDNN's attention: {cudnn}"


def first_lengths(size: Size) -> list[int]:
    """Those for which all code is compiled: neither end is 0 or 1, attention asks which power of two a length
    is a multiple of, and so does Triton, up to 16.
    """
    low, high = size.lengths
    return [high, low, *(high - less for less in (1, 2, 4, 8) if high - less > low)]


def lengths_of(place: Place, cudnn: bool) -> Figures:
    """Training on random lengths, from the first new one on.

    Args:
        cudnn: whether attention may be cuDNN's, which plans anew for each length.
    """
    choose_attention(cudnn)
    size = place.size
    count = place.spec.steps or size.steps
    training = Training(place, draw(place.spec.seed, *size.lengths, count))
    warm = compiled(place, first_lengths(size), lambda length: training.on(0, length))
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


def lengths_beside(place: Place, cudnn: bool) -> Figures:
    """As `lengths`, and the reference's code for the same steps: ten steps of each in turn, in one process.

    Hosts differ from one minute to the next by more than the two do, and so do processes. The reference has
    run each length before: what libraries set up when they first see one would be lost by whichever of the
    two comes first. And pgraph's clock stands still while the reference runs: what captures may cost is a
    share of the time of pgraph's own program.

    In the first seconds a core that is slow for a moment is all that would be seen. So another program runs
    beforehand that ends after `EARLY` steps (`again`), with nothing captured.

    Args:
        cudnn: see `lengths_of`.
    """
    choose_attention(cudnn)
    size = place.size
    count = place.spec.steps or size.steps
    lengths = draw(place.spec.seed, *size.lengths, count)
    other = Place(dataclasses.replace(place.spec, backend="inductor" if place.on_gpu else "aot_eager"))
    theirs = Training(other, lengths, 1)
    compiled(other, first_lengths(size), lambda length: theirs.on(0, length))
    for length in range(size.lengths[0], size.lengths[1] + 1):
        theirs.on(0, length)
    clock = OwnTime()
    if place.spec.backend == "pgraph":
        clock.tells()
    again: list[Figures] = []
    for number in range(AGAIN):
        shorter = Training(place, lengths, 2 + number)
        compiled(place, first_lengths(size), lambda length, it=shorter: it.on(0, length))
        timed, (beside,) = in_turns(shorter, [theirs], min(EARLY, count), clock)
        again.append({"marks": timed.marks, "totals_ms": timed.totals_ms, "beside_ms": beside})
        del shorter
        place.forget()
    before = ended(place)
    mine = Training(place, lengths)
    warm = compiled(place, first_lengths(size), lambda length: mine.on(0, length))
    timed, (beside,) = in_turns(mine, [theirs], count, clock, some(count, size.checked))
    found = result(place, timed, 0, warm) | {"beside_ms": beside, "again": again}
    for key in ("launches", "uncaptured_runs"):
        found[key] -= before[key]
    mine.compare()
    return found


def lengths_seen(place: Place) -> Figures:
    """Training on a few lengths, each of them seen often enough before."""
    choose_attention(cudnn=False)
    size = place.size
    lengths = spaced(*size.lengths, size.seen)
    chosen = draw(place.spec.seed, 0, len(lengths) - 1, size.again)
    training = Training(place, [lengths[k] for k in chosen])
    warm = compiled(place, lengths * size.warm, lambda length: training.on(0, length))
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
