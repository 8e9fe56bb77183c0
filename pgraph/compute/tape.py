"""Numbers that remember how they were computed, and compute the same for other sizes.

Pure logic: numbers in, numbers out; no torch, no CUDA.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Self

from pgraph.compute.errors import NotComputableError

__all__ = ["Number", "Real", "Tape"]

_OPERATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "/": operator.truediv,
}
_ROUNDINGS: Final[dict[str, Callable[[Any], Any]]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
}
_RELATIONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Tape:
    """All numbers that a run of some code met, in the order in which they came to be.

    The code runs once, on a number for each argument. Each sum, product and quotient is noted, and what the
    code compares with the answer, since it went one way and would go another. For other arguments the tape
    gives all numbers anew, as long as each comparison has the same answer. It computes as Python does:
    fractions are rounded to floats as they are there.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[str, Any, int]] = []
        self._values: list[Any] = []
        self._places: dict[tuple[str, Any, int], int] = {}
        self._guards: dict[tuple[str, int, int], bool] = {}
        self.arguments: list[int] = []
        """Positions among the code's arguments of those that are numbers, as they were first given."""

    def argument(self, position: int, value: int) -> Number:
        """An argument of the code."""
        self.arguments.append(position)
        return Number(self, self._place(("argument", position, 0), value))

    def index(self, value: Any) -> int:
        """Where a number stands on the tape.

        Raises:
            NotComputableError: it is no whole number.
        """
        if isinstance(value, Number):
            return value.place
        if type(value) is not int:
            raise NotComputableError(f"a size of type {type(value).__name__}: {value!r}")
        return self._place(("constant", value, 0), value)

    def value(self, place: int) -> Any:
        """The number there, for the arguments of the run."""
        return self._values[place]

    def compute(self, sign: str, a: Any, b: Any) -> Number | Real:
        """A number made of two.

        Raises:
            NotComputableError: it is neither an `int` nor a `float`.
        """
        left, right = self._operand(a), self._operand(b)
        return self._made((sign, left, right), _OPERATIONS[sign](self._values[left], self._values[right]))

    def rounded(self, how: str, number: Real) -> Number | Real:
        """A whole number made of one that may be none."""
        return self._made((how, number.place, 0), _ROUNDINGS[how](self._values[number.place]))

    def compare(self, sign: str, a: Any, b: Any) -> bool:
        """The answer, which every replay must give."""
        left, right = self._operand(a), self._operand(b)
        answer = _RELATIONS[sign](self._values[left], self._values[right])
        self._guards[sign, left, right] = answer
        return answer

    def replay(self, arguments: Sequence[Any]) -> list[Any] | None:
        """All numbers for other arguments of the code; None if it would not go the same way."""
        values: list[Any] = []
        try:
            for sign, a, b in self._rows:
                if sign == "argument":
                    values.append(arguments[a])
                elif sign == "constant":
                    values.append(a)
                elif sign == "real":
                    values.append(float.fromhex(a))
                elif sign in _ROUNDINGS:
                    values.append(_ROUNDINGS[sign](values[a]))
                else:
                    values.append(_OPERATIONS[sign](values[a], values[b]))
        except (ArithmeticError, ValueError):
            return None
        if list(map(type, values)) != list(map(type, self._values)):
            return None  # 2 ** n is a fraction for some n
        for (sign, a, b), answer in self._guards.items():
            if _RELATIONS[sign](values[a], values[b]) != answer:
                return None
        return values

    def _operand(self, value: Any) -> int:
        if isinstance(value, Real):
            return value.place
        if type(value) is float:  # by its text: 0.0 == -0.0
            return self._place(("real", value.hex(), 0), value)
        return self.index(value)

    def _made(self, row: tuple[str, Any, int], value: Any) -> Number | Real:
        if type(value) is int:
            return Number(self, self._place(row, value))
        if type(value) is float:
            return Real(self, self._place(row, value))
        raise NotComputableError(f"{row[0]} gives {value!r}, which is no number that can be followed")

    def _place(self, row: tuple[str, Any, int], value: Any) -> int:
        place = self._places.setdefault(row, len(self._rows))
        if place == len(self._rows):
            self._rows.append(row)
            self._values.append(value)
        return place


def _both(sign: str) -> tuple[Callable[[_Taped, Any], Number | Real], Callable[[_Taped, Any], Number | Real]]:
    def forth(self: _Taped, other: Any) -> Number | Real:
        return self.tape.compute(sign, self, other)

    def back(self: _Taped, other: Any) -> Number | Real:
        return self.tape.compute(sign, other, self)

    return forth, back


def _compared(sign: str) -> Callable[[_Taped, Any], bool]:
    def compared(self: _Taped, other: Any) -> bool:
        return self.tape.compare(sign, self, other)

    return compared


class _Taped:
    """A number on a tape. Whatever asks for its value alone, past the tape, fails."""

    __slots__ = ("place", "tape")

    def __init__(self, tape: Tape, place: int) -> None:
        self.tape, self.place = tape, place

    __add__, __radd__ = _both("+")
    __sub__, __rsub__ = _both("-")
    __mul__, __rmul__ = _both("*")
    __floordiv__, __rfloordiv__ = _both("//")
    __truediv__, __rtruediv__ = _both("/")
    __mod__, __rmod__ = _both("%")
    __pow__, __rpow__ = _both("**")
    __lt__, __le__ = _compared("<"), _compared("<=")
    __gt__, __ge__ = _compared(">"), _compared(">=")
    __eq__, __ne__ = _compared("=="), _compared("!=")  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Number | Real:
        return self.tape.compute("*", -1, self)

    def __pos__(self) -> Self:
        return self

    def __bool__(self) -> bool:
        return self.tape.compare("!=", self, 0)

    def _lost(self, *_: Any) -> NoReturn:
        raise NotComputableError("the generated code uses a size in a way that cannot be followed")

    __index__ = __int__ = __float__ = __round__ = _lost
    __and__ = __rand__ = __or__ = __ror__ = __lshift__ = __rshift__ = __invert__ = _lost

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tape.value(self.place)})"


class Number(_Taped):
    """A whole number on a tape. It is no `int`."""

    __slots__ = ()

    __floor__ = __ceil__ = __trunc__ = _Taped.__pos__

    def __abs__(self) -> Any:
        return self if self.tape.compare(">=", self, 0) else -self


class Real(_Taped):
    """A number on a tape that Python has as a `float`. A size is made of it by rounding only."""

    __slots__ = ()

    def __floor__(self) -> Number | Real:
        return self.tape.rounded("floor", self)

    def __ceil__(self) -> Number | Real:
        return self.tape.rounded("ceil", self)

    def __trunc__(self) -> Number | Real:
        return self.tape.rounded("trunc", self)

    def __round__(self, digits: None = None) -> Any:  # type: ignore[override]
        return self.tape.rounded("round", self) if digits is None else self._lost()
