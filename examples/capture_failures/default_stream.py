"""A library launches on the legacy default stream, whatever stream is current.

That stream waits for every blocking stream, so it cannot be used while one of those is captured (error
906). If the capture runs on a stream that does not block, as PyTorch's are, there is no error at all:
the kernel runs once, at capture, and is in no graph. pgraph sees that the op has a result and left no
node. The op has to launch on the current stream.
"""

from __future__ import annotations

import torch
from _harness import UNSHOWN, Entry, calls, main
from torch import Tensor


@torch.library.custom_op("capture_failures::doubled_on_default_stream", mutates_args=())
def doubled_on_default_stream(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    if x.is_cuda:
        with torch.cuda.stream(torch.cuda.default_stream(x.device)):
            torch.mul(x, 2, out=y)
    return y if x.is_cuda else x * 2


@torch.library.custom_op("capture_failures::doubled_on_current_stream", mutates_args=())
def doubled_on_current_stream(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.mul(x, 2, out=y)
    return y


@doubled_on_default_stream.register_fake
@doubled_on_current_stream.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def program(x: Tensor) -> Tensor:
    return doubled_on_default_stream(x + 1).cos()


def fixed(x: Tensor) -> Tensor:
    return doubled_on_current_stream(x + 1).cos()


def inputs(device: torch.device) -> tuple[Tensor]:
    return (torch.randn(64, 64, device=device),)


def plain() -> None:
    from cuda.bindings import runtime

    x = torch.randn(64, 64, device="cuda")
    program(x)
    # Other libraries' streams block, as CUDA's do unless asked not to.
    error, raw = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamDefault)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"no stream: {error}")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.ExternalStream(int(raw))):
        program(x)


ENTRY = Entry(
    symptom="error 906, the legacy stream would depend on a capturing blocking stream",
    cause="a kernel is launched on the default stream instead of the current one",
    fix="launch on `torch.cuda.current_stream()`",
    shows=r"would make the legacy stream depend on a capturing blocking stream",
    plain=plain,
    program=calls(program, inputs),
    fixed=calls(fixed, inputs),
    on_gpu="not-recorded",
    on_cpu=UNSHOWN,
)

if __name__ == "__main__":
    main(ENTRY)
