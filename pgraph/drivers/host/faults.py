"""Faults that tests inject into the host driver.

Each imitates something that real CUDA captures or libraries do, so that the tests can show how pgraph
handles it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch

from pgraph.errors import CaptureError, DriverError
from pgraph.reasons import Reason

__all__ = ["FaultPoint", "HostFaults", "Kind", "active", "inject"]

FaultPoint = Literal[
    "arena",
    "begin",
    "op",
    "end",
    "second-begin",
    "second-op",
    "second-end",
    "match",
    "instantiate",
    "allocate",
    "set_params",
    "launch",
]
Kind = Literal["device", "memory", "lost"]


@dataclasses.dataclass(slots=True)
class HostFaults:
    """What the host driver does wrong while this is active (`inject`).

    Args:
        garbage: words of uninitialised padding appended to each kernel node's parameters.
        stale: append a word that still holds the address of a range already dead.
        pointer_constant: append this word to each kernel node, the same in every capture.
        moving_words: append one word that takes these values, one per capture in turn.
        padded: ops whose nodes get such words; empty: all.
        refused: ops that cannot be recorded.
        tables: ops (packet names such as ``"mm"``) that get their addresses through a table in
            memory, written by a node of its own.
        scratch: ops that use scratch inside and place their result over it afterwards.
        beyond: ops that are given the address of an operand that is not there, so many bytes past the end
            of scratch of theirs (cuDNN's kernels are). Nothing is read there.
        origin: ops whose pointers are given so many bytes before the memory that they mean; their kernels
            add the rest.
        elsewhere: ops whose kernels go to a stream that is not being captured.
        aside: ops whose kernels go to a stream of their own, for which what follows waits as late as it may:
            when it reads the result, or something is written in place.
        clusters: ops whose kernels have another launch attribute for sizes of at least so many in the first
            dimension of their first tensor.
        reuse: hand out a dead range's address again inside one capture, as a caching allocator does.
        fail_at: the point.
        fail_as: how: a call of the driver's fails, memory runs out, or (while capturing) the capture is
            lost for good.
        fail_count: how many times it fails; after that it works.
        framework: (address, nbytes) ranges that the driver reports as the framework's memory.
    """

    garbage: int = 0
    stale: bool = False
    pointer_constant: int | None = None
    moving_words: tuple[int, ...] = ()
    padded: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()
    scratch: frozenset[str] = frozenset()
    beyond: Mapping[str, int] = dataclasses.field(default_factory=dict)
    origin: Mapping[str, int] = dataclasses.field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    aside: frozenset[str] = frozenset()
    clusters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reuse: bool = False
    fail_at: FaultPoint | None = None
    fail_as: Kind = "device"
    fail_count: int = 1_000_000
    framework: tuple[tuple[int, int], ...] = ()

    def cluster(self, name: str, words: Sequence[int]) -> int:
        """Launch attribute of an op's kernel.

        Args:
            words: its parameters: an address, and then the first size, if the first argument is a tensor.
        """
        return 2 if name in self.clusters and words[1] >= self.clusters[name] else 1

    def reach(self, point: FaultPoint) -> None:
        """Fail here if told so.

        Raises:
            DriverError, torch.OutOfMemoryError, CaptureError: this is the point.
        """
        if self.fail_at != point or self.fail_count <= 0:
            return
        self.fail_count -= 1
        sentence = f"injected failure at step {point!r}"
        if self.fail_as == "device":
            raise DriverError(sentence)
        if self.fail_as == "memory":
            raise torch.OutOfMemoryError(sentence)
        raise CaptureError(Reason("capture-lost", sentence, "end the injection"))


_NONE = HostFaults()
_ACTIVE: contextvars.ContextVar[HostFaults] = contextvars.ContextVar("pgraph_host_faults", default=_NONE)


def active() -> HostFaults:
    """The faults in force in this context."""
    return _ACTIVE.get()


@contextlib.contextmanager
def inject(faults: HostFaults) -> Iterator[HostFaults]:
    """Let the host driver misbehave for the duration of the block."""
    token = _ACTIVE.set(faults)
    try:
        yield faults
    finally:
        _ACTIVE.reset(token)
