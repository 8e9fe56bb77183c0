"""What must hold of a partition's arguments for a launch of one of its captures to be right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pgraph.compat import assert_size_stride
from pgraph.template.template import borrowed

__all__ = [
    "Guards",
    "TensorGuard",
    "Trait",
    "TraitGuard",
    "ValueGuard",
    "alignments",
    "guards_of",
    "lazy_bits_and_type",
    "storage_facts",
]

Trait = Callable[[torch.Tensor], Any]
"""Says something of a tensor that neither its layout nor its address tells."""


def lazy_bits_and_type(tensor: torch.Tensor) -> tuple[bool, bool, torch.dtype]:
    """(conjugated, negated) when it is read, and the type of the elements."""
    return tensor.is_conj(), tensor.is_neg(), tensor.dtype


def storage_facts(tensor: torch.Tensor) -> tuple[bool, bool, torch.dtype, int]:
    """The same and the storage offset in elements: what `as_strided` counts from."""
    return tensor.is_conj(), tensor.is_neg(), tensor.dtype, int(tensor.storage_offset())


@dataclasses.dataclass(frozen=True, slots=True)
class TensorGuard:
    """A tensor of the device.

    Args:
        position: among the partition's arguments.
        size, stride: in elements.
        mask: bits that must be 0 in its address: the alignment needed, in bytes, less 1.
    """

    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    mask: int

    @property
    def empty(self) -> bool:
        """Whether it has no element."""
        return 0 in self.size

    def layout_of(self, tensor: torch.Tensor) -> bool:
        """Whether it has these sizes, and these strides in dimensions of more than one element."""
        strides = zip(self.size, self.stride, tensor.stride(), strict=True)
        return tensor.size() == self.size and all(a == b for n, a, b in strides if n > 1)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ValueGuard:
    """A number that the code was specialized for. 0.0 is another one than -0.0; so are 1, 1.0 and True."""

    position: int
    value: Any

    def holds(self, value: Any) -> bool:
        """Whether it is this number."""
        if type(value) is not type(self.value) or value != self.value:
            return False
        return type(value) is not float or math.copysign(1.0, value) == math.copysign(1.0, self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueGuard):
            return NotImplemented
        return self.position == other.position and self.holds(other.value)

    def __hash__(self) -> int:
        return hash((self.position, self.value))


@dataclasses.dataclass(frozen=True, slots=True)
class TraitGuard:
    """What a function said of an argument, where layout and address do not say all."""

    position: int
    trait: Trait
    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Guards:
    """All that must hold. Comparable: equal guards mean one specialization.

    Args:
        tensors: in the order of the template's inputs.
        values: numbers among the arguments.
        traits: of tensors in `tensors`.

    Attributes:
        shape: which arguments they are about, and each tensor's number of dimensions. Kept, since to look at
            all tensors for it takes 7 us, for each of hundreds of sizes.
    """

    tensors: tuple[TensorGuard, ...]
    values: tuple[ValueGuard, ...] = ()
    traits: tuple[TraitGuard, ...] = ()
    shape: Any = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = tuple([(guard.position, len(guard.size)) for guard in self.tensors])
        object.__setattr__(self, "shape", (tensors, tuple([guard.position for guard in self.values])))

    @property
    def positions(self) -> tuple[int, ...]:
        """Where the template's inputs stand among the arguments."""
        return tuple(guard.position for guard in self.tensors)

    @property
    def alignments(self) -> list[int]:
        """What each tensor's address is a multiple of, in bytes."""
        return [guard.mask + 1 for guard in self.tensors]

    def alike(self, other: Guards) -> Guards:
        """The same guards, made of another's where these are equal: a second size takes less memory."""
        made = dataclasses.replace(self, tensors=borrowed(self.tensors, other.tensors))
        if made.shape == other.shape:
            object.__setattr__(made, "shape", other.shape)
        return made

    def addresses(self, args: Sequence[Any]) -> list[int] | None:
        """Addresses of the device tensors if all guards hold for `args`, else None.

        Note [Alignment is part of the contract]
        Kernels were chosen for the alignment of the captured addresses; a less aligned address
        needs another capture.
        """
        for number in self.values:
            if not number.holds(args[number.position]):
                return None
        found = []
        try:
            for guard in self.tensors:
                tensor = args[guard.position]
                address = tensor.data_ptr()
                if address & guard.mask:
                    return None
                assert_size_stride(tensor, guard.size, guard.stride)
                # Without an element any layout was right for that function; with one, the memory is gone.
                if not address and not (guard.empty and guard.layout_of(tensor)):
                    return None
                found.append(address)
            for told in self.traits:
                if told.trait(args[told.position]) != told.value:
                    return None
        except (AssertionError, AttributeError, RuntimeError):
            return None  # another layout, no tensor, or a tensor that lies nowhere
        return found


def guards_of(
    args: Sequence[Any], device: torch.device, usual: int, watched: Mapping[int, Trait]
) -> Guards | None:
    """The guards for arguments like these; None if a tensor lies nowhere (batched, fake, its storage shrunk).

    Args:
        args: of a partition.
        device: whose tensors count.
        usual: bytes to which the device's allocator aligns.
        watched: positions of which more must stay than layout and alignment.
    """
    tensors, values, traits, addresses = [], [], [], []
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            if value.device != device:
                continue  # CPU seeds of attention without dropout: never read
            try:
                addresses.append(value.data_ptr())
            except RuntimeError:
                return None
            if not addresses[-1] and value.numel():
                return None
            tensors.append((position, tuple(value.size()), tuple(value.stride())))
            if position in watched:
                traits.append(TraitGuard(position, watched[position], watched[position](value)))
        elif isinstance(value, int | float | bool):
            values.append(ValueGuard(position, value))
    aligned = alignments(addresses, usual)
    layouts = tuple(TensorGuard(*t, a - 1) for t, a in zip(tensors, aligned, strict=True))
    return Guards(layouts, tuple(values), tuple(traits))


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
