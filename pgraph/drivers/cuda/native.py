"""The functions that a launch in C calls on a CUDA device."""

from __future__ import annotations

import ctypes
import functools
import logging
import pathlib

import torch

from pgraph.drivers.cuda import workspaces
from pgraph.drivers.cuda.nodes import succeeded
from pgraph.drivers.native_calls import NativeCalls
from pgraph.native.libraries import address_of

__all__ = ["native_calls"]

log = logging.getLogger(__name__)


def native_calls(index: int) -> NativeCalls | None:
    """What a launch in C needs; None where this torch lacks the shims (they came with 2.10)."""
    found = _addresses()
    if found is None:
        return None
    alloc, free, capturing = found
    return NativeCalls(
        empty=torch._C._dynamo.guards._empty_strided_cuda,  # type: ignore[attr-defined]  # no stub
        current_stream=torch._C._cuda_getCurrentRawStream,
        current_device=torch._C._cuda_getDevice,
        index=index,
        raw_alloc=alloc,
        raw_free=free,
        capturing=capturing,
        failed=_launch_failed,
        workspace=workspaces.address_of_current(),
        no_workspace=workspaces.no_memory,
        made_on=index,
    )


@functools.cache  # to look for them takes as long as to read a program
def _addresses() -> tuple[int, int, int] | None:
    """Of the functions that allocate, free, and say whether a stream is being captured."""
    try:
        torch_cuda = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        alloc = torch_cuda.aoti_torch_cuda_caching_allocator_raw_alloc
        free = torch_cuda.aoti_torch_cuda_caching_allocator_raw_delete
        capturing = ctypes.CDLL("libcuda.so.1").cuStreamIsCapturing
    except (OSError, AttributeError) as e:
        log.info("no launches in C: %s", e)
        return None
    return address_of(alloc), address_of(free), address_of(capturing)


def _launch_failed(code: int) -> None:
    succeeded(code)
