"""Rules that judge an op by its name or its tags alone: a table.

What is wrong and what to change is in `pgraph.reason_codes`, under the code; the names are in
`pgraph.ops.op_names`.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch._ops import OpOverload
from torch.fx import Node

from pgraph.ops import op_names
from pgraph.ops.fx import op_name, op_of, why
from pgraph.reasons import Reason

__all__ = ["COLLECTIVE", "HOST_READ", "LIBRARY_STATE", "SOLVER", "STORAGE", "STREAM", "TAGGED", "NameRule"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NameRule:
    """Ops that stay outside whatever their arguments are: by name, by how the name begins, or by tag.

    Args:
        code: of the reason, whose fix is the catalogue's.
        sentence: what is wrong, after the name of the op.
        names: ``ns::name`` of such ops.
        begins: how names of such ops begin.
        except_for: names that begin so, of ops that may be captured.
        tag: what the author of such an op says of it.
    """

    code: str
    sentence: str
    names: frozenset[str] = frozenset()
    begins: tuple[str, ...] = ()
    except_for: frozenset[str] = frozenset()
    tag: torch.Tag | None = None

    def __call__(self, node: Node, device_type: str) -> Reason | None:
        op = op_of(node)
        name = op_name(op)
        tagged = isinstance(op, OpOverload) and self.tag in op.tags
        named = name in self.names or name.startswith(self.begins)
        if not tagged and (not named or name in self.except_for):
            return None
        return why(node, self.code, f"{name} {self.sentence}")


TAGGED: Final = NameRule("tagged", "carries torch.Tag.cudagraph_unsafe", tag=torch.Tag.cudagraph_unsafe)
# NCCL's nodes cannot be updated, and its buffers hide in tables: it runs between launches.
COLLECTIVE: Final = NameRule(
    "collective",
    "communicates, and a captured communication keeps its buffers' addresses",
    begins=op_names.COLLECTIVES,
)
# Streams and events belong to the moment of the call, not to a recording.
STREAM: Final = NameRule(
    "stream", "handles a stream or an event", names=op_names.STREAM_OPS, begins=op_names.STREAMS
)
# The host waits for the device: not possible while capturing, not repeated by a launch.
HOST_READ: Final = NameRule(
    "host-read",
    "reads a tensor's value on the host",
    names=op_names.HOST_READS,
    tag=torch.Tag.data_dependent_output,
)
# Factorisations: batched ones build pointer tables on the host, others wait for an error code.
SOLVER: Final = NameRule(
    "solver",
    "may build pointer tables on the host or wait for an error code",
    names=op_names.SOLVERS,
    begins=op_names.SOLVER_FAMILIES,
    except_for=op_names.PLAIN_LINALG,
)
# cuDNN and MIOpen keep dropout states and packed weights of recurrent nets behind handles.
LIBRARY_STATE: Final = NameRule(
    "library-state",
    "keeps state inside its library",
    names=op_names.STATEFUL,
    begins=op_names.STATEFUL_FAMILIES,
)
# Changes what a tensor *is* on the host. A launch repeats kernels only, so it would not happen.
STORAGE: Final = NameRule(
    "storage",
    "changes a tensor's storage or shape in place on the host",
    names=op_names.STORAGE_OPS,
    tag=torch.Tag.inplace_view,
)
