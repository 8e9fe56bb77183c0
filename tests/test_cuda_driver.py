"""The CUDA driver over stand-ins for the driver's functions and for PyTorch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pgraph.errors import DriverError

cuda = pytest.importorskip("pgraph.drivers.cuda.driver", reason="needs cuda-bindings")

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
