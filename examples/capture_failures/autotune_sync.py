"""A kernel is tuned the first time it runs, and the first time is in the capture.

Triton's autotuner times its candidates, and to read a clock the host waits for the device: error 900.
Whoever warms up first does not see it. pgraph runs every partition uncaptured before it captures it (option
`warmup`), and again for each new set of shapes, so the tuner has done its work.
"""

import torch
from _harness import CAPTURED, Entry, calls, main
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

if triton is not None:

    @triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["n"])
    @triton.jit
    def scale_kernel(x, y, n, BLOCK: tl.constexpr):  # noqa: N803 - Triton's way
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@torch.library.custom_op("capture_failures::tuned_double", mutates_args=())
def tuned_double(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x * 2
    y = torch.empty_like(x)
    scale_kernel[lambda config: (triton.cdiv(x.numel(), config["BLOCK"]),)](x, y, x.numel())
    return y


@tuned_double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def program(x: Tensor) -> Tensor:
    return tuned_double(x.sin()).cos()


def inputs(device: torch.device) -> tuple[Tensor]:
    return (torch.randn(64, 64, device=device),)


def plain() -> None:
    x = torch.randn(64, 64, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        program(x)


ENTRY = Entry(
    symptom="error 900 from inside a tuner (`triton.autotune`)",
    cause="the tuner waits for the device to time its candidates",
    fix="run once before the capture; with pgraph, nothing",
    shows=r"operation not permitted when stream is capturing",
    plain=plain,
    program=calls(program, inputs),
    fixed=calls(program, inputs),
    on_gpu=CAPTURED,
    on_cpu=CAPTURED,
    why_captured="Every part runs uncaptured before it is captured, and then the tuner has chosen.",
)

if __name__ == "__main__":
    main(ENTRY)
