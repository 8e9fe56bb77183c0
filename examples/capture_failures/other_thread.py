"""Another thread calls CUDA while this one captures.

`torch.cuda.graph` captures in the mode "global": until the capture ends, a watchdog that polls an event,
a loader that allocates or pins memory, any thread that makes such a call gets error 900, and the capture
is lost with it. The mode "thread_local" forbids these calls to the capturing thread alone; pgraph
captures in that mode, and for milliseconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import CAPTURED, Entry, Trial, main
from torch import Tensor


def program(x: Tensor) -> Tensor:
    return (x @ x.t()).softmax(-1).sum(0)


@contextlib.contextmanager
def watchdog(device: torch.device) -> Iterator[list[str]]:
    """A thread that polls an event all the time, as those of communication libraries do."""
    errors: list[str] = []
    done = threading.Event()
    event = torch.cuda.Event() if device.type == "cuda" else None
    if event is not None:
        event.record()

    def poll() -> None:
        while not done.wait(0.0005):
            try:
                if event is not None:
                    event.query()
            except RuntimeError as e:
                errors.append(str(e).splitlines()[0])
                return

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield errors
    finally:
        done.set()
        thread.join()


def start(device: torch.device) -> Trial:
    def step(run: Callable[..., Any], number: int) -> list[Tensor]:
        x = torch.randn(64, 64, device=device)
        with watchdog(device) as errors:
            result = run(x)
        if errors:
            raise RuntimeError(f"the watchdog's thread: {errors[0]}")
        return [result]

    return Trial(program, step)


def plain() -> None:
    x = torch.randn(64, 64, device="cuda")
    program(x)
    event = torch.cuda.Event()
    event.record()

    def poll() -> None:
        try:
            event.query()
            torch.empty(48 << 20, device="cuda")  # a loader's allocation
        except RuntimeError as e:
            print("the other thread:", str(e).splitlines()[0])

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        program(x)
        other = threading.Thread(target=poll)
        other.start()
        other.join()


ENTRY = Entry(
    symptom="error 900 in a thread that captures nothing (a watchdog, a loader), and the capture is lost",
    cause='the capture mode "global" forbids certain calls to every thread',
    fix='capture with `capture_error_mode="thread_local"`; with pgraph, nothing',
    shows=r"the other thread: .*operation not permitted when stream is capturing",
    plain=plain,
    program=start,
    fixed=start,
    on_gpu=CAPTURED,
    on_cpu=CAPTURED,
    why_captured="pgraph captures in thread-local mode: other threads are not its business.",
)

if __name__ == "__main__":
    main(ENTRY)
