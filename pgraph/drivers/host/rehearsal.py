"""The results of an op, found before it is recorded: its CPU kernel is run once on zeros."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from pgraph.compat import lazily
from pgraph.drivers.interface import extent
from pgraph.errors import CaptureError
from pgraph.reasons import Reason

__all__ = ["expected"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """What must not differ between what a rule says of a result and what a kernel makes."""

    dtype: torch.dtype
    size: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"


def expected(op: Any, args: Any, kwargs: Any, told: Sequence[Any], fresh: Sequence[int]) -> list[Any]:
    """The flat results of an op: those that it makes anew are as its CPU kernel makes them.

    Note [A rehearsal]
    A capture runs nothing: the op's rule for fake tensors tells which results it has, and the ops after it
    are recorded for those. The kernel may do otherwise: leave out a result that only a backward needs, choose
    other strides, return another type. So it is run once, on zeros in memory of its own. Where that fails
    (zeros may be no valid arguments) the rule is taken as right, and a launch checks the results.

    Args:
        told: the results by the rule.
        fresh: which of them are tensors that no argument is.

    Returns:
        `told`, where those at `fresh` are tensors of the layout to come, or None for what is left out.

    Raises:
        CaptureError: the kernel makes another number of results, or one of another type or size.
    """
    made = _rehearsed(op, args, kwargs) if fresh else None
    if made is None:
        return list(told)
    if len(made) != len(told):
        raise _refused(op, f"{len(made)} results", str(len(told)))
    results = list(told)
    for position, (rule, kernel) in enumerate(zip(told, made, strict=True)):
        if position in fresh:
            if kernel is not None and _kind(kernel) != _kind(rule):
                raise _refused(op, str(_kind(kernel)), str(_kind(rule)))
            results[position] = kernel
        elif rule is None and kernel is not None:
            raise _refused(op, str(_kind(kernel)), "nothing")
    return results


def _rehearsed(op: Any, args: Any, kwargs: Any) -> list[Any] | None:
    try:
        with _undisturbed(op), torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            stand_ins = tree_map_only(torch.Tensor, _zeros_like, (args, kwargs))
            return tree_flatten(op(*stand_ins[0], **stand_ins[1]))[0]
    except Exception:
        return None


def _zeros_like(t: torch.Tensor) -> torch.Tensor:
    """Zeros of the same layout in a storage that begins as far before them."""
    offset = int(t.storage_offset())
    memory = torch.zeros(offset + extent(t.size(), t.stride()), dtype=t.dtype, device="cpu")
    return lazily(memory.as_strided(t.size(), t.stride(), offset), t.is_conj(), t.is_neg())


@contextlib.contextmanager
def _undisturbed(op: Any) -> Iterator[None]:
    """The generator's state is restored: an op may draw numbers that do not show in its results."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _kind(value: Any) -> Any:
    return (
        _Kind(value.dtype, tuple(value.size())) if isinstance(value, torch.Tensor) else type(value).__name__
    )


def _refused(op: Any, made: str, told: str) -> CaptureError:
    return CaptureError(
        Reason(
            "not-permitted",
            f"{op} makes {made} on a CPU where its rule for fake tensors says {told}",
            "correct the rule (torch.library.opcheck tests it), or keep it outside with pgraph.mark_unsafe",
        )
    )
