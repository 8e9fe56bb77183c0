"""The tensor that a graph was captured on is freed.

A graph keeps addresses, not tensors. When the input, or a library's workspace, goes back to the driver,
the next replay reads memory that is nobody's: an illegal memory access, some kernels later. When it goes
to another tensor instead, there is no error and the numbers are wrong. pgraph keeps no address: each
launch gets those of the tensors that it is given.
"""

from __future__ import annotations

import torch
from _harness import CAPTURED, Entry, calls, main, record
from torch import Tensor


def program(x: Tensor) -> Tensor:
    return (x * 2).sin().sum(-1)


def inputs(device: torch.device) -> tuple[Tensor]:
    """Fresh memory in each step; the last step's is free by then."""
    return (torch.randn(64, 64, device=device),)


def plain() -> None:
    x = torch.ones(8192, 4096, device="cuda")  # large enough for a segment of its own
    graph, y = record(program, x)
    del x
    torch.cuda.empty_cache()
    graph.replay()
    torch.cuda.synchronize()
    print("no error, the first result is", y[0].item())


ENTRY = Entry(
    symptom="an illegal memory access at a replay, or wrong numbers",
    cause="an input or a workspace that the graph knows by address was freed",
    fix="keep it alive for as long as the graph; with pgraph, nothing",
    shows=r"illegal memory access",
    plain=plain,
    program=calls(program, inputs),
    fixed=calls(program, inputs),
    on_gpu=CAPTURED,
    on_cpu=CAPTURED,
    why_captured="Each launch gets the addresses of today's tensors; none is kept.",
)

if __name__ == "__main__":
    main(ENTRY)
