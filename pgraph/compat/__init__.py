"""Every private PyTorch interface that pgraph uses above the drivers, in one place.

Each was seen working on torch 2.11.0 (cu130) and 2.13.0 (CPU), but where it says that it was only found in
the sources of 2.11; `tests/test_compat.py` has a test for each, and `tests/test_compat_strides.py`.

A file for each part of PyTorch; whoever uses them imports them from here.
"""

from __future__ import annotations

from pgraph.compat.aot import (
    Joint,
    Tracing,
    boxed,
    boxed_module,
    compiling_again,
    donated_inputs,
    donating,
    eager_backward,
    fake_mode_of,
    joint_of,
    own_output_strides,
    packed_by_others,
    partition_joint,
    saved_results,
    static_inputs,
    tangents,
    tracing,
)
from pgraph.compat.dispatcher import is_composite, is_registered
from pgraph.compat.dynamo import (
    evaluate,
    graph_break,
    hearing_graph_breaks,
    is_compiled,
    plain_symbol,
    symbol_source,
    traced_function,
)
from pgraph.compat.frames import Compilation, hear_compilations, known_backends
from pgraph.compat.inductor import (
    WRAPPED_MUTATIONS,
    compile_graph,
    compile_model,
    generated_namespaces,
    inductor_mode,
    output_strides,
    partition_ops,
    propagate,
    returned_strides,
    unknown_settings,
    unwrap_mutations,
)
from pgraph.compat.modes import forward_mode, intercepted, profiling
from pgraph.compat.tensors import (
    Strides,
    assert_size_stride,
    lazily,
    real_values,
    reinterpret,
    restrided,
    same_counter,
    same_number,
    tensor_layout,
    tensor_shims,
)

__all__ = [
    "WRAPPED_MUTATIONS",
    "Compilation",
    "Joint",
    "Strides",
    "Tracing",
    "assert_size_stride",
    "boxed",
    "boxed_module",
    "compile_graph",
    "compile_model",
    "compiling_again",
    "donated_inputs",
    "donating",
    "eager_backward",
    "evaluate",
    "fake_mode_of",
    "forward_mode",
    "generated_namespaces",
    "graph_break",
    "hear_compilations",
    "hearing_graph_breaks",
    "inductor_mode",
    "intercepted",
    "is_compiled",
    "is_composite",
    "is_registered",
    "joint_of",
    "known_backends",
    "lazily",
    "output_strides",
    "own_output_strides",
    "packed_by_others",
    "partition_joint",
    "partition_ops",
    "plain_symbol",
    "profiling",
    "propagate",
    "real_values",
    "reinterpret",
    "restrided",
    "returned_strides",
    "same_counter",
    "same_number",
    "saved_results",
    "static_inputs",
    "symbol_source",
    "tangents",
    "tensor_layout",
    "tensor_shims",
    "traced_function",
    "tracing",
    "unknown_settings",
    "unwrap_mutations",
]
