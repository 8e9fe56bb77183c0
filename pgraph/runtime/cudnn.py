"""Captures of convolutions and the like hold for the settings of cuDNN that they were made with.

When `torch.backends.cudnn` changes Dynamo compiles nothing anew, as it does for the precision of products:
code that calls libraries follows by itself. A launch would not. So a partition with such ops looks at each
call, and begins anew after a change.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from pgraph import compat
from pgraph.ops import op_names

__all__ = ["Watched", "watched"]


class Watched:
    """cuDNN's settings as one partition has seen them last."""

    def __init__(self) -> None:
        self._latest: Hashable = None

    def changed(self) -> bool:
        """Whether they are others than at the call before."""
        before, self._latest = self._latest, compat.cudnn_settings()
        return before is not None and before != self._latest


def watched(ops: Collection[str]) -> Watched | None:
    """What looks at them for a partition of these ops; None where they do not matter."""
    return Watched() if op_names.OF_CUDNN.intersection(ops) else None
