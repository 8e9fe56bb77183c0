"""Numbers that remember how they were computed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgraph.compute.errors import NotComputableError
from pgraph.compute.tape import Number, Tape

SIZES = st.integers(1, 1 << 20)
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}


def expressions(depth: int = 4) -> st.SearchStrategy[Any]:
    """(sign, left, right), the number of an argument as text, or a constant."""
    leaves = st.sampled_from(["a", "b"]) | st.integers(1, 64)
    return st.recursive(
        leaves, lambda inner: st.tuples(st.sampled_from(sorted(SIGNS)), inner, inner), max_leaves=depth * 3
    )


def computed(expression: Any, numbers: dict[str, Any]) -> Any:
    match expression:
        case str():
            return numbers[expression]
        case int():
            return expression
        case sign, left, right:
            return SIGNS[sign](computed(left, numbers), computed(right, numbers))


@given(expressions(), SIZES, SIZES, SIZES, SIZES)
def test_a_replay_computes_what_the_code_does(expression: Any, a: int, b: int, c: int, d: int) -> None:
    tape = Tape()
    numbers = {"a": tape.argument(0, a), "b": tape.argument(3, b)}
    try:
        place = tape.index(computed(expression, numbers))
    except ZeroDivisionError:
        return
    assert tape.value(place) == computed(expression, {"a": a, "b": b})
    values = tape.replay([c, None, None, d])
    try:
        expected = computed(expression, {"a": c, "b": d})
    except ZeroDivisionError:
        assert values is None
    else:
        assert values is not None
        assert values[place] == expected


@pytest.mark.parametrize(
    "branch",
    [
        lambda n: 1 if n > 16 else 2,
        lambda n: max(n, 16),
        lambda n: min(16, n) + 1,
        lambda n: 1 if n % 2 else 2,
        lambda n: 1 if n == 17 else 2,
        abs,
    ],
)
@given(SIZES)
def test_another_way_is_no_replay(branch: Callable[[Any], Any], size: int) -> None:
    tape = Tape()
    place = tape.index(branch(tape.argument(0, 17)))
    values = tape.replay([size])
    assert values is None or values[place] == branch(size)
    assert tape.replay([17]) is not None


def test_the_same_sum_stands_on_the_tape_once() -> None:
    tape = Tape()
    n = tape.argument(0, 5)
    assert (n * 4 + 1).place == (n * 4 + 1).place
    assert tape.index(7) == tape.index(7)
    assert tape.arguments == [0]


@pytest.mark.parametrize(
    "use",
    [
        int,
        float,
        operator.index,
        hash,
        math.sqrt,
        math.floor,
        lambda n: n / 2,
        lambda n: 2 / n,
        lambda n: n & 1,
        lambda n: 1 << n,
        lambda n: range(n),
        lambda n: [0] * n,
        lambda n: n * 0.5,
        lambda n: n**-1,
    ],
)
def test_whatever_leaves_the_tape_is_refused(use: Callable[[Number], Any]) -> None:
    with pytest.raises((NotComputableError, TypeError)):
        use(Tape().argument(0, 5))
