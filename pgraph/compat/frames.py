"""Dynamo: what becomes of the functions that it is asked to compile, also of those that reach no backend.

Dynamo tells nobody of a function that it skips, or compiles no more. What it knows is told by two hooks: the
callback at the end of a compilation, and the warning that a function was compiled too often. Which function,
and for which backend, stands in the frame of its own `_compile`, below which both are called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import callback
from torch._dynamo.exc import Unsupported, UserError

__all__ = ["Compilation", "hear_compilations", "known_backends", "module_with"]

log = logging.getLogger(__name__)

_DYNAMOS = "_dynamo/convert_frame.py"
_RESUMED = re.compile(r"(?:.*\.)?torch_dynamo_resume_in_(.+)_at_(\d+)$")


@dataclasses.dataclass(frozen=True, slots=True)
class Compilation:
    """One attempt of Dynamo's to compile a function.

    Args:
        name: of the function, e.g. ``"Block.forward"``; of the module, where PyTorch's own code is compiled.
        where: ``file:line`` of its definition; None in PyTorch's own code.
        backend: what it was compiled for; None if that was not found.
        options: that torch.compile was given.
        guard: Dynamo's text about the guard that failed, if the function was compiled before.
        error: Dynamo's text, if it gave up on the function.
        frames: (path, line) of the user's frames where it did, innermost last.
        breaks: Dynamo's texts about the graph breaks that it met.
        limit: (name, value) of the setting that ends all compilations of this function.
        calls_break: whether the function's own code calls `torch._dynamo.graph_break`, by all that it names.
    """

    name: str
    where: str | None
    backend: Any
    options: Mapping[str, Any]
    guard: str | None = None
    error: str | None = None
    frames: tuple[tuple[str, int], ...] = ()
    breaks: tuple[str, ...] = ()
    limit: tuple[str, int] | None = None
    calls_break: bool = False


def hear_compilations(
    ended: Callable[[Compilation], None],
    stopped: Callable[[Compilation], None],
    begun_anew: Callable[[], None],
) -> None:
    """From now on, tell of each compilation that Dynamo ends, and of each that it refuses for a limit.

    Seen on 2.13; the sources of 2.11 and 2.15 have the same. Somebody who silences Dynamo's warnings is not
    told of limits.

    Args:
        ended: called after each compilation of a function, be it for any backend.
        stopped: called at the call that would have to be compiled beyond the limit. What it raises goes out
            of that call.
        begun_anew: called by `torch._dynamo.reset()`.
    """
    handler: Any = callback.callback_handler

    # A backward is compiled when it first runs, and then Dynamo looks at what its callbacks call: it would
    # compile this one, and wait for ever for a lock that its caller holds.
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def on_end(args: Any) -> None:
        if args.callback_trigger is not callback.CallbackTrigger.DYNAMO:
            return
        try:
            found = _compilation()
            if found is not None:
                ended(found)
        except Exception:  # a report must not end a compilation
            log.debug("a compilation was not understood", exc_info=True)

    clear = handler.clear

    def clear_others() -> None:
        """`torch._dynamo.reset()` drops all callbacks."""
        clear()
        handler.register_end_callback(on_end)
        begun_anew()

    handler.register_end_callback(on_end)
    handler.clear = clear_others
    logging.getLogger("torch._dynamo.convert_frame").addHandler(_Limits(stopped))


def known_backends() -> tuple[Any, ...]:
    """The backends that torch.compile was given since the last reset; 2.13."""
    cached = torch._dynamo.eval_frame.cached_backends
    return tuple(_innermost(backend)[0] for backend in list(cached.values()))


class _Limits(logging.Handler):
    """Hears that a function is compiled no more, which is a warning with the facts as its arguments."""

    def __init__(self, stopped: Callable[[Compilation], None]) -> None:
        super().__init__(logging.WARNING)
        self._stopped = stopped

    def emit(self, record: logging.LogRecord) -> None:
        args = record.args
        if not str(record.msg).startswith("torch._dynamo hit config.") or not isinstance(args, tuple):
            return
        found = _compilation()
        if found is not None and len(args) >= 4 and isinstance(args[1], int):
            self._stopped(
                dataclasses.replace(found, limit=(str(args[0]), args[1]), guard=found.guard or str(args[3]))
            )


def _compilation() -> Compilation | None:
    """The one that this is called from."""
    found = _under_way()
    if found is None:
        return None
    known, inside = found
    code = known.get("code")
    if not isinstance(code, types.CodeType):
        return None
    name, where = _identity(code, known.get("closure") or ())
    backend, options = _innermost(known.get("compiler_fn"))
    error = sys.exc_info()[1]
    if not isinstance(error, (Unsupported, UserError)) or not _passes(error, inside):
        error = None
    reason = known.get("recompile_reason")
    return Compilation(
        name,
        where,
        backend,
        options,
        guard=str(reason) if reason else None,
        error=str(error) if error is not None else None,
        frames=tuple((f.filename, f.lineno or 0) for f in getattr(error, "real_stack", None) or ()),
        breaks=tuple(str(text) for text in known.get("restart_reasons") or ()),
        calls_break="graph_break" in code.co_names,
    )


def _under_way() -> tuple[Mapping[str, Any], list[types.FrameType]] | None:
    """(what Dynamo's `_compile` knows, the frames below it) of the compilation that this is called from."""
    # From the caller's caller on: a frame in a list of its own would keep what is compiled alive.
    frame: types.FrameType | None = sys._getframe(2)
    inside = []
    while frame is not None and not (
        frame.f_code.co_name == "_compile" and frame.f_code.co_filename.endswith(_DYNAMOS)
    ):
        inside.append(frame)
        frame = frame.f_back
    return (frame.f_locals, inside) if frame is not None else None


def module_with(parameter: torch.Tensor) -> torch.nn.Module | None:
    """The module with this parameter that the function which is being compiled is of, or uses; None if that
    is not found.

    A weak reference to the parameter itself would tell as well when the model goes, but a tensor that has one
    cannot be swapped for another: `Module.to` does that with parameters of other tensor types.
    """
    found = _under_way()
    if found is None:
        return None
    known = found[0]
    code, names = known.get("code"), known.get("globals") or {}
    given = list((known.get("locals") or {}).values())
    held = list(map(_in_cell, known.get("closure") or ()))
    used = [*given, *held, *itertools.chain.from_iterable(map(_attributes, given))]
    used += _named(code, names)
    for function in filter(inspect.isfunction, held):  # one that is wrapped, by Dynamo itself for example
        used += [*map(_in_cell, function.__closure__ or ()), *_named(function.__code__, function.__globals__)]
    for value in used:
        module = _module_of(value)
        if module is not None and any(p is parameter for p in module.parameters()):
            return module
    return None


def _in_cell(value: Any) -> Any:
    """What a cell holds, if it is one that holds something."""
    try:
        return value.cell_contents if isinstance(value, types.CellType) else value
    except ValueError:
        return None


def _named(code: Any, namespace: dict[str, Any]) -> list[Any]:
    """The globals that a function's code names."""
    return [namespace[name] for name in getattr(code, "co_names", ()) if name in namespace]


def _attributes(value: Any) -> list[Any]:
    """Those of an object of the user's own, such as a trainer that holds the model."""
    plain = not isinstance(value, torch.nn.Module | torch.Tensor | types.ModuleType | type)
    return list(vars(value).values()) if plain and hasattr(value, "__dict__") else []


def _module_of(value: Any) -> torch.nn.Module | None:
    """A module, or that of a method of one, be it compiled already."""
    if isinstance(value, types.MethodType):
        value = value.__self__
    if isinstance(value, torch._dynamo.eval_frame.OptimizedModule):
        value = value._orig_mod
    return value if isinstance(value, torch.nn.Module) else None


def _passes(error: BaseException, frames: Sequence[types.FrameType]) -> bool:
    """Whether an error is on its way through one of these frames; a caller's may be in the air as well."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame in frames:
            return True
        traceback = traceback.tb_next
    return False


@contextlib.contextmanager
def hearing_calls() -> Iterator[set[str]]:
    """``file:line`` of each function of Python's that this thread calls in the block, compiled or not.

    Dynamo's code for a function bears the function's own file and line; 2.13. A profiler of the program's own
    hears nothing meanwhile.
    """
    codes: dict[int, types.CodeType] = {}  # by id: code of Dynamo's with a slice in it has no hash
    heard: set[str] = set()

    def hear(frame: types.FrameType, event: str, arg: object) -> None:
        if event == "call":
            codes[id(frame.f_code)] = frame.f_code

    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        yield heard
    finally:
        sys.setprofile(before)
        heard.update(f"{code.co_filename}:{code.co_firstlineno}" for code in codes.values())


def _identity(code: types.CodeType, closure: Sequence[Any]) -> tuple[str, str | None]:
    """Name and place of a function in the user's words."""
    name: str = getattr(code, "co_qualname", code.co_name)
    own = "/torch/_dynamo/" in code.co_filename.replace("\\", "/")
    if own and "fn" in code.co_freevars and len(closure) == len(code.co_freevars):
        # Dynamo's wrapper around a module of PyTorch's own, or a method of one: the module says more.
        fn = closure[code.co_freevars.index("fn")].cell_contents
        owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
        module = isinstance(owner, torch.nn.Module)
        name = type(owner).__qualname__ if module else getattr(fn, "__qualname__", name)
    if resumed := _RESUMED.match(name):
        name = f"{resumed[1]}, resumed at line {resumed[2]}"
    return name.replace("<locals>.", ""), None if own else f"{code.co_filename}:{code.co_firstlineno}"


def _innermost(backend: Any) -> tuple[Any, Mapping[str, Any]]:
    """What a user gave to torch.compile, behind Dynamo's wrappers and DDP's, and the options."""
    options: Mapping[str, Any] = {}
    for _ in range(16):
        inner = getattr(backend, "_torchdynamo_orig_backend", None)
        if inner is None and (given := getattr(backend, "compiler_fn", None)) is not None:
            options = getattr(backend, "kwargs", {}).get("options") or {}
            inner = given
        if inner is None:  # a method of DDPOptimizer's
            inner = getattr(getattr(backend, "__self__", None), "backend_compile_fn", None)
        if inner is None:
            break
        backend = inner
    return backend, options
