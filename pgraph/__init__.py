"""pgraph: a `torch.compile` backend with CUDA-graph speed at no-graph memory.

The files, in the order in which data flows through them:

========================  ==========================================================================
`backend`                 Dynamo graph in; forward, backward and inference graphs out
`compile_graph`           one such graph to runners
`options`, `environment`  what a user can choose
`constants`, `operands`,  what the program makes on the CPU out of nothing, and ops on the device take
`moving`
`seedless`                checkpointed ops that draw nothing lose the generator's state kept for them
`safety`, `rules_*`,      which ops may be captured, and why not
`nodes`, `optable`
`partition`               contiguous runs of safe and unsafe ops, each a module of its own
`capture`                 record a partition on ghost memory
`topology`                which nodes of a recording wait for which, and where all of them have met
`match`                   two recordings -> which words of the node parameters are which region
`plan`, `packing`         when memory is allocated and freed around which chunk of nodes
`build`                   the steps above in order; `template` holds what they leave behind
`launch`                  today's addresses in, ordinary tensors out
`runner`, `specialization`,      the state machine: plain, captured, launched, refused
`failures`
`culprit`, `resplit`      a refused capture: which op made it fail, and the split around that op
`borders`, `strides`      which strides go from one partition to the next, and from the forward to the
backward `storage`                 ops that read a tensor's storage, given the tensor that owns it
`graph_runner`            the partitions of a split graph in order, values from one to the next
`drivers/`                CUDA, and the same rules on the CPU
`facts`, `stats`          what is known of each partition, and what has been done with it so far
`explaining`, `breaks`,   why something stays outside, what it costs, what to change first
`observe`
`explanation`, `render`,  the answer as data, as text and as a page
`timeline`, `words`
`strict`, `sizes`         errors instead of running uncaptured; which sizes are captured
`peaks`                   what captures add to the framework's peak statistics
`compat/`                 PyTorch's private interfaces
========================  ==========================================================================

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
