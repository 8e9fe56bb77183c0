"""How many nodes a capture has recorded so far, asked of the driver twice for each op."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

from cuda.bindings import driver as cu

from pgraph.drivers.cuda.nodes import status_name
from pgraph.errors import CaptureError, DriverError
from pgraph.native import libraries
from pgraph.native.libraries import address_of
from pgraph.native.structs import PathEntry
from pgraph.reasons import Reason
from pgraph.template.topology import Topology

__all__ = ["Counting", "NodeCount", "lost"]


@functools.cache
def _whole() -> Any:
    """The driver function that counts all nodes of a graph, one by one."""
    get = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
    get.argtypes = [ctypes.c_void_p] * 3
    return get


@functools.cache
def _functions() -> tuple[int, int, int] | None:
    """Addresses of those that tell where a capture stands, and of a node those before it and behind it; None
    if this driver has them not."""
    lib = ctypes.CDLL("libcuda.so.1")
    names = ("StreamGetCaptureInfo_v2", "GraphNodeGetDependencies_v2", "GraphNodeGetDependentNodes_v2")
    try:
        info, before, behind = (address_of(getattr(lib, f"cu{name}")) for name in names)
    except AttributeError:
        return None
    return info, before, behind


@dataclasses.dataclass(slots=True)
class Counting:
    """How the captures of one device are counted.

    Args:
        whole: all nodes each time. From the first capture on that had forks: others may have some.
    """

    whole: bool = False


class NodeCount:
    """Of one capture.

    Note [Counted along the path]
    To count a graph's nodes the driver walks over all of them: to ask at each op takes time that grows with
    the square of the ops. What the stream's next node will wait for is told at once: the end of the path. So
    only the path's new nodes are walked, as long as each waits for one node and none waits for the end.

    What other streams record is not on the path until they are joined, so this may count too few. Not where
    the nodes are a chain when all is told: what was recorded by then is the beginning of the chain, and had
    there been more of it than the path, a node would have waited for the path's end. Where they are no chain,
    what was counted is worth nothing: the capture is made again, and all nodes are counted each time.

    Args:
        stream: that is captured.
        graph: the capture's.
        counting: how; it learns from this one.

    Attributes:
        counter: see `pgraph.drivers.interface.Session.counter`.
    """

    def __init__(self, stream: int, graph: int, counting: Counting) -> None:
        self._graph, self._counting = graph, counting
        library, functions = libraries.load(), None if counting.whole else _functions()
        self.counter: tuple[int, int] | None = None
        self._entry: PathEntry | None = None
        if library is not None and functions is not None:
            info, before, behind = functions
            self._entry = PathEntry(info=info, before=before, behind=behind, stream=stream)
            self._place, self._count = ctypes.addressof(self._entry), library.pg_count
            self.counter = address_of(library.pg_count), self._place
        self._kept = self._entry  # the counter's argument
        self._certain = True
        self._walked = self._entry is not None

    def now(self) -> int:
        """So many nodes.

        Raises:
            CaptureError, DriverError: the capture was lost.
        """
        if self._entry is not None:
            count: int = self._count(self._place)
            if count >= 0:
                return count
        count = self._all()
        if count > 0:
            self._entry = None  # there is a fork, or what cannot be told: no path to walk
        return count

    def checked(self) -> int:
        """As `now`, of all nodes; what was counted along the path is compared."""
        along, count = self.now(), self._all()
        self._certain &= along == count
        return count

    def was_right(self, order: Topology) -> bool:
        """Whether each count was, now that it is known how the nodes wait for one another."""
        right = self._certain and (order.is_chain or not self._walked)
        self._counting.whole |= not right
        return right

    def _all(self) -> int:
        count = ctypes.c_size_t()
        code: int = _whole()(self._graph, None, ctypes.addressof(count))
        if code:
            raise lost("the capture was lost", code)
        return count.value


def lost(sentence: str, code: int) -> CaptureError | DriverError:
    """What to raise for a capture that the driver gave up: an op's doing, or want of memory."""
    text = f"{sentence}: {status_name(code)}"
    if code == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        return DriverError(text)
    return CaptureError(Reason("capture-lost", text))
