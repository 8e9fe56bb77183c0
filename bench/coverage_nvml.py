"""Used memory of a GPU as the driver counts it, read without a CUDA context. Not a program."""

from __future__ import annotations

import ctypes
import os

MB = 2**20


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class DeviceMemory:
    """Reads one GPU's memory through NVML; answers None where there is no NVML."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._device = ctypes.c_void_p()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if library.nvmlInit_v2() == 0 and self._find(library):
            self._library = library

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
