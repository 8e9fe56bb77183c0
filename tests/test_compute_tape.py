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
from pgraph.compute.tape import Number, NumberSource, Real, Tape

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
    numbers = {"a": tape.argument(NumberSource(0), a), "b": tape.argument(NumberSource(3), b)}
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
        lambda n: math.ceil(max(n / 3, 6.5)),
        abs,
    ],
)
@given(SIZES)
def test_another_way_is_no_replay(branch: Callable[[Any], Any], size: int) -> None:
    tape = Tape()
    place = tape.index(branch(tape.argument(NumberSource(0), 17)))
    values = tape.replay([size])
    assert values is None or values[place] == branch(size)
    assert tape.replay([17]) is not None


def test_the_same_sum_stands_on_the_tape_once() -> None:
    tape = Tape()
    n = tape.argument(NumberSource(0), 5)
    assert (n * 4 + 1).place == (n * 4 + 1).place
    assert tape.index(7) == tape.index(7)
    assert tape.arguments == [NumberSource(0)]


@pytest.mark.parametrize(
    "use",
    [
        int,
        float,
        operator.index,
        hash,
        math.sqrt,
        lambda n: int(n / 2),
        lambda n: round(n / 2, 1),
        lambda n: math.fsum([n / 2]),
        lambda n: abs(n / 2),
        lambda n: n & 1,
        lambda n: 1 << n,
        lambda n: range(n),
        lambda n: [0] * n,
    ],
)
def test_whatever_leaves_the_tape_is_refused(use: Callable[[Number], Any]) -> None:
    with pytest.raises((NotComputableError, TypeError)):
        use(Tape().argument(NumberSource(0), 5))


ROUNDED: list[Callable[[Any], Any]] = [
    lambda n: math.ceil(n / 32) * 32,
    lambda n: math.floor(n * 0.5),
    lambda n: math.trunc(-n / 3),
    lambda n: round(n / 2),
    lambda n: math.ceil(7 / n),
    lambda n: math.floor(1.0 * n) + math.ceil(n),
    lambda n: round(n**-1 + 0.25),
    lambda n: math.floor(-0.0 * n + 3.0) + (1 if n * 0.0 == 0.0 else 2),
]


@pytest.mark.parametrize("code", ROUNDED)
@given(SIZES)
def test_fractions_are_rounded_as_python_rounds_them(code: Callable[[Any], Any], size: int) -> None:
    """Attention of some kinds rounds lengths up to multiples of 32 by way of a fraction."""
    tape = Tape()
    place = tape.index(code(tape.argument(NumberSource(0), 17)))
    values = tape.replay([size])
    assert tape.value(place) == code(17)
    assert values is not None
    assert (type(values[place]), values[place]) == (int, code(size))


@given(SIZES)
def test_functions_of_one_number(size: int) -> None:
    tape = Tape()
    n = tape.argument(NumberSource(0), 17)
    share = tape.index(math.trunc(0.7 * tape.applied("float", n)))
    root = tape.index(math.floor(tape.applied("sqrt", n)))
    values = tape.replay([size])
    assert values is not None
    assert (values[share], values[root]) == (int(0.7 * size), int(math.sqrt(size)))


def test_a_fraction_is_no_size() -> None:
    tape = Tape()
    n = tape.argument(NumberSource(0), 6)
    for fraction in (n / 2, n * 1.0, -(n / 3)):
        assert isinstance(fraction, Real)
        with pytest.raises(NotComputableError, match="a size of type Real"):
            tape.index(fraction)


def test_equal_constants_of_other_kinds_stay_apart() -> None:
    tape = Tape()
    n = tape.argument(NumberSource(0), 1)
    zero, negative = n * 0.0, n * -0.0
    assert zero.place != negative.place
    assert isinstance(n * 1.0, Real)
    assert isinstance(n * 1, Number)


def test_what_is_whole_for_some_sizes_only_is_no_replay() -> None:
    tape = Tape()
    tape.index(2 ** (tape.argument(NumberSource(0), 5) - 3))
    assert tape.replay([4]) is not None
    assert tape.replay([2]) is None
