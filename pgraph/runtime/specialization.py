"""One set of layouts and alignments of a partition's arguments, and what has become of it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pgraph.capture.build import Built
from pgraph.compat import assert_size_stride
from pgraph.launch.interpreter import Launcher
from pgraph.reasons import Reason
from pgraph.runtime.keeping import Use

__all__ = [
    "Specialization",
    "State",
    "Trait",
    "alignments",
    "all_that_ops_see",
    "key_of",
    "lazy_bits",
    "lazy_bits_and_type",
]

Trait = Callable[[torch.Tensor], Any]


def lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """(conjugated, negated) when it is read: Note [Lazy conjugates] in `pgraph.compat`."""
    return tensor.is_conj(), tensor.is_neg()


def lazy_bits_and_type(tensor: torch.Tensor) -> tuple[bool, bool, torch.dtype]:
    """The same and the type of the elements."""
    return tensor.is_conj(), tensor.is_neg(), tensor.dtype


def all_that_ops_see(tensor: torch.Tensor) -> tuple[bool, bool, torch.dtype, int]:
    """The same and the storage offset in elements: what `as_strided` counts from."""
    return tensor.is_conj(), tensor.is_neg(), tensor.dtype, int(tensor.storage_offset())


class State(enum.Enum):
    """Where a specialization stands."""

    COLD = "cold"
    WARM = "warm"
    READY = "ready"
    REFUSED = "refused"


@dataclasses.dataclass(slots=True)
class Specialization:
    """One set of layouts and alignments, and what has become of it.

    Args:
        tensors: per device tensor: (position among the arguments, size, stride, address bits that must
            be 0: the alignment needed less 1).
        others: (position, value) of the integers that the code was specialized for.
        traits: (position, function, what it says of the tensor) where layout and address do not say all.
    """

    tensors: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]
    others: tuple[tuple[int, Any], ...]
    traits: tuple[tuple[int, Trait, Any], ...] = ()
    runs: int = 0
    failures: int = 0
    threads: set[int] = dataclasses.field(default_factory=set)
    built: Built | None = None
    launcher: Launcher | None = None
    call: Callable[[list[Any]], tuple[list[Any], int] | None] | None = None
    reason: Reason | None = None
    use: Use = dataclasses.field(default_factory=Use)

    def restart(self) -> None:
        """Begin anew: its capture went for another's sake."""
        self.runs, self.use = 0, Use()

    @property
    def state(self) -> State:
        if self.reason is not None:
            return State.REFUSED
        if self.launcher is not None:
            return State.READY
        return State.WARM if self.runs else State.COLD

    def addresses(self, args: Sequence[Any]) -> list[int] | None:
        """Addresses of the device tensors if a launch of this specialization is right for `args`, else None.

        Note [Alignment is part of the contract]
        Kernels were chosen for the alignment of the captured addresses; a less aligned address
        needs another capture.
        """
        for position, value in self.others:
            if args[position] != value:
                return None
        found = []
        try:
            for position, size, stride, mask in self.tensors:
                tensor = args[position]
                address = tensor.data_ptr()
                if address & mask:
                    return None
                assert_size_stride(tensor, size, stride)
                found.append(address)
            for position, trait, value in self.traits:
                if trait(args[position]) != value:
                    return None
        except (AssertionError, RuntimeError):  # another layout, or a tensor that lies nowhere
            return None
        return found


def key_of(
    args: Sequence[Any], device: torch.device, usual: int, watched: Mapping[int, Trait]
) -> tuple[Any, Any, Any] | None:
    """The first three arguments of the `Specialization` for these; None if a tensor lies nowhere (batched,
    fake).

    Args:
        args: of a partition.
        device: whose tensors count.
        usual: bytes to which the device's allocator aligns.
        watched: positions of which more must stay than layout and alignment.
    """
    tensors, others, traits, addresses = [], [], [], []
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            if value.device != device:
                continue  # CPU seeds of attention without dropout: never read
            try:
                addresses.append(value.data_ptr())
            except RuntimeError:
                return None
            tensors.append((position, tuple(value.size()), tuple(value.stride())))
            if position in watched:
                traits.append((position, watched[position], watched[position](value)))
        elif isinstance(value, int | float | bool):
            others.append((position, value))
    aligned = alignments(addresses, usual)
    layouts = tuple((*t, a - 1) for t, a in zip(tensors, aligned, strict=True))
    return layouts, tuple(others), tuple(traits)


def alignments(addresses: Sequence[int], usual: int) -> list[int]:
    """The alignment to capture each address with, in bytes.

    Few classes, so that addresses that wander (slices of one large buffer) do not ask for a capture
    each: all as the allocator aligns, or all to 16 bytes (what vector loads and tensor maps need),
    or each by itself.
    """
    lows = [(a & -a) if a else usual for a in addresses]
    for common in (usual, 16):
        if all(low >= common for low in lows):
            return [common] * len(lows)
    return [min(low, 16) for low in lows]
