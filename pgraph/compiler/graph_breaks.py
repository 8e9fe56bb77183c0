"""Graph breaks: where Dynamo ends a graph and lets Python go on, as reasons with a fix.

Dynamo's own text names its settings; what a user of graphs needs is the change to the program. Breaks
of a known kind get that, the others keep Dynamo's first hint that is meant for users.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from pgraph import compat
from pgraph.ops.fx import FRAME, is_users, user_frame
from pgraph.reasons import Reason

__all__ = ["break_of", "from_log", "from_text", "is_schedulers"]

CODE: Final = "graph-break"
_OPTIMIZER: Final = "/torch/optim/"
_CALLED: Final = r"Call to `torch\._dynamo\.graph_break\(\)`"
_SCHEDULER: Final = r"in file `[^`]*/optim/lr_scheduler\.py`"

_FOR_DEVELOPERS: Final = re.compile(
    r"VariableTracker|as_proxy|tracing rules|dont_skip_tracing|fullgraph|([Rr]eport|file) an issue"
)
"""What Dynamo says to those who work on it, or to a user who has asked for one graph."""

# (how Dynamo's text begins or what it contains, what is wrong, what to change)
_KNOWN: Final[tuple[tuple[str, str, str], ...]] = (
    (
        r"Data dependent operator.*_local_scalar_dense",
        "the host reads a tensor that stands for a number, as i does in x[i, :2]",
        "index with x.index_select(0, i.view(1)) or torch.gather, or pass a Python int",
    ),
    (
        r"Tensor\.item\(\)|_local_scalar_dense",
        "Tensor.item() (or int(), float(), a slice up to a tensor) reads a value on the host",
        "keep the value in a tensor: x * s instead of x * s.item(), torch.where instead of if",
    ),
    (
        r"Tensor\.tolist\(\)",
        "Tensor.tolist() reads values on the host",
        "keep the values in a tensor, or call it outside the compiled function",
    ),
    (
        r"Dynamic shape operator.*aten\.(nonzero|masked_select)",
        "indexing by a mask (or nonzero) has a result whose shape depends on data",
        "use torch.where, masked_fill, or integer indices",
    ),
    (
        r"Dynamic shape operator.*`([\w.:]+)`",
        "{0} has a result whose shape depends on data",
        "use an op with a fixed shape: torch.where, topk, or a padded result",
    ),
    (
        r"generic_jump|[Dd]ata[- ]dependent (branching|jump|control)",
        "a branch depends on a tensor's value, which the host must wait for",
        "use torch.where, or decide outside the compiled region",
    ),
    (
        r"Tensor\.backward\(\)",
        "backward() is called inside the compiled function",
        "compile the model and the loss, and call backward() outside",
    ),
    (
        r"(wrap|support) RNN, GRU, or LSTM",
        "Dynamo does not trace torch.nn.RNN, GRU and LSTM",
        "write the cell with plain ops, e.g. torch.nn.LSTMCell in a loop",
    ),
    (
        r"set_runtime_stats_and_log|_inside_ddp_forward",
        "Dynamo does not trace DistributedDataParallel itself, only your modules inside",
        "wrap the compiled module: DistributedDataParallel(torch.compile(model))",
    ),
    (
        _CALLED,
        "torch._dynamo.graph_break() is called",
        "remove the call; Optimizer.step() has one of its own, so compile it by itself: "
        "torch.compile(optimizer.step)",
    ),
    (
        _SCHEDULER,
        "Dynamo does not trace the step of an optimizer around which a scheduler has put its own",
        "compile the step by itself: torch.compile(optimizer.step)",
    ),
    (
        r"don't trace into fused optimizer",
        "Dynamo does not trace fused optimizers",
        "leave the step uncompiled, as it is few kernels already, or build the optimizer with fused=False",
    ),
    (
        r"Backend compiler `pgraph` failed with ([\w.]+)\. Adding",
        "{0} cannot be traced: the shape of its result depends on data, or is not known to PyTorch",
        "call what uses it outside of the compiled function, or under torch.compiler.disable",
    ),
    (
        r"builtin `?print",
        "print() is called inside the compiled function",
        "print outside the compiled region",
    ),
    (
        r"logging\.Logger method.*?<Logger ([\w.]+)",
        "the logger {0} is called inside the compiled function",
        "log outside the compiled function, or add the method to "
        "torch._dynamo.config.ignore_logging_functions",
    ),
    (
        r"builtin `_warnings\.warn`",
        "warnings.warn() is called inside the compiled function",
        "warn outside the compiled function",
    ),
    (
        r"the function `Optimizer\.zero_grad`",
        "Optimizer.zero_grad() is called inside the compiled function",
        "call zero_grad() outside the compiled function",
    ),
    (
        r"intentionally marked that the function `([\w.<>]+)`",
        "Dynamo does not trace the function {0}",
        "call it outside the compiled function",
    ),
    (
        r"does not know how to trace (?:the )?(?:Python )?builtin (?:operator )?`([\w.]+?)\.?`",
        "Dynamo does not trace {0}(), which is no Python code",
        "call it outside the compiled function",
    ),
    (
        r"Attempted to wrap sparse Tensor",
        "Dynamo does not trace sparse tensors",
        "use dense (strided) tensors, or keep sparse ones outside the compiled function",
    ),
    (
        r"Failed to convert args/kwargs to proxy",
        "an op is given an object that Dynamo cannot put into a graph",
        "keep what makes or uses the object outside the compiled function",
    ),
    (
        r"Unsupported functorch tracing attempt.*?torch\.func\.(\w+)\(",
        "torch.func.{0} is called with the compiled function, which it runs eagerly",
        "compile the function that calls torch.func.{0}",
    ),
    (
        r"Missing tp_iternext.*?next\(\) on (\w+)",
        "Dynamo cannot step through a {0}",
        "loop over a list or a tuple, or outside the compiled function",
    ),
    (
        r"^step_unsupported$",
        "Dynamo broke off in a function that is called here, and could not go on inside it",
        "remove the break inside that call, which is told by itself or by TORCH_LOGS=graph_breaks",
    ),
)


def break_of(gm: Any) -> Reason | None:
    """Why Dynamo ended this graph before its function did; None if it did not."""
    found = compat.graph_break(gm)
    if found is None:
        return None
    text, stack = found
    if stack and _OPTIMIZER in stack[-1].filename.replace("\\", "/"):
        where = user_frame([(frame.filename, frame.lineno) for frame in stack])
        fix = "compile the step by itself: torch.compile(optimizer.step)"
        return Reason(CODE, "Optimizer.step() breaks the graph before it begins its own", fix, where)
    return _reason(text, user_frame([(frame.filename, frame.lineno) for frame in stack]))


def from_log(message: str) -> Reason | None:
    """What Dynamo logs about a break as a reason; None if the message is about something else."""
    head, _, traceback = message.partition("User code traceback:")
    _, marked, text = head.partition("Graph Break Reason: ")
    if not marked:
        return None
    if re.match(rf"\s*Graph break\b[^\n]* in user code at [^\n]*{_OPTIMIZER}", head):
        return None  # what it does around each step; a graph that it cuts off says so itself
    place = re.search(r"in user code at (.+):\d+", head)
    if is_schedulers(head) and place is not None and not is_users(place[1]):
        return None  # the step is compiled by itself, and Dynamo goes on to what the scheduler has wrapped
    # Dynamo leaves the traceback out where it broke before.
    frames = FRAME.findall(traceback) or re.findall(r"in user code at (.+):(\d+)", head)
    return from_text(text, frames)


def from_text(text: str, frames: Sequence[tuple[str, Any]]) -> Reason:
    """Dynamo's text about a break as a reason.

    Args:
        frames: (path, line) where it broke, innermost last.
    """
    # A break that cannot be handled names two: what broke, and why it could not go on after it.
    text = text.split("Graph break encountered:")[-1].split("*** While handling this graph break")[0]
    text = re.sub(r"^\s*Encountered graph break when attempting to trace [^\n]*\n", "", text)
    return _reason(text, user_frame(frames))


def is_called(text: str) -> bool:
    """Whether Dynamo's text is about a call of `torch._dynamo.graph_break`."""
    return re.search(_CALLED, text) is not None


def is_schedulers(text: str) -> bool:
    """Whether Dynamo's text is about the function that a scheduler puts around an optimizer's step."""
    return re.search(_SCHEDULER, text) is not None


def _reason(text: str, where: str | None) -> Reason:
    flat = " ".join(text.split())
    for pattern, sentence, fix in _KNOWN:
        found = re.search(pattern, flat)
        if found:
            return Reason(CODE, sentence.format(*found.groups()), fix.format(*found.groups()), where)
    hints = re.findall(r"Hint: (.*?)\.?\s*(?=Hint:|Developer debug context:|For more details|$)", flat)
    hint = next((one for one in hints if not _FOR_DEVELOPERS.search(one)), "")
    cause = (
        re.split(r" (?:Explanation|Hint|Developer debug context):", flat)[0].rstrip(".")
        or "the graph ends here"
    )
    explained = re.search(r"Explanation: (.*?)\.?\s*(?:Hint:|Developer debug context:|$)", flat)
    sentences = re.split(r"(?<=\.)\s+", explained[1]) if explained else []
    explanation = " ".join(one for one in sentences if not _FOR_DEVELOPERS.search(one)).rstrip(".")
    return Reason(CODE, f"{cause}: {explanation}" if explanation else cause, hint, where)
