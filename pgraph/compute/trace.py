"""A partition's generated code, run on stand-ins: what it does for whatever sizes.

Note [Computed recordings]
A capture of a new size tells what is known but for numbers: the generated code does the same for all sizes.
So that code runs once, on stand-ins for its tensors and on numbers that remember how they were computed
(`pgraph.compute.tape`). Nothing is allocated, launched or patched: the code runs as a function of its own
whose globals are stand-ins, too. What it did is a script. For a new size

* the tape gives the sizes, strides, offsets and counts anew, if every comparison comes out as before;
* a generated kernel's node is the one that was captured, with this call's arguments and grid
  (`Driver.kernel_node`);
* a library chooses kernels by sizes in ways that nobody can compute. So its calls are recorded, each once for
  the sizes, strides, alignments and settings that it may depend on (`pgraph.compute.sites`). Layers with the
  same sizes share a recording;
* a view that a library gives (Inductor leaves complex numbers to ATen, and views of them) has the layout that
  the op itself gives a tensor without memory.

Nothing of that is believed before it was seen: what the script gives for sizes that were captured must be
equal to the captures, byte for byte, three times (`pgraph.compute.computer`). Words are never fitted to
sizes: magic divisors, tile thresholds and alignment flags would pass any such fit. Where the code does
something that has no stand-in, sizes go on being captured.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten

from pgraph.compute.errors import NotComputableError
from pgraph.compute.library_call import gives_view, returned_arguments
from pgraph.compute.script import (
    PLAIN,
    CallLibrary,
    CallView,
    Check,
    Drop,
    Event,
    Figure,
    Host,
    LaunchKernel,
    Make,
    Script,
    TensorRef,
)
from pgraph.compute.tape import Number, NumberSource, Real, Tape

__all__ = ["traced"]

_ALLOCATORS: Final = ("empty_strided_cpu", "empty_strided_cuda", "empty_strided")

_OF_ONE_NUMBER: Final = {torch: {"sym_float": "float", "_sym_sqrt": "sqrt"}, math: {"sqrt": "sqrt"}}
"""Functions in which generated code computes sizes, as the tape names them; of Python's own up to 2.12."""


_METHODS: Final = {"copy_": torch.ops.aten.copy_.default, "zero_": torch.ops.aten.zero_.default}
"""Of a tensor, which generated code calls: for copies of what it has no kernels for, and for counters."""


class _Stand:
    """In a tensor's place."""

    __slots__ = ("dtype", "place", "trace")

    def __init__(self, trace: _Trace, place: TensorRef, dtype: Any) -> None:
        self.trace, self.place, self.dtype = trace, place, dtype
        trace.held[place.memory] += 1

    def __del__(self) -> None:
        self.trace.released(self.place.memory)

    def __getattr__(self, name: str) -> Any:
        op = _METHODS.get(name)
        if op is None:
            raise NotComputableError(f"the generated code asks a tensor for its {name}")
        return lambda *arguments: self.trace.call(op, (self, *arguments), {})


class _Input(_Stand):
    """In the place of a tensor that the code is given. It tells sizes that no argument is."""

    __slots__ = ("_layout", "_position")

    def __init__(self, trace: _Trace, position: int, tensor: torch.Tensor) -> None:
        super().__init__(trace, TensorRef(trace.memory()), tensor.dtype)
        self._position = position
        self._layout = {"size": tuple(tensor.size()), "stride": tuple(tensor.stride())}

    def size(self) -> tuple[Number, ...]:
        return self._numbers("size")

    def stride(self) -> tuple[Number, ...]:
        return self._numbers("stride")

    def _numbers(self, method: str) -> tuple[Number, ...]:
        tape, told = self.trace.tape, self._layout[method]
        return tuple(
            tape.argument(NumberSource(self._position, method, dim), n) for dim, n in enumerate(told)
        )


class _Elsewhere:
    """In the place of a tensor that is not on the device."""

    def __init__(self, position: int) -> None:
        self._position = position

    def host(self) -> Host:
        return Host(self._position)

    def __getattr__(self, name: str) -> Any:
        raise NotComputableError(f"the generated code asks a tensor on the host for its {name}")


class _Trace:
    """One run under way."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.events: list[Event] = []
        self.held: list[int] = []
        self.kinds: dict[Any, int] = {}  # of calls
        self.launches = self.looks = 0
        self.open = True

    def memory(self) -> int:
        self.held.append(0)
        return len(self.held) - 1

    def released(self, memory: int) -> None:
        self.held[memory] -= 1
        if not self.held[memory] and self.open:
            self.events.append(Drop(memory))

    def applied(self, name: str, function: Callable[[Any], Any], number: Any) -> Any:
        """What a function makes of one number."""
        return self.tape.applied(name, number) if isinstance(number, Number | Real) else function(number)

    def numbers(self, values: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(self.tape.index, values))

    # -- what stands for names of the generated module ----------------------------------------

    def empty_strided(self, size: Sequence[Any], stride: Sequence[Any], dtype: Any) -> _Stand:
        memory = self.memory()
        self.events.append(Make(memory, self.numbers(size), self.numbers(stride), dtype))
        return _Stand(self, TensorRef(memory), dtype)

    def reinterpret_tensor(self, base: Any, size: Any, stride: Any, offset: Any = 0) -> _Stand:
        if not isinstance(base, _Stand):
            raise NotComputableError("a view of a constant")
        further = self.tape.index(offset)
        if base.place.offset is not None and type(offset) is int and not offset:
            further = base.place.offset  # as most often: views of views, each of memory that is used again
        elif base.place.offset is not None:
            both = (Number(self.tape, place) for place in (base.place.offset, further))
            further = self.tape.compute("+", *both).place
        place = TensorRef(
            base.place.memory, self.numbers(size), self.numbers(stride), further, base.place.look
        )
        return _Stand(self, place, base.dtype)

    def assert_size_stride(self, tensor: Any, size: Any, stride: Any, *_: Any) -> None:
        if isinstance(tensor, _Stand):
            self.events.append(Check(tensor.place, self.numbers(size), self.numbers(stride)))

    def assert_size_stride_grouped(self, tensors: Any, sizes: Any, strides: Any, *_: Any) -> None:
        for tensor, size, stride in zip(tensors, sizes, strides, strict=True):
            self.assert_size_stride(tensor, size, stride)

    def kernel(self, name: str, kernel: Any) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            unknown = options.keys() - {"stream"}
            if unknown:
                raise NotComputableError(f"{name} is launched with {', '.join(sorted(unknown))}")
            self.events.append(LaunchKernel(self.launches, name, kernel, tuple(map(self.leaf, arguments))))
            self.launches += 1

        return run

    def call(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A call of a library; what its results stand for."""
        leaves, spec = tree_flatten((arguments, options))
        known = tuple(map(self.leaf, leaves))
        if function is _METHODS["copy_"] and any(isinstance(value, Host) for value in known):
            raise NotComputableError(f"{function} reads a tensor on the host")
        if gives_view(function):
            return self.view(function, known, spec)
        given = returned_arguments(function, arguments, options, _Stand)
        memories = tuple(self.memory() for result in given if result is None)
        kind = self.kinds.setdefault((function, spec), len(self.kinds))
        self.events.append(CallLibrary(kind, function, known, spec, memories))
        new = iter(memories)
        results = tuple(
            _Stand(self, TensorRef(next(new)), None) if result is None else result for result in given
        )
        return results[0] if len(results) == 1 else results or None

    def view(self, function: OpOverload, arguments: tuple[Any, ...], spec: Any) -> _Stand:
        """What a library gives that takes no memory; it lies in that of the only tensor it is given."""
        bases = [value for value in arguments if isinstance(value, TensorRef)]
        if len(bases) != 1 or any(isinstance(value, torch.Tensor | Host) for value in arguments):
            raise NotComputableError(f"{function._schema.name} returns a view of one of {len(bases)} tensors")
        kind, look = self.kinds.setdefault((function, spec), len(self.kinds)), self.looks
        self.events.append(CallView(kind, function, arguments, spec, look))
        self.looks += 1
        return _Stand(self, TensorRef(bases[0].memory, look=look), None)

    def leaf(self, value: Any) -> Any:
        if isinstance(value, _Stand):
            return value.place
        if isinstance(value, Number | Real):
            return Figure(value.place)
        if isinstance(value, _Elsewhere):
            return value.host()
        if isinstance(value, PLAIN) or (isinstance(value, torch.Tensor) and value.layout == torch.strided):
            return value
        raise NotComputableError(f"an argument of type {type(value).__name__}")


class _Names:
    """In the place of a module or of a namespace of ops."""

    def __init__(self, trace: _Trace, real: Any) -> None:
        self._trace, self._real = trace, real

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if real is torch.cuda._DeviceGuard or real is torch.cuda.set_device:
            return lambda *_: contextlib.nullcontext()
        function = _OF_ONE_NUMBER[torch].get(name) if self._real is torch else None
        if function is not None:
            return functools.partial(self._trace.applied, function, real)
        if isinstance(real, PLAIN):
            return real
        return (_Function if callable(real) else _Names)(self._trace, real)


class _Function(_Names):
    """In the place of a function or of an op."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._trace.call(self._real, arguments, options)


def traced(
    code: types.FunctionType | types.MethodType,
    arguments: Sequence[Any],
    device: torch.device,
    kernels: Callable[[Mapping[str, Any]], Sequence[str]],
) -> Script:
    """What generated code does.

    Args:
        code: a function in a generated module; takes one list and empties it.
        arguments: of one call; of tensors only the type is read, and whether they are on the device.
        device: whose tensors count.
        kernels: tells the names of generated kernels among the globals of a module.

    Raises:
        NotComputableError: it does something that has no stand-in.
    """
    trace = _Trace()
    function = code.__func__ if isinstance(code, types.MethodType) else code
    namespace = dict(function.__globals__)
    namespace |= _stand_ins(trace, namespace, kernels(namespace))
    inputs = tuple(i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.device == device)
    given: list[Any] = []
    constants: list[tuple[int, Any]] = []
    for i, value in enumerate(arguments):
        if i in inputs:
            given.append(_Input(trace, i, value))
        elif type(value) is int:
            given.append(trace.tape.argument(NumberSource(i), value))
        elif isinstance(value, torch.Tensor):
            given.append(_Elsewhere(i))
        else:
            given.append(value)
            constants.append((i, value))
    run = types.FunctionType(function.__code__, namespace, None, function.__defaults__, function.__closure__)
    try:
        results = run(code.__self__, given) if isinstance(code, types.MethodType) else run(given)
        results = tuple(results)
        given.clear()
        leaves = tuple(map(trace.leaf, results))
    except NotComputableError:
        raise
    except Exception as e:
        raise NotComputableError(f"{type(e).__name__}: {e}") from None
    finally:
        trace.open = False
    first: dict[int, int] = {}
    identities = tuple(first.setdefault(id(r), i) for i, r in enumerate(results))
    made = {memory for event in trace.events if isinstance(event, CallLibrary) for memory in event.results}
    layouts = {
        event.tensor.memory: (event.size, event.stride)
        for event in trace.events
        if isinstance(event, Check) and event.tensor.memory in made and event.tensor.size is None
        if event.tensor.look is None
    }
    return Script(
        trace.tape,
        inputs,
        tuple(constants),
        tuple(trace.events),
        leaves,
        identities,
        len(trace.held),
        layouts,
    )


def _stand_ins(trace: _Trace, namespace: Mapping[str, Any], kernels: Sequence[str]) -> dict[str, Any]:
    known: dict[str, Any] = {
        **dict.fromkeys(_ALLOCATORS, trace.empty_strided),
        "reinterpret_tensor": trace.reinterpret_tensor,
        "assert_size_stride": trace.assert_size_stride,
        "assert_size_stride_grouped": trace.assert_size_stride_grouped,  # from 2.15 on, and the next one
        "assert_tensor_metadata": trace.assert_size_stride,
        "assert_alignment": lambda *_: None,
        "get_raw_stream": lambda *_: 0,
    }
    found: dict[str, Any] = {}
    for name, real in namespace.items():
        if name in kernels:
            found[name] = _TracedKernel(trace, name, real)
        elif name in known:
            found[name] = known[name]
        elif name == "alloc_from_pool" or name.startswith("empty_strided"):
            found[name] = _Unfollowed(name)
        elif name in ("torch", "aten", "inductor_ops", "_quantized", "extern_kernels"):
            found[name] = _Names(trace, real)
        elif real is math:
            found[name] = _Math(trace)
    return found


class _Math:
    """In the place of Python's module. What rounds asks the number by itself."""

    def __init__(self, trace: _Trace) -> None:
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        real, function = getattr(math, name), _OF_ONE_NUMBER[math].get(name)
        return real if function is None else functools.partial(self._trace.applied, function, real)


class _TracedKernel:
    """In the place of a generated kernel: called, on a CPU, or run."""

    def __init__(self, trace: _Trace, name: str, real: Any) -> None:
        self.run = self._run = trace.kernel(name, real)

    def __call__(self, *arguments: Any) -> None:
        self._run(*arguments)


class _Unfollowed:
    """In the place of what cannot be followed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotComputableError(f"the generated code calls {self._name}")
