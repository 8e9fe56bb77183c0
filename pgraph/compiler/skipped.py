"""What Dynamo does not compile, or compiles no more, as reasons with a fix."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, Final

from pgraph import compat
from pgraph.compiler.graph_breaks import from_text, is_called, is_schedulers
from pgraph.ops import safety
from pgraph.ops.fx import is_users
from pgraph.options import parse
from pgraph.reasons import Reason
from pgraph.runtime import full_capture, functions, registry

__all__ = ["listen"]

# (what Dynamo's text about a failed guard contains, what to change)
_GUARDS: Final[tuple[tuple[str, str], ...]] = (
    (
        r"integer attributes of the nn\.Module",
        "hold the number in a tensor, or set torch._dynamo.config.allow_unspec_int_on_nn_module = True",
    ),
    (
        r"past_key_values|\bcache\b",
        "call the model with use_cache=False where no tokens are generated, or with a static cache",
    ),
    (
        r"param_groups\[\d+\]\['lr'\]",
        "hold the learning rate in a tensor: lr=torch.tensor(1e-3)",
    ),
    (
        r"requires_grad mismatch|grad_mode|GLOBAL_STATE",
        "call it in the same gradient mode, with inputs that need gradients in all calls or in none",
    ),
    (
        r"(size|stride|rank) mismatch",
        "compile with dynamic=True, or pad to a few sizes",
    ),
    (
        r"\.size\(\)",
        "pad to sizes for which the code goes one way, or have it go one way for all of them",
    ),
)
_LONGEST: Final = 160

_OPTIMIZERS: Final = os.path.join("torch", "optim", "")
"""PyTorch's own code of which programs compile a part by itself: the step."""


def listen(is_ours: Callable[[Any], bool]) -> None:
    """Keep `pgraph.runtime.functions` up to date from now on.

    Args:
        is_ours: whether a backend is pgraph's.
    """

    def ours(compilation: compat.Compilation) -> bool:
        return compilation.backend is None or is_ours(compilation.backend)

    compat.hear_compilations(
        lambda one: _ended(one) if ours(one) else None,
        lambda one: _stopped(one) if ours(one) else None,
        _begun_anew,
    )


def _begun_anew() -> None:
    functions.forget()
    safety.forget_judged()
    registry.all_gone()


def _ended(compilation: compat.Compilation) -> None:
    graphs = functions.graphs_arrived()
    place = (compilation.where or "").rpartition(":")[0]
    if place and not graphs and not _asked_for(place, compilation.name):
        return  # helpers of Python's own, which Dynamo meets below a function that it has skipped
    if not place and any(map(is_schedulers, compilation.breaks)):
        return  # it counts the steps in a function around the step, which Dynamo compiles nevertheless
    function = functions.found(compilation.name, compilation.where)
    function.graphs += graphs
    if compilation.guard is not None and (guard := _guard(compilation.guard)) not in function.guards:
        function.guards.append(guard)
        function.change = _change(compilation.guard)
    function.below = False
    if compilation.error is not None:
        function.skipped = from_text(compilation.error, compilation.frames)
        return
    function.compilations += 1
    function.skipped = None
    if not graphs and compilation.breaks:
        function.skipped = from_text(compilation.breaks[0], ())
        function.below = is_called(compilation.breaks[0]) and not compilation.calls_break


def _asked_for(place: str, name: str) -> bool:
    """Whether a user may have asked for a function to be compiled."""
    if place == "<string>":  # made with exec(), by a user or by a dataclass
        return not name.rpartition(".")[2].startswith(("_", "<"))
    return is_users(place) or (_OPTIMIZERS in place and name.endswith(".step"))


def _stopped(compilation: compat.Compilation) -> None:
    """It was compiled too often.

    Raises:
        FullCaptureError: it was compiled with `require_full_capture`.
    """
    assert compilation.limit is not None
    setting, limit = compilation.limit
    function = functions.found(compilation.name, compilation.where)
    text = compilation.guard or ""
    change = _change(text) or "let what the guard names be the same in all calls"
    function.stopped = Reason(
        "recompile-limit",
        f"Dynamo has compiled {function.name} {function.compilations} times and compiles it no more, since "
        f"torch._dynamo.config.{setting} is {limit}: calls that fit none of these run eagerly. "
        f"The last guard that failed: {_guard(text)}",
        f"{change}; or raise torch._dynamo.config.{setting} before the first call, or after "
        "torch._dynamo.reset()",
        function.where,
    )
    if parse(compilation.options).require_full_capture:
        full_capture.refuse(function.name, function.stopped)


def _change(text: str) -> str:
    """What to change, by Dynamo's text about a guard; empty if that is not known."""
    hint = text.partition("(HINT")[2]
    return next((fix for pattern, fix in _GUARDS if re.search(pattern, _guard(text) + hint)), "")


def _guard(text: str) -> str:
    """The guard itself, e.g. ``"self.layer == 7"``, of Dynamo's text about it."""
    plain = re.sub(r"^\d+/\d+: ", "", text.strip().splitlines()[0] if text.strip() else "")
    plain = re.split(r"\s+# |\s+\(HINT", plain)[0].strip()
    return plain[:_LONGEST] or "not told"
