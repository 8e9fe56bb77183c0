"""Failures put between pgraph's CUDA driver and CUDA: driver calls that return an error, failing allocations.

The calls before the failing one are real, and so is all cleaning up.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch

from pgraph.capture import build
from pgraph.errors import DriverError, PlanError
from pgraph.native import libraries

Kind = Literal["memory", "device"]


@dataclasses.dataclass
class Fault:
    """One way to fail, and how often it did.

    Args:
        kind: memory has run out, or something else is wrong.
        left: how often to fail from now on.
    """

    kind: Kind
    left: int = 1_000_000
    hits: int = 0

    def strikes(self) -> bool:
        """Count a visit; whether it fails."""
        if self.left <= 0:
            return False
        self.left -= 1
        self.hits += 1
        return True

    def error(self) -> Exception:
        """What libraries raise."""
        if self.kind == "memory":
            return torch.OutOfMemoryError("injected: no memory")
        return RuntimeError("injected: CUDA error: unspecified launch failure")

    def code(self) -> Any:
        """What the driver API returns."""
        from cuda.bindings import driver as cu

        memory = self.kind == "memory"
        return cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY if memory else cu.CUresult.CUDA_ERROR_UNKNOWN


class _Api:
    """The driver API with some functions replaced."""

    def __init__(self, real: Any, replaced: dict[str, Callable[..., Any]]) -> None:
        self._real, self._replaced = real, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._real, name)


def _call(patch: pytest.MonkeyPatch, module: Any, name: str, strikes: Callable[[], Any]) -> None:
    """Have a driver call return an error, if `strikes` gives one, in place of being made."""
    real = getattr(module.cu, name)

    def call(*args: Any) -> Any:
        code = strikes()
        return real(*args) if code is None else (code, None)

    patch.setattr(module, "cu", _Api(module.cu, {name: call}))


def _second(fault: Fault, second: bool) -> Callable[[], bool]:
    """Whether it is the turn of the first or the second of two captures, and the fault strikes.

    A first capture that fails is followed by no second one.
    """
    visits = [0]

    def strikes() -> bool:
        visits[0] += 1
        if second and visits[0] % 2 == 1:
            return False
        return fault.strikes()

    return strikes


def _capture_steps(patch: pytest.MonkeyPatch, step: str, fault: Fault, second: bool) -> None:
    from pgraph.drivers.cuda import session

    strikes = _second(fault, second)
    if step == "begin":
        _call(patch, session, "cuStreamBeginCapture", lambda: fault.code() if strikes() else None)
    elif step == "end":
        real = session.cu.cuStreamEndCapture
        destroy = session.cu.cuGraphDestroy

        def end(stream: Any) -> Any:
            error, graph = real(stream)
            if not strikes():
                return error, graph
            destroy(graph)
            return fault.code(), None

        patch.setattr(session, "cu", _Api(session.cu, {"cuStreamEndCapture": end}))
    else:
        run = session.CudaSession.run_op

        def run_op(self: Any, *rest: Any) -> Any:
            result = run(self, *rest)  # the failing op has recorded and allocated already
            if not hasattr(self, "visited"):
                self.visited = True
                if strikes():
                    raise fault.error()
            return result

        patch.setattr(session.CudaSession, "run_op", run_op)


@contextlib.contextmanager
def _launch_step(step: str, fault: Fault) -> Iterator[None]:
    """Replace a function that launches call, in the table of the native helper and in Python's list."""
    from pgraph.drivers.cuda import exec

    position, field = {"rebind": (0, "kernel"), "launch": (3, "launch")}[step]
    functions, table = exec._calls()
    real, address = functions[position], getattr(table, field)
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *real.argtypes)
    call = kind(lambda *args: int(fault.code()) if fault.strikes() else real(*args))
    functions[position] = call
    setattr(table, field, ctypes.cast(call, ctypes.c_void_p).value)
    try:
        yield
    finally:
        functions[position] = real
        setattr(table, field, address)


_KEEP: list[Any] = []  # a launcher may outlive the injection


def _put(patch: pytest.MonkeyPatch, step: str, fault: Fault) -> None:
    from pgraph.drivers.cuda import driver, exec, ghost

    def raising(real: Callable[..., Any], error: Callable[[], Exception]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if fault.strikes():
                raise error()
            return real(*args, **kwargs)

        return call

    def device_error() -> Exception:
        return fault.error() if fault.kind == "memory" else DriverError("injected: CUDA_ERROR_UNKNOWN")

    if step == "arena":
        _call(patch, ghost, "cuMemCreate", lambda: fault.code() if fault.strikes() else None)
    elif step == "match":
        patch.setattr(
            driver.CudaDriver, "framework_ranges", raising(driver.CudaDriver.framework_ranges, device_error)
        )
    elif step == "plan":
        wrong = MemoryError if fault.kind == "memory" else PlanError
        patch.setattr(build, "plan_of", raising(build.plan_of, lambda: wrong("injected")))
    elif step == "instantiate":
        _call(patch, exec, "cuGraphInstantiate", lambda: fault.code() if fault.strikes() else None)
    elif step == "allocate":
        calls_of = driver.CudaDriver.native_calls
        # Memory without a tensor is refused: then the launch in C asks for a tensor, and Python for that.
        refuse = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)(lambda nbytes, where: 1)
        _KEEP.append(refuse)

        def native_calls(self: Any) -> Any:
            calls = calls_of(self)
            if calls is None:
                return None
            empty = raising(calls.empty, device_error)
            refused = libraries.address_of(refuse)
            return dataclasses.replace(calls, raw_alloc=refused, empty=empty, made_on=None)

        patch.setattr(driver.CudaDriver, "native_calls", native_calls)
        patch.setattr(
            driver.CudaDriver, "empty_strided", raising(driver.CudaDriver.empty_strided, device_error)
        )
    else:
        which, name = step.split()
        _capture_steps(patch, name, fault, which == "second")


@contextlib.contextmanager
def inject(step: str, fault: Fault) -> Iterator[Fault]:
    """Let `step` fail for the duration of the block."""
    with contextlib.ExitStack() as stack:
        if step in ("rebind", "launch"):
            stack.enter_context(_launch_step(step, fault))
        else:
            _put(stack.enter_context(pytest.MonkeyPatch.context()), step, fault)
        stack.callback(setattr, fault, "left", 0)  # a launcher may hold on to what was replaced
        yield fault
