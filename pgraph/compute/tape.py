"""Whole numbers that remember how they were computed, and compute the same for other sizes.

Pure logic: numbers in, numbers out; no torch, no CUDA.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from pgraph.compute.errors import NotComputableError

__all__ = ["Number", "Tape"]

_OPERATIONS: Final[dict[str, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_RELATIONS: Final[dict[str, Callable[[int, int], bool]]] = {
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
    gives all numbers anew, as long as each comparison has the same answer.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[str, int, int]] = []
        self._values: list[int] = []
        self._places: dict[tuple[str, int, int], int] = {}
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

    def value(self, place: int) -> int:
        """The number there, for the arguments of the run."""
        return self._values[place]

    def compute(self, sign: str, a: Any, b: Any) -> Number:
        """A number made of two."""
        left, right = self.index(a), self.index(b)
        value = _OPERATIONS[sign](self._values[left], self._values[right])
        if type(value) is not int:
            raise NotComputableError(f"{sign} gives {value!r}, which is no whole number")
        return Number(self, self._place((sign, left, right), value))

    def compare(self, sign: str, a: Any, b: Any) -> bool:
        """The answer, which every replay must give."""
        left, right = self.index(a), self.index(b)
        answer = _RELATIONS[sign](self._values[left], self._values[right])
        self._guards[sign, left, right] = answer
        return answer

    def replay(self, arguments: Sequence[Any]) -> list[int] | None:
        """All numbers for other arguments of the code; None if it would not go the same way."""
        values: list[int] = []
        for sign, a, b in self._rows:
            if sign == "argument":
                values.append(arguments[a])
            elif sign == "constant":
                values.append(a)
            else:
                try:
                    values.append(_OPERATIONS[sign](values[a], values[b]))
                except (ArithmeticError, ValueError):
                    return None
        for (sign, a, b), answer in self._guards.items():
            if _RELATIONS[sign](values[a], values[b]) != answer:
                return None
        return values

    def _place(self, row: tuple[str, int, int], value: int) -> int:
        place = self._places.setdefault(row, len(self._rows))
        if place == len(self._rows):
            self._rows.append(row)
            self._values.append(value)
        return place


def _both(sign: str) -> tuple[Callable[[Number, Any], Number], Callable[[Number, Any], Number]]:
    def forth(self: Number, other: Any) -> Number:
        return self.tape.compute(sign, self, other)

    def back(self: Number, other: Any) -> Number:
        return self.tape.compute(sign, other, self)

    return forth, back


def _compared(sign: str) -> Callable[[Number, Any], bool]:
    def compared(self: Number, other: Any) -> bool:
        return self.tape.compare(sign, self, other)

    return compared


class Number:
    """A whole number on a tape. It is no `int`: whatever asks for its value alone, past the tape, fails."""

    __slots__ = ("place", "tape")

    def __init__(self, tape: Tape, place: int) -> None:
        self.tape, self.place = tape, place

    __add__, __radd__ = _both("+")
    __sub__, __rsub__ = _both("-")
    __mul__, __rmul__ = _both("*")
    __floordiv__, __rfloordiv__ = _both("//")
    __mod__, __rmod__ = _both("%")
    __pow__, __rpow__ = _both("**")
    __lt__, __le__ = _compared("<"), _compared("<=")
    __gt__, __ge__ = _compared(">"), _compared(">=")
    __eq__, __ne__ = _compared("=="), _compared("!=")  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Number:
        return self.tape.compute("-", 0, self)

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> Number:
        return self if self.tape.compare(">=", self, 0) else -self

    def __bool__(self) -> bool:
        return self.tape.compare("!=", self, 0)

    def _lost(self, *_: Any) -> NoReturn:
        raise NotComputableError("the generated code uses a size in a way that cannot be followed")

    __index__ = __int__ = __float__ = __truediv__ = __rtruediv__ = __round__ = __trunc__ = _lost
    __floor__ = __ceil__ = __and__ = __rand__ = __or__ = __ror__ = __lshift__ = __rshift__ = __invert__ = (
        _lost
    )

    def __repr__(self) -> str:
        return f"Number({self.tape.value(self.place)})"
