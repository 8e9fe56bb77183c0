"""Hazards of recordings that fork, each with its cure and, to prove that the check can fail, without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import host, launching, same, shows, with_and_without
from torch import Tensor

import pgraph
from pgraph.capture import build
from pgraph.drivers.host import driver as host_driver
from pgraph.drivers.host.faults import HostFaults, inject
from pgraph.template import topology
from pgraph.template.template import Template

N = 24


def right(fn: Callable[..., Any], aside: Sequence[str], **options: Any) -> Template:
    """Launched with these ops on streams of their own, `fn` computes what eager does."""
    compiled = host(fn, **options)

    def inputs() -> list[Tensor]:
        return [torch.randn(N, N) for _ in range(2)]

    with inject(HostFaults(aside=frozenset(aside))):
        for _ in range(2):
            compiled(*inputs())
        with launching(3):
            for _ in range(3):
                given = inputs()
                same(compiled(*given), fn(*given), rtol=1e-5, atol=1e-5)
    (specialization,) = pgraph.runtime.registry.live_capturable()[-1].specializations()
    assert specialization.built is not None
    return specialization.built.template


def late_reader(x: Tensor, y: Tensor) -> Tensor:
    """The sine runs while the products overwrite whatever they are given."""
    a = x * 2
    s = a.sin()
    del a
    b = y @ y
    c = b @ y
    del b
    return (c @ y) + s


def as_if_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are run as they may be, but are taken for a chain by all that reasons about time."""
    monkeypatch.setattr(topology.Topology, "before", lambda self, position: position)
    monkeypatch.setattr(topology.Topology, "after", lambda self, position: position)
    monkeypatch.setattr(topology.Topology, "index", lambda self, join: join)
    real = build._plan

    def plan(order: topology.Topology, *rest: Any) -> Any:
        return real(dataclasses.replace(order, joins=tuple(range(order.n_nodes + 1))), *rest)

    monkeypatch.setattr(build, "_plan", plan)


@with_and_without
def test_memory_is_shared_only_after_a_join(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary that a forked node still reads is not given to what runs beside it."""
    if not cured:
        as_if_a_chain(monkeypatch)
    shows(lambda: right(late_reader, ["sin"]) and None, cured)


@with_and_without
def test_chunks_end_where_all_paths_join(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little memory there is, no chunk begins or ends beside a forked node."""
    if not cured:
        as_if_a_chain(monkeypatch)

    def check() -> None:
        template = right(late_reader, ["sin"], memory_slack_mb=0)
        sine = next(i for i, node in enumerate(template.nodes) if node.name == "sin")
        adding = next(i for i, node in enumerate(template.nodes) if node.name == "add")
        borders = [chunk.first for chunk in template.plan.chunks[1:]]
        assert len(borders) >= 1
        assert not [p for p in borders if sine < p < adding]

    shows(check, cured)


def test_forks_that_join_at_once_are_captured() -> None:
    """Two heads, and a fork within: nothing is lost, and the plan is that of the joins."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return ((x.sin() + y.cos()).exp().sin() + x).cumsum(0)

    template = right(fn, ["sin", "cos"])
    assert [node.name for node in template.nodes] == ["sin", "cos", "add", "exp", "sin", "add", "cumsum"]


def test_results_of_forked_nodes_are_waited_for() -> None:
    """What nobody reads before the end is complete when the launch is."""
    template = right(lambda x, y: (x.sin(), (x @ y).cos(), y.exp()), ["sin", "cos"])
    assert len(template.outputs) == 3


def test_writes_in_place_wait_for_forked_readers() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        s = x.sin()
        x.add_(1)
        return s + x @ y

    compiled = host(fn)
    with inject(HostFaults(aside=frozenset({"sin"}))):
        for _ in range(5):
            x, y = torch.randn(N, N), torch.randn(N, N)
            twin = x.clone()
            same(compiled(x, y), fn(twin, y), rtol=1e-5, atol=1e-5)
            same(x, twin)


def test_other_forks_in_the_second_capture_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that wait for others in one capture and not in the next: which is right, nobody knows."""
    real = host_driver.HostSession._set_aside

    def first_only(self: Any, results: Any) -> None:
        if not self._second:
            real(self, results)

    monkeypatch.setattr(host_driver.HostSession, "_set_aside", first_only)
    compiled = host(late_reader)
    with inject(HostFaults(aside=frozenset({"sin"}))):
        for _ in range(4):
            given = torch.randn(N, N), torch.randn(N, N)
            same(compiled(*given), late_reader(*given), rtol=1e-5, atol=1e-5)
    (partition,) = pgraph.report().capturable
    assert partition.reason is not None
    assert partition.reason.code == "nodes-differ"
    assert "wait for one another in different ways" in partition.reason.sentence
