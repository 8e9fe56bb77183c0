"""Used memory of a GPU as the driver counts it, read without a CUDA context. Not a program."""

from __future__ import annotations

import ctypes
import os

MB = 2**20


def visible() -> list[str]:
    """The GPUs that CUDA would see, as CUDA_VISIBLE_DEVICES would name them; empty where there is no NVML."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    library, count = _nvml(), ctypes.c_uint(0)
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    return [str(index) for index in range(count.value)]


def _nvml() -> ctypes.CDLL | None:
    """The library, ready for use; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class DeviceMemory:
    """Reads one GPU's memory through NVML; answers None where there is no NVML."""

    def __init__(self) -> None:
        self._device = ctypes.c_void_p()
        library = _nvml()
        self._library = library if library is not None and self._find(library) else None

    def _find(self, library: ctypes.CDLL) -> bool:
        """Take the first GPU that CUDA would see."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if visible.isdigit():
            return library.nvmlDeviceGetHandleByIndex_v2(int(visible), ctypes.byref(self._device)) == 0
        return library.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(self._device)) == 0

    def used_mb(self) -> float | None:
        """MB in use on the whole device, by all processes."""
        if self._library is None:
            return None
        memory = _Memory()
        if self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)):
            return None
        return memory.used / MB
