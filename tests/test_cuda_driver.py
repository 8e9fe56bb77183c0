"""The CUDA driver over stand-ins for the driver's functions and for PyTorch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pgraph.drivers.interface import HiddenAllocation
from pgraph.errors import DriverError

cuda = pytest.importorskip("pgraph.drivers.cuda.driver", reason="needs cuda-bindings")
cuda_ghost = pytest.importorskip("pgraph.drivers.cuda.ghost", reason="needs cuda-bindings")

SUCCESS, FAILURE = cuda.cu.CUresult.CUDA_SUCCESS, cuda.cu.CUresult.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("code", [SUCCESS, FAILURE])
def test_a_capture_that_cannot_be_counted_is_ended(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was begun: nobody else would end it, and the thread could allocate nothing from then on."""
    done: list[str] = []

    def told(name: str, *values: Any) -> None:
        def function(*_: Any) -> tuple[Any, ...]:
            done.append(name)
            return values

        monkeypatch.setattr(cuda.cu, name, function)

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    told("cuStreamBeginCapture", SUCCESS)
    told("cuStreamGetCaptureInfo", code, 1, 1, 9)
    told("cuStreamEndCapture", SUCCESS, 9)
    told("cuGraphDestroy", SUCCESS)
    monkeypatch.setattr(cuda.cu, "cuGetErrorString", lambda error: (SUCCESS, b"no"))
    monkeypatch.setattr(cuda, "NodeCount", fails)
    monkeypatch.setattr(cuda.workspaces, "drop", lambda *_: done.append("drop"))
    stream = SimpleNamespace(cuda_stream=5)
    with pytest.raises(KeyboardInterrupt if code == SUCCESS else DriverError):
        cuda.CudaSession(None, stream, None, False, cuda.Counting())
    assert done[-3:] == ["cuStreamEndCapture", "cuGraphDestroy", "drop"]


class Devices:
    """Two devices as PyTorch shows them.

    Attributes:
        capturing: those whose current stream is captured.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.capturing = 0, set[int]()
        patch.setattr(torch.cuda, "device", self.device)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current in self.capturing)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: self.current, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before


def test_a_library_is_asked_on_the_drivers_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is current: its handles and workspaces are each device's own."""
    devices, asked = Devices(monkeypatch), []
    monkeypatch.setattr(
        cuda.workspaces, "lends", lambda *given: asked.append((devices.current, *given)) or True
    )
    assert cuda.CudaDriver(1).lends_workspace(4096)
    assert asked == [(1, 71, 4096)]
    assert devices.current == 0


@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_of_either_device_is_seen(capturing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches go to the stream that is current on the driver's device, whichever is current."""
    devices = Devices(monkeypatch)
    driver = cuda.CudaDriver(1)
    assert not driver.is_capturing()
    devices.capturing.add(capturing)
    assert driver.is_capturing()
    assert devices.current == 0


def test_what_the_log_says_of_earlier_arenas_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own log goes back further than a capture, and addresses come again after many of them."""
    log: list[dict[str, Any]] = []

    def note(time: int, action: str, address: int, size: int = 0) -> None:
        log.append({"time_us": time, "action": action, "addr": address, "size": size})

    monkeypatch.setattr(cuda_ghost.snapshot, "log", lambda device, pool=None: log)
    assert cuda_ghost.last_logged(0) == -1
    note(5, "alloc", 1000, 4096)
    note(6, "alloc", 1200, 64)
    note(7, "free_requested", 1000)
    note(7, "free_requested", 1200)
    arena = SimpleNamespace(low=1000, high=2000, segments=1, device=torch.device("cuda", 0), stream=7)
    arena.since = cuda_ghost.last_logged(0)
    note(9, "alloc", 1000, 512)
    assert cuda_ghost.read_trace(arena, (0, 7)) == [HiddenAllocation(1000, 512, False)]


def test_a_log_that_tells_of_want_of_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an entry has no address. It may be the program's own, from long before."""
    log = [
        {"action": "oom", "device_free": 4096, "size": 1 << 40},
        {"action": "alloc", "addr": 1000, "size": 64},
    ]
    monkeypatch.setattr(cuda_ghost.snapshot, "log", lambda device, pool=None: log)
    arena = SimpleNamespace(low=1000, high=2000, segments=1, device=torch.device("cuda", 0))
    arena.since, arena.stream = -1, 7
    assert cuda_ghost.read_trace(arena, (0, 7)) == [HiddenAllocation(1000, 64, False)]


@pytest.mark.parametrize("entry", [{}, {"stream": 6}, {"time_us": 3}, {"action": "free_requested"}])
def test_memory_of_a_pool_of_the_programs_own_is_no_ghost(
    entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured op was given it, and each launch would write there. Other streams may have some."""
    arena = SimpleNamespace(low=1000, high=2000, segments=1, device=torch.device("cuda", 0))
    arena.since, arena.stream, dropped = 5, 7, list[Any]()
    log = [
        {"time_us": 8, "stream": 7, "action": "alloc", "addr": 1000, "size": 64},
        {"time_us": 9, "stream": 7, "action": "alloc", "addr": 9000, "size": 512, **entry},
    ]
    monkeypatch.setattr(cuda_ghost.snapshot, "log", lambda device, pool=None: log)
    monkeypatch.setattr(cuda.workspaces, "drop", lambda *given: dropped.append(given))
    session = object.__new__(cuda.CudaSession)
    session.arena, session._stream, session._shared_history = arena, SimpleNamespace(cuda_stream=7), True
    session._pools = SimpleNamespace(latest=(0, 7))
    if not entry:
        with pytest.raises(DriverError, match="512 bytes came from elsewhere"):
            session._read_hidden()
    else:
        assert [h.address for h in session._read_hidden()] == [1000]
    assert dropped == [(7, arena)]
