"""A plan's first chunk in two, so that the device need not wait for all of its memory."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from typing import Final

from pgraph.template.lifetimes import Lives
from pgraph.template.plan import Plan

__all__ = ["RESULTS", "SHARE", "begun_early"]

RESULTS: Final = 64
"""A first chunk with fewer results is launched as a whole: a further launch costs the host some 5 us."""

SHARE: Final = 8
"""The device begins when the memory of one in so many of its results is there."""


def begun_early(plan: Plan, lives: Lives) -> Plan:
    """The same plan, with its first chunk in two if that makes many results.

    Note [The device begins early]
    A device that has nothing to do waits until the first chunk's blocks are allocated: hundreds, where a
    forward saves what its backward needs, at 0.5 to 1 us each. After a step in which the host waits for the
    device (a loss that is read, a scaled gradient that is checked) all of that is lost. So the nodes for
    which an eighth of the results is enough are launched first, and the others are allocated while they run.
    Nothing is freed in between: each block lies where it did, and lives no longer than it did. Results decide
    and not blocks, since many temporaries share a block, in other ways at other sizes: sizes whose chunks
    differ cannot share an exec.
    """
    results, births = lives.results, lives.birth_of
    first = plan.chunks[0] if plan.chunks else None
    if first is None or len(results) < RESULTS or results[RESULTS - 1] >= first.last:
        return plan
    border = results[bisect_left(results, first.last) // SHARE]
    if not first.first < border:
        return plan
    now, later = list[int](), list[int]()
    for i in first.allocate:  # a block's first tenant is born first
        (now if births[plan.blocks[i].tenants[0][0]] < border else later).append(i)
    held = first.held - sum([plan.blocks[i].nbytes for i in later])
    head = dataclasses.replace(first, last=border, allocate=tuple(now), free=(), release=(), held=held)
    rest = dataclasses.replace(first, first=border, allocate=tuple(later))
    return dataclasses.replace(plan, chunks=(head, rest, *plan.chunks[1:]))
