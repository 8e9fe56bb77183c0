"""The dispatcher: which ops are registered, and which of them take themselves apart."""

from __future__ import annotations

import torch

__all__ = ["is_composite", "is_registered"]


def is_registered(name: str) -> bool:
    """Whether there is an op ``ns::name``."""
    return bool(_overloads(name))


def is_composite(name: str) -> bool:
    """Whether an op is made of others, by which it is replaced before a graph is traced; 2.13.

    Variants that write to given results are asked for their answer only if there are no others.
    """
    known = [overload for overload in _overloads(name) if torch._C._dispatch_has_kernel(overload)]
    plain = [overload for overload in known if not overload.endswith("out")] or known
    return bool(plain) and all(
        torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd")
        for overload in plain
    )


def _overloads(name: str) -> list[str]:
    """E.g. ``["aten::add.Tensor", "aten::add.Scalar"]``."""
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    return [getattr(packet, overload).name() for overload in packet.overloads()] if packet is not None else []
