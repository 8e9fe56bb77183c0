"""Choosing a driver. `cuda` is imported only when a CUDA tensor is met."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator

import torch

from pgraph import compat
from pgraph.drivers.interface import Driver
from pgraph.drivers.peak_stats import GhostPeaks
from pgraph.errors import DriverError
from pgraph.reasons import Reason

__all__ = ["Preview", "choose", "ghost_peaks", "previewing", "why_none"]

log = logging.getLogger(__name__)

_drivers: dict[torch.device, Driver] = {}
_lock = threading.Lock()
_noticed = False


@dataclasses.dataclass(slots=True)
class Preview:
    """What is compiled for the CPU now is tried on the host driver, and judged as if it were on CUDA.

    Args:
        graphs: that the host driver got although nobody had asked for it.
    """

    graphs: int = 0


preview: Preview | None = None
"""The one in force."""


@contextlib.contextmanager
def previewing() -> Iterator[Preview]:
    """Preview what is compiled in the block."""
    global preview
    before, preview = preview, Preview()
    try:
        yield preview
    finally:
        preview = before


def choose(wanted: str, gm: torch.fx.GraphModule) -> Driver | None:
    """The driver for a graph; None if the graph runs uncaptured.

    Args:
        wanted: option `driver`.
        gm: an ATen graph with ``meta["val"]``; its tensors' devices decide.

    Raises:
        DriverError: the driver asked for is not available on this machine.
    """
    device = _device_of(gm)
    if wanted == "host":
        return _get(torch.device("cpu")) if device is None or device.type == "cpu" else None
    if device is not None and device.type == "cuda":
        return _get(device) if _other_allocator() is None else None
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DriverError(
            "option driver='cuda' but torch.cuda.is_available() is False; use driver='host' to try pgraph on "
            "a CPU, or 'auto'"
        )
    if preview is not None and wanted == "auto":
        preview.graphs += 1
        return _get(torch.device("cpu"))
    if device is None or device.type == "cpu":
        _notice_once()
    return None


def why_none(wanted: str, gm: torch.fx.GraphModule) -> Reason:
    """Why a graph for which `choose` finds no driver runs uncaptured."""
    device = _device_of(gm) or torch.device("cpu")
    if device.type == "cpu":
        return Reason("no-device", "the graph's tensors are on the CPU, where there is nothing to capture")
    if device.type == "cuda" and wanted != "host" and (reason := _other_allocator()) is not None:
        return reason
    if device.type == "cuda":
        sentence = (
            f"the graph's tensors are on {device}, and option driver={wanted!r} captures the CPU's only"
        )
        return Reason("no-device", sentence, "leave the option driver out, or have it be 'cuda'")
    sentence = f"the graph's tensors are on the device {device}, which pgraph does not capture"
    return Reason("no-device", sentence, "move the model and its inputs to CUDA")


def _other_allocator() -> Reason | None:
    """Why no graph on a CUDA device is captured: ghosts take PyTorch's own allocator, and its pools."""
    name = torch.cuda.get_allocator_backend()
    if name == "cudaMallocAsync":
        fix = "leave backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF"
    elif name != "native":
        fix = "leave torch.cuda.memory.change_current_allocator out"
    elif not compat.caches_memory():
        name = "CUDA, each time anew"
        fix = f"unset {compat.UNCACHED}, whatever its value, or call torch.cuda.caching_allocator_enable()"
    else:
        return None
    sentence = f"memory comes from {name}, so that a capture cannot tell what ops allocate"
    return Reason("other-allocator", sentence, fix)


def _device_of(gm: torch.fx.GraphModule) -> torch.device | None:
    """The first CUDA device met, else the CPU if there is any tensor at all."""
    found: torch.device | None = None
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, list | tuple) else (value,):
            if isinstance(leaf, torch.Tensor):
                if leaf.device.type == "cuda":
                    return leaf.device if leaf.device.index is not None else torch.device("cuda", 0)
                found = found or leaf.device
    return found


def _get(device: torch.device) -> Driver:
    with _lock:
        if device not in _drivers:
            if device.type == "cuda":
                from pgraph.drivers.cuda.driver import CudaDriver

                _drivers[device] = CudaDriver(device.index)
            else:
                from pgraph.drivers.host.driver import HostDriver

                _drivers[device] = HostDriver()
        return _drivers[device]


def _notice_once() -> None:
    global _noticed
    if not _noticed:
        _noticed = True
        log.warning(
            "pgraph has nothing to capture for CPU tensors: they run uncaptured "
            "(options={'driver': 'host'} tries the mechanism on the CPU)"
        )


def ghost_peaks() -> tuple[GhostPeaks, ...]:
    """What captures may have added to the peak statistics, for the devices where they have."""
    with _lock:
        found = [driver.ghost_peaks() for driver in _drivers.values()]
    return tuple(peaks for peaks in found if peaks is not None)
