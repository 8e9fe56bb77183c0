"""Options from the environment: `PGRAPH_<OPTION>`, for programs whose own config has no place for them.

An explicit option wins. A value that is not valid is an error, as it is in `options`; a variable whose
name is nearly that of an option is most likely a slip, but may be somebody else's, so it is a warning.
"""

from __future__ import annotations

import difflib
import functools
import logging
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pgraph.errors import OptionError

__all__ = ["PREFIX", "WORDS", "read", "variable"]

log = logging.getLogger(__name__)

PREFIX = "PGRAPH_"
# Variables of ours that are no options: the native helper, the benchmarks' commit and other checkout, the
# set-up's torch, the number of the tests' random programs.
_OTHERS = ("PGRAPH_NATIVE", "PGRAPH_COMMIT", "PGRAPH_OTHER", "PGRAPH_TORCH", "PGRAPH_FUZZ_PROGRAMS")
# Options that have no variable, and what to do instead.
_NO_VARIABLE = {"inductor": "set Inductor's own variables (TORCHINDUCTOR_...), or torch._inductor.config"}
WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def variable(option: str) -> str | None:
    """The environment variable of an option, None if it has none."""
    return None if option in _NO_VARIABLE else PREFIX + option.upper()


def read(environment: Mapping[str, str], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the environment sets, as they would be written in `options`.

    Args:
        environment: e.g. `os.environ`. An empty value counts as not set.
        hints: the type of every option.

    Raises:
        OptionError: a value that does not have its option's type, or a variable for an option that has none.
            Ranges and choices are checked by `pgraph.options.parse`.
    """
    by_variable = {PREFIX + option.upper(): option for option in hints}
    found = {}
    for name in sorted(n for n in environment if n.startswith(PREFIX)):
        if name in _OTHERS or not environment[name].strip():
            continue
        if name not in by_variable:
            _warn_unknown(name, tuple(v for option in hints if (v := variable(option)) is not None))
            continue
        option = by_variable[name]
        if option in _NO_VARIABLE:
            raise OptionError(f"{name} is set, but {option!r} has no variable. Fix: {_NO_VARIABLE[option]}")
        found[option] = _value(name, environment[name].strip(), hints[option])
    return found


def _value(name: str, text: str, hint: Any) -> Any:
    if hint is bool:
        if text.lower() not in WORDS:
            raise _refusal(name, text, "1 or 0 (also true, false, yes, no, on, off)")
        return WORDS[text.lower()]
    if hint in (int, int | None):
        return _int(name, text, text, "a whole number, e.g. 2")
    if typing.get_origin(hint) is tuple:
        wanted = "sizes between commas, e.g. 128,256"
        return [_int(name, text, piece, wanted) for piece in text.split(",") if piece.strip()]
    assert typing.get_origin(hint) is Literal, hint
    return text


def _int(name: str, text: str, piece: str, wanted: str) -> int:
    try:
        return int(piece)
    except ValueError:
        raise _refusal(name, text, wanted) from None


def _refusal(name: str, text: str, wanted: str) -> OptionError:
    return OptionError(f"{name} is {text!r}; it must be {wanted}. Fix: export {name}=... or unset it")


@functools.cache
def _warn_unknown(name: str, known: Iterable[str]) -> None:
    """Once per variable and process."""
    # Without the prefix, which would make everything alike.
    short = {other.removeprefix(PREFIX): other for other in (*known, *_OTHERS)}
    given = name.removeprefix(PREFIX).upper()  # all of ours are in capitals
    near = [short[n] for n in difflib.get_close_matches(given, short, n=2, cutoff=0.7)]
    hint = f"did you mean {' or '.join(near)}?" if near else "pgraph.list_options() lists the options"
    log.warning("%s is set, but pgraph has no such option, and it changes nothing: %s", name, hint)
