"""The catalogue of reasons: for each code what it says, what to change, and what pgraph decides by it.

Data only. Decisions read the fields of an entry, never its texts: a text may be reworded at any time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["CATALOGUE", "ReasonCode"]


@dataclasses.dataclass(frozen=True, slots=True)
class ReasonCode:
    """What is true of every reason with one code.

    Args:
        code: short stable name, for tables and tests.
        meaning: what the code says, in one sentence.
        fix: what to change in general; a reason that knows more says its own.
        actionable: the user can change something, so `explain` lists it among the changes.
        free: what runs uncaptured costs nothing, so that a program with it counts as captured.
        too_small: the ops could be captured, but are too few to pay for a launch.
        suffers: the op is refused for what another op made, and is freed by changing that one.
        draws_random: an op with this code may draw random numbers, so that no draw of seeds may overtake it.
        blames_custom_ops: it speaks of a whole recording. Where no op is known to be at fault, the custom
            ops of the partition are named: what PyTorch's own ops do in a capture is known.
    """

    code: str
    meaning: str
    fix: str
    actionable: bool = True
    free: bool = False
    too_small: bool = False
    suffers: bool = False
    draws_random: bool = False
    blames_custom_ops: bool = False


_KEEP_OUTSIDE: Final = "keep it outside with pgraph.mark_unsafe"
_REPORT: Final = 'report it, with the log of TORCH_LOGS="+pgraph"'
_RERUN: Final = (
    "mark the op with pgraph.mark_unsafe, or report it: the rest of the model is still captured around it"
)

# What the safety rules say of one op, before anything is captured.
_OF_OPS: Final = (
    ReasonCode(
        "marked",
        "You keep the op outside: with pgraph.mark_unsafe, or in Inductor's custom_should_partition_ops.",
        "take the mark back",
    ),
    ReasonCode(
        "tagged",
        "The author of the op has tagged it as unsafe for CUDA graphs.",
        "remove the tag if the op only launches kernels on the current stream",
    ),
    ReasonCode(
        "higher-order",
        "The op calls functions, and the host decides at each call which of them, or in what order.",
        "write it with torch.where or masks, or keep it between two compiled regions",
        draws_random=True,
    ),
    ReasonCode(
        "rng-state",
        "The host puts another state into the random generator, to draw the same numbers again.",
        "draw the numbers outside the checkpointed region and pass them in, or do without dropout there "
        "(attention with dropout_p=0 is captured); preserve_rng_state=False changes nothing here",
        draws_random=True,
    ),
    ReasonCode(
        "collective",
        "The op communicates with other ranks, and runs between two graphs.",
        "nothing to do: it runs between two graphs; group collectives to have fewer, longer graphs",
        actionable=False,
    ),
    ReasonCode(
        "stream",
        "The op handles a stream or an event, which belong to the moment of the call.",
        "use streams outside the compiled region",
    ),
    ReasonCode(
        "host-read",
        "The host reads the value of a tensor, for which it waits for the device.",
        "keep the value in a tensor (torch.where instead of if), or read it outside the compiled region",
    ),
    ReasonCode(
        "host-sync",
        "The op makes the host wait for the device, although its result is a tensor.",
        "use an op that does not wait, or call it outside the compiled region",
    ),
    ReasonCode(
        "bool-index",
        "A tensor is indexed by a mask: how many elements that selects depends on data.",
        "use torch.where, masked_fill, or integer indices",
    ),
    ReasonCode(
        "solver",
        "The op factorises or solves a matrix, for which the host builds tables or waits for an error code.",
        "factorise outside the compiled region, or less often",
    ),
    ReasonCode(
        "library-state",
        "The op keeps state inside a library, where no launch can rewrite its address.",
        "write the cell with plain ops, e.g. torch.nn.LSTMCell in a loop",
    ),
    ReasonCode(
        "dynamic-shape",
        "The shape of the result depends on data.",
        "use an op with a fixed shape: torch.where, topk, or a padded result",
    ),
    ReasonCode(
        "storage",
        "The host changes the storage or the shape of a tensor in place, which a launch does not repeat.",
        "make a new tensor instead",
    ),
    ReasonCode(
        "pinned",
        "The op allocates page-locked memory on the host.",
        "pin it outside the compiled region",
    ),
    ReasonCode(
        "device-copy",
        "The op copies between two kinds of devices.",
        "create the tensor on the captured device, or copy before the compiled region",
    ),
    ReasonCode(
        "rng",
        "The op draws from the random generator, whose state moves on the host.",
        "use the default codegen, which passes seeds as an input, or set the dropout to 0",
        draws_random=True,
    ),
    ReasonCode(
        "rng-seeds",
        "The seeds of a graph are drawn before it, and the graph takes them as an input.",
        "nothing to do: seeds are drawn before the graph, which takes them as an input",
        actionable=False,
        free=True,
        draws_random=True,
    ),
    ReasonCode(
        "layout",
        "The op works on a sparse, nested, jagged or quantized tensor, which has several tensors inside.",
        "use dense (strided) tensors",
    ),
    ReasonCode(
        "unbacked-size",
        "The op uses a size that is known only after a kernel has run.",
        "pad to a fixed size, or compute it outside and pass it in",
        suffers=True,
    ),
    ReasonCode(
        "opaque",
        "The op takes an object that may hold tensors, whose addresses nobody sees.",
        "pass its tensors as arguments",
    ),
    ReasonCode(
        "not-an-op",
        "The graph calls a Python function, which a launch does not repeat.",
        "wrap it in torch.library.custom_op",
    ),
    ReasonCode(
        "no-metadata",
        "A graph pass has left no value at the op, so that its device and shape are unknown.",
        "keep meta['val'] in custom graph passes",
    ),
    ReasonCode(
        "cpu-scalar",
        "The op takes a number from a CPU tensor, whose value a recording would keep.",
        "create it on the captured device, or pass a Python number",
    ),
    ReasonCode(
        "other-device",
        "The op works on a tensor of another device than the captured one.",
        "create the tensor on the captured device",
    ),
    ReasonCode(
        "several-devices",
        "The op works on two devices; a graph is launched on one.",
        "keep each compiled region on one device",
    ),
    ReasonCode(
        "host-only",
        "The op has no tensors: it acts on the host, where a launch does not repeat it.",
        "call it outside the compiled region",
    ),
)

# What is said of a graph or of a partition, before anything is captured.
_OF_GRAPHS: Final = (
    ReasonCode(
        "graph-break",
        "Dynamo ends the graph here and lets Python go on.",
        "keep it outside the compiled region, or run with TORCH_LOGS=graph_breaks",
    ),
    ReasonCode(
        "recompile-limit",
        "Dynamo has compiled the function too often and compiles it no more: other calls run eagerly.",
        "let what the guard names be the same in all calls, or raise torch._dynamo.config.recompile_limit",
    ),
    ReasonCode(
        "no-device",
        "The tensors of the graph are on the CPU, or on another device that is not captured.",
        "move the model and its inputs to CUDA, or try the mechanism on the CPU with "
        "options={'driver': 'host'}",
    ),
    ReasonCode(
        "other-allocator",
        "Memory of the device comes from another allocator than PyTorch's own, or is not cached: what ops "
        "allocate during a capture cannot be told.",
        "use PyTorch's own allocator with its cache, as it is by default",
    ),
    ReasonCode(
        "too-small",
        "The ops between two that stay outside are too few to pay for a launch.",
        "capture more around them, or lower min_ops",
        too_small=True,
    ),
)

# What went wrong in a capture.
_OF_CAPTURES: Final = (
    ReasonCode(
        "capture-failed",
        "An op raised an error while it was captured.",
        "mark the op with pgraph.mark_unsafe, so that the rest of the partition stays in a graph",
        blames_custom_ops=True,
    ),
    ReasonCode(
        "capture-lost",
        "CUDA ended the capture, since an op did something that no capture allows.",
        "some op synchronizes, allocates or uses another stream; mark it with pgraph.mark_unsafe",
        blames_custom_ops=True,
    ),
    ReasonCode(
        "node-kind",
        "The recording has a node whose addresses no launch can rewrite, such as a call of the host.",
        "keep the op that makes it outside with pgraph.mark_unsafe",
        blames_custom_ops=True,
    ),
    ReasonCode(
        "not-permitted",
        "The host driver cannot record the op.",
        _KEEP_OUTSIDE,
    ),
    ReasonCode(
        "random-in-capture",
        "The host driver met an op that draws random numbers, which every launch would repeat.",
        _KEEP_OUTSIDE,
    ),
    ReasonCode(
        "not-recorded",
        "A custom op left nothing in the recording: it launches on a stream of its own choice.",
        "have it launch on torch.cuda.current_stream(), asked for at each call; until then the partition "
        "runs uncaptured, and pgraph.mark_unsafe on the op keeps the rest of it in a graph",
    ),
    ReasonCode(
        "ghost-kept",
        "An op keeps its arguments or its results for itself, beyond the capture.",
        "mark the op that remembers its arguments or results with pgraph.mark_unsafe",
    ),
    ReasonCode(
        "untracked-output",
        "A result lies in memory of the capture that belongs to no tensor that was seen.",
        "mark the op that makes it with pgraph.mark_unsafe",
    ),
    ReasonCode(
        "library-keeps-memory",
        "A library allocated memory during the capture and kept it.",
        "run the model once more before it is captured (option warmup), so that the library settles",
    ),
    ReasonCode(
        "foreign-graphs",
        "The program holds CUDA graphs of its own, and a capture would free their cuBLAS workspaces.",
        "run the compiled model a few times before you capture your own graphs; or drop them and "
        "call pgraph.reset(); with pgraph's native helper (it needs gcc and g++) none would be freed",
    ),
    ReasonCode(
        "history-too-short",
        "Somebody records the history of the allocator with fewer entries than a capture makes.",
        "give torch.cuda.memory._record_memory_history a max_entries of 100,000 or more and "
        'enabled="all", or switch it on later; then pgraph.reset()',
    ),
)

# Two captures of the same code do not agree, so that nothing is proved.
_OF_MATCHES: Final = (
    ReasonCode("nodes-differ", "Two captures of the same code recorded different nodes.", _RERUN),
    ReasonCode("allocations-differ", "Two captures of the same code allocated differently.", _RERUN),
    ReasonCode("outputs-differ", "Two captures of the same code returned different results.", _RERUN),
    ReasonCode("ghosts-overlap", "Two captures used the same addresses.", _RERUN),
    ReasonCode(
        "ambiguous-word",
        "Two captures do not tell for certain which memory a number in the recording points to.",
        _RERUN,
    ),
    ReasonCode(
        "hidden-pointer",
        "The recording points to device memory that is no argument, no result and no allocation of its own.",
        _RERUN,
    ),
)

# What went wrong otherwise.
_OF_RUNS: Final = (
    ReasonCode(
        "device-failed",
        "The device refused a capture again and again, most likely for want of memory.",
        "free some device memory, then pgraph.reset() to try again; until then the partition runs uncaptured",
    ),
    ReasonCode(
        "launch-failed",
        "CUDA did not launch a graph that had been captured.",
        f"{_REPORT}; these shapes run uncaptured until pgraph.reset()",
    ),
    ReasonCode(
        "no-gain",
        "A launch of these few kernels takes the host longer than launching them one by one.",
        "nothing to do: it runs as fast as it can; option step_aside=False launches it all the same",
        actionable=False,
    ),
    ReasonCode(
        "sizes-vary",
        "So many sizes or layouts come that to capture them takes longer than launches save.",
        "pad to a few sizes, or list those worth a capture in option capture_sizes; "
        "step_aside=False captures whatever comes again",
    ),
    ReasonCode(
        "size-not-listed",
        "The call has a size that option capture_sizes does not list.",
        "list the size in option capture_sizes, or pad to a listed one",
    ),
    ReasonCode(
        "too-many-sizes",
        "More sizes or layouts take turns than option max_captures or capture_memory_mb lets in.",
        "raise that option, list the sizes worth a capture in option capture_sizes, or pad to fewer sizes",
    ),
    ReasonCode(
        "internal-error",
        "pgraph itself failed while it captured.",
        f"{_REPORT}; the partition runs uncaptured",
    ),
)

CATALOGUE: Final[Mapping[str, ReasonCode]] = MappingProxyType(
    {entry.code: entry for entry in (*_OF_OPS, *_OF_GRAPHS, *_OF_CAPTURES, *_OF_MATCHES, *_OF_RUNS)}
)
"""Code -> entry."""
