"""The optional native helper: built on first use with the machine's C compiler, else None.

What pays for it, measured on an H200: setting a kernel node's parameters takes 0.11-0.13 us from C
and 0.47-0.70 us from Python. Launches work without it, through the Python path in
`pgraph.drivers` and `pgraph.launch.interpreter`; set ``PGRAPH_NATIVE=0`` to force that.

Four sources: `rebind.c` needs nothing but C (`load`), `launch.c` is an extension module and
needs Python's headers (`load_call`), as Triton's own launchers do; `workspaces.cpp` and `tensors.cpp` need
a C++ compiler and PyTorch's headers (`load_workspaces`, `load_tensors`). `workspaces.cpp` does what Python
cannot: what becomes of captures without it is told in Note [Others' workspaces].
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from typing import Any

from pgraph.environment import WORDS
from pgraph.native.structs import check_sizes

__all__ = ["address_of", "load", "load_call", "load_tensors", "load_workspaces", "missing"]

log = logging.getLogger(__name__)

_HERE = pathlib.Path(__file__).parent
_REBIND = ("rebind_plan.h", "rebind_read.h", "rebind_turns.h")
_PARTS = ("launch.h", "launch_match.h", "launch_run.h", "launch_read.h")
_missing: dict[str, str] = {}  # source -> what goes without it, and why it is not there


@functools.cache
def load() -> ctypes.CDLL | None:
    """The loaded library, or None where it is switched off or no compiler is found.

    A `CDLL`: a launch may wait for room in the device's queue, and other Python threads must run
    meanwhile.
    """
    wish = os.environ.get("PGRAPH_NATIVE", "").strip() or "1"
    if wish.lower() not in WORDS:
        log.warning("PGRAPH_NATIVE is %r; it must be 1 or 0 and counts as 1", wish)
    elif not WORDS[wish.lower()]:
        return None
    try:
        library = ctypes.CDLL(str(_build("rebind.c", parts=_REBIND)))
        check_sizes(library)
    except (OSError, subprocess.SubprocessError) as e:
        _lack("rebind.c", "no native helper, launching from Python instead", e)
        return None
    _missing.pop("rebind.c", None)
    library.pg_arena_take.restype = ctypes.c_uint64
    library.pg_arena_take.argtypes = [ctypes.c_void_p] + [ctypes.c_uint64] * 2
    library.pg_arena_activate.argtypes = [ctypes.c_void_p]
    library.pg_pack.restype = None
    library.pg_pack.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64]
    for read, arguments in ((library.pg_read_nodes, "ppip"), (library.pg_read_kept, "ppippipipi")):
        read.restype = None
        read.argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in arguments]
    library.pg_count.restype = ctypes.c_int64
    library.pg_count.argtypes = [ctypes.c_void_p]
    library.pg_suspects.restype = ctypes.c_int64
    library.pg_suspects.argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in "pppipip"]
    library.pg_pack_all.restype = None
    library.pg_pack_all.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64]
    library.pg_pack_chunk.restype = ctypes.c_int64
    library.pg_pack_chunk.argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in "piiiip"]
    library.pg_launch.restype = ctypes.c_int64
    library.pg_launch.argtypes = [ctypes.c_void_p] * 3
    library.pg_take_turns.restype = None
    library.pg_take_turns.argtypes = [ctypes.c_void_p] * 2
    library.pg_fits.restype = ctypes.c_int64
    library.pg_fits.argtypes = [ctypes.c_void_p]
    return library


@functools.cache
def load_call() -> Any | None:
    """The extension module made of `launch.c`; None where `load` gives None, or without headers."""
    if load() is None:
        return None
    abi = sysconfig.get_config_var("SOABI")
    try:
        path = str(_build("launch.c", f"-I{sysconfig.get_path('include')}", tag=f"-{abi}", parts=_PARTS))
        loader = importlib.machinery.ExtensionFileLoader("_pgraph_launch", path)
        spec = importlib.util.spec_from_file_location("_pgraph_launch", path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (OSError, ImportError, subprocess.SubprocessError) as e:
        _lack("launch.c", "no launches in C, the steps of a launch run in Python instead", e)
        return None
    return module


@functools.cache
def load_workspaces() -> ctypes.CDLL | None:
    """The library made of `workspaces.cpp`; None where `load` gives None, or if it cannot be built."""
    if load() is None:
        return None
    import torch

    root = pathlib.Path(torch.__file__).parent
    try:
        header = root / "include" / "ATen" / "cuda" / "CUDAContextLight.h"
        declared = header.read_text()
        struct = re.search(r"^struct WorkspaceMapWithMutex \{.*?^\};$", declared, re.M | re.S)
        handle = re.search(r"cublasHandle_t (getCurrentCUDABlasHandle\(.*?\);)", declared, re.S)
        if struct is None or handle is None:
            raise OSError(f"{header} declares no WorkspaceMapWithMutex, or no getCurrentCUDABlasHandle")
        path = _build(
            "workspaces.cpp",
            *_torch_flags(root, "torch_cuda", "c10"),
            tag=f"-{torch.__version__}",
            header=("WORKSPACE_MAP", f"{struct.group()}\ncublasContext* {handle.group(1)}\n"),
        )
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as e:
        _lack("workspaces.cpp", "captures drop the cuBLAS workspaces of all streams", e)
        return None
    library.pg_drop_workspaces.restype = ctypes.c_int64
    library.pg_drop_workspaces.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    library.pg_current_workspace.restype = ctypes.c_uint64
    library.pg_current_workspace.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.pg_workspaces.restype = ctypes.c_int64
    library.pg_workspaces.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_int64]
    return library


@functools.cache
def load_tensors() -> ctypes.CDLL | None:
    """The library made of `tensors.cpp`; None where `load_call` gives None, or if it cannot be built."""
    if load_call() is None:
        return None
    import torch

    root = pathlib.Path(torch.__file__).parent
    names, flags = ["torch_python", "torch_cpu", "c10"], [f"-I{sysconfig.get_path('include')}"]
    if (root / "lib" / "libtorch_cuda.so").exists():
        names.append("torch_cuda")
        flags.append("-DPGRAPH_CUDA")
    tag = f"-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    try:
        path = _build(
            "tensors.cpp", *flags, *_torch_flags(root, *names), tag=tag, parts=("watch.h", "timeline.h")
        )
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as e:
        _lack("tensors.cpp", "Python functions make the results of launches", e)
        return None
    return library


def missing() -> tuple[str, ...]:
    """What is done without the helpers that could not be built so far, and why; () if nothing is missing."""
    return tuple(_missing.values())


def _lack(source: str, consequence: str, error: Exception) -> None:
    """A helper is not there. The last line of what a compiler says tells most."""
    log.info("%s: %s", consequence, error)
    why = str(error).strip().splitlines() or [type(error).__name__]
    _missing[source] = f"{consequence}: {why[-1]}"


def address_of(function: Any) -> int:
    """Address of a C function that `ctypes` found."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _torch_flags(root: pathlib.Path, *names: str) -> list[str]:
    """To compile with PyTorch's headers, which need C++20 since 2.13, and to link with its libraries."""
    return ["-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}", *(f"-l{name}" for name in names)]


def _build(
    file: str,
    *flags: str,
    tag: str = "",
    header: tuple[str, str] | None = None,
    parts: tuple[str, ...] = (),
) -> pathlib.Path:
    """The shared library made of a source beside this file.

    Args:
        header: a macro, and the text of the file that it names.
        parts: files that the source includes.
    """
    path = _HERE / file
    sources = b"".join(source.read_bytes() for source in (path, *(_HERE / part for part in parts)))
    digest = hashlib.sha256(sources + repr((flags, header)).encode()).hexdigest()[:16]
    name = f"{path.stem}-{digest}{tag}-{sysconfig.get_platform()}.so"
    target = _cache_dir() / name
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = pathlib.Path(scratch) / name
        command = [*_compiler(path.suffix), "-O2", "-shared", "-fPIC", "-o", str(built), str(path)]
        if header is not None:
            macro, text = header
            (pathlib.Path(scratch) / "header.h").write_text(text)
            command += [f'-D{macro}="header.h"', f"-I{scratch}"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise OSError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:] or done.returncode}")
        os.replace(built, target)  # atomic: two processes may build at the same time
    return target


def _compiler(suffix: str) -> list[str]:
    variable, names = (
        ("CXX", ("c++", "g++", "clang++")) if suffix == ".cpp" else ("CC", ("cc", "gcc", "clang"))
    )
    found = os.environ.get(variable) or next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise OSError(f"no compiler for *{suffix} found")
    return shlex.split(found)  # "ccache g++" is a common value


def _cache_dir() -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for candidate in (
        pathlib.Path(root) / "pgraph",
        pathlib.Path(tempfile.gettempdir()) / f"pgraph-{os.getuid()}",
    ):
        try:
            candidate.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(candidate, os.W_OK) and candidate.stat().st_uid == os.getuid():
                return candidate
        except OSError:
            continue
    raise OSError("no cache directory can be written")
