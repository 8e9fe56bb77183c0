"""Choose a `torch.compile` backend by name, for the example and the benchmark programs.

Works both with pgraph installed (its entry point makes ``backend="pgraph"`` known to torch) and from a
plain checkout, where this module puts the repository root on ``sys.path`` and registers the backend.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[1]
if str(REPO) not in sys.path:
    # Behind everything else, so that an installed pgraph wins over the checkout.
    sys.path.append(str(REPO))

BACKENDS = ("pgraph", "inductor", "eager", "reduce-overhead", "aot_eager")
DRIVERS = ("auto", "cuda", "host")
CODEGENS = ("auto", "inductor", "aten")


def pgraph_available() -> bool:
    """Whether pgraph's backend module can be found (nothing of it is imported)."""
    return (
        importlib.util.find_spec("pgraph") is not None
        and importlib.util.find_spec("pgraph.backend") is not None
    )


def register_pgraph() -> str:
    """Make ``backend="pgraph"`` known to torch where no entry point does; returns that name."""
    if not pgraph_available():
        raise RuntimeError(
            "backend pgraph: the module pgraph.backend was not found on sys.path; "
            "run `pip install -e .` in the repository's root, or run from a complete checkout"
        )
    if "pgraph" not in torch._dynamo.list_backends(None):
        from pgraph.backend import backend

        torch._dynamo.register_backend(backend, name="pgraph")
    return "pgraph"


def default_codegen(device: torch.device) -> str:
    """Inductor on a GPU; ATen ops on a CPU, where Inductor would need a C++ compiler."""
    return "inductor" if device.type == "cuda" else "aten"


def default_driver(device: torch.device) -> str:
    """The driver that can serve `device`."""
    return "cuda" if device.type == "cuda" else "host"


def compile_kwargs(
    backend: str, device: torch.device, driver: str = "auto", codegen: str = "auto"
) -> dict[str, Any] | None:
    """Arguments for `torch.compile` that select `backend`, or None for eager (no compile at all).

    Args:
        backend: one of `BACKENDS`.
        device: where the model lives; settles ``auto``.
        driver: pgraph's driver, one of `DRIVERS`; other backends ignore it.
        codegen: pgraph's code generator, one of `CODEGENS`; other backends ignore it.
    """
    # Shapes are fixed in these programs; dynamic=False keeps a stray recompile from turning symbolic.
    if backend == "eager":
        return None
    if backend in ("inductor", "aot_eager"):
        return {"backend": backend, "dynamic": False}
    if backend == "reduce-overhead":
        return {"mode": "reduce-overhead", "dynamic": False}
    if backend == "pgraph":
        options = {
            "driver": default_driver(device) if driver == "auto" else driver,
            "codegen": default_codegen(device) if codegen == "auto" else codegen,
        }
        return {"backend": register_pgraph(), "options": options, "dynamic": False}
    raise ValueError(f"backend={backend!r} is unknown; choose one of {', '.join(BACKENDS)}")


def pgraph_report() -> Any | None:
    """pgraph's report object, or None where its backend was never imported."""
    if "pgraph.backend" not in sys.modules:
        return None
    import pgraph

    return pgraph.report()


def pgraph_settled() -> bool:
    """Whether pgraph tries nothing just now: no capture beside the code it came from, no layout of memory."""
    if "pgraph.backend" not in sys.modules:
        return True
    import pgraph
    from pgraph.runtime import trimming

    return trimming.pending is None and pgraph.report().on_trial == 0


def as_count(value: Any) -> float:
    """A number as it is, a collection by its length: the report's fields as plain figures."""
    return value if isinstance(value, int | float) else len(value)


def reset_compiled() -> None:
    """Forget all compiled code and, where pgraph is loaded, its templates and counters."""
    if "pgraph.backend" in sys.modules:
        import pgraph

        pgraph.reset()
    torch._dynamo.reset()


def peak_rss_mb() -> float | None:
    """Largest resident size of this process so far, in MB (2**20 bytes); None where unknown."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
