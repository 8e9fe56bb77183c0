"""pgraph: a `torch.compile` backend with CUDA-graph speed at no-graph memory.

`pgraph/README.md` has the way of the data through the folders, the proof, the words and the file map.

Importing this package imports neither torch nor CUDA: `TORCH_LOGS="+pgraph"` imports it while torch
itself is still being imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgraph.backend import reset as reset
    from pgraph.errors import DriverError as DriverError
    from pgraph.errors import FullCaptureError as FullCaptureError
    from pgraph.errors import OptionError as OptionError
    from pgraph.errors import PgraphError as PgraphError
    from pgraph.explanation.explanation import Explanation as Explanation
    from pgraph.explanation.session import explain as explain
    from pgraph.ops.safety import mark_unsafe as mark_unsafe
    from pgraph.ops.safety import unmark_unsafe as unmark_unsafe
    from pgraph.options import list_options as list_options
    from pgraph.runtime.registry import report as report

__all__ = [
    "DriverError",
    "Explanation",
    "FullCaptureError",
    "OptionError",
    "PgraphError",
    "explain",
    "list_options",
    "mark_unsafe",
    "report",
    "reset",
    "unmark_unsafe",
]
__version__ = "0.1.0"

_HOME = {
    "DriverError": "pgraph.errors",
    "Explanation": "pgraph.explanation.explanation",
    "FullCaptureError": "pgraph.errors",
    "OptionError": "pgraph.errors",
    "PgraphError": "pgraph.errors",
    "explain": "pgraph.explanation.session",
    "list_options": "pgraph.options",
    "mark_unsafe": "pgraph.ops.safety",
    "report": "pgraph.runtime.registry",
    "reset": "pgraph.backend",
    "unmark_unsafe": "pgraph.ops.safety",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pgraph' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, those that nobody has asked for yet as well."""
    return sorted({*globals(), *__all__})
