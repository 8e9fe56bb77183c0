"""Generated code on stand-ins: what a script has, and what ends the attempt."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch._inductor.select_algorithm import extern_kernels

from pgraph.compute.errors import NotComputableError
from pgraph.compute.library_call import LibraryCall
from pgraph.compute.script import CallLibrary, Check, Drop, Host, LaunchKernel, Make, Script, TensorRef
from pgraph.compute.trace import traced
from pgraph.drivers.operands import HostOperand

CPU = torch.device("cpu")


class Kernel:
    """As a Triton kernel in a generated module."""

    def run(self, *arguments: Any, stream: int) -> None:
        raise AssertionError("launched")


def script_of(body: str, *arguments: Any) -> Script:
    """The script of a function of the list `args` in a module like those that Inductor generates."""
    refuse = Kernel().run
    module: dict[str, Any] = {
        "math": math,
        "torch": torch,
        "aten": torch.ops.aten,
        "extern_kernels": extern_kernels,
        "empty_strided_cuda": refuse,
        "reinterpret_tensor": refuse,
        "assert_size_stride": refuse,
        "alloc_from_pool": refuse,
        "get_raw_stream": refuse,
        "kernel": Kernel(),
        "weight": torch.ones(3),
        "foreign": len,
    }
    exec("def call(args):\n" + textwrap.indent(textwrap.dedent(body), "    "), module)
    given = list(arguments)
    found = traced(module["call"], given, CPU, kernels)
    assert given == list(arguments)
    return found


def kernels(namespace: Mapping[str, Any]) -> list[str]:
    return [name for name, value in namespace.items() if isinstance(value, Kernel)]


BODY = """
    n, x = args
    args.clear()
    assert_size_stride(x, (n, 4), (4, 1))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((n, 8), (8, 1), torch.float32)
        kernel.run(x, buf0, n * 8, 2.5, stream=get_raw_stream(0))
        del x
        buf1 = buf0; del buf0  # reuse
        buf2 = empty_strided_cuda((n, n), (n, 1), torch.float32)
        extern_kernels.mm(buf1, reinterpret_tensor(buf1, (8, n), (1, 8), n - 1), out=buf2)
        del buf1
        buf3, buf4 = torch.ops.aten.native_dropout.default(buf2, 0.5, True)
        del buf3
    return (reinterpret_tensor(buf2, (n * n, ), (1, ), 0), buf2, buf4, n, None)
"""


def test_a_script_says_what_the_code_does() -> None:
    script = script_of(BODY, 6, torch.ones(6, 4))
    kinds = [type(event) for event in script.events]
    assert kinds == [Check, Make, LaunchKernel, Drop, Make, CallLibrary, Drop, CallLibrary, Drop]
    values = script.tape.replay([10, None])
    assert values is not None
    check, make, run, dropped, _, product, *_ = script.events
    assert isinstance(check, Check)
    assert [values[i] for i in check.size + check.stride] == [10, 4, 4, 1]
    assert isinstance(make, Make)
    assert ([values[i] for i in make.size], make.dtype) == ([10, 8], torch.float32)
    assert isinstance(run, LaunchKernel)
    x, out, count, factor = run.arguments
    assert (x, out, values[count.place], factor) == (TensorRef(0), TensorRef(make.memory), 80, 2.5)
    assert dropped == Drop(0)
    assert isinstance(product, CallLibrary)
    assert product.results == (), "it writes into the buffer that it was given"
    transposed = product.arguments[1]
    assert transposed.memory == make.memory
    assert [values[i] for i in (*transposed.size, *transposed.stride, transposed.offset)] == [8, 10, 1, 8, 9]
    flat, square, mask, number, nothing = script.results
    assert (flat.memory, [values[i] for i in flat.size]) == (square.memory, [100])
    assert square.size is None
    assert mask.memory == script.memories - 1
    assert (values[number.place], nothing) == (10, None)
    assert script.identities == (0, 1, 2, 3, 4)


def test_views_of_views_add_up_and_hold_the_memory() -> None:
    script = script_of(
        """
        n, x = args
        args.clear()
        a = reinterpret_tensor(x, (n, ), (1, ), 3)
        del x
        b = reinterpret_tensor(a, (n, ), (1, ), n)
        del a
        kernel.run(b, stream=0)
        del b
        kernel.run(n, stream=0)
        return ()
        """,
        6,
        torch.ones(20),
    )
    run, dropped, last = script.events
    assert isinstance(run, LaunchKernel)
    values = script.tape.replay([7, None])
    assert values is not None
    assert values[run.arguments[0].offset] == 10
    assert dropped == Drop(0)
    assert isinstance(last, LaunchKernel)
    assert (run.number, last.number) == (0, 1)


@pytest.mark.parametrize("root", ["torch._sym_sqrt", "math.sqrt"])  # up to 2.12 the second one
def test_sizes_that_only_an_input_tells(root: str) -> None:
    body = """
        n, x = args
        args.clear()
        x_size = x.size()
        m = x_size[1]
        step = x.stride()[0]
        y = empty_strided_cuda((n, math.trunc(0.7*torch.sym_float(m))), (step, 1), torch.float32)
        z = empty_strided_cuda((math.floor(torch._sym_sqrt(torch.sym_float(m))), ), (1, ), torch.float32)
        w = empty_strided_cuda((math.trunc(torch.sym_float(5)) + int(math.pi), ), (1, ), torch.float32)
        return (y, z, w)
        """
    script = script_of(body.replace("torch._sym_sqrt", root), 6, torch.ones(6, 20))
    makes = [event for event in script.events if isinstance(event, Make)]
    values = script.tape.replay([7, torch.ones(7, 40)[:, :30]])
    assert values is not None
    assert [tuple(values[i] for i in make.size) for make in makes] == [(7, 21), (5,), (8,)]
    assert values[makes[0].stride[0]] == 40


def test_results_that_are_one_object() -> None:
    script = script_of(
        "y = empty_strided_cuda((2, ), (1, ), torch.float32)\nreturn (args[1], y, y)", 3, torch.ones(1)
    )
    assert script.identities == (0, 1, 1)
    assert script.results[0] == TensorRef(0)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("args[1].add_(1)\nreturn ()", "asks a tensor for its add_"),
        ("return (args[1].item(), )", "asks a tensor for its item"),
        (
            "y = empty_strided_cuda((2, ), (1, ), torch.float32)\nreturn (y.size()[0], )",
            "tensor for its size",
        ),
        ("return (torch.ops.aten.expand_as.default(args[1], args[1]), )", "a view of one of 2 tensors"),
        ("return (torch.ops.aten.expand_as.default(args[1], weight), )", "a view of one of 1 tensors"),
        ("return torch.ops.aten.split.Tensor(args[1], 2)", "returns"),
        ("return (torch.ops.aten.add(args[1], args[1]), )", "which overload"),
        ("return (alloc_from_pool(args[1], 0, torch.float32, (2, ), (1, )), )", "calls alloc_from_pool"),
        ("return (foreign(args[1]), )", "TypeError: object of type"),
        ("kernel.run(args[1], grid=(1, 1, 1), stream=0)\nreturn ()", "is launched with grid"),
        ("return (reinterpret_tensor(weight, (2, ), (1, ), 0), )", "a view of a constant"),
        ("empty_strided_cuda((args[0] / 2, ), (1, ), torch.float32)\nreturn ()", "a size of type Real"),
        ("empty_strided_cuda((int(args[0] / 2), ), (1, ), torch.float32)\nreturn ()", "cannot be followed"),
        ("empty_strided_cuda((1.0, ), (1, ), torch.float32)\nreturn ()", "a size of type float"),
        ("return (object(), )", "an argument of type object"),
        ("raise ValueError('no')", "ValueError: no"),
    ],
)
def test_what_has_no_stand_in_ends_the_attempt(body: str, why: str) -> None:
    with pytest.raises(NotComputableError, match=why):
        script_of(body, 6, torch.ones(6))


def test_ops_in_place_return_their_argument() -> None:
    script = script_of(
        "y = torch.ops.aten.add_.Tensor(args[1], args[1])\nkernel.run(y, weight, stream=0)\nreturn (y, )",
        6,
        torch.ones(6),
    )
    call, run = script.events
    assert isinstance(call, CallLibrary)
    assert call.results == ()
    assert isinstance(run, LaunchKernel)
    assert run.arguments[0] == TensorRef(0)
    assert isinstance(run.arguments[1], torch.Tensor)
    assert script.results == (TensorRef(0),)


def test_methods_of_tensors_are_calls_of_a_library() -> None:
    """Inductor copies complex numbers by one, and sets counters of kernels to 0 by another."""
    body = "y = args[1].copy_(weight, False)\nreinterpret_tensor(y, (2, ), (1, ), 3).zero_()\nreturn (y, )"
    script = script_of(body, 6, torch.ones(6))
    copy, zero = script.events
    assert isinstance(copy, CallLibrary)
    assert isinstance(zero, CallLibrary)
    assert (copy.function, copy.results) == (torch.ops.aten.copy_.default, ())
    assert (zero.function, zero.results) == (torch.ops.aten.zero_.default, ())
    assert copy.arguments[0] == TensorRef(0)
    assert copy.arguments[2] is False
    assert script.results == (TensorRef(0),)


def test_tensors_on_the_host_are_other_ones_at_each_call() -> None:
    """Attention's seeds, which go from its forward to its backward and are read by nobody."""
    body = """
        n, x, seed = args
        args.clear()
        y = torch.ops.aten.native_dropout.default(seed, 0.5, True)[0]
        return (y, seed)
    """
    module = {"torch": torch, "extern_kernels": extern_kernels}
    exec("def call(args):\n" + textwrap.indent(textwrap.dedent(body), "    "), module)
    given = [3, torch.ones(3, device="meta"), torch.ones(())]
    script = traced(module["call"], given, torch.device("meta"), kernels)
    assert script.inputs == (1,)
    (call,) = (event for event in script.events if isinstance(event, CallLibrary))
    assert call.arguments[0] == Host(2)
    assert script.results[1] == Host(2)
    calls = [LibraryCall(call, (HostOperand(torch.rand(())), 0.5, True), 0) for _ in range(2)]
    assert calls[0].key == calls[1].key
    assert calls[0].key != LibraryCall(call, (HostOperand(torch.rand(2)), 0.5, True), 0).key
    assert len(calls[0].run([])) == 2
    with pytest.raises(NotComputableError, match="asks a tensor on the host for its item"):
        traced(_item, given, torch.device("meta"), kernels)
    with pytest.raises(NotComputableError, match="reads a tensor on the host"):
        traced(_copy, given, torch.device("meta"), kernels)


def _item(args: list[Any]) -> list[Any]:
    return [args[2].item()]


def _copy(args: list[Any]) -> list[Any]:
    return [args[1].copy_(args[2], False)]
