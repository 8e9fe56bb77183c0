"""Inside the capture, the stream waits for work that began before the capture.

A recording must stand by itself: it cannot depend on an event that another stream recorded outside of
it (error 905). Typical: a layer waits for the upload of its weights. The wait belongs before the
captured part: the launch is ordered behind it like any other work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _harness import UNSHOWN, Entry, Trial, main, record
from torch import Tensor


@functools.cache
def loader() -> tuple[torch.cuda.Stream, torch.cuda.Event]:
    """The stream that uploads, and the event that it records when it is done."""
    return torch.cuda.Stream(), torch.cuda.Event()


@torch.library.custom_op("capture_failures::doubled_when_loaded", mutates_args=())
def doubled_when_loaded(x: Tensor) -> Tensor:
    if x.is_cuda:
        torch.cuda.current_stream().wait_event(loader()[1])
    return x * 2


@doubled_when_loaded.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def program(x: Tensor) -> Tensor:
    return doubled_when_loaded(x.sin()).cos()


def fixed(x: Tensor) -> Tensor:
    return (x.sin() * 2).cos()


def upload(device: torch.device) -> Tensor:
    """A batch, written by the loader's stream."""
    if device.type == "cpu":
        return torch.randn(64, 64)
    stream, event = loader()
    x = torch.empty(64, 64, device=device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.normal_()
        event.record()
    # `x.sin()` reads it already, so the caller waits as well: the wait in the layer is one too many.
    torch.cuda.current_stream().wait_event(event)
    return x


def start(fn: Callable[..., Any], device: torch.device) -> Trial:
    return Trial(fn, lambda run, number: [run(upload(device))])


def plain() -> None:
    record(program, upload(torch.device("cuda")))


ENTRY = Entry(
    symptom="error 905, dependency created on uncaptured work in another stream",
    cause="the captured stream waits for an event that was recorded before the capture",
    fix="wait before the captured part",
    shows=r"dependency created on uncaptured work in another stream",
    plain=plain,
    program=functools.partial(start, program),
    fixed=functools.partial(start, fixed),
    on_gpu="capture-failed",
    on_cpu=UNSHOWN,
)

if __name__ == "__main__":
    main(ENTRY)
