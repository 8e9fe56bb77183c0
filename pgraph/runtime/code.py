"""What is captured of a partition."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pgraph import compat
from pgraph.runtime.protocols import Boxed

__all__ = ["Code"]


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """What is captured.

    Args:
        run: the partition's own code; takes one list and empties it.
        namespaces: see `pgraph.capture.record.record`.
        constants: tensors held by the code.
        static: argument positions whose memory the caller keeps (parameters and buffers).
        saved: positions of results that are saved for the backward, and their names there.
        kept: positions of results that are parameters' gradients.
        lasting: positions of results that the program gets.
        joint: what is known of the backward.
    """

    run: Boxed
    namespaces: Sequence[dict[str, Any]] = ()
    constants: Sequence[torch.Tensor] = ()
    static: frozenset[int] = frozenset()
    saved: Mapping[int, str] = dataclasses.field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    lasting: frozenset[int] = frozenset()
    joint: compat.Joint | None = None

    def sharing(self) -> dict[int, int]:
        """Saved results that may share memory, and when each dies: Note [Results in one piece]."""
        if self.joint is None or not self.joint.plain or compat.packed_by_others():
            return {}
        deaths = self.joint.deaths
        return {i: deaths[name] for i, name in self.saved.items() if name in deaths}
