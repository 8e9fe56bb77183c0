"""Numbers that remember how they were computed, and compute the same for other sizes.

Pure logic: numbers in, numbers out; no torch, no CUDA.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Self

from pgraph.compute.errors import NotComputableError

__all__ = ["Number", "NumberSource", "Real", "Tape"]

_OPERATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "/": operator.truediv,
}
_FUNCTIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "float": float,
    "sqrt": math.sqrt,
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


@dataclasses.dataclass(frozen=True, slots=True)
class NumberSource:
    """Where the arguments of some code tell a number.

    Args:
        position: among the arguments.
        method: of the tensor there, which gives the number; None if the argument is the number itself.
        dim: that the method is given.
    """

    position: int
    method: str | None = None
    dim: int = 0

    def of(self, arguments: Sequence[Any]) -> Any:
        """The number."""
        argument = arguments[self.position]
        return argument if self.method is None else getattr(argument, self.method)(self.dim)


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
        self.arguments: list[NumberSource] = []
        """Of the numbers that the code was given, in the order in which it was."""

    def argument(self, source: NumberSource, value: int) -> Number:
        """A number that the code is given."""
        row = ("argument", source, 0)
        if row not in self._places:
            self.arguments.append(source)
        return Number(self, self._place(row, value))

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

    def applied(self, function: str, number: Number | Real) -> Number | Real:
        """A number made of one: rounded, as a fraction, its root."""
        return self._made((function, number.place, 0), _FUNCTIONS[function](self._values[number.place]))

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
                    values.append(a.of(arguments))
                elif sign == "constant":
                    values.append(a)
                elif sign == "real":
                    values.append(float.fromhex(a))
                elif sign in _FUNCTIONS:
                    values.append(_FUNCTIONS[sign](values[a]))
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
        return self.tape.applied("floor", self)

    def __ceil__(self) -> Number | Real:
        return self.tape.applied("ceil", self)

    def __trunc__(self) -> Number | Real:
        return self.tape.applied("trunc", self)

    def __round__(self, digits: None = None) -> Any:  # type: ignore[override]
        return self.tape.applied("round", self) if digits is None else self._lost()
