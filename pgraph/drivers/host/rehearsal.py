"""The results of an op, found before it is recorded: its CPU kernel is run once on zeros."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from pgraph.compat import lazily
from pgraph.drivers.interface import extent
from pgraph.errors import CaptureError
from pgraph.ops.fx import is_builtin
from pgraph.reasons import Reason

__all__ = ["Outline", "Rehearsal"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Flat:
    """What must not differ between what a rule says of a result and what a kernel makes."""

    dtype: torch.dtype
    size: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """The flat results of an op.

    Args:
        spec: how they are nested.
        fresh: those that it makes anew, by position, as tensors without memory.
        given: those that are arguments, by position; which of the flat arguments.
        values: all others; None in the places of these.
    """

    spec: TreeSpec
    fresh: dict[int, torch.Tensor]
    given: dict[int, int]
    values: tuple[Any, ...]


class Rehearsal:
    """Tells the results of the ops of one capture. Built-in ops that are called alike are asked once."""

    def __init__(self) -> None:
        self._known: dict[Any, Outline] = {}
        self._fake = FakeTensorMode()
        self._fake.cache_enabled = False  # the cache is the process's, and grows with every new size

    def outline(self, op: Any, args: Any, kwargs: Any) -> Outline:
        """The op's results, by its rule and by its kernel.

        Raises:
            CaptureError: it cannot be recorded.
        """
        key = (op, _likeness((args, kwargs))) if is_builtin(op) else None
        try:
            known = self._known.get(key)
        except TypeError:  # an argument without a hash
            key = known = None
        if known is None:
            known = self._asked(op, args, kwargs)
            if key is not None:
                self._known[key] = known
        return known

    def _asked(self, op: Any, args: Any, kwargs: Any) -> Outline:
        fakes = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        leaves, spec = tree_flatten(self._traced(op, *fakes))
        position = {id(leaf): i for i, leaf in enumerate(tree_flatten(fakes)[0]) if _is_tensor(leaf)}
        given = {i: position[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in position}
        new = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf) and i not in given]
        results = expected(op, args, kwargs, leaves, new)
        fresh = {i: _without_memory(results[i]) for i in new if results[i] is not None}
        values = (None if i in new or i in given else leaf for i, leaf in enumerate(leaves))
        return Outline(spec, fresh, given, tuple(values))

    def _traced(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The op's results by its rule for fake tensors."""
        try:
            with self._fake:
                return op(*args, **kwargs)
        except Exception as e:  # data-dependent results, ops without a shape rule
            raise CaptureError(Reason("not-permitted", f"{op} cannot be recorded: {type(e).__name__}")) from e

    def _as_fake(self, t: torch.Tensor) -> torch.Tensor:
        with self._fake:
            fake = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")
            return lazily(fake, t.is_conj(), t.is_neg())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _without_memory(t: torch.Tensor) -> torch.Tensor:
    bare = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
    return lazily(bare, t.is_conj(), t.is_neg())


def _likeness(value: Any) -> Any:
    """What calls of an op must have in common to have the same results, but for the numbers in them."""
    if isinstance(value, torch.Tensor):
        layout = value.dtype, tuple(value.size()), value.stride(), value.storage_offset()
        return torch.Tensor, *layout, value.is_conj(), value.is_neg()
    if isinstance(value, list | tuple):
        return type(value), *map(_likeness, value)
    if isinstance(value, dict):
        return dict, *((name, _likeness(item)) for name, item in value.items())
    return type(value), str(value) if isinstance(value, float | complex) else value  # -0.0 == 0.0


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
        _Flat(value.dtype, tuple(value.size())) if isinstance(value, torch.Tensor) else type(value).__name__
    )


def _refused(op: Any, made: str, told: str) -> CaptureError:
    return CaptureError(
        Reason(
            "not-permitted",
            f"{op} makes {made} on a CPU where its rule for fake tensors says {told}",
            "correct the rule (torch.library.opcheck tests it), or keep it outside with pgraph.mark_unsafe",
        )
    )
