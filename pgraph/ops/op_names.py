"""Names of ops that need judging by name, with what is known about each. Data only.

Facts come from PyTorch's CUDA sources of 2.11 to 2.13. Ops that are safe although they look otherwise,
and why: ``embedding_dense_backward``, ``embedding_renorm_``, ``_embedding_bag*`` (their counts stay on
the device since the thrust calls went), ``_foreach_*`` and ``_fused_adam`` (pointers sit in kernel
parameters), ``_grouped_mm`` in bfloat16 on the GPUs that have its kernel (its table is made on the
device from bases, and lives in program order), ``_fft_*`` (the work area is set at each call),
``nonzero_static``, ``_assert_async``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


# Higher-order ops that may be captured, each with the reason why.
ALLOWED_HOPS: Final = MappingProxyType(
    {
        "triton_kernel_wrapper_mutation": "one launch of the user's Triton kernel",
        "triton_kernel_wrapper_functional": "clones, then one launch of the user's Triton kernel",
        "out_dtype": "one matrix product with another result type",
        "flex_attention": "one kernel made from its subgraphs, which are judged too",
        "flex_attention_backward": "kernels made from its subgraphs, which are judged too",
        "inline_asm_elementwise": "one pointwise kernel",
    }
)
SUBGRAPH_HOPS: Final = frozenset({"flex_attention", "flex_attention_backward"})
RNG_STATE_HOPS: Final = frozenset(
    {"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state", "run_dtensor_rng_op"}
)

COLLECTIVES: Final = (
    "_c10d_functional::",
    "_c10d_functional_autograd::",
    "c10d_functional::",
    "c10d::",
    "_dtensor::",
    "symm_mem::",
)
# How cuDNN does them depends on settings that Dynamo compiles nothing anew for.
OF_CUDNN: Final = _aten(
    "_batch_norm_no_update",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_convolution",
    "_cudnn_ctc_loss",
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
    "batch_norm_backward",
    "convolution",
    "convolution_backward",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
    "cudnn_convolution",
    "cudnn_convolution_add_relu",
    "cudnn_convolution_relu",
    "cudnn_convolution_transpose",
    "cudnn_grid_sampler",
    "cudnn_grid_sampler_backward",
)
# They count from the start of the storage, wherever the tensor itself begins.
STORAGE_OFFSETS: Final = _aten("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
STREAMS: Final = ("streams::",)
STREAM_OPS: Final = _aten("record_stream")

HOST_READS: Final = _aten(
    "_assert_scalar",
    "_functional_assert_scalar",
    "_local_scalar_dense",
    "_to_cpu",
    "allclose",
    "equal",
    "is_nonzero",
    "item",
)

_QUANTIZE_FIX: Final = "use fake_quantize_per_tensor_affine, or quantize outside the compiled region"
# Op -> fix.
HOST_SYNCS: Final = MappingProxyType(
    {
        "aten::_fused_moving_avg_obs_fq_helper": "observe outside the compiled region",
        "aten::_fused_moving_avg_obs_fq_helper_functional": "observe outside the compiled region",
        "aten::_fake_quantize_learnable_per_channel_affine": _QUANTIZE_FIX,
        "aten::_fake_quantize_learnable_per_tensor_affine": _QUANTIZE_FIX,
        "aten::_fake_quantize_learnable_per_tensor_affine_backward": _QUANTIZE_FIX,
        "aten::fake_quantize_per_channel_affine": _QUANTIZE_FIX,
        "aten::fake_quantize_per_channel_affine_cachemask": _QUANTIZE_FIX,
        "aten::histc": "pass min and max",
        "aten::isin": "compare with broadcasting: (a.unsqueeze(-1) == b).any(-1)",
        "aten::mode": "use torch.median, or a sort and a comparison",
        "aten::segment_reduce": "pass unsafe=True when the lengths are known to be valid",
    }
)

INDEX_OPS: Final = _aten(
    "_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index", "index_put", "index_put_"
)
DYNAMIC_FIXES: Final = MappingProxyType(
    {
        "aten::bincount": "use zeros(n).index_add_(0, x, ones)",
        "aten::masked_select": "use torch.where, or multiply by the mask",
        "aten::nonzero": "use torch.where(mask, a, b), or torch.nonzero_static with a size",
        "aten::one_hot": "pass num_classes",
        "aten::repeat_interleave": "pass output_size",
    }
)

# With all of `fbgemm` that has "jagged" in its name.
JAGGED_OPS: Final = _aten("_jagged_to_padded_dense_forward", "_padded_dense_to_jagged_forward")
# Major compute capabilities with a kernel for `_grouped_mm`; elsewhere it is a loop over offsets read on
# the host, as it is for any type but bfloat16.
GROUPED_GPUS: Final = frozenset({9, 10})

SOLVER_FAMILIES: Final = ("aten::linalg_", "aten::_linalg_", "aten::cholesky", "aten::_cholesky")
SOLVERS: Final = _aten(
    "_lu_with_info",
    "det",
    "geqrf",
    "inverse",
    "logdet",
    "lu_solve",
    "matrix_exp",
    "orgqr",
    "ormqr",
    "pinverse",
    "qr",
    "slogdet",
    "svd",
    "triangular_solve",
)
# One or a few ordinary kernels each, although their names begin as those of solvers.
PLAIN_LINALG: Final = _aten(
    "linalg_cross",
    "linalg_diagonal",
    "linalg_matmul",
    "linalg_multi_dot",
    "linalg_vecdot",
    "linalg_vector_norm",
)

STATEFUL_FAMILIES: Final = (
    "aten::_cudnn_rnn",
    "aten::_cudnn_ctc",
    "aten::_cudnn_init_dropout",
    "aten::miopen_rnn",
    "aten::miopen_ctc",
    "aten::_ctc_loss",
)
STATEFUL: Final = _aten("ctc_loss", "gru", "lstm", "rnn_relu", "rnn_tanh")

STORAGE_OPS: Final = _aten("_resize_output", "_resize_output_", "resize", "resize_as_sparse_", "set_data") | {
    "inductor::accumulate_grad_",
    "inductor::resize_storage_bytes_",
}
PIN_OPS: Final = _aten("_pin_memory", "is_pinned", "pin_memory")
COPY_OPS: Final = _aten("_copy_from", "_copy_from_and_resize", "_to_copy", "copy", "copy_", "to") | {
    "prims::copy_to",
    "prims::device_put",
}

# These draw the seeds of a whole graph; the ops that use the seeds are ordinary kernels.
SEED_OPS: Final = frozenset({"prims::inductor_seed", "prims::inductor_seeds"})
# Ops whose `p` is the chance to drop, so that 0 draws nothing that matters.
DROPOUT_OPS: Final = _aten(
    "alpha_dropout",
    "alpha_dropout_",
    "dropout",
    "dropout_",
    "feature_alpha_dropout",
    "feature_alpha_dropout_",
    "feature_dropout",
    "feature_dropout_",
    "native_dropout",
)
ATTENTION_OPS: Final = _aten(
    *(
        f"{family}_{step}"
        for family in ("_flash_attention", "_efficient_attention", "_cudnn_attention")
        for step in ("forward", "backward")
    ),
    *(
        f"_scaled_dot_product_{kind}_attention{tail}"
        for kind in ("flash", "efficient", "cudnn")
        for tail in ("", "_backward")
    ),
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)

# Their seed and offset are on the host in an uncaptured run, and on the device in a capture.
HOST_SEEDS: Final = _aten("_efficient_attention_forward", "_scaled_dot_product_efficient_attention")

# Op -> (argument, value): with this constant the op asks no generator for anything, as its sources say.
# Not here although it looks alike: dropout with p=0, which draws on CUDA (`native_dropout`) and then keeps
# everything, and `_scaled_dot_product_fused_attention_overrideable`, which is what a backend makes it.
DRAWS_NOTHING: Final = MappingProxyType(
    {
        **dict.fromkeys(
            _aten(
                "_cudnn_attention_forward",
                "_efficient_attention_forward",
                "_flash_attention_forward",
                "_scaled_dot_product_attention_math",
                "_scaled_dot_product_cudnn_attention",
                "_scaled_dot_product_efficient_attention",
                "_scaled_dot_product_flash_attention",
                "_scaled_dot_product_flash_attention_for_cpu",
            ),
            ("dropout_p", 0.0),
        ),
        **dict.fromkeys(_aten("dropout", "native_dropout"), ("train", False)),
    }
)

# Copies scalars of the CPU to the device, at each call (`pgraph.rewrites.scalars`).
NUMBERS_OP: Final = "pgraph::numbers_on_device"

OPAQUE_TYPES: Final = frozenset({"FakeScriptObject", "FakeOpaqueObject"})
