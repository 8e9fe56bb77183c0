"""The options of the backend: `torch.compile(..., backend="pgraph", options={...})`, or `PGRAPH_<OPTION>`.

torch does not validate a backend's options; a misspelt one would be silently ignored. Here every
key and value is checked, and the error names the nearest matches.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import typing
from collections.abc import Mapping
from typing import Any, Literal

from pgraph import environment
from pgraph.errors import OptionError

__all__ = ["Options", "list_options", "parse"]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What a user can choose. The comment above each field is its documentation.

    Raises:
        OptionError: (from `parse`) an unknown key, a value of the wrong type or out of range.
    """

    # Which driver captures. "auto": "cuda" for CUDA tensors, running uncaptured for CPU tensors.
    driver: Literal["auto", "cuda", "host"] = "auto"
    # How a partition becomes code: compiled by Inductor, or ATen ops as they are.
    codegen: Literal["inductor", "aten"] = "inductor"
    # Plain runs of a partition, per set of shapes, before it is captured.
    warmup: int = 1
    # A safe partition with fewer device ops between unsafe ones runs uncaptured.
    min_ops: int = 3
    # MiB of memory that the captures of this process may take on each device (execs), and as many of the
    # host's (recipes); None: 1 % of the device's memory, at least 256. The least useful go. It counts for all
    # compiled models together, as memory is what they share; if their options differ, each keeps what it adds
    # within its own.
    capture_memory_mb: int | None = None
    # Captures kept per partition (one per set of shapes and alignments), the least recently used goes when
    # another is used more: see Note [Taking turns]. None: as many as there is memory for.
    max_captures: int | None = None
    # How far the plan of a launch may pass the eager peak, in MiB, or 1 % of that peak if that is more.
    # Less memory means more launches.
    memory_slack_mb: int = 8
    # With dynamic shapes: capture only calls whose varying sizes (of every dynamic dimension) are all among
    # these; () captures any.
    capture_sizes: tuple[int, ...] = ()
    # "on": where sizes vary, recordings of new ones are computed from Inductor's code, once three captures
    # came out as computed. "off": all are captured. "check": all are, and compared with what is computed.
    compute_sizes: Literal["on", "off", "check"] = "on"
    # Leave uncaptured what would not gain: a partition of few kernels if a launch takes the host longer than
    # the partition's own code, which is tried in the first calls after its capture; and, where sizes vary,
    # those that come so seldom that their captures would take longer than launches save.
    step_aside: bool = True
    # Raise FullCaptureError as soon as anything that reaches pgraph stays outside the graphs, and at a graph
    # break that cuts one or where Dynamo compiles a function no more, instead of running it uncaptured. (What
    # Dynamo skips whole never reaches pgraph.)
    require_full_capture: bool = False
    # Inductor settings, as for torch.compile(options=...) of the "inductor" backend.
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_AT_LEAST = {"warmup": 1, "min_ops": 1, "capture_memory_mb": 1, "max_captures": 1, "memory_slack_mb": 0}


def list_options() -> dict[str, Any]:
    """Every option with its default."""
    default = Options()
    return {f.name: getattr(default, f.name) for f in dataclasses.fields(Options)}


def parse(given: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> Options:
    """Options from the mapping that torch.compile hands over, and from the environment where it is silent.

    Args:
        environ: instead of `os.environ`.

    Raises:
        OptionError: a key or value is not valid; the message says which would be.
    """
    hints = typing.get_type_hints(Options)
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"pgraph options are {given!r}; they must be a dict, e.g. {{'warmup': 2}}")
    for name, value in (given or {}).items():
        if name not in hints:
            raise OptionError(_unknown(name, list(hints)))
        _check_value(name, value, hints[name])
    from_outside = environment.read(os.environ if environ is None else environ, hints)
    for name, value in from_outside.items():
        if name not in (given or {}):
            _check_value(name, value, hints[name], f" (from {environment.variable(name)})")
    # As torch.compile takes them: hyphens are underscores.
    settings = {name.replace("-", "_"): value for name, value in (given or {}).get("inductor", {}).items()}
    if settings.get("cpp_wrapper"):
        raise OptionError(
            "pgraph option 'inductor' sets cpp_wrapper: no capture can follow C++ that allocates by itself, "
            "and launches need no wrapper. Fix: leave it out"
        )
    chosen = {**from_outside, **(given or {})}
    if "inductor" in chosen:
        chosen["inductor"] = settings
    if "capture_sizes" in chosen:
        chosen["capture_sizes"] = tuple(chosen["capture_sizes"])
    return Options(**chosen)


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the options are {', '.join(known)}"
    return f"unknown pgraph option {name!r}: {hint} (pgraph.list_options() lists them)"


def _check_value(name: str, value: Any, hint: Any, source: str = "") -> None:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            near = difflib.get_close_matches(str(value).lower(), choices, n=1)
            meant = f", did you mean {near[0]!r}?" if near else ""
            allowed = ", ".join(map(repr, choices))
            raise OptionError(
                f"pgraph option {name!r}{source} is {value!r}; it must be one of {allowed}{meant}"
            )
    elif hint == int | None and value is None:
        return
    elif hint in (int, int | None):
        if type(value) is not int:
            raise OptionError(
                f"pgraph option {name!r}{source} is {value!r}; it must be an int, not {type(value).__name__}"
            )
        if value < _AT_LEAST[name]:
            raise OptionError(
                f"pgraph option {name!r}{source} is {value}; it must be at least {_AT_LEAST[name]}"
            )
    elif hint is bool:
        if type(value) is not bool:
            raise OptionError(f"pgraph option {name!r}{source} is {value!r}; it must be True or False")
    elif name == "capture_sizes":
        if not isinstance(value, list | tuple) or any(type(size) is not int or size < 0 for size in value):
            raise OptionError(
                f"pgraph option {name!r}{source} is {value!r}; it must be a list of sizes, e.g. [128, 256]"
            )
    elif not isinstance(value, Mapping):
        raise OptionError(
            f"pgraph option {name!r}{source} is {value!r}; it must be a dict, not {type(value).__name__}"
        )
    elif odd := [key for key in value if not isinstance(key, str)]:
        raise OptionError(
            f"pgraph option {name!r} has the key {odd[0]!r}, which is no str. Fix: name the setting, e.g. "
            "{'max_autotune': True}"
        )
