"""What the driver allows of an exec's nodes, asked of the GPU that is here: one row for each question.

    python bench/probes.py
    python bench/probes.py --only clusters-plain-to-static shared-raised

* ``function-*``: does `cuGraphExecKernelNodeSetParams` take another function, with parameters of as many
  bytes, or of more?
* ``clusters-*``: and one with other clusters? Static ones belong to the function, others to the node.
* ``passing-*``: may a node whose parameters were a list be set by one buffer (``extra``), and the reverse?
* ``upload-*``: host time of a launch of 200 nodes (`us`), and time until the device is through (`done_us`),
  for an exec that was uploaded or not, whose nodes were set since or not. `first_us`: of the first launch.
* ``shared-*``: more dynamic shared memory than a function may use by default: refused, taken after the
  function's limit was raised, and what happens when it is lowered again.
* ``attention-*``: ms of attention, forward and backward, at lengths never seen before (`us` is of one) and at
  the same again (`again_us`), with ``TORCH_CUDNN_SDPA_DEPRIORITIZED`` of 0 and 1.
* ``results-*``: host time to make one of 13 results of 64 KiB (`us`), and to free it (`done_us`): its memory
  alone, tensors as a launch makes them in C++, and as generated code does. A launch takes at least the first.

`answer` is "yes" where the node did what it was set to do, "no" and an error where the driver refused, and
"wrong" with what came instead. Each question is asked in a process of its own: a wrong launch may spoil the
context. Results go to ``bench/results/probes-<gpu>.json``. Without a GPU nothing is asked.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401  (puts the checkout on sys.path)
import probes_results
import schema
import torch
from workers import start_worker

PROGRAM = Path(__file__).resolve()
NODES = 200
ROUNDS = 200
THREADS = 32
BLOCKS = 4  # a multiple of all clusters
VARIABLE = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Figures = dict[str, Any]
Value = tuple[str, float]

SOURCE = r"""
#define HERE out[blockIdx.x * blockDim.x + threadIdx.x]
extern "C" __global__ void once(float* out, float a) { HERE = a; }
extern "C" __global__ void twice(float* out, float a) { HERE = 2 * a; }
extern "C" __global__ void sum(float* out, float a, float b, float c, double d) {
    HERE = a + b + c + (float)d;
}
extern "C" __global__ void scratch(float* out, float a) {
    extern __shared__ float memory[];
    unsigned bytes;
    asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    float* last = memory + bytes / 4 - blockDim.x;
    last[threadIdx.x] = a + bytes;
    HERE = last[threadIdx.x];
}
#if __CUDA_ARCH__ >= 900
__device__ float blocks() {
    unsigned n;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n));
    return n;
}
extern "C" __global__ void any(float* out, float a) { HERE = a + blocks(); }
extern "C" __global__ void __cluster_dims__(2, 1, 1) pair(float* out, float a) { HERE = a + blocks(); }
extern "C" __global__ void __cluster_dims__(4, 1, 1) four(float* out, float a) { HERE = a + blocks(); }
#endif
"""


class Params:
    """What a node is told: `address` is that of CUDA_KERNEL_NODE_PARAMS_v2.

    Args:
        function: handle.
        values: its parameters, formats of `struct` with numbers, at the places that C gives them.
        buffer: passed in one buffer (``extra``) instead of a list of addresses.
        shared: bytes of dynamic shared memory.
    """

    def __init__(
        self, function: int, values: Sequence[Value], *, buffer: bool = False, shared: int = 0
    ) -> None:
        from pgraph.drivers.cuda.nodes import KernelParams

        self.bytes, offsets = packed(values)
        self._memory = ctypes.create_string_buffer(self.bytes, len(self.bytes))
        at = ctypes.addressof(self._memory)
        self.struct = KernelParams(func=function, shared=shared)
        self.struct.grid[:], self.struct.block[:] = (BLOCKS, 1, 1), (THREADS, 1, 1)
        if buffer:  # CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE, the end
            self._size = ctypes.c_size_t(len(self.bytes))
            self._table = (ctypes.c_void_p * 5)(1, at, 2, ctypes.addressof(self._size), 0)
            self.struct.extra = ctypes.addressof(self._table)
        else:
            self._table = (ctypes.c_void_p * len(offsets))(*[at + offset for offset in offsets])
            self.struct.kernel_params = ctypes.addressof(self._table)
        self.address = ctypes.addressof(self.struct)


def packed(values: Sequence[Value]) -> tuple[bytes, list[int]]:
    """Parameters as a kernel has them, each aligned to its size, and where they are."""
    data, offsets = b"", []
    for form, number in values:
        data += bytes(-len(data) % struct.calcsize(form))
        offsets.append(len(data))
        data += struct.pack(f"={form}", number)
    return data, offsets


class Machine:
    """The GPU, the kernels, and the driver functions that are called by hand."""

    def __init__(self) -> None:
        from cuda.bindings import driver as cu

        from pgraph.drivers.cuda.nodes import check

        self.cu, self.check = cu, check
        self.out = torch.full((BLOCKS * THREADS,), -1.0, device="cuda")
        self.capability = torch.cuda.get_device_capability()
        self._module = check(cu.cuModuleLoadData(compiled(self.capability)))[0]
        lib = ctypes.CDLL("libcuda.so.1")
        self.add = lib.cuGraphAddKernelNode_v2
        self.add.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_size_t, ctypes.c_void_p]
        self.set = lib.cuGraphExecKernelNodeSetParams_v2
        self.set.argtypes = [ctypes.c_void_p] * 3
        self.attribute = lib.cuGraphKernelNodeSetAttribute
        self.attribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]

    def function(self, name: str) -> int:
        """Handle of a kernel."""
        return int(self.check(self.cu.cuModuleGetFunction(self._module, name.encode()))[0])

    def params(self, name: str, a: float, *more: Value, **how: Any) -> Params:
        """Have a kernel write to `out`."""
        return Params(self.function(name), [("Q", self.out.data_ptr()), ("f", a), *more], **how)

    def exec_of(
        self, params: Sequence[Params], *, clusters: int = 0, upload: bool = True
    ) -> tuple[Any, list[int]]:
        """An exec of nodes, one after another, and these."""
        (graph,) = self.check(self.cu.cuGraphCreate(0))
        nodes: list[int] = []
        for one in params:
            node = ctypes.c_void_p()
            before = (ctypes.c_void_p * 1)(nodes[-1] if nodes else None)
            at = ctypes.addressof(before) if nodes else None
            self.ok(self.add(ctypes.addressof(node), int(graph), at, len(nodes[-1:]), one.address))
            assert node.value is not None
            nodes.append(node.value)
        if clusters:
            value = ctypes.create_string_buffer(struct.pack("=3I", clusters, 1, 1), 64)
            self.ok(self.attribute(nodes[0], CLUSTER, ctypes.addressof(value)))
        (made,) = self.check(self.cu.cuGraphInstantiate(graph, 0))
        if upload:
            self.check(self.cu.cuGraphUpload(made, 0))
        torch.cuda.synchronize()
        return made, nodes

    def ok(self, code: int) -> None:
        """Raise if a driver call failed."""
        self.check((self.cu.CUresult(code),))

    def launch(self, made: Any) -> list[float]:
        """What a launch writes: each value that occurs."""
        self.out.fill_(-1.0)
        self.check(self.cu.cuGraphLaunch(made, 0))
        torch.cuda.synchronize()
        return sorted(set(self.out.tolist()))

    def asked(self, made: Any, node: int, params: Params, expected: float) -> Figures:
        """Set a node, and see what comes of it."""
        code = self.set(int(made), node, params.address)
        if code:
            return {"answer": f"no: {self.cu.CUresult(code).name}"}
        found = self.launch(made)
        if found != [expected]:
            return {"answer": f"wrong: {found[:4]} in the place of {expected}"}
        return {"answer": "yes"}


def compiled(capability: tuple[int, int]) -> bytes:
    """The kernels for a device of this capability."""
    from cuda.bindings import nvrtc

    def done(result: tuple[Any, ...]) -> tuple[Any, ...]:
        error, *values = result
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"the kernels were not compiled: {error.name}")
        return tuple(values)

    (program,) = done(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"probes.cu", 0, [], []))
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode()]
    done(nvrtc.nvrtcCompileProgram(program, len(options), options))
    (size,) = done(nvrtc.nvrtcGetCUBINSize(program))
    code = b" " * size
    done(nvrtc.nvrtcGetCUBIN(program, code))
    return code


# -- the questions -------------------------------------------------------------------------------------------


def function(name: str, *more: Value) -> Figures:
    """Another function."""
    here = Machine()
    made, (node,) = here.exec_of([here.params("once", 3.0)])
    first = here.launch(made)
    assert first == [3.0], f"the exec itself is wrong: {first}"
    expected = 10.0 if name == "twice" else 5.0 + sum(value for _, value in more)
    found = here.asked(made, node, here.params(name, 5.0, *more), expected)
    back = here.asked(made, node, here.params("once", 7.0), 7.0)
    return found if back["answer"] == "yes" else {"answer": f"{found['answer']}; and back: {back['answer']}"}


def clusters(before: str, after: str, expected: int, dynamic: int = 0) -> Figures:
    """A function with other clusters; each block says how many blocks are in its cluster.

    Args:
        before, after: names of the functions.
        expected: blocks of a cluster afterwards, if the function's own are what counts.
        dynamic: clusters that the node was given.
    """
    here = Machine()
    if here.capability < (9, 0):
        return {"answer": "clusters need compute capability 9.0"}
    made, (node,) = here.exec_of([here.params(before, 100.0)], clusters=dynamic)
    first = here.launch(made)
    return here.asked(made, node, here.params(after, 200.0), 200.0 + expected) | {"before": first}


def passing(buffer: bool) -> Figures:
    """The other way of passing parameters.

    Args:
        buffer: what it was at first.
    """
    here = Machine()
    made, (node,) = here.exec_of([here.params("once", 3.0, buffer=buffer)])
    first = here.launch(made)
    assert first == [3.0], f"the exec itself is wrong: {first}"
    return here.asked(made, node, here.params("twice", 5.0, buffer=not buffer), 10.0)


def upload(uploaded: bool, set_since: bool) -> Figures:
    """Time of launches."""
    here = Machine()
    made, nodes = here.exec_of([here.params("once", float(i)) for i in range(NODES)], upload=uploaded)
    if set_since:
        for i, node in enumerate(nodes):
            params = here.params("twice", float(i))  # held until the driver has copied it
            here.ok(here.set(int(made), node, params.address))

    def timed() -> tuple[float, float]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        here.check(here.cu.cuGraphLaunch(made, 0))
        issued = time.perf_counter() - began
        torch.cuda.synchronize()
        return issued * 1e6, (time.perf_counter() - began) * 1e6

    first = timed()
    times = [timed() for _ in range(ROUNDS)]
    expected = (2.0 if set_since else 1.0) * (NODES - 1)
    found = here.launch(made)
    return {
        "answer": "yes" if found == [expected] else f"wrong: {found[:4]} in the place of {expected}",
        "us": statistics.median(issued for issued, _ in times),
        "done_us": statistics.median(done for _, done in times),
        "first_us": first[1],
        "nodes": NODES,
    }


def shared(raised: bool, lowered: bool) -> Figures:
    """100,000 bytes of dynamic shared memory, in an exec that was made with 16,384.

    Args:
        raised: the function's limit, before the node is set.
        lowered: it is again, before the launch.
    """
    here = Machine()
    made, (node,) = here.exec_of([here.params("scratch", 1.0, shared=16384)])
    first = here.launch(made)
    assert first == [16385.0], f"the exec itself is wrong: {first}"
    scratch = here.cu.CUfunction(here.function("scratch"))
    limit = here.cu.CUfunction_attribute(LIMIT)
    if raised:
        here.check(here.cu.cuFuncSetAttribute(scratch, limit, 100_000))
    params = here.params("scratch", 1.0, shared=100_000)
    if not lowered:
        return here.asked(made, node, params, 100_001.0)
    here.ok(here.set(int(made), node, params.address))
    here.check(here.cu.cuFuncSetAttribute(scratch, limit, 16384))
    found = here.launch(made)
    return {"answer": "yes" if found == [100_001.0] else f"wrong: {found[:4]} in the place of 100001"}


def attention(deprioritized: bool) -> Figures:
    """Attention at lengths that are new, then at the same again. The variable was set for this process."""
    assert os.environ[VARIABLE] == str(int(deprioritized))
    generator = torch.Generator().manual_seed(0)
    lengths = (16 + torch.randperm(241, generator=generator)[:100]).tolist()

    def step(length: int) -> None:
        q, k, v = (
            torch.randn(8, 8, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    def total() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for length in lengths:
            step(length)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e6 / len(lengths)

    for length in (300, 310, 320):  # loads what there is to load
        step(length)
    return {"us": total(), "again_us": total(), "answer": f"{VARIABLE}={int(deprioritized)}"}


def cuda_driver() -> Any:
    """That of the first GPU."""
    from pgraph.drivers.cuda.driver import CudaDriver

    torch.cuda.init()
    return CudaDriver(0)


PROBES: dict[str, Callable[[], Figures]] = {
    "function-same-size": lambda: function("twice"),
    "function-other-size": lambda: function("sum", ("f", 1.0), ("f", 2.0), ("d", 4.0)),
    "clusters-plain-to-static": lambda: clusters("any", "pair", 2),
    "clusters-static-to-plain": lambda: clusters("pair", "any", 1),
    "clusters-static-to-larger": lambda: clusters("pair", "four", 4),
    "clusters-of-the-node-stay": lambda: clusters("any", "any", 2, dynamic=2),
    "clusters-of-the-node-to-static": lambda: clusters("any", "four", 4, dynamic=2),
    "passing-list-to-buffer": lambda: passing(buffer=False),
    "passing-buffer-to-list": lambda: passing(buffer=True),
    "upload-yes": lambda: upload(True, False),
    "upload-no": lambda: upload(False, False),
    "upload-yes-then-set": lambda: upload(True, True),
    "upload-no-then-set": lambda: upload(False, True),
    "shared-above": lambda: shared(raised=False, lowered=False),
    "shared-raised": lambda: shared(raised=True, lowered=False),
    "shared-raised-and-lowered": lambda: shared(raised=True, lowered=True),
    "results-memory": lambda: probes_results.memory_alone(cuda_driver()),
    "results-tensors": lambda: probes_results.tensors(cuda_driver()),
    "results-python": lambda: probes_results.from_python(cuda_driver()),
    "attention-cudnn": lambda: attention(False),
    "attention-deprioritized": lambda: attention(True),
}


def environment_of(name: str) -> dict[str, str]:
    """For the process that asks."""
    if not name.startswith("attention"):
        return dict(os.environ)
    return {**os.environ, VARIABLE: str(int(name.endswith("deprioritized")))}


def row(name: str, timeout: float) -> dict[str, Any]:
    """The answer to one question, or why there is none."""
    figures = start_worker({"probe": name}, environment_of(name), timeout, PROGRAM)
    identity = {"bench": "probes", "config": name, "mode": "infer", "scope": "block", "backend": "replay"}
    return {**identity, "answer": None, **dict.fromkeys(schema.FIGURES["probes"]), **figures}


def main(argv: Sequence[str] | None = None) -> Path | None:
    """Ask, print, write; returns the result file's path, or None where there is no GPU."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0].startswith("{"):
        print(json.dumps(PROBES[json.loads(argv[0])["probe"]]()))
        return None
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=list(PROBES), default=list(PROBES))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one question (120)")
    parser.add_argument("--out", default=None, help="JSON file or folder for the results")
    args = parser.parse_args(argv)
    header = schema.environment()
    if header["gpu"] == "cpu":
        print("bench/probes.py: there is no CUDA device here, so there is nothing to ask")
        return None
    path = schema.result_path("probes", header["gpu"], args.out)
    for name in args.only:
        one = row(name, args.timeout)
        shown = {k: v for k, v in one.items() if v is not None and k not in schema.IDENTITY}
        print(f"{name}: {shown}", flush=True)
        schema.write(path, [one], header)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
