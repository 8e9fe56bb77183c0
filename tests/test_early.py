"""A first chunk that makes many results begins with the memory that its first nodes need."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import host, same
from support_plan import Build, occupied, programs
from torch import Tensor

from pgraph.runtime import registry
from pgraph.template import early
from pgraph.template.early import RESULTS, SHARE, begun_early
from pgraph.template.lifetimes import Lifetime, Lives
from pgraph.template.plan import Plan, make_plan


def forward(outputs: int) -> tuple[int, list[Lifetime]]:
    """A node for each of so many results."""
    build = Build(outputs)
    build.input(4096)
    for node in range(outputs):
        build.output(2048, node)
    return build.n, build.lives


def split(n: int, lives: list[Lifetime], slack: int = 1 << 40) -> tuple[Plan, Plan]:
    plan = make_plan(n, lives, slack_bytes=slack)
    return plan, begun_early(plan, Lives(n, lives))


def test_an_eighth_of_the_results_is_enough_to_begin() -> None:
    plan, begun = split(*forward(RESULTS))
    (whole,) = plan.chunks
    head, rest = begun.chunks
    assert (head.first, head.last, rest.first, rest.last) == (0, RESULTS // SHARE, RESULTS // SHARE, RESULTS)
    assert head.allocate + rest.allocate == whole.allocate
    assert len(head.allocate) == RESULTS // SHARE
    assert (head.free, head.release) == ((), ())
    assert (rest.free, rest.release, rest.held) == (whole.free, whole.release, whole.held)
    assert head.held == 4096 + 2048 * (RESULTS // SHARE)


def test_few_results_wait_for_one_another() -> None:
    plan, begun = split(*forward(RESULTS - 1))
    assert begun is plan


def test_results_of_the_first_node_are_not_split() -> None:
    build = Build(2)
    for _ in range(2 * RESULTS):
        build.output(512, 0)
    plan, begun = split(build.n, build.lives)
    assert begun is plan
    assert begun_early(make_plan(0, []), Lives(0, [])).chunks == ()


@given(programs(max_nodes=30, max_regions=60), st.integers(1, 8), st.sampled_from([0, 4096, 1 << 40]))
def test_each_node_has_its_blocks_and_nothing_else_has_changed(
    program: tuple[int, list[Lifetime]], least: int, slack: int
) -> None:
    n, lives = program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early, "RESULTS", least)
        plan, begun = split(n, lives, slack)
    if begun is plan:
        return
    head, rest, *others = begun.chunks
    whole = dataclasses.replace(rest, first=head.first, allocate=head.allocate + rest.allocate)
    assert dataclasses.replace(begun, chunks=(whole, *others)) == plan
    there = set(head.allocate)
    sizes = {life.region: life.nbytes for life in lives if life.kind == "input"}
    assert head.held <= rest.held
    assert head.held >= sum(begun.blocks[block].nbytes for block in there) + sum(sizes.values())
    for life in lives:
        if life.kind != "input" and occupied(life, n).start < head.last:
            assert begun.location(life.region)[0] in there


@pytest.mark.parametrize("inplace", [False, True])
def test_a_forward_with_many_saved_tensors_is_launched_in_two(inplace: bool) -> None:
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(RESULTS)]

    def fn(x: Tensor) -> Tensor:
        for weight in weights:
            x = (x @ weight).tanh()
            if inplace:
                x = x.mul(0.5).sin_()
        return x.sum()

    compiled = host(fn, memory_slack_mb=1024)
    for _ in range(5):
        x = torch.randn(700, 4)
        results = []
        for run in (compiled, fn):
            loss = run(x)
            results.append([loss, *torch.autograd.grad(loss, weights)])
        same(*results)
    template = next(
        p.template() for p in registry.live_capturable() if p.name.startswith("forward") and p.template()
    )
    assert template is not None
    head, rest = template.plan.chunks
    assert 0 < head.last < template.plan.chunks[-1].last / 4
    assert len(head.allocate) < len(rest.allocate) / 4
