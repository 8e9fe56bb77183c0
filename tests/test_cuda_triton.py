"""Nodes of generated Triton kernels, computed: with launchers as Inductor makes them, and no device."""

from __future__ import annotations

import gc
import inspect
import struct
import types
import weakref
from typing import Any

import pytest
import torch

from pgraph import compat
from pgraph.drivers.operands import Operand
from pgraph.template.recording import NodeRecord

triton = pytest.importorskip("pgraph.drivers.cuda.triton")

FUNCTION, BLOCK, SHARED, CONTEXT = 7001, (128, 1, 1), 64, 9

SOURCE = """
def launcher(in_ptr0, in_ptr1, out_ptr0, ks0, xnumel, stream):
    grid_0 = -(xnumel // -XBLOCK)
    grid_1 = 1
    grid_2 = 1
    runner(grid_0, grid_1, grid_2, stream, in_ptr0, in_ptr1, out_ptr0, ks0, xnumel)
"""


class Compiled:
    """As `StaticallyLaunchedCudaKernel`."""

    name = "triton_poi_fused_add_0"
    arg_tys = "OOOli"
    has_global_scratch = True

    def __init__(self) -> None:
        self.launched = 0

    def run(self, *_: Any) -> None:
        self.launched += 1


class Autotuner:
    """As `CachingAutotuner`, with one configuration left."""

    def __init__(self, source: str = SOURCE, **compiled: Any) -> None:
        self.kernel = Compiled()
        vars(self.kernel).update(compiled)
        scope: dict[str, Any] = {"runner": self.kernel.run, "XBLOCK": 256}
        exec(source, scope)
        self.launchers = [scope["launcher"]]


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """All kernels of these tests are launched as one function."""
    triton._codes.clear()
    triton._functions.clear()


OFFSETS = (0, 8, 16, 24, 32, 40)  # three pointers, a long, an int, and the scratch that nobody uses


def node(numbers: tuple[int, int], grid: int, params: bytes | None = None, **changes: Any) -> NodeRecord:
    """As read from a capture."""
    header = (FUNCTION, (grid, 1, 1), BLOCK, SHARED, CONTEXT, ("params", OFFSETS))
    params = params or struct.pack("=3Qqi4xQ", 0xA0, 0xB0, 0xC0, *numbers, 0)
    fields = {"kind": "kernel", "name": Compiled.name, "header": header, "params": params} | changes
    return NodeRecord(**fields, kept=(0, 1), layout=("params", OFFSETS))


def operand(address: int, dtype: torch.dtype = torch.float32) -> Operand:
    return Operand(address, (4,), (1,), dtype, 0)


ARGUMENTS = (operand(0x1000), operand(0x2000), operand(0x3000), 33, 1000)


def test_the_node_of_another_size() -> None:
    kernel, sample = Autotuner(), node((5, 256), 1)
    found = triton.kernel_node(kernel, sample, ARGUMENTS)
    assert found is not None
    made, addresses = found
    params = struct.pack("=3Qqi4xQ", 0x1000, 0x2000, 0x3000, 33, 1000, 0)
    assert made == node((33, 1000), 4, params)
    assert addresses == [(0, 0), (8, 1), (16, 2)]
    assert kernel.kernel.launched == 0
    again = triton.kernel_node(kernel, sample, ARGUMENTS)
    assert again == found


def test_constants_and_pointers_that_are_not_there() -> None:
    weight = torch.ones(4)
    found = triton.kernel_node(Autotuner(), node((5, 256), 1), (weight, None, *ARGUMENTS[2:]))
    assert found is not None
    made, addresses = found
    assert struct.unpack_from("=2Q", made.params) == (weight.data_ptr(), 0)
    assert addresses == [(16, 2)], "what is no argument of the partition stays where it is"


def test_all_types_of_parameters() -> None:
    source = "def launcher(a, b, c, d, stream):\n    runner(1, 2, 3, stream, a, b, c, d)\n"
    offsets = (0, 4, 8, 16)
    header = (FUNCTION, (1, 1, 1), BLOCK, SHARED, CONTEXT, ("params", offsets))
    sample = node((0, 0), 1, bytes(24), header=header)
    kernel = Autotuner(source, arg_tys="fidb", has_global_scratch=False)
    found = triton.kernel_node(kernel, sample, (1.5, -2, 2.25, -1))
    assert found is not None
    assert found[0].params == struct.pack("=fidb7x", 1.5, -2, 2.25, -1)
    assert found[0].header[1] == (1, 2, 3)


@pytest.mark.parametrize(
    ("kernel", "sample", "arguments"),
    [
        (Autotuner(), node((5, 256), 1, name="another"), ARGUMENTS),
        (Autotuner(), node((5, 256), 1, kind="memset"), ARGUMENTS),
        (Autotuner(), node((5, 256), 1), (*ARGUMENTS[:4], 0)),  # no grid: nothing is launched
        (Autotuner(arg_tys="OOOl"), node((5, 256), 1), ARGUMENTS),
        (Autotuner(has_global_scratch=False), node((5, 256), 1), ARGUMENTS),
        (Autotuner(arg_tys="OOOlO"), node((5, 256), 1), ARGUMENTS),
        (Autotuner(arg_tys="OOOl?"), node((5, 256), 1), ARGUMENTS),
        (Autotuner(arg_tys=None), node((5, 256), 1), ARGUMENTS),
        (types.SimpleNamespace(launchers=[]), node((5, 256), 1), ARGUMENTS),
        (types.SimpleNamespace(launchers=Autotuner().launchers * 2), node((5, 256), 1), ARGUMENTS),
        (types.SimpleNamespace(), node((5, 256), 1), ARGUMENTS),
        (Autotuner(), node((5, 256), 1), (ARGUMENTS[0]._replace(lazy=(True, False)), *ARGUMENTS[1:])),
        (
            Autotuner(),
            node((5, 256), 1, header=(FUNCTION, (1, 1, 1), BLOCK, SHARED, CONTEXT, ("extra",))),
            ARGUMENTS,
        ),
    ],
)
def test_what_is_launched_otherwise_is_not_told(kernel: Any, sample: NodeRecord, arguments: Any) -> None:
    assert triton.kernel_node(kernel, sample, arguments) is None


TRITONS = """
def launcher(in_ptr0, out_ptr0, ks0, xnumel, stream):
    grid_0 = -(xnumel // -256)
    grid_1 = 1
    grid_2 = 1
    runner(
        grid_0, grid_1, grid_2, stream, function, metadata, None, None, None,
        in_ptr0, out_ptr0, ks0, xnumel, 256
    )
"""
SIGNATURE = {"in_ptr0": "*fp32", "out_ptr0": "*i64", "ks0": "i64", "xnumel": "i32", "XBLOCK": "constexpr"}
PLACES = (0, 8, 16, 24, 32)  # two pointers, a long, an int, and one for scratch


class Binary:
    """As `CompiledKernel`."""

    name = Compiled.name

    def __init__(self, signature: Any) -> None:
        self.src = types.SimpleNamespace(signature=signature)


def by_triton(signature: Any = SIGNATURE, source: str = TRITONS) -> Any:
    """As `CachingAutotuner` with a kernel that Triton's own launcher launches."""
    kernel = Autotuner(source, arg_tys=None)
    scope = {"function": 1, "metadata": (), "bin": Binary(signature)}
    kernel.launchers[0].__globals__.update(scope)
    return kernel


def tritons_node(scratch: int = 0) -> NodeRecord:
    """As read from a capture of such a launch."""
    header = (FUNCTION, (1, 1, 1), BLOCK, SHARED, CONTEXT, ("params", PLACES))
    params = struct.pack("=2Qqi4xQ", 0xA0, 0xB0, 5, 256, scratch)
    return node((5, 256), 1, params, header=header)


def test_tritons_own_launcher() -> None:
    """Inductor leaves kernels with assertions to it: a loss's backward, on the device, with torch 2.11."""
    given = (operand(0x1000), operand(0x2000, torch.int64), 33, 1000)
    found = triton.kernel_node(by_triton(), tritons_node(), given)
    assert found is not None
    made, addresses = found
    assert made.params == struct.pack("=2Qqi4xQ", 0x1000, 0x2000, 33, 1000, 0)
    assert made.header[1] == (4, 1, 1)
    assert addresses == [(0, 0), (8, 1)]


@pytest.mark.parametrize(
    ("kernel", "sample"),
    [
        (by_triton(SIGNATURE | {"ks0": "fp16"}), tritons_node()),  # a launch would round it
        (by_triton(SIGNATURE | {"ks0": ("i32", "i32")}), tritons_node()),
        (by_triton(None), tritons_node()),
        (by_triton({k: v for k, v in SIGNATURE.items() if k != "XBLOCK"}), tritons_node()),
        (by_triton(), tritons_node(scratch=0xC0)),
        (by_triton(source=TRITONS.replace("metadata, None,", "metadata,")), tritons_node()),
    ],
)
def test_what_tritons_own_launcher_does_besides_is_not_told(kernel: Any, sample: NodeRecord) -> None:
    given = (operand(0x1000), operand(0x2000), 33, 1000)
    assert triton.kernel_node(kernel, sample, given) is None


def test_kernels_are_found_by_their_class() -> None:
    """Triton itself is not imported for that."""
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    kernel = object.__new__(heuristics.CachingAutotuner)
    assert triton.kernel_names({"a": kernel, "b": Autotuner(), "c": heuristics.CachingAutotuner}) == ["a"]


def test_inductors_launchers_are_read() -> None:
    """The very code that makes them, and the names that are looked for; seen on 2.13."""
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    launching = pytest.importorskip("torch._inductor.runtime.static_triton_launcher")
    owner = object.__new__(launching.StaticallyLaunchedTritonKernel)
    owner.name, owner.arg_tys, owner.has_global_scratch, owner.has_profile_scratch = "k", "Oi", True, True
    fields = {"kwargs": {"XBLOCK": 64}, "num_warps": 4, "num_stages": 1}
    # Without Triton there is no such class.
    config = types.SimpleNamespace(**fields) if heuristics.Config is object else heuristics.Config(**fields)
    meta = {"grid_type": "Grid1D"}
    result = heuristics.StaticTritonCompileResult(owner, config, {}, meta)
    defined = ["out_ptr0", "xnumel"]
    launcher = result._gen_launcher_code(
        {"runner": owner.run}, defined, ["grid_0", "grid_1", "grid_2", "stream", *defined]
    )
    found = compat.launcher_of(types.SimpleNamespace(launchers=[launcher]))
    assert found == compat.Launcher("k", launcher, "Oi", 2, owner)
    grid, parameters = triton._Kernel(found).launched([operand(64), 1000])
    assert (grid, parameters) == ((16, 1, 1), [operand(64), 1000])


def tuned(blocks: int) -> tuple[Autotuner, NodeRecord]:
    """A kernel that was tuned to blocks of so many elements, and a node that was captured of it."""
    kernel = Autotuner(SOURCE.replace("XBLOCK", str(blocks)))
    header = (FUNCTION + blocks, (1, 1, 1), BLOCK, SHARED, CONTEXT, ("params", OFFSETS))
    return kernel, node((5, 256), 1, header=header)


def test_a_kernel_that_was_tuned_anew() -> None:
    """Another function is launched since, of other blocks: its grid is not for the one that was captured.
    With that one captured, too, each has its own; and with the first one back it is as before."""
    kernel, small = tuned(128)
    other, large = tuned(256)
    found = triton.kernel_node(kernel, small, ARGUMENTS)
    assert found is not None
    assert found[0].header[:2] == (FUNCTION + 128, (8, 1, 1))
    before, kernel.launchers = kernel.launchers, other.launchers
    assert triton.kernel_node(kernel, small, ARGUMENTS) is None
    found = triton.kernel_node(kernel, large, ARGUMENTS)
    assert found is not None
    assert found[0].header[:2] == (FUNCTION + 256, (4, 1, 1))
    assert triton.kernel_node(kernel, small, ARGUMENTS) is None
    kernel.launchers = before
    assert triton.kernel_node(kernel, large, ARGUMENTS) is None
    assert triton.kernel_node(kernel, small, ARGUMENTS) is not None


def test_launchers_that_are_made_again() -> None:
    """Of the same code: it may be another function of Python's that computes the same grid."""
    kernel, small = tuned(128)
    first = triton.kernel_node(kernel, small, ARGUMENTS)
    scope: dict[str, Any] = {"runner": kernel.kernel.run}
    exec(SOURCE.replace("XBLOCK", "128"), scope)
    kernel.launchers = [scope["launcher"]]
    assert triton.kernel_node(kernel, small, ARGUMENTS) == first


def test_a_handle_that_is_another_functions_since() -> None:
    """A module was unloaded, and its function's handle given to another one."""
    kernel, small = tuned(128)
    assert triton.kernel_node(kernel, small, ARGUMENTS) is not None
    del kernel
    gc.collect()
    other, _ = tuned(256)
    assert triton.kernel_node(other, small, ARGUMENTS) is not None


def test_a_code_that_tells_its_function() -> None:
    """Whatever was noted of either before. Other captured functions are not what it is launched as."""
    kernel, small = tuned(128)
    other, large = tuned(256)
    assert triton.kernel_node(kernel, large, ARGUMENTS) is not None, "nothing is known"
    assert triton.kernel_node(kernel, small, ARGUMENTS) is None
    assert triton.kernel_node(other, large, ARGUMENTS) is None
    kernel.kernel.function, other.kernel.function = FUNCTION + 128, FUNCTION + 256
    for each, sample, wrong in ((kernel, small, large), (other, large, small)):
        assert triton.kernel_node(each, sample, ARGUMENTS) is not None
        assert triton.kernel_node(each, wrong, ARGUMENTS) is None


def test_the_handle_of_a_code() -> None:
    """Both kinds name it so in the sources of 2.11 and of Triton; the static one was seen on 2.13."""
    assert compat.handle_of(Compiled()) is None
    assert compat.handle_of(types.SimpleNamespace(function=None)) is None
    assert compat.handle_of(types.SimpleNamespace(function=0x7F00)) == 0x7F00
    launching = pytest.importorskip("torch._inductor.runtime.static_triton_launcher")
    source = inspect.getsource(launching.StaticallyLaunchedTritonKernel)
    assert "self.function: int | None = None" in source
    assert "self.function, self.n_regs" in source


def test_which_kernels_await_tuning() -> None:
    """Seen in the sources of 2.11, 2.13 and 2.15: `run` measures where there are several launchers."""
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    kernel = object.__new__(heuristics.CachingAutotuner)
    for launchers, awaits in (([], False), ([len], False), ([len, abs], True)):
        kernel.launchers = launchers
        assert compat.awaits_tuning({"kernel": kernel, "torch": torch, "others": [len, abs]}) is awaits
    source = inspect.getsource(heuristics.CachingAutotuner.run)
    assert "if len(self.launchers) > 1:" in source


def test_launchers_are_not_kept() -> None:
    kernel = Autotuner()
    kernel.launchers[0].__globals__["launcher"] = kernel.launchers[0]
    assert triton.kernel_node(kernel, node((5, 256), 1), ARGUMENTS) is not None
    gone = weakref.ref(kernel.launchers[0])
    kernel.launchers[0].__globals__.clear()
    del kernel
    gc.collect()
    assert gone() is None
