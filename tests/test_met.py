"""What users are told of the sizes that came."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from expecttest import assert_expected_inline
from support import host
from support_explain import HOST

import pgraph
from pgraph.runtime import met
from pgraph.runtime.met import Met, SizesTold


def test_padding_is_named_where_it_helps() -> None:
    found = Met(("dimension 0 of x", "dimension 1 of x"))
    for n in range(1, 41):
        found.note((n, 3))
    told = "dimension 0 of x padded to multiples of 8: 5 sizes in the place of 40"
    assert found.padding() == told
    found.note((1, 4))
    told = "dimension 0 of x and dimension 1 of x padded to multiples of 8: 5 sizes in the place of 41"
    assert found.padding() == told


def test_padding_is_not_named_where_it_does_not() -> None:
    found = Met(("dimension 0 of x",))
    for n in (8, 4096, 1 << 20):
        found.note((n,))
    assert found.padding() is None


def test_numbers_are_not_padded() -> None:
    """They are what the program computes with."""
    found = Met(("n", "dimension 0 of x"), frozenset({0}))
    for n in range(1, 41):
        found.note((n, 3))
    assert found.padding() is None
    for rows in range(1, 41):
        found.note((1, rows))
    assert found.padding() is None  # 40 numbers are left
    few = Met(found.labels, found.numbers, {(n % 2, n) for n in range(1, 65)})
    assert few.padding() == "dimension 0 of x padded to multiples of 8: 16 sizes in the place of 64"
    model = host(lambda x, n: x * n + 1, dynamic=True)
    for n in range(2, 30):
        model(torch.randn(3, 8), n)
    told = pgraph.report().partitions[-1].sizes
    assert told is not None
    assert (told.met, told.padding) == (28, None)


def test_few_sizes_are_remembered() -> None:
    found = Met(("dimension 0 of x",))
    for n in range(met._MOST):
        found.note((n,))
    found.note((0,))
    assert not found.more
    for n in range(met._MOST + 5):
        found.note((n,))
    assert len(found.sizes) == met._MOST
    assert found.more
    copy = found.at_present()
    found.sizes.clear()
    assert len(copy.sizes) == met._MOST
    assert copy.more


def test_the_report_tells_of_sizes() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cumsum(0) + 1

    model = host(work, dynamic=True)
    for n in (3, 3, 5, 5, 6):
        model(torch.randn(n, 4))
    (partition,) = pgraph.report().partitions
    sizes = partition.sizes
    assert sizes is not None
    assert (sizes.met, sizes.captured, sizes.computed, sizes.refused) == (3, 2, 0, 0)
    assert (sizes.exec_bytes, sizes.recipe_bytes) == (partition.exec_bytes, partition.recipe_bytes)
    assert f"\n    {sizes}" in str(pgraph.report())
    model = host(work)
    model(torch.randn(3, 4))
    assert pgraph.report().partitions[-1].sizes is None


@pytest.mark.parametrize("columns", [8, 4], ids=["whole", "part"])
def test_sizes_of_inputs_that_are_views_are_told_in_the_users_words(columns: int) -> None:
    """Dynamo takes the sizes from what they are views of, which the program may have no name for."""
    model = host(lambda x: (x * 2).cumsum(0) + 1, dynamic=True)
    for n in (3, 3, 5, 5):
        model(torch.randn(n, 8)[:, :columns])
    (partition,) = pgraph.report().partitions
    assert partition.met.labels
    for label in partition.met.labels:
        assert re.fullmatch(r"dimension \d of (what )?x( is a view of)?", label), label


def test_explain_tells_of_sizes() -> None:
    model = torch.compile(lambda x: (x * 2).cumsum(0) + 1, backend="pgraph", dynamic=True, options=HOST)
    for n in (3, 3, 5, 5):
        model(torch.randn(n, 4))
    explanation = pgraph.explain(model)(torch.randn(7, 4))
    lines = [line for line in str(explanation).splitlines() if "sizes: " in line]
    assert len(lines) == 1
    assert lines[0].startswith("    sizes: 3 met, ")
    (told,) = [p["sizes"] for p in explanation.to_dict()["partitions"]]
    assert told["met"] == 3


def test_the_words() -> None:
    told = SizesTold(
        40, 4, 30, 1, 12_000, 3_000_000, None, None, "dimension 0 of x padded to multiples of 8: 5 sizes"
    )
    assert_expected_inline(
        str(told),
        """sizes: 40 met, 4 captured, 30 computed, 1 refused; 12,000 B of execs, 3,000,000 B of the host's memory; dimension 0 of x padded to multiples of 8: 5 sizes""",  # noqa: E501
    )
    many = dataclasses.replace(told, met=4096, more=True)
    assert str(many).startswith("sizes: at least 4,096 met, 4 captured")
